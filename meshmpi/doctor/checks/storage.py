"""Folders and memory: checkpoints, shared memory, temporary files, limits."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from meshmpi.doctor.facts import Facts
from meshmpi.doctor.findings import BROKEN, WARNING, Finding
from meshmpi.doctor.mounts import mount_of
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
    """A folder for checkpoints that cannot be written, is nearly full, slow or forgotten soon.

    Args:
        facts: Their folder, or the nearest one above it that exists, is tried.
        slow: Bytes per second that are slow.
    """
    folder = facts.folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    other = "meshmpi train CONFIG --out /path/with/space"
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield Finding(
            BROKEN,
            "checkpoints-not-writable",
            f"nothing can be written to {folder}.",
            "Training ends at its first checkpoint.",
            other,
        )
        return
    free = free_bytes(str(folder))
    mount = mount_of(folder)
    try:
        speed = written_per_second(folder, min(_TRIED_BYTES, max(free // 2, 4096)))
    except OSError as error:
        full = free < 1 << 20
        yield Finding(
            BROKEN,
            "checkpoints-full" if full else "checkpoints-not-writable",
            f"a file cannot be written to {folder}: {error.strerror}; {_text(free)} are free at {mount.at}.",
            "Training ends at its first checkpoint.",
            f"df -h {folder}\n{other}",
        )
        return
    if free < LEAST_CHECKPOINT_BYTES:
        yield Finding(
            WARNING,
            "checkpoints-full",
            f"{_text(free)} are free in {folder} ({mount.at}).",
            "Several checkpoints are kept; a model of 100 million parameters needs 1.2 GB for each with Adam.",
            f"df -h {folder}\n{other}",
        )
    if speed < slow:
        yield Finding(
            WARNING,
            "checkpoints-slow",
            f"{folder} ({mount.kind} at {mount.at}) took {_text(speed)} per second.",
            "Every rank waits while its part of a checkpoint is written.",
            other,
        )
    if mount.kind in ("tmpfs", "ramfs"):
        yield Finding(
            WARNING,
            "checkpoints-in-memory",
            f"{folder} is on {mount.kind}, that is in memory.",
            "Checkpoints take memory from ranks, and are lost with the host.",
            other,
        )


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
    if not os.path.isdir("/dev/shm"):
        yield Finding(
            WARNING,
            "shared-memory-missing",
            "there is no /dev/shm.",
            "Ranks of one host exchange messages through files in it.",
            "sudo mkdir /dev/shm && sudo mount -t tmpfs tmpfs /dev/shm",
        )
        return
    free, ranks = free_bytes("/dev/shm"), max(facts.wanted, 1)
    if free < ranks * SHARED_BYTES_PER_RANK:
        yield Finding(
            WARNING,
            "shared-memory-small",
            f"/dev/shm has {_text(free)} left, for {ranks} ranks.",
            "MPI libraries put messages between ranks of one host there, and end with a bus error"
            " when it is full; meshmpi's launcher moves Open MPI's to TMPDIR.",
            "docker run --shm-size=1g ...        # a container's is 64 MB by default\n"
            "sudo mount -o remount,size=1g /dev/shm",
        )


def temporary(facts: Facts) -> Iterator[Finding]:
    """Launchers and compilers put files into TMPDIR."""
    folder = facts.environment.get("TMPDIR") or "/tmp"
    free = free_bytes(folder)
    problem = ""
    if not os.path.isdir(folder):
        problem = "does not exist"
    elif not os.access(folder, os.W_OK):
        problem = "is not writable"
    elif free < LEAST_TEMPORARY_BYTES:
        problem = f"has {_text(free)} left"
    if problem:
        yield Finding(
            WARNING,
            "temporary-folder",
            f"the folder of temporary files, {folder}, {problem}.",
            "Launchers put their sockets there, and compilers their files.",
            "export TMPDIR=$HOME/tmp && mkdir -p $TMPDIR",
        )


def copying(facts: Facts) -> Iterator[Finding]:
    """Whether one process may copy from another's memory: a ban, as older containers have it."""
    if facts.parts.get("processes", {}).get("can_read") is False and facts.kind != "mpich":
        yield Finding(
            WARNING,
            "copying-forbidden",
            "the kernel forbids a process to copy from another's memory (process_vm_readv).",
            "Open MPI tries it for long messages: they fail or go through a slower path;"
            " meshmpi's launcher turns it off.",
            "export OMPI_MCA_smsc=^cma OMPI_MCA_btl_vader_single_copy_mechanism=none\n"
            "docker run --cap-add=SYS_PTRACE ...   # allows it instead",
        )


def memory(facts: Facts) -> Iterator[Finding]:
    """Limits of memory by the shell and by control groups."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        yield Finding(
            WARNING,
            "address-space-limited",
            f"a process may use {_text(limit)} of addresses (ulimit -v).",
            "MPI libraries and BLAS reserve more than they use; they fail with errors of mmap.",
            "ulimit -v unlimited",
        )
    group = group_memory()
    ranks = max(facts.wanted, 1)
    if group is not None and group < ranks * LEAST_MEMORY_BYTES:
        yield Finding(
            WARNING,
            "memory-limited",
            f"this container or job may use {_text(group)} of memory, for {ranks} ranks.",
            "The kernel ends a rank that asks for more, without a message.",
            "#SBATCH --mem=16G      # or: docker run --memory=16g ...",
        )


def _text(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
