"""`meshmpi status`: what every rank of a run does now, or did last."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from meshmpi.commands.command import Command


def _add_arguments(made: argparse.ArgumentParser) -> None:
    made.description = (
        "What every rank of a run does now: phase, step, collective and since when; if the run has ended,"
        " what it did last."
    )
    made.add_argument("run", type=Path, help="folder of a run")
    made.add_argument("--json", action="store_true", help="print everything as JSON, for programs")
    made.add_argument("--every", type=float, metavar="SECONDS", help="repeat until interrupted")


def _status(options: argparse.Namespace) -> int:
    from meshmpi.guard import status
    from meshmpi.guard.rings import to_json

    while True:
        rows = status.read(options.run)
        if options.json:
            print(json.dumps([{"age": row.age, **to_json(row.seen)} for row in rows], indent=1))
        else:
            print(status.table(rows), flush=True)
        if not options.every:
            return 0
        try:
            time.sleep(options.every)
        except KeyboardInterrupt:
            return 0
        print()


COMMANDS = (
    Command("status", _status, "what every rank of a run does now", _add_arguments, on_mesh=False, starts_ranks=False),
)
