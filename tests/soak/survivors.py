"""SIGKILL of random ranks of ``meshmpi train --recover`` at random steps: the others go on.

The step is drawn and the job itself reports where it is, so that kills come while it runs, however
fast the machine.  Each run loses a rank, and often more, until one is left.  It must end with
status 0, have recorded every step once, with losses that differ from an undisturbed run's by
rounding alone, and bit-equal ones before the first step that a smaller mesh made.  Where every
block has a second holder no step may be repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from meshmpi.guard import flight
from meshmpi.guard.rings import Reader
from meshmpi.training.metrics import read_metrics
from tests.soak import signals
from tests.soak.kills import Jobs, Trial, row
from tests.soak.rows import Row

STEPS = 200
LAST = STEPS // 2
"""Before this step ranks are killed.  Assumption: it is seen before the other half is over."""
LIMIT_SECONDS = 600.0
"""Longest run, the compiling after each loss included; assumption."""
BLOCKS = "batch:rows;heads:cols;d_ff:cols;vocab:cols"
TOLERANCE = 1e-3
"""Relative; sums of other groups of ranks round otherwise, and training amplifies it."""
LOST = re.compile(r" (was|were) lost(?: after step (\d+))?: .* from step (\d+)(, which is in memory)?; (\d+) step")


class Kind(NamedTuple):
    """A mesh to kill ranks of.

    Attributes:
        mesh: Names and sizes.
        layout: Of the training.
        copies: Whether one loss leaves a holder of every block.
    """

    mesh: str
    layout: str
    copies: bool


KINDS = (
    Kind("all:2", "batch:all", True),
    Kind("all:4", "batch:all", True),
    Kind("rows:2;cols:2", BLOCKS, True),
    Kind("all:2", "heads:all;d_ff:all;vocab:all", False),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--runs", type=int, help="of each mesh: 25; --quick: 1")


def run(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each mesh."""
    draw = random.Random(options.seed)
    for kind in KINDS:
        with Survivals(kind, draw) as survivals:
            whole = survivals.trained("whole")
            trials = [Trial(0, 0, whole)] if whole else []
            for k in range(0 if whole else options.runs or (1 if options.quick else 25)):
                trials.append(survivals.kill(f"run-{k}"))
            note = (
                f"{survivals.killed} ranks killed; {survivals.losses} times went on,"
                f" {survivals.kept} of them from memory"
            )
            yield row(f"--recover on {kind.mesh}, '{kind.layout}'", trials, note)


class Survivals(Jobs):
    """Runs that lose ranks and go on.

    Attributes:
        killed: Ranks.
        losses: How often the others went on.
        kept: How often from memory.
    """

    program = b"-m\0meshmpi\0train\0"

    def __init__(self, kind: Kind, draw: random.Random) -> None:
        self._kind, self.draw = kind, draw
        self.ranks = math.prod(int(part.split(":")[1]) for part in kind.mesh.split(";"))
        self.killed = self.losses = self.kept = 0

    def __enter__(self) -> Survivals:
        super().__enter__()
        signals.prepare(self.folder, STEPS)
        return self

    def _job(self, name: str) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        command = [
            sys.executable,
            "-m",
            "meshmpi",
            "train",
            str(self.folder / "config.toml"),
            "--ranks",
            str(self.ranks),
            "--mesh",
            self._kind.mesh,
            "--layout",
            self._kind.layout,
            "--recover",
            "--out",
            str(self.folder / name),
        ]
        self._rings(name).mkdir()
        return self.started(command, {**os.environ, flight.FOLDER_VARIABLE: str(self._rings(name))})

    def _rings(self, name: str) -> Path:
        """Where the ranks of a run write what they do."""
        return self.shared / f"rings-{name}"

    def _reached(self, name: str) -> int:
        """The last step that any rank reports; 0 before the first, -1 until all are there."""
        rings = sorted(self._rings(name).glob("*/*.ring"))
        seen = [s for ring in rings if (s := Reader(ring).look("", "running", 1)) is not None]
        steps = [s.step for s in seen if s.step is not None]
        return max(steps, default=0 if len(seen) == self.ranks else -1)

    def trained(self, name: str) -> str:
        """A run that nobody disturbs; returns what is wrong."""
        with self._job(name) as process, contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LIMIT_SECONDS)
        if process.returncode:
            return f"exit status {process.returncode}: {self.output()[-300:]}"
        return ""

    def kill(self, name: str) -> Trial:
        """Kills ranks at random steps, often more than one, all but one at the most."""
        steps = sorted(self.draw.choices(range(LAST), k=self.draw.randint(1, self.ranks - 1)))
        killed = 0
        with self._job(name) as process:
            deadline, members = time.monotonic() + LIMIT_SECONDS, self.await_ranks(process)
            for step in steps if members else []:
                while self._reached(name) < step and time.monotonic() < deadline:
                    if process.poll() is not None:
                        break
                    time.sleep(0.002)
                victim = members.pop(self.draw.randrange(len(members)))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                    killed += 1
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LIMIT_SECONDS)
        self.killed += killed
        if killed < len(steps):
            return Trial(0, 0, f"{killed} of {len(steps)} kills, the job ended before the others")
        return Trial(0, 0, self._wrong(name, process.returncode))

    def _wrong(self, name: str, status: int | None) -> str:
        output = self.output()
        losses = LOST.findall(output)
        self.losses += len(losses)
        self.kept += sum(bool(memory) for _, _, _, memory, _ in losses)
        if status != 0:
            return f"exit status {status}: {output[-300:]}"
        if not losses:
            return "a rank was killed and nobody has said so"
        found, whole = (
            {r["step"]: r["loss"] for r in read_metrics(self.folder / n) if "loss" in r} for n in (name, "whole")
        )
        if sorted(found) != sorted(whole):
            return f"{len(found)} of {len(whole)} steps are recorded"
        first = min(int(source) for _, _, source, _, _ in losses)
        for step, loss in whole.items():
            if step <= first and found[step] != loss:
                return f"step {step}, of the whole mesh: {found[step]} for {loss}"
            if abs(found[step] - loss) > TOLERANCE * abs(loss):
                return f"step {step}: loss {found[step]} for {loss}"
        several, after, _, _, repeated = losses[0]
        if self._kind.copies and several == "was" and after and repeated != "0":
            return f"{repeated} steps were repeated though every block had a second holder"
        return ""
