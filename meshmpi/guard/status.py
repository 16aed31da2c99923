"""The current state of every rank of a run, in files of the run's folder, and as a table.

Each rank updates ``RUN/status/rank-00000.json`` every few seconds; on its own host its ring (`flight`) has the
present state. After the end the files say how the rank ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshmpi.errors import DataError
from meshmpi.files import plain
from meshmpi.files.private import replacing
from meshmpi.guard import abort, flight, watchdog
from meshmpi.guard.rings import Member, Reader, Seen, from_json, member, to_json
from meshmpi.job import in_job
from meshmpi.runtime import processes

FOLDER = "status"
CALLS_KEPT = 8
MOST_BYTES = 1 << 22
"""Longest status file that is read; one of a rank in many groups has some kilobytes."""


class Row(NamedTuple):
    """What is known of one rank."""

    seen: Seen  # its state
    age: float  # seconds since it was seen so; 0 for now


class Publisher:
    """Writes the files of ranks."""

    def __init__(self, folder: Path, size: int):
        self._folder, self._size = folder / FOLDER, size
        self._broken = False

    def __call__(self, member: Member, seen: Seen) -> None:
        """Writes a rank's file anew; a disk that refuses is named once and then left alone."""
        if self._broken:
            return
        about = {
            "time": time.time(),
            "size": self._size,
            "place": member.place,
            "start": member.start,
            "ring": member.ring,
            "seen": to_json(seen, CALLS_KEPT),
        }
        path = self._folder / f"rank-{seen.rank:05d}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with replacing(path, 0o644) as file:
                file.write(json.dumps(about).encode())
        except OSError as error:
            self._broken = True
            sys.stderr.write(
                f"meshmpi: rank {member.rank} cannot write {path} ({error.strerror}): meshmpi"
                " status does not show it any more.\n"
            )


def publish(folder: str | os.PathLike[str]) -> None:
    """From now on ``meshmpi status FOLDER`` shows what this rank does."""
    dog = watchdog.current()
    if dog is None and not in_job():
        abort.install_hooks()  # they remove the files at the end
        dog = watchdog.alone()
    ring = flight.ring()
    if dog is not None and ring is not None:
        dog.publish = Publisher(Path(folder), ring.size)
        dog.show()


def read(folder: str | os.PathLike[str]) -> list[Row]:
    """What is known of each rank of the newest job of a run, by rank."""
    files = sorted((Path(folder) / FOLDER).glob("rank-*.json"))
    found = [_parsed(f) for f in files]
    if not found:
        raise DataError(
            f"there is no status in {folder}.",
            "Give the folder of a run that meshmpi train has begun, as runs/quickstart.",
        )
    here = member(0, None).place
    size = max(found, key=lambda me: me["time"])["size"]
    return [_row(me, here) for me in found if me["seen"]["rank"] < size]


def _parsed(path: Path) -> dict[str, Any]:
    try:
        found = plain.json_table(path, MOST_BYTES)
        from_json(found["seen"])
        missing = [k for k in ("time", "size", "place", "start", "ring") if k not in found]
        if missing:
            raise KeyError(missing[0])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not a status file: {error}", "Remove it; the run is not affected.") from None
    return found


def _row(me: dict[str, Any], here: str) -> Row:
    seen = from_json(me["seen"])
    age = max(0.0, time.time() - me["time"])
    if not me["place"].startswith(here):  # of another host: the file is all there is
        return Row(seen, age)
    life = processes.state(seen.pid, me["start"])
    now = Reader(Path(me["ring"])).look(seen.host, life, CALLS_KEPT)
    if now is not None and now.pid == seen.pid:
        return Row(now, 0.0)
    if seen.life != "left":
        seen.life = life
    return Row(seen, age)


def table(rows: Sequence[Row]) -> str:
    """A line a rank: where it runs, what it does and since when."""
    head = ("rank", "host", "pid", "state", "phase", "step", "since", "doing")
    cells = [head, *(_cells(row) for row in rows)]
    widths = [max(len(c[k]) for c in cells) for k in range(len(head) - 1)]
    lines = ["  ".join([*(text.ljust(w) for text, w in zip(c, widths, strict=False)), c[-1]]).rstrip() for c in cells]
    return "\n".join([_summary(rows), "", *lines])


def _summary(rows: Sequence[Row]) -> str:
    count = Counter(row.seen.life for row in rows)
    oldest = max(row.age for row in rows)
    states = ", ".join(f"{n} {life}" for life, n in count.items())
    return f"{len(rows)} rank{'s' if len(rows) > 1 else ''}: {states}" + (
        f"; last seen {_span(oldest)} ago" if oldest else ""
    )


def _cells(row: Row) -> tuple[str, ...]:
    s = row.seen
    call = s.waiting or s.last
    life = s.life
    if life == "left" and s.status is not None:
        life = f"left ({s.status})"
    since, doing = s.phase_seconds, "outside of collectives"
    if s.waiting:
        since, doing = s.waiting.seconds, f"in {s.waiting}"
    elif call:
        doing += f", last in {call}"
    if s.life in ("gone", "left"):
        doing = f"last in {call}" if call else "before any collective"
    step = "" if s.step is None else str(s.step)
    cells = str(s.rank), s.host, str(s.pid), life, s.phase, step, _span(since), doing
    return tuple("".join(c if c.isprintable() else "?" for c in text) for text in cells)


def _span(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"
