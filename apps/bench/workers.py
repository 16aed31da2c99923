"""Starts the processes that are measured, and reads what they print.

A worker is a module of `apps.bench`; it prints ``RESULT {json}``, once per process.  Nothing that
is timed runs in the process of the bench itself.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshmpi.errors import MeshmpiError
from meshmpi.launch.command import THREAD_VARIABLES
from meshmpi.launch.launch import launch
from meshmpi.runtime.processes import stop_session

ROOT = Path(__file__).parents[2]
SLOWING = ("OPENBLAS_CORETYPE", "OPENBLAS_VERBOSE", "MKL_DEBUG_CPU_TYPE", "PYTHONDONTWRITEBYTECODE")
"""Variables that choose other routines than a user's library would, or have every process compile
its modules anew."""
LIMIT_SECONDS = 900
"""Time limit of a worker: far more than any needs, even on a busy machine."""
Result = dict[str, Any]


class BenchError(MeshmpiError):
    """A worker failed."""


def forget_slowing_variables() -> list[str]:
    """Takes `SLOWING` out of the environment; returns what was taken, as NAME=value."""
    return [f"{name}={os.environ.pop(name)}" for name in SLOWING if name in os.environ]


def on_ranks(
    ranks: int,
    module: str,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str] = {},
    seconds: float = LIMIT_SECONDS,
) -> list[Result]:
    """Results of a worker on MPI ranks of one thread each, by rank.

    Args:
        ranks: How many.
        module: Below `apps.bench`.
        arguments: Its command line.
        environment: Variables to set in addition.
        seconds: Time limit.
    """
    done = launch(
        ranks,
        ["-m", f"apps.bench.{module}", *arguments],
        threads=1,
        capture_output=True,
        timeout_seconds=seconds,
        cwd=ROOT,
        environment=dict(environment),
    )
    return _results(module, ranks, done.returncode, done.stdout, done.stderr)


def alone(
    python: str,
    module: str,
    arguments: Sequence[str],
    *,
    threads: int = 1,
    environment: Mapping[str, str] = {},
    seconds: float = LIMIT_SECONDS,
) -> Result:
    """The result of a worker in one process of ``threads`` threads; the rest as `on_ranks`."""
    return group(1, python, module, arguments, threads=threads, environment=environment, seconds=seconds)[0]


def group(
    size: int,
    python: str,
    module: str,
    arguments: Sequence[str],
    *,
    threads: int = 1,
    environment: Mapping[str, str] = {},
    seconds: float = LIMIT_SECONDS,
) -> list[Result]:
    """Results of a worker in several processes that find each other as torchrun's do.

    Args:
        size: How many processes.
        python: The interpreter of their environment.
        module, arguments, environment, seconds: As for `on_ranks`.
    """
    variables = {**os.environ, **{name: str(threads) for name in THREAD_VARIABLES}, **environment}
    if size > 1:
        port = str(_free_port())
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
    with tempfile.TemporaryDirectory() as folder:
        started = []
        try:
            for rank in range(size):
                # Files, not pipes: a process that prints much must not wait for another's end.
                out, err = (Path(folder, f"{rank}.{kind}").open("w+") for kind in ("out", "err"))  # noqa: SIM115
                own = {**variables, "RANK": str(rank)} if size > 1 else variables
                command = [python, "-m", f"apps.bench.{module}", *arguments]
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=own,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                    text=True,
                )
                started.append((process, out, err))
            return _joined(module, started, time.monotonic() + seconds)
        finally:
            for process, out, err in started:
                stop_session(process)  # with what it has started itself
                out.close()
                err.close()


def _joined(module: str, started: Sequence[tuple], deadline: float) -> list[Result]:
    """Waits for all processes; the first that fails ends the wait."""
    while any(process.poll() is None for process, _, _ in started):
        late = time.monotonic() > deadline
        if late or any(process.poll() not in (None, 0) for process, _, _ in started):
            time.sleep(0.2)  # what failed may be about to say why
            break
        time.sleep(0.02)
    texts = [[], []]
    for _, *files in started:
        for text, file in zip(texts, files, strict=True):
            file.seek(0)
            text.append(file.read())
    status = next((p.poll() for p, _, _ in started if p.poll() != 0), 0)
    return _results(module, len(started), 124 if status is None else status, "".join(texts[0]), "".join(texts[1]))


def _results(module: str, size: int, status: int, out: str, err: str) -> list[Result]:
    found = [json.loads(x.split("RESULT ", 1)[1]) for x in out.splitlines() if "RESULT " in x]
    if status or len(found) != size:
        said = "\n".join((err or out).strip().splitlines()[-8:])
        ended = "ran out of time" if status == 124 else f"ended with status {status}"
        raise BenchError(
            f"worker {module} {ended}, {len(found)} of {size} results. It said:\n{said}",
            "Run it by hand with python -m.",
        )
    return sorted(found, key=lambda result: result.get("rank", 0))


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


PYTHON = sys.executable
"""The interpreter of meshmpi's own workers."""
