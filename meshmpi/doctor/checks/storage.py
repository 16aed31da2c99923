"""Folders and memory: checkpoints, shared memory, temporary files, limits."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from meshmpi.amounts import amount
from meshmpi.doctor.facts import Facts, mount_of
from meshmpi.doctor.findings import Finding, found
from meshmpi.launch.command import free_bytes
from meshmpi.runtime.cores import group_memory

LEAST_CHECKPOINT_BYTES = 1 << 30
SLOW_BYTES_PER_SECOND = 50e6
"""Below it a checkpoint of a model of 100 million parameters takes half a minute."""
_TRIED_BYTES = 16 << 20
SHARED_BYTES_PER_RANK = 32 << 20
LEAST_TEMPORARY_BYTES = 64 << 20
LEAST_MEMORY_BYTES = 1 << 30
"""Memory for one rank.  All of these limits are assumptions, on the safe side of what small models need."""


def checkpoints(facts: Facts, slow: float = SLOW_BYTES_PER_SECOND) -> Iterator[Finding]:
    """A folder for checkpoints that cannot be written, is nearly full, slow or forgotten soon."""
    folder = facts.folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield found("checkpoints-not-writable", f"nothing can be written to {folder}.", look="")
        return
    free, mount = free_bytes(str(folder)), mount_of(folder)
    try:
        speed = written_per_second(folder, min(_TRIED_BYTES, max(free // 2, 4096)))
    except OSError as error:
        what = f"a file cannot be written to {folder}: {error.strerror}; {amount(free, 'B')} are free at {mount.at}."
        name = "checkpoints-full/nothing" if free < 1 << 20 else "checkpoints-not-writable"
        yield found(name, what, look=f"df -h {folder}\n", folder=folder)
        return
    if free < LEAST_CHECKPOINT_BYTES:
        yield found("checkpoints-full", f"{amount(free, 'B')} are free in {folder} ({mount.at}).", folder=folder)
    if speed < slow:
        yield found("checkpoints-slow", f"{folder} ({mount.kind} at {mount.at}) took {amount(speed, 'B')} per second.")
    if mount.kind in ("tmpfs", "ramfs"):
        yield found("checkpoints-in-memory", f"{folder} is on {mount.kind}, that is in memory.")


def written_per_second(folder: Path, count: int) -> float:
    """Bytes a second, with the wait until they are on the disk."""
    block = os.urandom(min(count, 1 << 20))
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".meshmpi-doctor-") as file:
        began = time.perf_counter()
        left = count
        while left > 0:
            left -= file.write(block[: min(left, len(block))])
        file.flush()
        os.fsync(file.fileno())
        return count / (time.perf_counter() - began)


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """Room for the segments by which ranks of one host exchange messages."""
    free, ranks = free_bytes("/dev/shm"), max(facts.wanted, 1)
    if not os.path.isdir("/dev/shm"):
        yield found("shared-memory-missing", "there is no /dev/shm.")
    elif free < ranks * SHARED_BYTES_PER_RANK:
        yield found("shared-memory-small", f"/dev/shm has {amount(free, 'B')} left, for {ranks} ranks.")


def temporary(facts: Facts) -> Iterator[Finding]:
    """Launchers and compilers put files into TMPDIR."""
    folder = facts.environment.get("TMPDIR") or "/tmp"
    free, problem = free_bytes(folder), ""
    if not os.path.isdir(folder):
        problem = "does not exist"
    elif not os.access(folder, os.W_OK):
        problem = "is not writable"
    elif free < LEAST_TEMPORARY_BYTES:
        problem = f"has {amount(free, 'B')} left"
    if problem:
        yield found("temporary-folder", f"the folder of temporary files, {folder}, {problem}.")


def copying(facts: Facts) -> Iterator[Finding]:
    """Whether one process may copy from another's memory: a ban, as older containers have it."""
    if facts.parts.get("processes", {}).get("can_read") is False and facts.kind != "mpich":
        what = "the kernel forbids a process to copy from another's memory (process_vm_readv)."
        yield found("copying-forbidden", what)


def memory(facts: Facts) -> Iterator[Finding]:
    """Limits of memory by the shell and by control groups."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        yield found("address-space-limited", f"a process may use {amount(limit, 'B')} of addresses (ulimit -v).")
    group, ranks = group_memory(), max(facts.wanted, 1)
    if group is not None and group < ranks * LEAST_MEMORY_BYTES:
        yield found(
            "memory-limited", f"this container or job may use {amount(group, 'B')} of memory, for {ranks} ranks."
        )
