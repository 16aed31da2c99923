"""How many cores and how much memory this process may use, and how much it has used.

Affinity masks, hardware threads and container quotas lower the number that `os.cpu_count` gives.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_TOPOLOGY = Path("/sys/devices/system/cpu")


class Cores(NamedTuple):
    """What the machine lends to this process."""

    logical: int  # processors in the affinity mask, at most the container's quota
    physical: int  # the same, with the hardware threads of one core counted once
    whole_machine: bool  # true when neither mask nor quota takes anything away


def available_cores() -> Cores:
    """Cores that this process may use, by affinity mask, core topology and cgroup quota."""
    allowed = sorted(os.sched_getaffinity(0))
    quota = cgroup_quota()
    limit = len(allowed) if quota is None else max(1, int(quota))
    cores = {_siblings(cpu) for cpu in allowed}
    whole = len(allowed) == os.cpu_count() and limit >= len(allowed)
    return Cores(min(limit, len(allowed)), min(limit, len(cores)), whole)


def _siblings(cpu: int) -> str:
    try:
        return (_TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def cgroup_quota(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> float | None:
    """Processors that the control groups of this process allow, or None without a limit.

    Returns:
        Quota divided by period, the smallest of the own group and all groups above it.
    """
    found = list[float | None]()
    for controllers, path in _groups(membership):
        if not controllers:
            found += [_quota(d, "cpu.max") for d in _upward(root, path)]
        elif "cpu" in controllers:
            base = next((b for b in (root / ",".join(controllers), root / "cpu") if b.is_dir()), root)
            found += [_quota(d, "cpu.cfs_quota_us", "cpu.cfs_period_us") for d in _upward(base, path)]
    return min((q for q in found if q is not None), default=None)


def group_memory(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """Bytes of memory that the control groups of this process allow, or None without a limit."""
    limits = []
    for controllers, path in _groups(membership):
        if not controllers or "memory" in controllers:
            base, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
            for folder in _upward(base, path):
                with contextlib.suppress(OSError, ValueError):
                    limits.append(int((folder / name).read_text()))
    # Version 1 writes "no limit" as a huge number.
    return min((n for n in limits if n < 1 << 60), default=None)


def free_memory() -> float:
    """Bytes of memory that this host can still give; infinite where Linux does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return math.inf


def _groups(membership: Path) -> list[tuple[list[str], str]]:
    """Controllers, none in version 2, and path of the control groups of this process."""
    try:
        rows = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return []
    return [(controllers.split(",") if controllers else [], path) for _, controllers, path in rows]


def _upward(base: Path, path: str) -> Iterator[Path]:
    parts = [p for p in path.split("/") if p not in ("", "..")]
    for n in range(len(parts), -1, -1):
        yield base.joinpath(*parts[:n])


def _quota(folder: Path, *names: str) -> float | None:
    """Quota divided by period, which version 2 has in one file and version 1 in two."""
    try:
        quota, period = (int(word) for name in names for word in (folder / name).read_text().split())
    except (OSError, ValueError):  # the latter of "max", which is version 2's word for no limit
        return None
    return None if quota <= 0 or period <= 0 else quota / period


# ---- what the operating system has measured of this process and its host ------------------------

NETWORK, FABRIC = Path("/proc/net/dev"), Path("/sys/class/infiniband")
_SENT_COLUMN = 8  # of a line of /proc/net/dev, behind the name
_FABRIC_WORD = 4  # bytes of one count of port_xmit_data


def peak_resident_bytes() -> int:
    """The most memory that this process has held so far, libraries and shared pages included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def network_bytes_sent() -> int | None:
    """Bytes that this host has sent to others, by all processes, since it started.

    Its network interfaces but the loopback, and InfiniBand, whose traffic those do not see.
    """
    try:
        lines = NETWORK.read_text().splitlines()[2:]
    except OSError:
        return None
    rows = [line.replace(":", " ", 1).split() for line in lines]
    sent = sum(int(row[1 + _SENT_COLUMN]) for row in rows if row and row[0] != "lo")
    return sent + sum(_counted(path) for path in FABRIC.glob("*/ports/*/counters/port_xmit_data"))


def _counted(path: Path) -> int:
    try:
        return _FABRIC_WORD * int(path.read_text())
    except (OSError, ValueError):
        return 0
