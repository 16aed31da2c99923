"""A second copy of every rank's file, kept by its buddy rank: in memory, or on the buddy's own disk.

The buddy is a rank of the next host, or the next rank if there is only one host.  If a file of a
checkpoint is missing or damaged when it is read, it is written again from the copy.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshmpi.checkpoint.folder import step_name
from meshmpi.checkpoint.manifest import Manifest
from meshmpi.checkpoint.shard import Identity, Shard, file_name, is_whole
from meshmpi.errors import CheckpointError
from meshmpi.files import disk, plain
from meshmpi.runtime.agreement import first_error, gathered
from meshmpi.runtime.mesh_protocol import Ranks

if TYPE_CHECKING:
    from meshmpi.runtime.mpi import MPI

MEMORY = "memory"
_MESSAGE_BYTES = 1 << 28  # some MPI libraries count bytes in 31 bits


class _Copy(NamedTuple):
    identity: Identity
    file: str
    data: np.ndarray


_IN_MEMORY: dict[str, list[_Copy]] = {}
"""Run -> copies that this process keeps.  They outlive the mesh: when a rank is lost, the survivors
make a smaller mesh and still have them."""


def buddy_ranks(hosts: Sequence[str]) -> list[int]:
    """For each rank the rank that keeps its copy.

    Example:
        >>> buddy_ranks(["a", "a", "b", "b", "b"])
        [2, 3, 0, 1, 0]
    """
    names, found = list(dict.fromkeys(hosts)), []
    ranks = {name: [r for r, h in enumerate(hosts) if h == name] for name in names}
    if len(names) == 1:
        return [(r + 1) % len(hosts) for r in range(len(hosts))]
    for r, host in enumerate(hosts):
        there = ranks[names[(names.index(host) + 1) % len(names)]]
        found.append(there[ranks[host].index(r) % len(there)])
    return found


class Buddies:
    """Copies of other ranks' files.  Making it is collective.

    Args:
        mesh: Of the run, or its `Survivors`.
        where: ``"memory"``, or a folder that each host has for itself, such as on its local disk.
    """

    def __init__(self, mesh: Ranks, where: str) -> None:
        self.mesh = mesh
        self.folder = None if where == MEMORY else Path(where)
        comm = mesh.comm
        self._comm = comm if comm is not None and comm.size > 1 else None
        self._buddy = buddy_ranks(gathered(mesh, socket.gethostname()))
        self._unwritten: list[_Copy] = []

    def exchange(self, checkpoint: Path, identity: Identity, shards: Sequence[Shard]) -> None:
        """Hands files to buddies and takes those of others.  Collective.

        Copies of the checkpoint before are kept until `drop_old` says that the new one is whole.
        """
        if self._comm is None:
            new = [_Copy(identity, s.file, _joined(s)) for s in shards]
        else:
            # Recorded as one: a rank that waits for its buddy's copy is seen to wait.
            send = functools.partial(self._sent, self._comm, identity, shards)
            new = self.mesh.outside("buddies", send)()
        if self.folder is None:
            _IN_MEMORY.setdefault(_run(checkpoint), []).extend(new)
        else:
            self._unwritten = new

    def _sent(self, comm: MPI.Intracomm, identity: Identity, shards: Sequence[Shard]) -> list[_Copy]:
        """One file a rank goes to its buddy; what others have sent to this rank comes back."""
        sizes = comm.allgather(sum(s.record()["bytes"] for s in shards))
        waiting: list[Any] = []
        found = []
        for source, buddy in enumerate(self._buddy):
            if buddy == comm.rank and sizes[source]:
                data = np.empty(sizes[source], np.uint8)
                found.append(_Copy(identity, file_name(source), data))
                waiting += [comm.Irecv(m, source) for m in messages(data)]
        joined = [_joined(s) for s in shards]
        for data in joined:
            waiting += [comm.Isend(m, self._buddy[comm.rank]) for m in messages(data)]
        for request in waiting:
            request.Wait()
        return found

    def write(self, checkpoint: Path) -> None:
        """Puts new copies into the folder, where there is one."""
        while self._unwritten:
            copy = self._unwritten[-1]
            path = self._path(checkpoint, copy.identity, copy.file)
            disk.make_folder(path.parent)
            disk.replace_file(path, [copy.data.data])
            self._unwritten.pop()

    def _path(self, checkpoint: Path, identity: Identity, file: str) -> Path:
        return self._of_run(checkpoint) / f"{step_name(identity.step)}-{identity.checkpoint}" / file

    def _of_run(self, checkpoint: Path) -> Path:
        assert self.folder is not None
        return self.folder / hashlib.blake2b(_run(checkpoint).encode(), digest_size=8).hexdigest()

    def drop_old(self, checkpoint: Path) -> None:
        """Forgets copies of checkpoints that are not kept; ``checkpoint`` has become whole."""
        if self.folder is None:
            kept = _IN_MEMORY.get(_run(checkpoint), [])
            kept[:] = [c for c in kept if c.identity == kept[-1].identity]
            return
        run = self._of_run(checkpoint)
        for path in sorted(run.iterdir()) if run.is_dir() else []:
            if not (checkpoint.parent / path.name.rpartition("-")[0]).exists():
                with contextlib.suppress(OSError):  # another rank of this host may be faster
                    disk.remove(path)

    def damaged(self, manifest: Manifest) -> list[str]:
        """Files of a checkpoint that are missing or damaged, and of which this rank has a copy."""

        def differs(file: str) -> bool:
            return not is_whole(_bytes_of(manifest.folder / file, manifest, file), manifest.files[file])

        return [f for f in manifest.files if self._good_copy(manifest, f) and differs(f)]

    def restore(self, manifest: Manifest, damaged: Sequence[str]) -> list[str]:
        """Writes damaged files again, where any rank has a good copy.  Collective.

        Returns:
            What was restored, from where, as lines; the same on all ranks.
        """
        good = {file: copy for file in damaged if (copy := self._good_copy(manifest, file))}
        mine = {file: where for file, (_, where) in good.items()}
        offers = gathered(self.mesh, mine)
        notes, error = [], None
        for file in damaged:
            giver = next((k for k, offer in enumerate(offers) if file in offer), None)
            if giver is None:
                continue
            notes.append(f"{manifest.what(file)} was restored from {offers[giver][file]}")
            if giver == self.mesh.rank:
                try:
                    with disk.errors_of(self.mesh.rank):
                        disk.replace_file(manifest.folder / file, [good[file][0].data])
                except CheckpointError as failure:
                    error = failure
        error = first_error(self.mesh, error)
        if error is not None:
            raise error
        return notes

    def _good_copy(self, manifest: Manifest, file: str) -> tuple[np.ndarray, str] | None:
        """This rank's verified copy of a file, and where it is."""
        if self.folder is None:
            kept, wanted = _IN_MEMORY.get(_run(manifest.folder), []), (manifest.identity, file)
            data = next((c.data for c in kept if (c.identity, c.file) == wanted), None)
            where = f"the memory of rank {self.mesh.rank}"
        else:
            path = self._path(manifest.folder, manifest.identity, file)
            data, where = _bytes_of(path, manifest, file), f"rank {self.mesh.rank}'s copy, {path}"
        return (data, where) if data is not None and is_whole(data, manifest.files[file]) else None


def _bytes_of(path: Path, manifest: Manifest, file: str) -> np.ndarray | None:
    """All bytes of a file of a checkpoint, or of a copy; None where it cannot be read."""
    try:
        most = manifest.files[file]["bytes"]
        return np.frombuffer(plain.contents(path, most, links=False), np.uint8)
    except OSError:
        return None


def _run(checkpoint: Path) -> str:
    return os.path.abspath(checkpoint.parent)


def messages(data: np.ndarray) -> list[np.ndarray]:
    """The bytes of a C-contiguous array in parts that every MPI library can count."""
    data = data.reshape(-1).view(np.uint8)
    return [data[a : a + _MESSAGE_BYTES] for a in range(0, data.size, _MESSAGE_BYTES)]


def _joined(shard: Shard) -> np.ndarray:
    return np.concatenate([np.frombuffer(shard.header, np.uint8), *shard.data])
