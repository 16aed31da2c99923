"""Restarts a command on several ranks, and ends it on all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshmpi.guard import ending
from meshmpi.job import rank_by_environment
from meshmpi.runtime.processes import start_time
from meshmpi.training import signals
from meshmpi.training.lock import RUN_VARIABLE
from meshmpi.training.signals import STOPPED

GRACE_VARIABLE, GRACE_SECONDS = "PRTE_MCA_odls_base_sigkill_timeout", "60"
"""Seconds that Open MPI's launcher leaves ranks to save their state after SIGTERM.
Its own default of 1 s is less than a step of a large model takes."""
_FOR_THE_LAUNCHER = ("--ranks", "--restarts", "--hosts")
"""Options that ranks do not get; each takes a value."""
AGENT_VARIABLE = "PRTE_MCA_prte_launch_agent"
"""What Open MPI's launcher starts on other nodes."""


def fail(text: str) -> None:
    """Prints an error once: it is mostly the same on all ranks."""
    ending.end_job(text, 1)  # returns where no job of several ranks has begun
    rank = rank_by_environment()
    if rank:  # a launcher ends the other ranks as soon as the first has left
        time.sleep(ending.stagger_seconds(rank))
    sys.stderr.write(text)


def on_ranks(
    ranks: int,
    given: Sequence[str],
    module: str = "meshmpi",
    *,
    hosts: str = "",
    recover: bool = False,
    run: Path | None = None,
    listens: bool = False,
) -> int:
    """Starts the same command of ``python -m module`` again on several ranks; returns the exit status of the job.

    Args:
        ranks: Number of ranks.
        given: Arguments of the command; those for the launcher are left out.
        module: The module that has the command.
        hosts: Where to start, see `meshmpi.launch.launch.launch`.
        recover: Whether the job must outlive a rank.
        run: Folder of a training, on a file system that all hosts see.
        listens: Whether the module calls `signals.listen_for_life` before anything else.
    """
    from meshmpi.launch.launch import launch  # ranks themselves need no launcher
    from meshmpi.launch.start import wrapped

    environment = {GRACE_VARIABLE: os.environ.get(GRACE_VARIABLE, GRACE_SECONDS)}
    environment[RUN_VARIABLE] = f"{os.uname().nodename}:{os.getpid()}:{start_time(os.getpid())}"
    argv, more = ["-m", module, *_for_ranks(given)], dict[str, Any]()
    if given[:1] == ["train"]:  # its ranks save when they are asked to stop
        prefix = signals.blocked_prefix() if listens else []
        argv = ["--", *prefix, sys.executable, *wrapped(argv)]
        if prefix and "SLURM_JOB_ID" in os.environ:
            # Slurm signals the daemons of other nodes as well, and their ranks would end with them.
            environment.setdefault(AGENT_VARIABLE, " ".join([*prefix, "prted"]))
        # Called when the launcher's handlers are set.
        more = {"stop_by": signal.SIGUSR1, "stopped": signals.telling_before}
    shared = None if run is None else run.absolute().parent
    if shared is not None:
        shared.mkdir(parents=True, exist_ok=True)
    try:
        with signals.handing_on(run) if more else contextlib.nullcontext({}) as handed:
            status = launch(
                ranks,
                argv,
                environment={**environment, **handed},
                hosts=hosts,
                recover=recover and ranks > 1,
                shared=shared,
                **more,
            ).returncode
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    status = status if status >= 0 else 128 - status
    # A signal ended launcher or rank before they listened: there was nothing to save.
    ended_early = more and status in (128 + signal.SIGUSR1, 128 + signal.SIGTERM)
    return STOPPED if ended_early else status


def _for_ranks(given: Sequence[str]) -> list[str]:
    """The arguments without those for the launcher."""
    rest = iter(given)
    kept: list[str] = []
    for argument in rest:
        if argument in _FOR_THE_LAUNCHER:
            next(rest, None)  # its value
        elif argument.partition("=")[0] not in _FOR_THE_LAUNCHER:
            kept.append(argument)
    return kept
