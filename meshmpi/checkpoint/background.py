"""Background saves: a step copies its blocks, and a thread of each rank writes the copies.

The threads do not call MPI. At the end of each step the ranks agree on whether all files are on disk. Then a thread
of rank 0 writes the manifest and renames the folder; the checkpoint exists once all ranks know of it.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meshmpi.checkpoint.buddies import Buddies
from meshmpi.checkpoint.saving import Save, owned
from meshmpi.errors import CheckpointError
from meshmpi.runtime.agreement import Flag
from meshmpi.runtime.variables import VariableStore


class _Work(threading.Thread):
    """A piece of work in a thread; its result or its error is kept for the main thread."""

    def __init__(self, rank: int, work: Callable[[], Any]) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._rank, self._work = rank, work
        self.result: Any = None
        self.error: CheckpointError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._work()
        except CheckpointError as error:
            self.error = error
        except Exception as error:  # the main thread raises it, on all ranks
            self.error = CheckpointError(
                f"rank {self._rank}: {type(error).__name__}: {error}",
                "Please report it; checkpoint.background=false saves in the training loop itself.",
            )


class BackgroundSaver:
    """Saves one checkpoint at a time while the training goes on.  All methods are collective.

    The arguments are those of `meshmpi.checkpoint.save`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        store: VariableStore,
        keep: int = 0,
        buddies: Buddies | None = None,
        say: Callable[[str], None] = warnings.warn,
    ) -> None:
        self._begin = functools.partial(Save, folder, store, buddies=buddies, say=say)
        self._store, self._keep, self._mesh = store, keep, store.mesh
        self._running, self._failed = Flag(store.mesh), Flag(store.mesh)
        self._copies: dict[tuple[int, str], np.ndarray] = {}
        self._save: Save | None = None
        self._thread: _Work  # of the save
        self._committing = False

    @property
    def copy_bytes(self) -> int:
        """Memory that the copies take in this process from the first save on, in bytes."""
        blocks = (b for r in self._store.ranks for b in owned(self._store, r).values())
        return sum(b.nbytes for b in blocks)

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is being written; the same on all ranks."""
        return self._save is not None

    def start(
        self,
        step: int,
        about: Mapping[str, Any],
        keep: int | None = None,
        after: int | None = None,
        compared: bool = False,
    ) -> None:
        """Copies all variables and begins to write them, as `save` does; the previous save must be done."""
        assert self._save is None, "wait() comes before start()"
        keep = self._keep if keep is None else keep
        saving = self._begin(step=step, about=about, keep=keep, after=after, compared=compared)
        saving.take({rank: self._copied(rank) for rank in self._store.ranks})
        self._save, self._committing = saving, False
        self._thread = _Work(self._mesh.rank, saving.write)

    def _copied(self, rank: int) -> dict[str, np.ndarray]:
        """Copies of the blocks that a rank writes, in memory that is allocated once."""
        found = {}
        for name, block in owned(self._store, rank).items():
            copy = self._copies.get((rank, name))
            if copy is None:
                copy = self._copies[rank, name] = np.empty_like(block, order="C")
            np.copyto(copy, block)
            found[name] = copy
        return found

    def poll(self) -> Path | None:
        """The folder of a checkpoint that is done, once; costs nothing when none is being written."""
        if self._save is None:
            return None
        thread, saving = self._thread, self._save
        alive = thread.is_alive()
        failed = self._failed.agree(not alive and thread.error is not None)
        if self._running.agree(alive) and not failed:
            return None
        thread.join()  # files are not removed while a thread still writes them
        try:
            saving.check(thread.error)
        except CheckpointError:
            self._save = None
            raise
        if self._committing:
            self._save = None
            return saving.finish()
        files = saving.all_files(thread.result)
        self._committing = True
        self._thread = _Work(self._mesh.rank, lambda: saving.commit(files) if self._mesh.rank == 0 else None)
        return None

    def abandon(self) -> None:
        """Leaves the checkpoint unfinished once this rank's thread is done; not collective.

        For survivors of a lost rank, who will make another saver.
        """
        if self._save is not None:
            self._thread.join()
        self._save = None

    def wait(self) -> Path | None:
        """Waits until the checkpoint is done; returns its folder; None if none was being written."""
        found = None
        while self._save is not None:
            self._thread.join()
            found = self.poll()
        return found
