"""Damage to every other kind of file that a run writes or trusts.

A kind says what comes of damage: it is found and named, or what the file held is made anew, or no
number that a run computes can change by it, and why.  Each trial damages one file of a good set and
looks whether that is true.  Checkpoints have trials of their own (`damage`).
"""

from __future__ import annotations

import contextlib
import io
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshmpi import checkpoint
from meshmpi.checkpoint.buddies import Buddies
from meshmpi.dims import MeshShape
from meshmpi.errors import ConfigError, DataError
from meshmpi.files import cache
from meshmpi.files.private import Folder
from meshmpi.guard import outcome, rings, status
from meshmpi.guard.exit_status import LOST
from meshmpi.guard.flight import Ring
from meshmpi.guard.rings import Reader
from meshmpi.kernels.native import available, compiler
from meshmpi.planner.machine_file import find_machine, keep_machine, load_machine
from meshmpi.runtime.calls import CallKind as Call
from meshmpi.runtime.calls import Tally
from meshmpi.training import compare, lock, metrics
from meshmpi.transformer.training import data
from tests.soak.rows import Row
from tests.soak.stores import LAYOUTS, store, values

FOUND, REBUILT = "found and named", "made anew"


class Good(NamedTuple):
    """A set of good files, and how to look at them.

    Attributes:
        files: All of them.
        look: Uses them as a run does; returns what is wrong, or nothing.  It leaves no trace.
    """

    files: Sequence[Path]
    look: Callable[[], str]


class Kind(NamedTuple):
    """A kind of file.

    Attributes:
        comes: What comes of damage: `FOUND`, `REBUILT`, or why it is harmless.
        make: Makes a good set in an empty folder, which is also the cache.
    """

    comes: str
    make: Callable[[Path], Good]


def _libraries(folder: Path) -> Good:
    sources = [f"int answer(void) {{ return {k}; }}\n" for k in (41, 42)]
    for source in sources:
        compiler.load_library(source)
    place = compiler.kernel_folder()
    good = {f.stem: f.read_bytes() for f in place.glob("*.so")}

    def look() -> str:
        with Folder.at(place) as opened:
            kept = {key: compiler._kept(opened, key) for key in good}
        bad = [key for key in good if kept[key] not in (None, good[key])]
        return f"{bad} would be loaded" if bad else ""

    files = [f for f in sorted(place.iterdir()) if f.suffix in (".so", ".json")]
    return Good([f for f in files if not f.name.startswith("compiler-")], look)


def _documents(folder: Path) -> Good:
    """As the notes of a compiler and the products that were measured."""
    told = {"one.json": {"float32 mkl": 1.5e-3}, "two.json": {"accepts": [True, False]}}
    with cache.opened("documents") as opened:
        for name, document in told.items():
            cache.remember(opened, name, document)
        place = opened.path

    def look() -> str:
        with Folder.at(place) as opened:
            found = {name: cache.recall(opened, name) for name in told}
        bad = [name for name in told if found[name] not in (None, told[name])]
        return f"{bad} are believed" if bad else ""

    return Good([place / name for name in told], look)


def _machines(folder: Path) -> Good:
    meshes = [MeshShape("rows:2"), MeshShape("rows:3")]
    machines = [load_machine("tpuv2"), replace(load_machine("tpuv2"), name="x")]
    files = [keep_machine(m, mesh) for m, mesh in zip(machines, meshes, strict=True)]

    def look() -> str:
        with contextlib.redirect_stderr(io.StringIO()):
            found = [find_machine("", mesh) for mesh in meshes]
        right = all(f in (None, m) for f, m in zip(found, machines, strict=True))
        return "" if right else "another machine is believed"

    return Good(files, look)


def _copies(folder: Path) -> Good:
    given = values(0, wide=True)
    made = store(LAYOUTS[5], given, True)
    buddies = Buddies(made.mesh, str(folder / "local"))
    path = checkpoint.save(folder / "checkpoints", made, 7, {}, buddies=buddies)
    manifest = checkpoint.read_manifest(path)
    good = {name: (path / name).read_bytes() for name in manifest.files}

    def look() -> str:
        for name, content in good.items():
            copy = buddies._good_copy(manifest, name)
            if copy is not None and copy[0].tobytes() != content:
                return f"{name} would be restored from a damaged copy"
        return ""

    return Good(sorted((folder / "local").rglob("*.safetensors")), look)


