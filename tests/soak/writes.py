"""Saves whose system calls fail: the Nth with EIO, ENOSPC, EDQUOT or a short write, N = 1, 2, ...

After each the checkpoint before must load bit-equal, the message must name path, rank and errno,
and the next save must leave no litter.  On a simulated mesh at once and in the background, with and
without buddies' copies, under a real mpirun with either rank failing; and on a full disk.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshmpi import checkpoint
from meshmpi.errors import CheckpointError
from meshmpi.files import disk
from meshmpi.runtime.agreement import gathered
from tests.soak.rows import Row
from tests.soak.stores import Placed, equal, store, values

CALLS = ("open", "pwrite", "fsync", "close", "rename", "mkdir", "rmdir", "unlink", "lstat", "listdir")
FAULTS = ("EIO", "ENOSPC", "EDQUOT", "short")
PLACED = Placed("all:2", "model:all;vocab:all")
KEPT = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which of them."""
    parser.add_argument("--no-mpirun", action="store_true", help="simulated meshes only")


def run(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each way to save and each fault."""
    for fault in ("EIO", "short") if options.quick else FAULTS:
        for how in ("at once", "background", "at once, partner", "background, partner"):
            if options.quick and how == "background, partner":
                continue
            with tempfile.TemporaryDirectory() as folder:
                yield Row.of(f"writes, {how}, {fault}", trials(Path(folder), how, fault))
    if not options.no_mpirun:
        for victim in (0, 1):
            faults = ("ENOSPC",) if options.quick else FAULTS
            for fault, how in itertools.product(faults, ("at once", "background, partner")):
                yield _on_ranks(victim, fault, how)
    yield from full_disk()


class Failing:
    """`os`, but for its Nth call of those in CALLS.

    Args:
        fault: The name of an errno; or ``short``: writes take half of what they are given, and
            the Nth call fails with ENOSPC.
        number: Which call fails; 0: none.
    """

    def __init__(self, fault: str, number: int) -> None:
        self._fault, self._number, self.count = fault, number, 0
        self.hit: tuple[str, int] | None = None

    def __getattr__(self, name: str) -> Any:
        function = getattr(os, name)
        return (lambda *given: self._call(name, function, given)) if name in CALLS else function

    def _call(self, name: str, function: Any, given: tuple[Any, ...]) -> Any:
        self.count += 1
        if self.count == self._number:
            code = getattr(errno, "ENOSPC" if self._fault == "short" else self._fault)
            self.hit = (name, code)
            if name == "close":  # Linux closes the file, then tells
                function(*given)
            named = isinstance(given[0], str | Path)  # of a descriptor the system does not say the path
            raise OSError(code, os.strerror(code), *([str(given[0])] if named else []))
        if name == "pwrite" and self._fault == "short" and len(given[1]) > 1:
            return function(given[0], given[1][: len(given[1]) // 2], given[2])
        return function(*given)


def trials(folder: Path, how: str, fault: str, mesh: Any = None, victim: int = 0) -> list[str]:
    """Saves with the first, second, ... call failing, until none fails.  Collective.

    Args:
        folder: An empty one that all ranks see.
        how: ``at once`` or ``background``, and whether with buddies.
        fault: As `Failing` takes it.
        mesh: A mesh of two ranks; default: simulated.
        victim: The rank whose calls fail.

    Returns:
        What was wrong in each trial, or empty.
    """
    rank, found = 0 if mesh is None else mesh.rank, []
    for number in itertools.count(1):
        trial = _Trial(folder, how, mesh, number)
        failing = Failing(fault, number if rank == victim else 0)
        message = trial.save(failing)
        problem = next(filter(None, gathered(trial.mesh, trial.problem(message, failing))), "")
        found.append(problem and f"call {number} ({failing.hit}): {problem}")
        if not any(gathered(trial.mesh, failing.hit is not None)):
            return found
    raise AssertionError("the loop returns")


class _Trial:
    """Two good checkpoints, and a third save that may fail."""

    def __init__(self, folder: Path, how: str, mesh: Any, number: int) -> None:
        self._how, self._folder = how, folder / "checkpoints"
        self._old, self._new = values(2 * number), values(2 * number + 1)
        self._store = store(PLACED, self._old, mesh=mesh)
        self.mesh, self._step, self._said = self._store.mesh, 10 * number, []
        self._buddies = None
        if "partner" in how:
            self._buddies = checkpoint.Buddies(self.mesh, str(folder / "partner"))
        self._good = self._saved(self._step)
        for name, blocks in store(PLACED, self._new, mesh=mesh).blocks.items():
            for r, block in blocks.items():
                self._store.blocks[name][r][...] = block

    def _saved(self, step: int) -> Path:
        if "background" not in self._how:
            return checkpoint.save(self._folder, self._store, step, {}, KEPT, self._buddies, self._said.append)
        saver = checkpoint.BackgroundSaver(self._folder, self._store, KEPT, self._buddies, self._said.append)
        saver.start(step, {})
        path = saver.wait()
        assert path is not None
        return path

    def save(self, failing: Failing) -> str:
        """Saves the new values; the message of the error, or empty."""
        disk.os = failing
        try:
            self._saved(self._step + 1)
        except CheckpointError as error:
            return str(error)
        finally:
            disk.os = os
        return ""

    def problem(self, message: str, failing: Failing) -> str:
        """What went wrong on this rank, or empty."""
        found = store(PLACED, mesh=None if self.mesh.comm is None else self.mesh)
        checkpoint.load(self._good, found)
        problem = "" if equal(found, self._old) else "the checkpoint before has other numbers"
        manifest, notes = checkpoint.load_newest(self._folder, found)
        newest = self._old if manifest.step == self._step else self._new
        if not equal(found, newest) or notes:
            problem = problem or f"the newest has other numbers {notes}"
        if not message and manifest.step != self._step + 1:
            problem = problem or "no error, and no new checkpoint"
        self._saved(self._step + 2)
        names = sorted(p.name for p in self._folder.iterdir())
        if any(not n.startswith("step-") for n in names) or len(names) > KEPT:
            problem = problem or f"litter: {names}"
        if failing.hit is not None:
            problem = problem or self._wrong_message(message, failing.hit[1])
        return problem

    def _wrong_message(self, message: str, code: int) -> str:
        """Whether an error says which rank could not write which path, and why."""
        if not message:  # only what is not needed failed: leftovers that the next save removes
            return ""
        rank = self.mesh.rank
        wanted = [f"rank {rank} cannot write ", errno.errorcode[code], f"errno {code}"]
        wanted.append(str(self._folder.parent))
        missing = [w for w in wanted if w not in message]
        return f"{message!r} lacks {missing}" if missing else ""


def _on_ranks(victim: int, fault: str, how: str) -> Row:
    """The trials in a job of two ranks, one of which fails."""
    from meshmpi.launch.launch import launch

    with tempfile.TemporaryDirectory() as folder:
        done = launch(
            2, ["-m", "tests.soak.writes", folder, how, fault, str(victim)], timeout_seconds=300, capture_output=True
        )
    what = f"writes, mpirun, rank {victim}, {how}, {fault}"
    if done.returncode:
        return Row(what, 1, 0, done.stderr.strip()[-300:])
    return Row.of(what, json.loads(done.stdout.strip().splitlines()[-1]))


def full_disk() -> Iterator[Row]:
    """Saves on a file system of 16 MB until it is full."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"full disk: skipped: {done.stderr.strip() or 'mount needs root'}")
            return
        try:
            yield Row.of("writes, full tmpfs of 16 MB", _until_full(Path(folder)))
        finally:
            subprocess.run(["umount", folder], check=True)


def _until_full(folder: Path) -> list[str]:
    made, last, problem = store(PLACED, wide=True), None, ""
    for k in itertools.count(1):
        given = values(k, wide=True)
        try:
            last = checkpoint.save(folder, store(PLACED, given, True), k, {}), given
        except CheckpointError as error:
            text = str(error)
            if "No space left on device (ENOSPC, errno 28)" not in text or "rank 0" not in text:
                problem = text
            break
    assert last is not None
    checkpoint.load(last[0], made)
    if not equal(made, last[1]):
        problem = problem or "the checkpoint before has other numbers"
    names = sorted(p.name for p in folder.iterdir())
    if any(n.startswith(".") for n in names):
        problem = problem or f"litter: {names}"
    return [""] * k + [problem]


def _main(folder: str, how: str, fault: str, victim: str) -> None:
    from meshmpi.runtime.mesh import Mesh

    mesh = Mesh(PLACED.mesh)
    found = trials(Path(folder), how, fault, mesh, int(victim))
    if mesh.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    _main(*sys.argv[1:])
