"""``python -m apps.scaling paper [--machine FILE]`` or ``weak [--ranks 1 2 4]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import meshmpi as mm
from apps.scaling import paper, weak
from meshmpi.errors import MeshmpiError


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one of the tables."""
    parser = argparse.ArgumentParser(prog="python -m apps.scaling", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    by_paper = commands.add_parser("paper", help="Tables 2 and 3 of the paper, predicted")
    by_paper.add_argument("--machine", default="tpuv2", help="a name, or a file of a machine")
    weakly = commands.add_parser("weak", help="a curve measured here, beside its prediction")
    weakly.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    weakly.add_argument("--kind", choices=weak.KINDS, action="append")
    weakly.add_argument("--steps", type=int, default=10)
    weakly.add_argument("--tiny", action="store_true", help="a toy: tries the command itself")
    options = parser.parse_args(arguments)
    try:
        if options.command == "paper":
            print("\n".join(paper.table(mm.load_machine(options.machine))))
        else:
            for kind in options.kind or list(weak.KINDS):
                print("\n".join(weak.curve(kind, options.ranks, options.steps, options.tiny)))
    except MeshmpiError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