def _metrics(folder: Path) -> Good:
    for rank in (0, 1):
        with metrics.MetricsWriter(folder, rank) as writer:
            for step in range(20):
                writer.write(step=step, loss=4.0 - step / 10, seconds=0.1)
    files = sorted(folder.glob("metrics-*.jsonl"))

    def look() -> str:
        for path in files:
            before = path.read_bytes()
            metrics.drop_from(path, 10, lambda line: None)  # as a resume does
            path.write_bytes(before)
            for aside in folder.glob("*.damaged-*"):
                aside.unlink()
        with contextlib.suppress(DataError):
            metrics.read_metrics(folder)
        return ""

    return Good(files, look)


def _facts(folder: Path) -> Good:
    (folder / "settings.json").write_text('{"train": {"steps": 20, "seed": 3}}\n')
    metrics.write_document(folder / compare.FACTS, {"ranks": 2, "layout": "batch:rows"})

    def look() -> str:
        with contextlib.suppress(DataError):
            compare.read_run(folder)
        return ""

    return Good([folder / "settings.json", folder / compare.FACTS], look)


def _records(folder: Path) -> Good:
    rings = [Ring(folder, rank, 2) for rank in (0, 1)]
    call = Call("all_reduce", "sum", "float32", "rows", 10, "10")
    for ring in rings:
        entry, channel = ring.entry(call, 4, "a.py:1"), ring.channel("k", (0, 1))
        for _ in range(5):
            ring.recorded(lambda: None, Tally(), channel, call, entry)()

    def look() -> str:
        for ring in rings:
            reader = Reader(ring.path)
            reader.heartbeat()
            reader.look("host", "running")
        return ""

    return Good([p.with_suffix(s) for r in rings for p in [r.path] for s in (".ring", ".txt")], look)


def _status(folder: Path) -> Good:
    publish = status.Publisher(folder, 2)
    for rank in (0, 1):
        ring = Ring(folder, rank, 2)
        seen = Reader(ring.path).look("host", "running")
        assert seen is not None
        publish(rings.member(rank, ring), seen)
        ring.remove()

    def look() -> str:
        with contextlib.suppress(DataError):
            status.table(status.read(folder))
        return ""

    return Good(sorted((folder / status.FOLDER).iterdir()), look)


def _tokens(folder: Path) -> Good:
    """Tokens and their vocabulary, as `prepare` keeps them."""
    text = folder / "text.txt"
    text.write_text("To be, or not to be\n" * 200)
    kept = [data.prepare(str(text), name) for name in ("characters", "bytes")]
    good = [(d.vocabulary.state(), _all(d.train), _all(d.held_out)) for d in kept]
    places = sorted(p for p in cache.cache_folder("tokens").iterdir() if p.is_dir())
    order = [next(k for k, p in enumerate(places) if n in p.name) for n in ("characters", "bytes")]

    def look() -> str:
        for k, want in zip(order, good, strict=True):
            try:
                found = data.load_dataset(places[k])
                same = (found.vocabulary.state(), _all(found.train), _all(found.held_out)) == want
            except DataError:
                continue
            if not same:
                return f"{places[k].name} has other tokens"
        return ""

    return Good([f for p in places for f in sorted(p.iterdir())], look)


def _all(tokens: Any) -> bytes:
    return np.asarray(tokens[0 : len(tokens)]).tobytes()


def _locks(folder: Path) -> Good:
    held = lock.RunLock(folder / "run")
    held._ended.set()

    def look() -> str:
        """A lock that is not as it was written is nobody's: who holds it stops before it writes."""
        changed = held.path.read_bytes() != good
        waits, lock._WRITING_SECONDS = lock._WRITING_SECONDS, 0.0  # for the rest of its text
        try:
            lock._holder(held.path)
            held.check()
        except ConfigError:
            return "" if changed else "the holder gives up"
        finally:
            lock._WRITING_SECONDS = waits
        return "the holder goes on" if changed and not held.mine() else ""

    good = held.path.read_bytes()
    return Good([held.path], look)


def _ends(folder: Path) -> Good:
    """What ranks tell of their end, in three jobs: done, failed, without a rank that was lost."""
    jobs = {"done": ("0", "0"), "failed": ("0", "1"), "went on": ("0 others lost", "3")}
    for job, words in jobs.items():
        (folder / job).mkdir()
        for rank, word in enumerate(words):
            path = folder / job / f"rank-{rank:05d}"
            path.write_bytes(outcome._content(path, word))

    def verdicts() -> dict[str, tuple[int, str]]:
        return {job: outcome.verdict(outcome.read(folder / job), 2, 0) for job in jobs}

    def look() -> str:
        found = verdicts()
        wrong = [job for job in jobs if found[job] != good[job] and found[job][0] != LOST]
        return f"{wrong} would end with {[found[job][0] for job in wrong]}" if wrong else ""

    good = verdicts()
    assert [status for status, _ in good.values()] == [0, 1, 3]
    return Good(sorted(folder.glob("*/rank-*")), look)


