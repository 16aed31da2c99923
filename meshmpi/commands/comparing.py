"""`meshmpi compare`: a table of several runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from meshmpi.commands.command import Command


def _add_arguments(made: argparse.ArgumentParser) -> None:
    made.description = (
        "A table of two or more runs, which may still train: the settings that differ, losses at common steps, speed,"
        " memory and bytes."
    )
    made.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    made.add_argument("--png", type=Path, metavar="FILE", help="draw all loss curves into a file")


def _compare(options: argparse.Namespace) -> int:
    from meshmpi.transformer.training.compare import comparison, plot_comparison, read_runs

    runs = read_runs(options.runs)
    print(comparison(runs))
    if options.png is not None:
        print(f"\ndrew {plot_comparison(runs, options.png)}")
    return 0


COMMANDS = (
    Command(
        "compare",
        _compare,
        "compare settings, losses, speed and memory of runs",
        _add_arguments,
        on_mesh=False,
        starts_ranks=False,
    ),
)
