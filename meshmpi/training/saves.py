"""Saves and loads a run: directly or in the background, with or without buddy ranks.

The loop decides what is saved and when.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshmpi.checkpoint import BackgroundSaver, Buddies, Manifest, load, load_newest, save
from meshmpi.checkpoint.saving import drop_old
from meshmpi.runtime.agreement import from_first
from meshmpi.runtime.variables import VariableStore
from meshmpi.training.settings import CheckpointSettings


class Saves:
    """Saves and loads the variables of a run.  All methods but `abandon` are collective."""

    def __init__(
        self, settings: CheckpointSettings, folder: Path, store: VariableStore, say: Callable[[str], None]
    ) -> None:
        self._folder, self._store, self._keep, self._say = folder, store, settings.keep, say
        self._buddies = Buddies(store.mesh, settings.partner) if settings.partner else None
        self._saver: BackgroundSaver | None = None
        if settings.background:
            self._saver = BackgroundSaver(folder, store, settings.keep, self._buddies, say)
            size = self._saver.copy_bytes / 1e6
            say(f"checkpoints are written in the background, from a copy of {size:.3g} MB on rank 0")
        self._began = self.seconds = 0.0  # of the last complete save
        self._after: int | None = None  # the step resumed from, until something is saved
        self._unproven = False

    def save(self, step: int, about: Mapping[str, Any], background: bool, finite: bool = True) -> Path | None:
        """Writes a checkpoint after ``step`` steps; the one before must be complete, and replicas must be equal.

        The new checkpoint may be poisoned; only a finite step from it proves that it is not.  So the last
        proven one is kept as well until `proven`, and none is dropped unless the last step was ``finite``.

        Args:
            about: Plain values for the manifest.
            background: Whether to return, without a folder, when variables are copied; needs the setting.
        """
        self._began = time.perf_counter()
        keep = max(self._keep, 2) if self._keep and finite else 0
        if not background or self._saver is None:
            return self._complete(
                save(self._folder, self._store, step, about, keep, self._buddies, self._say, self._after, compared=True)
            )
        self._saver.start(step, about, keep, self._after, compared=True)
        seconds = time.perf_counter() - self._began
        self._say(f"copied the state of step {step} in {seconds:.3f} s; it is being written")
        return None

    def poll(self) -> Path | None:
        """The folder of a checkpoint that has become complete in the background, once."""
        return None if self._saver is None else self._complete(self._saver.poll())

    def wait(self) -> Path | None:
        """As `poll`, when nothing is being written any more."""
        return None if self._saver is None else self._complete(self._saver.wait())

    def proven(self) -> None:
        """A step was finite: drops the older checkpoints if the newest is from before this step."""
        if self._unproven and not (self._saver is not None and self._saver.pending):
            self._unproven = False
            from_first(self._store.mesh, self._drop)

    def _drop(self) -> None:
        try:
            drop_old(self._folder, self._keep)
        except OSError as failure:
            self._say(f"an old checkpoint stays: {failure.filename}: {failure.strerror}")

    def abandon(self) -> None:
        """When this returns, nothing is written any more, see `BackgroundSaver`."""
        if self._saver is not None:
            self._saver.abandon()

    def _complete(self, path: Path | None) -> Path | None:
        if path is not None:
            self.seconds = time.perf_counter() - self._began
            self._after, self._unproven = None, True
            self._say(f"wrote {path} in {self.seconds:.1f} s")
        return path

    def load(self, source: str | os.PathLike[str] | None) -> Manifest:
        """Loads a checkpoint; None: the newest complete one of the run."""
        if source is not None:
            manifest = load(source, self._store, buddies=self._buddies, say=self._say)
        else:
            manifest, notes = load_newest(self._folder, self._store, buddies=self._buddies, say=self._say)
            for note in notes:
                self._say(note)
        self._after = manifest.step
        return manifest
