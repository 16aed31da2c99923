"""``python -m tests.fuzz --trials 5000``: random graphs against the oracle.

Simulated meshes of 1 to 8 ranks; under ``python -m meshmpi.launch -n 3 -m tests.fuzz`` on
the real ranks of the job.  ``--first N --trials 1`` repeats trial N.  Exit status 1 when a trial is
wrong.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
import traceback

import tests.conftest  # noqa: F401  (threads)
from tests.fuzz.trial import Outcome, trial


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--kernels", choices=["numpy", "native"], default="")
    parser.add_argument("--ranks", type=int, default=0, help="of simulated meshes; default 1 to 8")
    parser.add_argument("--verbose", action="store_true", help="print every trial")
    options = parser.parse_args()
    world = _world()
    verdicts: collections.Counter[str] = collections.Counter()
    began = time.monotonic()
    for number in range(options.first, options.first + options.trials):
        outcome = _agreed(world, number, options)
        verdicts[outcome.verdict] += 1
        if (world is None or world.rank == 0) and (outcome.verdict == "wrong" or options.verbose):
            print(f"{outcome.verdict.upper()} {outcome.what}", flush=True)
    if world is None or world.rank == 0:
        counts = ", ".join(f"{n} {v}" for v, n in sorted(verdicts.items()))
        print(f"{options.trials} trials: {counts}; {time.monotonic() - began:.0f} s")
    return int(verdicts["wrong"] > 0)


def _world():
    """The communicator of a job of several ranks; None in a single process."""
    from meshmpi.job import in_job

    if not in_job():
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD if MPI.COMM_WORLD.size > 1 else None


def _agreed(world, number: int, options: argparse.Namespace) -> Outcome:
    """The outcome of a trial, wrong for all ranks where it is wrong for one."""
    import meshmpi as mm

    ranks = world.size if world is not None else options.ranks or 1 + number % 8
    try:
        found = trial(number, ranks, mm.Mesh if world is not None else None, options.kernels)
    except Exception:
        found = Outcome("wrong", f"trial {number}: {traceback.format_exc()}")
    if world is None:
        return found
    all_found = world.allgather(found)
    return next((f for f in all_found if f.verdict == "wrong"), all_found[0])


if __name__ == "__main__":
    sys.exit(main())
