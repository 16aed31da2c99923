"""Which checkpoints of a folder count, and what killed jobs have left among them.

Checkpoints are ordered by step.  So when one is saved though there are later ones, as after going
back to an older checkpoint, the later ones must count no more from the very moment at which it has
its name: a file beside them says so in advance; then they move into a folder of their own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from meshmpi.checkpoint import disk
from meshmpi.checkpoint.shard import Identity

PARTIAL, GONE = ".partial", ".gone"
"""End the hidden names of a checkpoint that is being written, and of one that is being removed."""
REPLACED = ".old"
"""Ends the hidden name of a checkpoint while one of the same step takes its place."""
MANIFEST = "manifest.json"
NAME = re.compile(r"^step-(\d{8,})$")
_HIDDEN = re.compile(rf"^\.step-(\d{{8,}})\{REPLACED}$")
_TURN = re.compile(r"^\.step-(\d{8,})-([0-9a-f]+)-after-(\d{8,})$")


def step_name(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step-{step:08d}"


def partial_name(identity: Identity) -> str:
    """Where a checkpoint is written; the name is of this save alone."""
    return f".{step_name(identity.step)}-{identity.checkpoint}{PARTIAL}"


class Turn(NamedTuple):
    """A save that gives up the checkpoints of all steps after one, but for its own.

    Attributes:
        identity: Of the checkpoint that is saved.
        after: The last step of those before that still counts.
    """

    identity: Identity
    after: int

    @property
    def file(self) -> str:
        """The name of the empty file that says so."""
        return f".{step_name(self.identity.step)}-{self.identity.checkpoint}-after-{self.after:08d}"

    @property
    def aside(self) -> str:
        """The folder that takes what is given up."""
        return f"abandoned-after-{self.after:08d}-{self.identity.checkpoint[:8]}"

    def counts(self, folder: Path) -> bool:
        """Whether its checkpoint, and no other of that step, has got its name."""
        try:
            text = (folder / step_name(self.identity.step) / MANIFEST).read_bytes()
        except OSError:
            return False
        return self.identity.checkpoint.encode() in text

    def gives_up(self, name: str, step: int) -> bool:
        """Whether a checkpoint counts no more."""
        return step > self.after and name != step_name(self.identity.step)


def find(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in a folder, the last saved first: steps descend.

    One that was being replaced by another of its step when the job was killed is among them.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return []
    names = sorted(p.name for p in folder.iterdir())  # hidden names first: the others win
    turns = [t for t in _turns(names) if t.counts(folder)]
    found = {
        step: folder / name
        for name, step in _checkpoints(names)
        if not any(t.gives_up(name, step) for t in turns)
    }
    return [path for _, path in sorted(found.items(), reverse=True)]


def _checkpoints(names: Iterable[str]) -> list[tuple[str, int]]:
    matches = [(n, _HIDDEN.match(n) or NAME.match(n)) for n in names]
    return [(name, int(match[1])) for name, match in matches if match]


def _turns(names: Iterable[str]) -> list[Turn]:
    matches = filter(None, map(_TURN.match, names))
    return [Turn(Identity(m[2], int(m[1])), int(m[3])) for m in matches]


def clean(folder: Path) -> list[str]:
    """Finishes what a killed job had begun: half-written and half-removed checkpoints go.

    Returns:
        Which checkpoints were set aside, as lines.

    Raises:
        OSError: Something cannot be removed.
    """
    if not folder.is_dir():
        return []
    names, lines = sorted(p.name for p in folder.iterdir()), []
    for turn in _turns(names):
        if turn.counts(folder):
            lines.append(set_aside(folder, turn))
        else:
            revoke(folder, turn)
    for path in sorted(folder.iterdir()):
        if not path.name.startswith(".step-"):
            continue
        if path.name.endswith(REPLACED):
            name = folder / path.name[1 : -len(REPLACED)]
            if not name.exists():
                disk.rename(path, name)  # the one that should replace it was never renamed
                disk.sync_folder(folder)
            else:
                disk.remove(path)
        elif path.name.endswith((PARTIAL, GONE)):
            disk.remove(path)
    return [line for line in lines if line]


def turn_back(folder: Path, identity: Identity, after: int) -> Turn | None:
    """What a save gives up; None where there is nothing.

    Args:
        folder: Of the checkpoints.
        identity: Of the new one.
        after: The last step that is not given up.
    """
    turn = Turn(identity, min(after, identity.step))
    there = _checkpoints(p.name for p in folder.iterdir())
    return turn if any(step > turn.after for _, step in there) else None


def announce(folder: Path, turn: Turn) -> None:
    """Says in advance what is given up; the rename that gives the new one its name makes it true.

    Raises:
        OSError: The file cannot be written.
    """
    disk.write_file(folder / turn.file, [])
    disk.sync_folder(folder)


def revoke(folder: Path, turn: Turn) -> None:
    """Takes back what `announce` has said.

    Raises:
        OSError: It cannot.
    """
    disk.remove(folder / turn.file)
    disk.sync_folder(folder)


def set_aside(folder: Path, turn: Turn) -> str:
    """Moves the checkpoints that were given up into a folder of their own; returns a line.

    Raises:
        OSError: One cannot be moved; none of them counts all the same.
    """
    aside, moved = folder / turn.aside, []
    for name, step in _checkpoints(sorted(p.name for p in folder.iterdir())):
        if turn.gives_up(name, step) and not (aside / step_name(step)).exists():
            disk.make_folder(aside)
            disk.rename(folder / name, aside / step_name(step))
            moved.append(step_name(step))
    if moved:
        disk.sync_folder(aside)
    disk.sync_folder(folder)
    revoke(folder, turn)
    if not moved:  # a killed job had moved all of them
        return ""
    return (
        f"set aside in {aside}: {', '.join(moved)}, as {step_name(turn.identity.step)} was saved"
        f" after going back to step {turn.after}"
    )
