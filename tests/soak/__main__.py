"""``python -m tests.soak PART [--quick]``: trials of one kind, hours of them or a minute's worth.

Exit status 1 when a trial went wrong.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence

from tests.soak.rows import Row, table

PARTS = {
    "damage": "bits flipped, files cut, swapped: checkpoints and all else that a run trusts",
    "writes": "write, fsync, rename, open that fail while a checkpoint is saved; full disks",
    "reshard": "checkpoints of every layout read in every other layout",
    "kills": "SIGKILL of a random rank at a random time, also inside a save",
    "trainer_kills": "SIGKILL of a random rank of `meshmpi train`, resumed until it has finished",
    "survivors": "SIGKILL of random ranks of `meshmpi train --recover`: the others go on",
    "faults": "ranks that raise, leave, diverge or give other arguments",
    "signals": "SIGTERM and SIGUSR1 on any rank at any time",
    "hosts": "several hosts: link cut, host killed, packets dropped (needs root)",
}
"""Name -> what is tried; each is a module of this package with `add_arguments` and `run`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one part."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parts = parser.add_subparsers(required=True, dest="part", metavar="PART")
    given = list(sys.argv[1:] if arguments is None else arguments)
    for name, what in PARTS.items():
        sub = parts.add_parser(name, help=what, description=what)
        sub.add_argument("--quick", action="store_true", help="few trials")
        sub.add_argument("--seed", type=int, default=0, help="of random times and places")
        if name in given:  # others need not be importable
            importlib.import_module(f"tests.soak.{name}").add_arguments(sub)
    options = parser.parse_args(given)
    began, rows = time.perf_counter(), []
    for row in importlib.import_module(f"tests.soak.{options.part}").run(options):
        rows.append(Row(*row))
        print(table(rows[-1:]), flush=True)
    print(f"\n{table(rows)}\n\n{time.perf_counter() - began:.0f} s")
    return int(any(r.failed for r in rows))


if __name__ == "__main__":
    sys.exit(main())
