"""Several hosts, of which one is lost: link cut, power off, processes killed, packets dropped.

The job must end and name the lost ranks and their host, and a new start on the hosts that are left
must go on from the last checkpoint, bit for bit; where packets are only lost, it must go on.  Hosts
are network namespaces of this machine; that needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import meshmpi as mm
from meshmpi import checkpoint
from tests.soak import counting
from tests.soak.namespaces import Hosts, cannot_lose_packets, unavailable
from tests.soak.rows import Row

NOTICE_SECONDS = 12.0
"""From the moment that nothing comes from a host to the moment that it is taken for lost."""
END_SECONDS = 10.0
"""From there to the end of the job: what is promised."""
START_SECONDS = 90.0
LOSS_SECONDS = 20.0
LAYOUTS = (("h1:1,h2:1", 2), ("h1:2,h2:2", 4), ("h1:1,h2:1,h3:1", 3))
"""Hosts with their ranks, and ranks in all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--rounds", type=int, help="of each trial: 5; --quick: 1")


def run(options: argparse.Namespace) -> Iterator[Row]:
    """Trials; one row a fault, over several numbers of hosts."""
    why = unavailable()
    if why:
        print(f"skipped: {why}")
        yield Row("hosts in namespaces", 1, 1, f"not tried: {why}")
        return
    rounds = options.rounds or (1 if options.quick else 5)
    layouts = LAYOUTS[:1] if options.quick else LAYOUTS
    draw = random.Random(options.seed)
    for name, fault in FAULTS.items():
        problems, seconds = list[str](), list[float]()
        for where, ranks in layouts * rounds:
            with Trial(where, ranks, draw) as trial:
                problems.append(trial.lose(fault))
                seconds.append(trial.seconds)
        note = f"ended after {min(seconds):.1f} to {max(seconds):.1f} s"
        yield Row.of(f"{name}: the job ends, the rest goes on", problems, note)
    why = cannot_lose_packets()
    if why:
        print(f"packets are not dropped: {why}")
    for percent in () if why else (5, 20):
        problems = []
        for where, ranks in layouts * rounds:
            with Trial(where, ranks, draw) as trial:
                problems.append(trial.go_on_with(percent))
        yield Row.of(f"{percent} % of packets lost for {LOSS_SECONDS:g} s: the job goes on", problems)


def _cut(hosts: Hosts, name: str) -> None:
    hosts.cut(name)


def _power(hosts: Hosts, name: str) -> None:
    hosts.kill(name)


def _processes(hosts: Hosts, name: str) -> None:
    hosts.kill(name, silent=False)


FAULTS: dict[str, Callable[[Hosts, str], None]] = {
    "link cut": _cut,
    "power off": _power,
    "all processes of a host killed": _processes,
}


