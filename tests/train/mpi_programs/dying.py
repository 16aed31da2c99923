"""Under mpirun: the command ``meshmpi`` with ranks that die, or fail, at given places.

Usage: dying.py "3@5 0!9 1@7:commit" train ...: rank 3 of MPI.COMM_WORLD is killed when 5 steps are
done, rank 0 raises an exception when 9 are, rank 1 is killed in the 8th step.  Places in a step:
``begin`` and ``middle`` of its calls, ``commit`` (before the ranks wait for each other),
``barrier`` (while they do, so that some get through and some do not), ``writing`` (behind it),
``end``.  With a + behind it, as in 3@5+, the rank's files of all checkpoints go with it.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshmpi import cli
from meshmpi.job import rank_by_environment
from meshmpi.runtime.executor import Executor
from meshmpi.transformer.training.trainer import Trainer

takes_files = False


def die(*_: Any) -> None:
    if takes_files:
        folder = Path(sys.argv[sys.argv.index("--out") + 1], "checkpoints")
        for path in folder.glob(f"step-*/rank-{rank_by_environment():05d}.safetensors"):
            path.unlink()
    os.kill(os.getpid(), signal.SIGKILL)


def place_fault(executor: Executor, place: str) -> None:
    """Kills this process when the next step comes to a place."""
    calls, commit = executor._calls, executor._committed - 1
    at = {"begin": 0, "middle": commit // 2, "commit": commit, "writing": commit + 1, "end": len(calls) - 1}
    if place != "barrier":
        after = calls[at[place]]

        def call() -> None:
            if place == "end":
                after()
            die()

        calls[at[place]] = call


def barrier_of_messages(executor: Executor, dies: Callable[[], bool]) -> None:
    """In place of the executor's: two rounds of messages, so that a rank can die between them.

    With 4 ranks of which 3 dies, 0 and 2 get through and 1 does not.
    """
    comm, commit = executor.mesh.comm, executor._committed - 1

    def call() -> None:
        executor.progress = "ready"
        for distance in (1, 2):
            other = comm.rank ^ distance
            if other < comm.size:
                comm.sendrecv(None, other, source=other)
            if distance == 1 and dies():
                time.sleep(0.2)  # the message is on its way
                die()
        executor.progress = "writing"

    executor._calls[commit] = call


def main() -> int:
    faults = {
        (int(rank), int(step)): (kind, place, bool(files))
        for rank, kind, step, place, files in re.findall(r"(\d+)([@!])(\d+)(?::(\w+))?(\+?)", sys.argv[1])
    }
    in_barrier = any(place == "barrier" for _, place, _ in faults.values())
    one_step = Trainer.one_step

    def perhaps(trainer: Trainer) -> tuple[float, float]:
        global takes_files
        found = faults.get((rank_by_environment(), trainer.done), ("", "", False))
        kind, place, takes_files = found
        if kind == "@" and not place:
            die()
        if kind == "!":
            raise RuntimeError("by order")
        executor = trainer.step.executor
        if in_barrier and executor.mesh.comm.size == 4:
            barrier_of_messages(executor, lambda: place == "barrier")
        if place:
            place_fault(executor, place)
        return one_step(trainer)

    Trainer.one_step = perhaps  # type: ignore[method-assign]
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
