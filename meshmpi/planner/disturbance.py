"""Whether a machine was busy with other things while it was measured.

By what Linux counts for the whole host: processor time of all processes, of which the ranks' own is
taken away, and time that the hypervisor gave to other machines.  Without /proc nothing is known.
"""

from __future__ import annotations

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
    """Counts at one moment, in seconds.

    Attributes:
        host: Whose they are.
        wall: By the clock.
        working: Processor time of all processes of the host; None: not known.
        stolen: Processor time that the host did not get from its hypervisor.
        own: Processor time of this rank.
        turns: Times that this rank had to make room for another process.
    """

    host: str
    wall: float
    working: float | None
    stolen: float
    own: float
    turns: int

    def since(self, before: Look) -> Look:
        """The counts between two looks."""
        known = self.working is not None and before.working is not None
        working = (self.working or 0.0) - (before.working or 0.0) if known else None
        return Look(
            self.host,
            self.wall - before.wall,
            working,
            self.stolen - before.stolen,
            self.own - before.own,
            self.turns - before.turns,
        )


def look() -> Look:
    """The counts of this moment."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    working, stolen = _of_host()
    return Look(
        os.uname().nodename, time.perf_counter(), working, stolen, used.ru_utime + used.ru_stime, used.ru_nivcsw
    )


def _of_host() -> tuple[float | None, float]:
    try:
        counts = [int(x) for x in STATISTICS.read_text().split("\n", 1)[0].split()[1:]]
        tick = 1.0 / os.sysconf("SC_CLK_TCK")
        return tick * sum(counts[k] for k in _WORKING), tick * counts[_STOLEN]
    except (OSError, ValueError, IndexError):
        return None, 0.0


def disturbances(ranks: Sequence[Look], unsteady: int, measurements: int, sharing: bool) -> str:
    """What disturbed the measurements, for people; empty where nothing did.

    Args:
        ranks: For each rank, the counts while it measured.
        unsteady: Measurements that differed from one repeat to the next until the end.
        measurements: All of them.
        sharing: Whether ranks share cores: then they make room for one another.
    """
    parts = []
    for host in dict.fromkeys(r.host for r in ranks):
        here = [r for r in ranks if r.host == host]
        wall = max(r.wall for r in here)
        found = max(here, key=lambda r: r.working or 0.0)
        if wall <= 0.0 or found.working is None:
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