class Trial:
    """A job on hosts of its own.

    Args:
        where: Hosts with their ranks.
        ranks: In all.
        draw: For times.

    Attributes:
        seconds: From the fault to the end of the job.
    """

    def __init__(self, where: str, ranks: int, draw: random.Random) -> None:
        self._where, self._ranks, self._draw, self.seconds = where, ranks, draw, 0.0

    def __enter__(self) -> Trial:
        self.folder = Path(tempfile.mkdtemp(prefix="meshmpi-hosts-soak-"))
        try:
            self.hosts = Hosts(len(self._where.split(",")), [self.folder]).__enter__()
        except BaseException:
            shutil.rmtree(self.folder)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.hosts.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- jobs ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _job(self, where: str, ranks: int, *more: str) -> Iterator[subprocess.Popen[bytes]]:
        command = [
            sys.executable,
            "-m",
            "meshmpi.launch",
            "-n",
            str(ranks),
            "--hosts",
            where,
            "--threads",
            "1",
            "-m",
            "tests.soak.counting",
            str(self.folder),
            *more,
        ]
        folders = {"TMPDIR": str(self.folder), "MESHMPI_SHARED_FOLDER": str(self.folder)}
        environment = {**os.environ, **self.hosts.environment(), **folders}
        with (
            open(self.folder / "output", "ab") as output,
            subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            ) as process,
        ):
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()

    def _commits(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "commits").read_text().count("\n")
        return 0

    def _until_commits(self, process: subprocess.Popen[bytes], count: int) -> str:
        deadline = time.monotonic() + START_SECONDS
        while self._commits() < count:
            if process.poll() is not None or time.monotonic() > deadline:
                return f"no {count} checkpoints: {self._output()[-300:]}"
            time.sleep(0.02)
        return ""

    def _output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    # ---- trials --------------------------------------------------------------------------

    def lose(self, fault: Callable[[Hosts, str], None]) -> str:
        """Loses the last host; returns what went wrong, or nothing."""
        lost = self.hosts.names[-1]
        with self._job(self._where, self._ranks) as process:
            problem = self._until_commits(process, 3)
            if problem:
                return problem
            time.sleep(self._draw.uniform(0, 1))
            began = time.monotonic()
            fault(self.hosts, lost)
            try:
                process.wait(NOTICE_SECONDS + END_SECONDS + 10)
            except subprocess.TimeoutExpired:
                return f"the job still runs {time.monotonic() - began:.0f} s after"
            self.seconds = time.monotonic() - began
        if self.seconds > NOTICE_SECONDS + END_SECONDS:
            return f"the job ended after {self.seconds:.1f} s only"
        if process.returncode == 0:
            return "the job has lost a host and ended with status 0"
        return self._named(lost, fault is _processes) or self._goes_on(lost)

    def _named(self, lost: str, at_once: bool) -> str:
        """Whether the report names the host and its ranks; or, of one ended at once, the host."""
        text = self._output()
        ranks = _ranks_on(self._where, lost)
        wanted = [f"host {lost}", *(str(r) for r in ranks)]
        reports = [line for line in text.splitlines() if "HangError" in line]
        if any(all(w in line for w in wanted) for line in reports):
            return ""
        # The launcher, whose connection is closed at once, may end the ranks before they report.
        if at_once and re.search(rf"Remote daemon: .* on node {lost}\b", text):
            return ""
        return f"no report names {lost} and ranks {ranks}: {text[-400:]}"

    def _goes_on(self, lost: str) -> str:
        """A new start on the other hosts, and what it finds and makes."""
        committed = int((self.folder / "commits").read_text().split()[-1])
        left = ",".join(h for h in self._where.split(",") if not h.startswith(f"{lost}:"))
        ranks = self._ranks - len(_ranks_on(self._where, lost))
        problem = self._compare(committed)
        if problem:
            return problem
        with self._job(left, ranks, "--steps", "6") as process:
            try:
                status = process.wait(START_SECONDS)
            except subprocess.TimeoutExpired:
                return f"the new start hangs: {self._output()[-300:]}"
        if status:
            return f"the new start ends with status {status}: {self._output()[-300:]}"
        return self._compare(committed + 4)

    def _compare(self, least: int) -> str:
        """Whether the newest checkpoint is of this step or later, and right in every bit."""
        store = counting.build(mm.SimulatedMesh("all:1")).variables
        newest = checkpoint.find(self.folder / "checkpoints")
        step = checkpoint.load(newest[0], store).step if newest else 0
        if step < least:
            return f"the newest checkpoint is of step {step}, not of {least}"
        expected = counting.Expected().after(step)
        different = [n for n, v in expected.items() if store[n].tobytes() != v.tobytes()]
        return f"step {step}: {' and '.join(different)} differ" if different else ""

    def go_on_with(self, percent: float) -> str:
        """Loses packets of the last host for a while; returns what went wrong, or nothing."""
        with self._job(self._where, self._ranks) as process:
            problem = self._until_commits(process, 3)
            if problem:
                return problem
            self.hosts.lose(self.hosts.names[-1], percent)
            time.sleep(LOSS_SECONDS)
            self.hosts.lose(self.hosts.names[-1], 0)
            if process.poll() is not None:
                return f"the job has ended: {self._output()[-300:]}"
            problem = self._until_commits(process, self._commits() + 3)
        return problem or self._compare(6)


def _ranks_on(where: str, host: str) -> list[int]:
    first = 0
    for part in where.split(","):
        name, _, count = part.partition(":")
        if name == host:
            return list(range(first, first + int(count)))
        first += int(count)
    raise ValueError(f"{host} is not in {where}")
