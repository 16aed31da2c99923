"""`meshmpi status` and `compare`: the state of a run, and a table of several runs."""

from __future__ import annotations

import time
from pathlib import Path

from meshmpi.commands.command import Command, Options, answer, argument


def _status(options: Options) -> int:
    from meshmpi.guard import status
    from meshmpi.guard.rings import to_json

    while True:
        rows = status.read(options.run)
        text = "" if options.json else status.table(rows)
        answer(options, text, {"ranks": [{"age": row.age, **to_json(row.seen)} for row in rows]})
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
    text, data = comparison(runs), {"runs": [r.data() for r in runs]}
    if options.png is not None:
        path = plot_comparison(runs, options.png)
        text, data = f"{text}\n\ndrew {path}", data | {"wrote": str(path)}
    answer(options, text, data)
    return 0


_STATUS = (
    argument("run", Path, "folder of a run"),
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
_COMPARES = "compare settings, losses, speed and memory of runs"
COMMANDS = (
    Command("status", _status, "show what every rank of a run is doing", _STATUS, ("json",), description=_STATES),
    Command("compare", _compare, _COMPARES, _COMPARE, ("json",), description=_TABLE),
)
