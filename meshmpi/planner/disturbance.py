"""Detects whether a machine was busy with other things while it was measured.

Uses Linux's counters for the whole host: processor time of all other processes, and time that the hypervisor gave to
other machines. Without /proc nothing is known.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

STATISTICS = Path("/proc/stat")
_WORKING = (0, 1, 2, 5, 6)  # of the line "cpu": user, nice, system, irq, softirq
_STOLEN = 7
OTHERS, STOLEN, TURNS, UNSTEADY = 0.1, 0.02, 20.0, 0.05
"""Reported from here on: cores that other processes took; share of the time that was stolen; times
a second that a rank had to make room on its core; share of measurements that did not settle."""


class Look(NamedTuple):
    """Counts at one moment, in seconds."""

    host: str  # whose they are
    wall: float  # by the clock
    working: float  # processor time of all processes of the host; NaN: not known
    stolen: float  # processor time that the host did not get from its hypervisor
    own: float  # processor time of this rank
    turns: float  # times that this rank had to make room for another process

    def since(self, before: Look) -> Look:
        """The counts between two looks."""
        return Look(self.host, *(now - then for now, then in zip(self[1:], before[1:], strict=True)))


def look() -> Look:
    """The counts of this moment."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    working, stolen = _of_host()
    own = used.ru_utime + used.ru_stime
    return Look(os.uname().nodename, time.perf_counter(), working, stolen, own, used.ru_nivcsw)


def _of_host() -> tuple[float, float]:
    try:
        counts = [int(x) for x in STATISTICS.read_text().split("\n", 1)[0].split()[1:]]
        tick = 1.0 / os.sysconf("SC_CLK_TCK")
        return tick * sum(counts[k] for k in _WORKING), tick * counts[_STOLEN]
    except (OSError, ValueError, IndexError):
        return math.nan, 0.0


def disturbances(ranks: Sequence[Look], unsteady: int, measurements: int, sharing: bool) -> str:
    """What disturbed the measurements, for people; empty where nothing did.

    Args:
        ranks: For each rank, the counts while it measured.
        unsteady: Number of ``measurements`` that differed from one repeat to the next until the end.
        sharing: Whether ranks share cores: then they make room for one another.
    """
    parts = []
    for host in dict.fromkeys(r.host for r in ranks):
        here = [r for r in ranks if r.host == host]
        wall = max(r.wall for r in here)
        found = max(here, key=lambda r: r.working)
        if wall <= 0.0 or math.isnan(found.working):
            continue
        others = (found.working - sum(r.own for r in here)) / wall
        if others > OTHERS:
            parts.append(f"other processes on {host} took {others:.1f} cores")
        if found.stolen / wall > STOLEN:
            parts.append(f"{host} lost {found.stolen / wall:.2f} cores to its hypervisor")
        turns = max(r.turns for r in here) / wall
        if turns > TURNS and not sharing:
            parts.append(f"a rank on {host} made room for others {turns:.0f} times a second")
    if unsteady > UNSTEADY * measurements:
        parts.append(f"{unsteady} of {measurements} measurements did not settle")
    return "; ".join(parts)
