"""Damaged files: every change must be found before a number is used.

Each trial changes a file of a good checkpoint, loads it onto another layout, and looks whether a
CheckpointError came and all variables are what they were.  Then the file is put back.  All other
files that a run writes or trusts follow (`trusted`).
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from meshmpi import checkpoint
from meshmpi.checkpoint import hashing
from meshmpi.dims import Shape
from meshmpi.errors import CheckpointError
from meshmpi.ir.program import LocalType, VariableType
from meshmpi.runtime.simulated_mesh import SimulatedMesh
from meshmpi.runtime.variables import VariableStore
from tests.soak import trusted
from tests.soak.rows import Row
from tests.soak.stores import LAYOUTS, equal, fingerprint, store, values

Change = Callable[[], object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Counts, and the measurement of time."""
    parser.add_argument("--flips", type=int, default=10_000, help="single bits flipped")
    parser.add_argument("--truncations", type=int, default=1_000, help="files cut anywhere")
    parser.add_argument(
        "--time", type=int, metavar="MB", help="only measure what verifying and saving cost, with so much"
    )


def run(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each kind of damage, or the times."""
    with tempfile.TemporaryDirectory() as folder:
        if options.time:
            yield from _times(Path(folder), options.time)
            return
        trials = _Trials(Path(folder), options.seed)
        quick = options.quick
        yield trials.row("one bit flipped", trials.flips(200 if quick else options.flips))
        cuts = 60 if quick else options.truncations
        yield trials.row("file cut", trials.cuts(cuts))
        yield trials.row("bytes added at the end", trials.longer(20 if quick else 200))
        yield trials.row("zeroed from a place on", trials.zeroed(20 if quick else 500))
        yield trials.row("deleted", trials.deleted())
        yield trials.row("two files swapped", trials.swapped())
        yield trials.row("a file in the place of another", trials.doubled())
        yield trials.row("file of another step", trials.foreign("step-00000020"))
        yield trials.row("file of another run's same step", trials.foreign("other"))
        yield trials.row("folder under the name of another step", trials.renamed())
        yield trials.row("nothing changed: loads, bit-equal", [], good=True)
        other = Path(folder, "other-files")
        other.mkdir()
        yield from trusted.rows(other, 40 if quick else options.flips, options.seed)


class _Trials:
    """A good checkpoint, what resembles it, and variables to load it into."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._rng, self._values = np.random.default_rng(seed), values(seed, wide=True)
        writer = store(LAYOUTS[5], self._values, True)
        self.folder = folder
        self.good = checkpoint.save(folder, writer, 10, {"note": "the good one"})
        checkpoint.save(folder, store(LAYOUTS[5], values(seed + 1, True), True), 20, {})
        other = checkpoint.save(folder / "x", store(LAYOUTS[5], self._values, True), 10, {})
        other.rename(folder / "other")
        self.files = sorted(self.good.iterdir())
        readers = [LAYOUTS[0], LAYOUTS[5], LAYOUTS[6], LAYOUTS[9]]
        made = [store(placed, values(seed + 2, True), True) for placed in readers]
        self._readers = itertools.cycle([(s, fingerprint(s)) for s in made])
        self.kept = {path: path.read_bytes() for path in self.files}

    def row(self, what: str, changes: Sequence[Change] | Iterator[Change], good: bool = False):
        """Tries each change once; with ``good`` there is one trial without any."""
        problems = []
        for k, change in enumerate([lambda: None] if good else changes):
            change()
            reader, before = next(self._readers)
            problem = self._good(reader) if good else self._found(reader, before)
            problems.append(problem and f"{what} no. {k + 1}: {problem}")
            self._put_back()
        return Row.of(f"damage, {what}", problems)

    def _found(self, reader, before: str) -> str:
        try:
            checkpoint.load(self.good, reader)
        except CheckpointError:
            return "" if fingerprint(reader) == before else "variables were overwritten"
        return "was loaded"

    def _good(self, reader) -> str:
        checkpoint.load(self.good, reader)
        return "" if equal(reader, self._values) else "other numbers"

    def _put_back(self) -> None:
        self.good.mkdir(exist_ok=True)
        for path, data in self.kept.items():
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)

    def _some(self) -> Path:
        return self.files[self._rng.integers(len(self.files))]

    def _write(self, path: Path, change: Callable[[bytearray], object]) -> Change:
        data = bytearray(self.kept[path])
        change(data)
        assert bytes(data) != self.kept[path]
        return lambda: path.write_bytes(data)

    def flips(self, count: int) -> Iterator[Change]:
        """Half of them anywhere, half in the small parts: headers, the manifest, small blocks."""
        for k in range(count):
            path = self.files[k % len(self.files)]
            most = len(self.kept[path]) if k % 2 else min(len(self.kept[path]), 5000)
            at, bit = int(self._rng.integers(most)), int(self._rng.integers(8))
            yield self._write(path, lambda d, at=at, b=bit: d.__setitem__(at, d[at] ^ (1 << b)))

    def cuts(self, count: int) -> Iterator[Change]:
        """Lengths anywhere, and by one byte."""
        for k in range(count):
            path = self._some()
            length = len(self.kept[path]) - 1 if k % 10 == 0 else None
            length = int(self._rng.integers(len(self.kept[path]))) if length is None else length
            yield self._write(path, lambda d, n=length: d.__delitem__(slice(n, None)))

    def longer(self, count: int) -> Iterator[Change]:
        """One byte to 4 KiB more."""
        for _ in range(count):
            more = bytes(int(self._rng.integers(1, 4096)))
            yield self._write(self._some(), lambda d, more=more: d.extend(more))

    def zeroed(self, count: int) -> Iterator[Change]:
        """Up to a page, or all the rest, reads as zeros, as after a power failure."""
        for k in range(count):
            path = self._some()
            size = len(self.kept[path])
            at = int(self._rng.integers(size)) if k % 5 else 0
            stop = size if k % 2 else min(size, at + 4096)
            if any(self.kept[path][at:stop]):
                zeros = bytes(stop - at)
                yield self._write(path, lambda d, a=at, b=stop, z=zeros: d.__setitem__(slice(a, b), z))

    def deleted(self) -> list[Change]:
        """Each file, and the whole folder."""
        return [*(path.unlink for path in self.files), lambda: shutil.rmtree(self.good)]

    def swapped(self) -> list[Change]:
        """Each two files of the checkpoint, the manifest among them."""
        return [
            lambda a=a, b=b: (a.write_bytes(self.kept[b]), b.write_bytes(self.kept[a]))
            for a, b in itertools.combinations(self.files, 2)
        ]

    def doubled(self) -> list[Change]:
        """Each file over each other."""
        return [lambda a=a, b=b: a.write_bytes(self.kept[b]) for a, b in itertools.permutations(self.files, 2)]

    def foreign(self, name: str) -> list[Change]:
        """Each file from another checkpoint, and all but one."""
        there = self.folder / name

        def take(files: Sequence[Path]) -> None:
            for path in files:
                shutil.copyfile(there / path.name, path)

        one: list[Change] = [lambda p=path: take([p]) for path in self.files]
        rest = [[f for f in self.files if f != path] for path in self.files]
        return one + [lambda files=files: take(files) for files in rest]

    def renamed(self) -> list[Change]:
        """All of another step's checkpoint under the good one's name."""

        def take() -> None:
            shutil.rmtree(self.good)
            shutil.copytree(self.folder / "step-00000020", self.good)

        return [take]


