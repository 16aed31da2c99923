"""`meshmpi status` and `compare`: the state of a run, and a table of several runs."""

from __future__ import annotations

import json
import time
from pathlib import Path

from meshmpi.commands.command import Command, Options, argument


def _status(options: Options) -> int:
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


def _compare(options: Options) -> int:
    from meshmpi.training.compare import comparison, plot_comparison, read_runs

    runs = read_runs(options.runs)
    print(comparison(runs))
    if options.png is not None:
        print(f"\ndrew {plot_comparison(runs, options.png)}")
    return 0


_STATUS = (
    argument("run", Path, "folder of a run"),
    argument("--json", bool, "print everything as JSON, for programs"),
    argument("--every", float, "repeat until interrupted", metavar="SECONDS"),
)
_COMPARE = (
    argument("runs", Path, "folder of a run", metavar="RUN", nargs="+"),
    argument("--png", Path, "draw all loss curves into a file", metavar="FILE"),
)
_STATES = (
    "Shows what every rank of a run is doing: phase, step, collective and since when; if the run has ended, what it did"
    " last."
)
_TABLE = (
    "Prints a table of two or more runs, which may still be training: the settings that differ, losses at common"
    " steps, speed, memory and bytes."
)
COMMANDS = (
    Command("status", _status, "show what every rank of a run is doing", _STATUS, description=_STATES),
    Command("compare", _compare, "compare settings, losses, speed and memory of runs", _COMPARE, description=_TABLE),
)
