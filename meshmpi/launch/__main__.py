"""``python -m meshmpi.launch -n 4 train.py``: starts ranks."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from meshmpi.errors import MeshError
from meshmpi.launch.command import launch_command
from meshmpi.launch.launch import launch


def main(
    arguments: Sequence[str] | None = None,
    name: str = "python -m meshmpi.launch",
    kind: type[argparse.ArgumentParser] = argparse.ArgumentParser,
) -> int:
    """The command line called ``name``, read by a parser of this kind; returns the exit status of the job."""
    parser = kind(
        prog=name,
        description="Start a Python program (or, after --, any command) on several MPI ranks.",
        usage="%(prog)s -n RANKS [options] (script.py | -m module | -- command) [arguments]",
    )
    parser.add_argument("-n", "--ranks", dest="n", type=int, metavar="RANKS", help="number of ranks")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="stop the job after this time")
    parser.add_argument("--mpi", help="openmpi, mpich, intel, or the path of an mpirun")
    parser.add_argument("--threads", type=int, help="threads per rank (default: cores / ranks)")
    parser.add_argument("--hosts", default="", metavar="LIST", help="hosts and their ranks, such as n1:2,n2:2")
    parser.add_argument("--bind", choices=("auto", "core", "none"), default="auto")
    parser.add_argument(
        "--option",
        dest="launcher_options",
        action="append",
        default=[],
        metavar="OPTION",
        help="an additional option for mpirun, may be repeated: --option=--hostfile --option=hosts",
    )
    parser.add_argument("--show", action="store_true", help="print the command, do not run it")
    own, program = _split(list(sys.argv[1:] if arguments is None else arguments))
    settings = vars(parser.parse_args(own))
    n, show, seconds = (settings.pop(name) for name in ("n", "show", "timeout"))
    if n is None:  # said after an unknown argument, which may be a misspelt one
        parser.error("the following arguments are required: -n/--ranks")
    if not program:
        parser.error("no program to start")
    try:
        if show:
            print(shlex.join(launch_command(n, program, **settings)[0]))
            return 0
        result = launch(n, program, timeout_seconds=seconds, **settings)
    except MeshError as error:
        sys.stderr.write(f"MeshError: {error}\n")
        return 1
    # A launcher killed by a signal is reported as a shell would.
    return result.returncode if result.returncode >= 0 else 128 - result.returncode


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Parts the launcher's own options from the program: at ``--``, ``-m``, ``-c`` or a name."""
    takes_value = {"-n", "--ranks", "--timeout", "--mpi", "--threads", "--bind", "--option", "--hosts"}
    k = 0
    while k < len(arguments):
        word = arguments[k]
        if word in ("--", "-m", "-c") or not word.startswith("-"):
            break
        k += 2 if word in takes_value else 1
    return arguments[:k], arguments[k:]


if __name__ == "__main__":
    sys.exit(main())
