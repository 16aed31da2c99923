"""Under mpirun: the command ``meshmpi`` with ranks that die, or fail, before given steps.

Usage: dying.py "3@5 0!9" train ...: rank 3 of MPI.COMM_WORLD is killed when 5 steps are done, and
rank 0 raises an exception when 9 are.
"""

from __future__ import annotations

import os
import re
import signal
import sys

from meshmpi import cli
from meshmpi.runtime.world import rank_by_environment
from meshmpi.train.loop import Trainer


def main() -> int:
    faults = {
        (int(rank), int(step)): kind
        for rank, kind, step in re.findall(r"(\d+)([@!])(\d+)", sys.argv[1])
    }
    one_step = Trainer.one_step

    def perhaps(trainer: Trainer) -> tuple[float, float]:
        kind = faults.get((rank_by_environment(), trainer.done))
        if kind == "@":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "!":
            raise RuntimeError("by order")
        return one_step(trainer)

    Trainer.one_step = perhaps  # type: ignore[method-assign]
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
