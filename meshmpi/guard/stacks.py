"""Writes the stacks of all threads of this process to a file, and merges those of many ranks into one text.

Independent of MPI.
"""

from __future__ import annotations

import faulthandler
import re
from collections.abc import Mapping
from pathlib import Path

from meshmpi.files.private import replacing
from meshmpi.guard.deadlock import grouped, named

MOST_STACKS = 4
"""Different stacks that a report shows; the ranks of the others are named."""
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+ ?(\[[^\]]*\] )?\(most recent call.*$", re.M)
_OWN = ("meshmpi/guard/watchdog.py", "meshmpi/guard/stacks.py")


def dump(path: Path) -> None:
    """Writes the stacks of all threads; the file appears when it is whole."""
    with replacing(path) as file:
        faulthandler.dump_traceback(file, all_threads=True)


def shown(dumps: Mapping[int, str]) -> str:
    """The stacks of many ranks, equal ones once."""
    groups = grouped((_threads(text), rank) for rank, text in sorted(dumps.items()))
    told = [f"---- stacks of {named(ranks)} ----\n{text}" for text, ranks in list(groups.items())[:MOST_STACKS]]
    rest = [r for ranks in list(groups.values())[MOST_STACKS:] for r in ranks]
    if rest:
        told.append(f"---- {named(rest)} have other stacks ----\n")
    return "".join(told)


def _threads(text: str) -> str:
    """The threads without the watchdog's own, which says nothing, and without addresses."""
    starts = [m.start() for m in _THREAD.finditer(text)]
    parts = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    kept = [p for p in parts if not any(own in p for own in _OWN)]
    count = len(kept)
    out = []
    for number, part in enumerate(reversed(kept), start=1):  # the main thread is the last
        head = "" if count == 1 else f"thread {number} of {count}\n"
        out.append(head + part.partition("\n")[2].rstrip() + "\n")
    return "".join(out)