_ONLY_SHOWN = "harmless: only people read it; no run computes with it, and none fails"
KINDS: dict[str, Kind] = {
    "kernel libraries and their index": Kind(REBUILT, _libraries),
    "documents of the cache: compilers, measured products": Kind(REBUILT, _documents),
    "measured machines": Kind(FOUND, _machines),
    "buddies' copies": Kind(FOUND, _copies),
    "tokens and vocabularies": Kind(FOUND, _tokens),
    "locks of runs": Kind("found by the holder before it writes what others rely on", _locks),
    "how ranks ended": Kind("found: the job ends as one that lost the rank", _ends),
    "metrics": Kind("found and set aside by a resume; " + _ONLY_SHOWN, _metrics),
    "settings and facts of a run": Kind(
        "found, or " + _ONLY_SHOWN + ": a resume takes the manifest's, which has a hash", _facts
    ),
    "records of collectives": Kind(
        "harmless: damaged lines and calls are left out; they lead to a report, never to a number", _records
    ),
    "status files": Kind("found, or " + _ONLY_SHOWN, _status),
}
"""Name -> kind of file, of those that are read again."""
NEVER_READ = {
    "event files": "written for TensorBoard, which has a checksum for each record",
    "traces": "written for viewers",
    "pictures and reports": "written for people",
    "locks of the cache": "empty: the kernel holds the lock, not the file",
    "sources of kernels": "beside the library for people; the library is built from memory",
}
"""Name -> why damage can do nothing: no run reads what they hold."""


def rows(folder: Path, trials: int, seed: int) -> Iterator[Row]:
    """A row for each kind of file.

    Args:
        folder: Empty.
        trials: Of each kind.
        seed: Of the damage.
    """
    before = os.environ.get("MESHMPI_CACHE")
    for number, (name, kind) in enumerate(KINDS.items()):
        if kind.make is _libraries and not available():
            continue
        place = folder / str(number)
        place.mkdir(mode=0o700)
        os.environ["MESHMPI_CACHE"] = str(place)
        try:
            yield _row(name, kind, place, trials, random.Random(f"{seed} {name}"))
        finally:
            os.environ.pop("MESHMPI_CACHE")
            if before is not None:
                os.environ["MESHMPI_CACHE"] = before


def _row(name: str, kind: Kind, place: Path, trials: int, draw: random.Random) -> Row:
    good = kind.make(place)
    kept = {path: path.read_bytes() for path in good.files}
    assert kept and not good.look(), name
    problems = []
    for k in range(trials):
        path = good.files[k % len(good.files)]
        what, data = _damaged(path, kept, draw)
        path.write_bytes(data)
        try:
            problem = good.look()
        except Exception as error:  # of whatever kind: it would have taken a run down
            problem = f"{type(error).__name__}: {error}"
        problems.append(problem and f"{path.name}, {what}: {problem}")
        path.write_bytes(kept[path])
    problems.append((problem := good.look()) and f"put back: {problem}")
    return Row.of(f"damage, {name}", problems, kind.comes)


def _damaged(path: Path, kept: dict[Path, bytes], draw: random.Random) -> tuple[str, bytes]:
    """What was done, and the new content: never the old one."""
    old = kept[path]
    others = [data for other, data in kept.items() if data != old]
    how = draw.choice(["flip", "flip", "flip", "cut", "longer", "zeros", *["swap"] * bool(others)])
    new = bytearray(old)
    if how == "flip" or not old:
        at = draw.randrange(max(1, len(old)))
        new[at : at + 1] = bytes([(old[at] if old else 0) ^ 1 << draw.randrange(8)])
        return f"bit flipped at {at}", bytes(new)
    if how == "cut":
        return "cut", bytes(old[: draw.randrange(len(old))])
    if how == "longer":
        return "longer", old + bytes(draw.randrange(1, 4096))
    if how == "swap":
        return "swapped", draw.choice(others)
    at = draw.randrange(len(old))
    new[at:] = bytes(len(old) - at)
    return "zeros at the end", bytes(new) if bytes(new) != old else old + b"\0"
