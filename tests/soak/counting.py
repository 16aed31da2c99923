"""A training whose every state is known: sums of small integers, exact on any number of ranks.

``python -m tests.soak.counting FOLDER`` goes on from the newest checkpoint in ``FOLDER/checkpoints``
and saves after every other step, at once or beside the next steps.  It tells, outside of that
folder, which checkpoints it has committed and whether it is inside a save, so that whoever kills it
knows what must be there.
"""

from __future__ import annotations

import argparse
import os
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import meshmpi as mm
from meshmpi import checkpoint
from meshmpi.checkpoint import BackgroundSaver
from meshmpi.runtime.agreement import from_first
from meshmpi.runtime.world import world_size

BATCH, WIDTH, DEPTH = 6, 37, 211
SAVE_EVERY, KEEP = 2, 2
WAIT_EVERY = 8 * SAVE_EVERY
"""A save in the background that is due is left out while another is being written; after so many
steps it is waited for instead.  Thus steps run during saves, and some saves are waited for."""
STATE = struct.Struct("<qqq")
"""What each rank keeps in a file of its own: process, saves begun, saves ended."""


def feeds(step: int) -> tuple[np.ndarray, np.ndarray]:
    """What step number ``step`` learns from: integers of -3 to 3."""
    draw = np.random.default_rng(step)
    x = draw.integers(-3, 4, (BATCH, WIDTH))
    return x.astype(np.float32), draw.integers(-3, 4, (BATCH, DEPTH)).astype(np.float32)


class Expected:
    """The variables after each step, computed by NumPy in whole numbers."""

    def __init__(self) -> None:
        self._step, self._total = 0, np.zeros((WIDTH, DEPTH), np.int64)

    def after(self, step: int) -> dict[str, np.ndarray]:
        """Name -> value after so many steps; quick when steps ascend from call to call."""
        if step < self._step:
            self._step, self._total = 0, np.zeros((WIDTH, DEPTH), np.int64)
        for k in range(self._step, step):
            x, y = feeds(k)
            self._total += x.astype(np.int64).T @ y.astype(np.int64)
        self._step = step
        return {"total": self._total.astype(np.float32), "count": np.full(3, step, np.int32)}


def build(mesh: Any) -> Any:
    """The compiled step: ``total`` adds the product of what is fed, ``count`` counts.

    Every rank holds a part of ``total``; its sum is fetched, which takes a collective.
    """
    batch, width = mm.Dimension("batch", BATCH), mm.Dimension("width", WIDTH)
    depth, three = mm.Dimension("depth", DEPTH), mm.Dimension("three", 3)
    with mm.Graph() as graph:
        x, y = mm.placeholder("x", [batch, width]), mm.placeholder("y", [batch, depth])
        total = mm.get_variable("total", [width, depth], initializer=mm.zeros_initializer())
        count = mm.get_variable("count", [three], "int32", initializer=mm.zeros_initializer())
        new = total + mm.einsum([x, y], [width, depth])
        updates = [mm.assign(total, new), mm.assign(count, count + 1)]
        checksum = mm.reduce_sum(new)
    return mm.compile(graph, mesh, "depth:all", fetches=[checksum], updates=updates)


class Teller:
    """Writes down what one rank does, for whoever kills it.

    Args:
        folder: Of the files; not that of the checkpoints.
        rank: This rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._first, self._folder = rank == 0, folder
        self._state = os.open(folder / f"state-{rank}", os.O_WRONLY | os.O_CREAT, 0o644)
        self._begun = self._ended = 0
        self._write()

    def _write(self) -> None:
        os.pwrite(self._state, STATE.pack(os.getpid(), self._begun, self._ended), 0)

    def saving(self) -> None:
        """A save begins."""
        self._begun += 1
        self._write()

    def saved(self, step: int) -> None:
        """It has ended: the checkpoint of this step must not get lost any more."""
        self._ended += 1
        self._write()
        if self._first:
            with open(self._folder / "commits", "a", encoding="utf-8") as log:
                log.write(f"{step}\n")
                log.flush()
                os.fsync(log.fileno())

    def litter(self, checkpoints: Path) -> None:
        """Tells of files among the checkpoints that should have been cleared away by now."""
        names = sorted(p.name for p in checkpoints.iterdir())
        if self._first and (len(names) > KEEP or not all(n.startswith("step-") for n in names)):
            with open(self._folder / "litter", "a", encoding="utf-8") as log:
                log.write(f"{' '.join(names)}\n")


class Saves:
    """Saves at once or in the background, and tells of it.  All methods are collective.

    Args:
        checkpoints: Their folder.
        store: ``step.variables``.
        tell: Told of each save.
        background: Whether the next steps run meanwhile.
    """

    def __init__(self, checkpoints: Path, store: Any, tell: Teller, background: bool) -> None:
        self._checkpoints, self._store, self._tell = checkpoints, store, tell
        self._saver = BackgroundSaver(checkpoints, store, KEEP) if background else None

    def after(self, done: int) -> None:
        """After each step: notes a save that has ended, begins one that is due."""
        if self._saver is not None:
            self._note(self._saver.poll())
        if done % SAVE_EVERY:
            return
        if self._saver is None:
            self._tell.saving()
            self._note(checkpoint.save(self._checkpoints, self._store, done, {}, KEEP))
        elif not self._saver.pending or done % WAIT_EVERY == 0:
            self._note(self._saver.wait())
            self._tell.saving()
            self._saver.start(done, {})

    def end(self) -> None:
        """Waits for what is being written."""
        if self._saver is not None:
            self._note(self._saver.wait())

    def _note(self, path: Path | None) -> None:
        """Tells of a checkpoint that is whole.  Now, and only now, nothing is being written."""
        if path is not None:
            self._tell.saved(int(path.name.removeprefix("step-")))
            self._tell.litter(self._checkpoints)


def run(folder: Path, ranks: int, steps: int, background: bool) -> None:
    """Trains and saves; on rank 0 of a mesh, or all of them."""
    mesh, checkpoints = mm.Mesh(f"all:{ranks}"), folder / "checkpoints"
    tell = Teller(folder, mesh.rank)
    step, done = build(mesh), 0
    # Rank 0 looks and tells: another might see what rank 0 has cleared away meanwhile.
    if from_first(mesh, lambda: bool(checkpoint.find(checkpoints))):
        done = checkpoint.load_newest(checkpoints, step.variables)[0].step
    saves, last = Saves(checkpoints, step.variables, tell, background), done + steps
    while done < last:
        x, y = feeds(done)
        step(x=x, y=y)
        done += 1
        saves.after(done)
    saves.end()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of one rank."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.counting", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=10**6, help="to do from here on")
    parser.add_argument("--background", action="store_true", help="save beside the next steps")
    options = parser.parse_args(arguments)
    run(options.folder, world_size(), options.steps, options.background)
    return 0


if __name__ == "__main__":
    sys.exit(main())
