"""Finds the valid checkpoints in a folder, and what killed jobs left behind.

Checkpoints are ordered by step. When a run goes back, later checkpoints must become invalid at the moment in which
the next one is renamed: an empty file, written in advance, lists them; after the rename they are moved into a
separate folder.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from meshmpi.checkpoint.shard import Identity
from meshmpi.files import disk, plain

PARTIAL, GONE = ".partial", ".gone"
"""Endings of the hidden names of checkpoints that are being written, and being removed."""
REPLACED = ".old"
"""Ending of the hidden name of a checkpoint while another one of the same step takes its place."""
MANIFEST = "manifest.json"
NAME = re.compile(r"^step-(\d{8,})$")
_HIDDEN = re.compile(rf"^\.step-(\d{{8,}})\{REPLACED}$")
_TURN = re.compile(r"^\.step-(\d{8,})-([0-9a-f]+)-after-(\d{8,})$")


def step_name(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step-{step:08d}"


def durable_folder(folder: Path, identity: Identity) -> disk.DurableFolder:
    """The folder of a checkpoint."""
    name = step_name(identity.step)
    # Of this save alone: a lost rank or thread that still writes for one that was given up cannot write into it.
    partial = f".{name}-{identity.checkpoint}{PARTIAL}"
    return disk.DurableFolder(folder / name, folder / partial, folder / f".{name}{REPLACED}")


class Turn(NamedTuple):
    """A save that gives up all other checkpoints of steps later than ``after``."""

    identity: Identity  # the checkpoint that is saved
    after: int  # the last earlier step that still counts

    @property
    def file(self) -> str:
        """The name of the empty file that announces it."""
        return f".{step_name(self.identity.step)}-{self.identity.checkpoint}-after-{self.after:08d}"

    @property
    def aside(self) -> str:
        """The folder that takes what is given up."""
        return f"abandoned-after-{self.after:08d}-{self.identity.checkpoint[:8]}"

    def counts(self, folder: Path) -> bool:
        """Whether its checkpoint, and not another one of that step, has its name."""
        try:
            text = plain.contents(folder / step_name(self.identity.step) / MANIFEST, links=False)
        except OSError:
            return False
        return self.identity.checkpoint.encode() in text

    def gives_up(self, name: str, step: int) -> bool:
        """Whether a checkpoint no longer counts."""
        return step > self.after and name != step_name(self.identity.step)


def find(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in a folder, newest first, which means by descending step.

    A checkpoint that was just being replaced by another one of its step when the job was killed is included.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return []
    names = sorted(p.name for p in folder.iterdir())  # hidden names first: the others win
    turns = [t for t in _turns(names) if t.counts(folder)]
    found = {
        step: folder / name for name, step in _checkpoints(names) if not any(t.gives_up(name, step) for t in turns)
    }
    return [path for _, path in sorted(found.items(), reverse=True)]


def _checkpoints(names: Iterable[str]) -> list[tuple[str, int]]:
    matches = [(n, _HIDDEN.match(n) or NAME.match(n)) for n in names]
    return [(name, int(match[1])) for name, match in matches if match]


def _turns(names: Iterable[str]) -> list[Turn]:
    matches = filter(None, map(_TURN.match, names))
    return [Turn(Identity(m[2], int(m[1])), int(m[3])) for m in matches]


def clean(folder: Path) -> list[str]:
    """Finishes what a killed job has begun: removes half-written and half-removed checkpoints.

    Returns:
        Which checkpoints were set aside, as lines.
    """
    if not folder.is_dir():
        return []
    names, lines = sorted(p.name for p in folder.iterdir()), []
    for turn in _turns(names):
        if turn.counts(folder):
            lines.append(set_aside(folder, turn))
        else:
            _revoke(folder, turn)
    for path in sorted(folder.glob(".step-*")):
        name = folder / path.name[1 : -len(REPLACED)]
        if path.name.endswith(REPLACED) and not name.exists():
            disk.rename(path, name)  # the one that should replace it was never renamed
            disk.sync_folder(folder)
        elif path.name.endswith((REPLACED, PARTIAL, GONE)):
            disk.remove(path)
    return [line for line in lines if line]


def turn_back(folder: Path, identity: Identity, after: int) -> Turn | None:
    """The checkpoints that a save gives up: those of steps later than ``after``; None if there are none."""
    turn = Turn(identity, min(after, identity.step))
    there = _checkpoints(p.name for p in folder.iterdir())
    return turn if any(step > turn.after for _, step in there) else None


@contextlib.contextmanager
def announced(folder: Path, turn: Turn | None) -> Iterator[None]:
    """Writes in advance which checkpoints are given up; the rename inside the block makes it true.

    After an error it is taken back, unless the new checkpoint has got its name.
    """
    if turn is None:
        yield
        return
    try:
        disk.write_file(folder / turn.file, [])
        disk.sync_folder(folder)
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            if not turn.counts(folder):
                _revoke(folder, turn)
        raise


def _revoke(folder: Path, turn: Turn) -> None:
    disk.remove(folder / turn.file)
    disk.sync_folder(folder)


def set_aside(folder: Path, turn: Turn) -> str:
    """Moves the checkpoints that were given up into a folder of their own; returns a line."""
    aside, moved = folder / turn.aside, []
    for name, step in _checkpoints(sorted(p.name for p in folder.iterdir())):
        if turn.gives_up(name, step) and not (aside / step_name(step)).exists():
            disk.make_folder(aside)
            disk.rename(folder / name, aside / step_name(step))
            moved.append(step_name(step))
    if moved:
        disk.sync_folder(aside)
    disk.sync_folder(folder)
    _revoke(folder, turn)
    if not moved:  # a killed job had moved all of them
        return ""
    return (
        f"set aside in {aside}: {', '.join(moved)}, as {step_name(turn.identity.step)} was saved"
        f" after going back to step {turn.after}"
    )
