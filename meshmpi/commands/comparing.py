"""`meshmpi compare`: runs beside each other."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """Adds the command."""
    made = commands.add_parser(
        "compare", help="settings, losses, speed and memory of runs beside each other",
        description="A table of two or more runs, which may still train: the settings that"
        " differ, losses at common steps, speed, memory and bytes.",
    )  # fmt: skip
    made.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    made.add_argument("--png", type=Path, metavar="FILE", help="draw all loss curves into a file")
    made.set_defaults(command=_compare, ranks=None)


def _compare(options: argparse.Namespace) -> int:
    from meshmpi.train.compare import comparison, plot_comparison, read_runs

    runs = read_runs(options.runs)
    print(comparison(runs))
    if options.png is not None:
        print(f"\ndrew {plot_comparison(runs, options.png)}")
    return 0
