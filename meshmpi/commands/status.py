"""`meshmpi status`: what every rank of a run does now, or did last."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any


def add(commands: Any, command: Any) -> None:
    """Adds the command."""
    made = commands.add_parser(
        "status", help="what every rank of a run does now",
        description="What every rank of a run does now: phase, step, collective and since when; of"
        " a run that has ended, what it did last.",
    )  # fmt: skip
    made.set_defaults(command=_status, ranks=None)
    made.add_argument("run", type=Path, help="folder of a run")
    made.add_argument("--json", action="store_true", help="print all that is known, for programs")
    made.add_argument(
        "--every", type=float, metavar="SECONDS", help="again and again, until interrupted"
    )


def _status(options: argparse.Namespace) -> int:
    from meshmpi.runtime import status
    from meshmpi.runtime.rings import to_json

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