TURNS = 7
"""Loads of each kind whose times are compared."""


def _times(folder: Path, megabytes: int) -> Iterator[Row]:
    """Times of loads with hashing, and with hashes that are known beforehand, in turn."""
    given = {"wide": np.zeros((megabytes, 250_000), np.float32)}
    given["wide"][...] = np.random.default_rng(0).random(250_000, np.float32)
    made = store_of(given)
    path = checkpoint.save(folder, made, 1, {})
    real, known = hashing.hashes, []
    hashing.hashes = lambda data: known.append(real(data)) or known[-1]
    try:
        checkpoint.load(path, made)
        for cold in (False, True):
            seconds: dict[bool, list[float]] = {True: [], False: []}
            for turn in range(2 * TURNS):
                again = iter(known)
                hashing.hashes = real if turn % 2 else lambda data, again=again: next(again)
                if cold:
                    _forget(path)
                began = time.perf_counter()
                checkpoint.load(path, made)
                seconds[bool(turn % 2)].append(time.perf_counter() - began)
            with_, without = (sorted(seconds[k])[TURNS // 2] for k in (True, False))
            note = (
                f"{with_:.3f} s ({megabytes / with_ / 1e3:.2f} GB/s), without verifying"
                f" {without:.3f} s: {with_ / without - 1:+.1%}; medians of {TURNS}"
            )
            yield Row(f"load of {megabytes} MB from {'disk' if cold else 'page cache'}", 1, 1, note)
    finally:
        hashing.hashes = real
    yield from _stalls(folder, made, megabytes)


def _stalls(folder: Path, made: VariableStore, megabytes: int) -> Iterator[Row]:
    """How long a step waits for a save: until it is on disk, or until it is copied."""
    at_once, copying = [], []
    saver = checkpoint.BackgroundSaver(folder, made, keep=1)
    for k in range(2 * TURNS):
        began = time.perf_counter()
        if k % 2:
            checkpoint.save(folder, made, k, {}, keep=1)
            at_once.append(time.perf_counter() - began)
        else:
            saver.start(k, {})
            copying.append(time.perf_counter() - began)
            saver.wait()
    note = (
        f"at once {sorted(at_once)[TURNS // 2]:.3f} s, in the background"
        f" {sorted(copying[1:])[TURNS // 2]:.3f} s, the first time {copying[0]:.3f} s"
    )
    yield Row(f"stall of a save of {megabytes} MB", 1, 1, note)


def _forget(folder: Path) -> None:
    """Drops the files of a folder from the page cache."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def store_of(given: dict[str, np.ndarray]) -> VariableStore:
    """Variables of one rank with these values."""
    made = VariableStore(SimulatedMesh("all:1"), [0])
    for name, x in given.items():
        shape = Shape([(f"dim{k}", n) for k, n in enumerate(x.shape)])
        t = LocalType(shape, x.dtype.name, ((),) * x.ndim)
        made.add(VariableType(name, t, x), 0)
    return made
