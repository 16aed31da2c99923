"""How a run saves and loads: at once or in the background, with or without copies at buddy ranks.

Puts the settings ``checkpoint`` into effect; the loop decides what is saved and when.
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
from meshmpi.transformer.training.settings import CheckpointSettings


class Saves:
    """Saves and loads the variables of a run.  All methods are collective.

    Args:
        settings: Settings of the run.
        folder: Folder of its checkpoints.
        store: ``step.variables``.
        say: Takes lines, on rank 0 only.

    Attributes:
        seconds: That the last whole checkpoint took.
    """

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
        self._began = self.seconds = 0.0
        self._after: int | None = None  # the step resumed from, until something is saved
        self._unproven = False

    def save(self, step: int, about: Mapping[str, Any], background: bool, finite: bool = True) -> Path | None:
        """Writes a checkpoint; the one before must be done, and replicas must be equal.

        What was just saved may be poisoned: nobody knows before a step from it was finite.  So one
        that is proven is kept as well until `proven`.

        Args:
            step: Training steps done.
            about: Plain values for the manifest.
            background: Whether to return when variables are copied; needs the setting.
            finite: Whether the last step was; if not, or if there was none, nothing is dropped.

        Returns:
            Its folder; None if it is being written.

        Raises:
            CheckpointError: It cannot be written.
        """
        self._began = time.perf_counter()
        keep = max(self._keep, 2) if self._keep and finite else 0
        if not background or self._saver is None:
            path = save(
                self._folder, self._store, step, about, keep, self._buddies, self._say, self._after, compared=True
            )
            return self._whole(path)
        self._saver.start(step, about, keep, self._after, compared=True)
        seconds = time.perf_counter() - self._began
        self._say(f"copied the state of step {step} in {seconds:.3f} s; it is being written")
        return None

    def poll(self) -> Path | None:
        """The folder of a checkpoint that has become whole in the background, once.

        Raises:
            CheckpointError: It could not be written.
        """
        return None if self._saver is None else self._whole(self._saver.poll())

    def wait(self) -> Path | None:
        """As `poll`, when nothing is being written any more."""
        return None if self._saver is None else self._whole(self._saver.wait())

    def proven(self) -> None:
        """A step was finite: if the newest checkpoint is from before it, older ones may go."""
        if not self._unproven or (self._saver is not None and self._saver.pending):
            return
        self._unproven = False

        def drop() -> None:
            try:
                drop_old(self._folder, self._keep)
            except OSError as failure:
                self._say(f"an old checkpoint stays: {failure.filename}: {failure.strerror}")

        from_first(self._store.mesh, drop)

    def abandon(self) -> None:
        """Nothing is written any more when this returns; not collective, see `BackgroundSaver`."""
        if self._saver is not None:
            self._saver.abandon()

    def _whole(self, path: Path | None) -> Path | None:
        if path is not None:
            self.seconds = time.perf_counter() - self._began
            self._after, self._unproven = None, True
            self._say(f"wrote {path} in {self.seconds:.1f} s")
        return path

    def load(self, source: str | os.PathLike[str] | None) -> Manifest:
        """Loads a checkpoint, or the newest whole one of the run.

        Raises:
            CheckpointError: There is none, it is damaged, or it is of another model.
        """
        how: Any = {"buddies": self._buddies, "say": self._say}
        if source is not None:
            manifest, notes = load(source, self._store, **how), []
        else:
            manifest, notes = load_newest(self._folder, self._store, **how)
        for note in notes:
            self._say(note)
        self._after = manifest.step
        return manifest
