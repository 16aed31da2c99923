"""Saving while the next steps run: blocks are copied, a thread of each rank writes the copies.

No thread calls MPI.  At the end of each step the ranks ask each other whether all files are on
disk; then rank 0's thread writes the manifest and renames, and a later step learns that it is done.
Until then the checkpoint does not exist, and the one before stays.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meshmpi.checkpoint import disk
from meshmpi.checkpoint.partners import Partners
from meshmpi.checkpoint.saving import Place, Records, begin, owned
from meshmpi.checkpoint.shard import Shard, make_shard
from meshmpi.errors import CheckpointError
from meshmpi.runtime.agreement import Flag, first_error, from_first, gathered
from meshmpi.runtime.variables import VariableStore

_Copies = Mapping[int, Mapping[str, np.ndarray]]


class _Work(threading.Thread):
    """A piece of work whose error is kept; ``result`` is there when it ended without one."""

    def __init__(self, rank: int, work: Callable[[], Any]) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._rank, self._work = rank, work
        self.result: Any = None
        self.error: CheckpointError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._work()
        except OSError as error:
            self.error = disk.unwritable(error, self._rank)
        except CheckpointError as error:
            self.error = error
        except Exception as error:  # said by the main thread, on all ranks
            self.error = CheckpointError(
                f"rank {self._rank}: {type(error).__name__}: {error}",
                "Please report it; checkpoint.background=false saves in the training loop itself.",
            )


class BackgroundSaver:
    """Saves one checkpoint at a time beside the training.  All methods are collective.

    Args:
        folder: Where checkpoints are kept, on a file system that all ranks see.
        store: ``step.variables`` of a compiled step.
        keep: Newest checkpoints to keep; 0 keeps all.
        partners: Who else keeps a copy of each rank's file.
        say: Takes what was set aside, and what went wrong after a checkpoint was whole, on rank 0.
    """

    def __init__(
        self, folder: str | os.PathLike[str], store: VariableStore, keep: int = 0,
        partners: Partners | None = None, say: Callable[[str], None] = warnings.warn,
    ) -> None:  # fmt: skip
        self._folder, self._store, self._keep = Path(folder), store, keep
        self._partners, self._say, self._mesh = partners, say, store.mesh
        self._running, self._failed = Flag(store.mesh), Flag(store.mesh)
        self._copies: dict[tuple[int, str], np.ndarray] = {}
        self._place: Place | None = None
        self._about: Mapping[str, Any] = {}
        self._keeping, self._after = keep, 0
        self._thread: _Work | None = None
        self._committing = False

    @property
    def copy_bytes(self) -> int:
        """Memory that copies take from the first save on, of this process, in bytes."""
        blocks = (b for r in self._store.ranks for b in owned(self._store, r).values())
        return sum(b.nbytes for b in blocks)

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is being written; the same on all ranks."""
        return self._place is not None

    def start(
        self, step: int, about: Mapping[str, Any], keep: int | None = None,
        after: int | None = None,
    ) -> None:  # fmt: skip
        """Copies all variables and begins to write them; the checkpoint before must be done.

        Args:
            step: Training steps done; names the checkpoint.
            about: Plain values for the manifest.
            keep: Newest checkpoints to keep this time; default: as always.
            after: As in `save`.

        Raises:
            CheckpointError: The folder cannot be made, or ``about`` cannot be written.
        """
        assert self._place is None, "wait() comes before start()"
        self._place = place = begin(self._mesh, self._folder, step, about)
        self._about, self._committing = dict(about), False
        self._keeping = self._keep if keep is None else keep
        self._after = place.identity.step if after is None else after
        copies = {rank: self._copied(rank) for rank in self._store.ranks}
        shards = None
        if self._partners is not None:  # whose MPI calls must be made here
            shards = self._shards(place, copies)
            self._partners.exchange(place.target, place.identity, shards)
        self._thread = _Work(self._mesh.rank, lambda: self._write(place, copies, shards))

    def _copied(self, rank: int) -> dict[str, np.ndarray]:
        """The blocks that a rank writes, in memory that is taken once and used for every save."""
        found = {}
        for name, block in owned(self._store, rank).items():
            copy = self._copies.get((rank, name))
            if copy is None:
                copy = self._copies[rank, name] = np.empty_like(block, order="C")
            np.copyto(copy, block)
            found[name] = copy
        return found

    def _shards(self, place: Place, copies: _Copies) -> list[Shard]:
        return [make_shard(place.identity, r, b) for r, b in copies.items() if b]

    def _write(self, place: Place, copies: _Copies, shards: list[Shard] | None) -> Records:
        records = place.write(self._shards(place, copies) if shards is None else shards)
        if self._partners is not None:
            self._partners.write(place.target)
        return records

    def poll(self) -> Path | None:
        """Looks whether the checkpoint is done; costs nothing when none is being written.

        Returns:
            Its folder, once.

        Raises:
            CheckpointError: A rank could not write; what was there before is untouched.
        """
        if self._place is None:
            return None
        thread, place = self._thread, self._place
        alive = thread is not None and thread.is_alive()
        failed = self._failed.agree(not alive and thread is not None and thread.error is not None)
        if self._running.agree(alive) and not failed:
            return None
        if thread is not None:
            thread.join()  # nothing is removed under a thread that still writes
        error = first_error(self._mesh, None if thread is None else thread.error)
        if error is not None:
            self._place = self._thread = None
            from_first(self._mesh, place.discard)
            raise error
        if self._committing:
            self._place = self._thread = None
            if self._partners is not None:
                self._partners.drop_old(place.target)
            return place.target
        self._commit(place, {} if thread is None else thread.result)
        return None

    def _commit(self, place: Place, records: Records) -> None:
        files = {f: r for part in gathered(self._mesh, records) for f, r in part.items()}
        types = {name: v.type for name, v in self._store.types.items()}
        shape, about, say = self._mesh.shape, self._about, self._say
        keep, after = self._keeping, self._after
        self._committing, self._thread = True, None
        if self._mesh.rank == 0:
            self._thread = _Work(
                0, lambda: place.commit(shape, types, about, files, keep, say, after)
            )

    def abandon(self) -> None:
        """Leaves the checkpoint unfinished once this rank's thread is done; not collective.

        For when other ranks are lost and there will be another saver.
        """
        if self._thread is not None:
            self._thread.join()
        self._place = self._thread = None

    def wait(self) -> Path | None:
        """Waits until the checkpoint is done.

        Returns:
            Its folder; None if none was being written.

        Raises:
            CheckpointError: A rank could not write; what was there before is untouched.
        """
        found = None
        while self._place is not None:
            if self._thread is not None:
                self._thread.join()
            found = self.poll()
        return found
