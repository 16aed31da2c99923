"""Faults that leave ranks hanging, or with wrong numbers, in plain MPI: each must end the job.

A trial passes when the job ends within ten seconds of the fault with one report that names the rank
that did it and a line of the program.  A rank that is only stopped for a while must not be taken
for a fault.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshmpi.launch.launch import TIMED_OUT, launch
from tests.soak.rows import Row

PROGRAM = "tests.soak.faulty"
MOST_SECONDS = 10.0
LIMIT_SECONDS = 60.0

FAULTS = {
    "exception": "an exception",
    "exit3": "sys.exit(3)",
    "sigkill": "SIGKILL",
    "skip": "a collective left out",
    "broadcast": "all_reduce against broadcast",
    "count 500": "1000 against 500 elements",
    "count 100k": "200,000 against 100,000 elements",
    "dtype": "float32 against int32",
    "op": "sum against max",
    "order": "two communicators in swapped order",
    "root": "another root",
    "exit0": "return from main",
    "swallowed": "an exception swallowed, the loop left",
    "early": "sys.exit(0) before the first mesh",
    "before mpi": "return from main before MPI is initialised",
    "early exception": "an exception before the first mesh",
    "shape": "meshes of different shapes",
    "mesh": "a mesh that one rank makes alone",
    "compile": "a step that one rank compiles alone",
}
"""Name in `faulty` -> what it is.  The first eleven are those that MPI programs meet most."""


class Trial(NamedTuple):
    """How one ended.

    Attributes:
        problem: What is not as it must be, or empty.
        seconds: From the fault to the end of the job.
        text: What the job printed on stderr.
    """

    problem: str
    seconds: float
    text: str


def reports(text: str) -> list[str]:
    """Lines in which a rank of ours reports."""
    return re.findall(r"^\0?(?:\[rank \d+(?: of \d+)?\] |meshmpi: )(.*)", text, re.MULTILINE)


def trial(fault: str, ranks: int, rank: int, debug: bool = False) -> Trial:
    """One job with a fault.

    Args:
        fault: A key of `FAULTS`.
        ranks: Of the job.
        rank: That does wrong.
        debug: Whether ranks compare collectives beforehand.
    """
    done = launch(
        ranks,
        ["-m", PROGRAM, fault, str(rank)],
        timeout_seconds=LIMIT_SECONDS,
        capture_output=True,
        environment={"MESHMPI_DEBUG": "collectives" if debug else ""},
    )
    ended = time.time()
    began = re.search(r"^fault (\S+)", done.stdout, re.MULTILINE)
    seconds = ended - float(began[1]) if began else float("nan")
    return Trial(_problem(fault, rank, done, seconds), seconds, done.stderr)


def _problem(fault: str, rank: int, done: subprocess.CompletedProcess[str], seconds: float) -> str:
    found = reports(done.stderr)
    if done.returncode == TIMED_OUT:
        return "the job hangs"
    if done.returncode == 0:
        return "the job ends as if all were well"
    if not seconds <= MOST_SECONDS:
        return f"the job ends {seconds:.1f} s after the fault"
    if len(found) != 1:
        return f"{len(found)} reports"
    whole = done.stderr[done.stderr.index(found[0]) :]
    if not re.search(rf"rank {rank}\b|ranks [\d,-]*\b{rank}\b", whole) and (f"[rank {rank} of" not in done.stderr):
        return f"rank {rank} is not named"
    if "faulty.py:" not in whole and 'faulty.py", line' not in whole:
        return "no line is named"
    return ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this part."""
    parser.add_argument("--rounds", type=int, default=25, help="trials of each fault and size")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--only", nargs="*", choices=FAULTS, help="names of faults")


def run(options: argparse.Namespace) -> Iterable[Row]:
    """All faults, then ranks that are stopped for a while."""
    draw = random.Random(options.seed)
    rounds = 2 if options.quick else options.rounds
    for ranks in options.ranks:
        for fault in options.only or FAULTS:
            trials = [trial(fault, ranks, draw.randrange(ranks)) for _ in range(rounds)]
            yield _row(f"{FAULTS[fault]}, {ranks} ranks", trials)
        if options.only is None:
            yield from _no_alarms(ranks, 15.0 if options.quick else 60.0)


def _row(what: str, trials: Sequence[Trial]) -> Row:
    problems = [t.problem and f"{t.problem}: {t.text[-400:]!r}" for t in trials]
    return Row.of(what, problems, f"longest {max(t.seconds for t in trials):.1f} s")


def _no_alarms(ranks: int, seconds: float) -> Iterable[Row]:
    for rank in (0, ranks - 1):
        yield Row.of(f"rank {rank} stopped {seconds:g} s, {ranks} ranks", [stopped(ranks, rank, seconds)])
    done = launch(
        ranks, ["-m", PROGRAM, "slow", "1", str(seconds)], capture_output=True, timeout_seconds=seconds + LIMIT_SECONDS
    )
    yield Row(f"rank 1 computes {seconds:g} s, {ranks} ranks", 1, int(done.returncode == 0), done.stderr[-400:])


def stopped(ranks: int, rank: int, seconds: float) -> str:
    """A rank is stopped by SIGSTOP for a while: what goes wrong, or empty."""
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "meshmpi.launch",
            "-n",
            str(ranks),
            "--timeout",
            str(seconds + LIMIT_SECONDS),
            "-m",
            PROGRAM,
            "pid",
            str(rank),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout is not None
        pid = int(next(line for line in job.stdout if line.startswith("pid ")).split()[1])
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(seconds, os.kill, (pid, signal.SIGCONT)).start()
        out, err = job.communicate()
    if job.returncode != 0 or reports(err):
        return f"status {job.returncode}: {err[-400:]!r}"
    return "" if out.count("is done") == ranks else f"not all ranks came to the end: {out!r}"
