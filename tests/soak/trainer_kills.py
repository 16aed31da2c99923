"""SIGKILL of a random rank of ``meshmpi train`` at a random time, resumed until it has finished.

After each kill all checkpoints must be bit-equal to those of a run without kills at the same steps,
and the newest not older than the last one the killed job told of.  Once the run has come to its
end, its losses, evaluations, last variables and files must be those of the run without kills.
Every other job saves in the background; half of the kills wait for a save that is under way.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from meshmpi import checkpoint
from meshmpi.checkpoint.folder import PARTIAL
from meshmpi.checkpoint.tools import differences, problems
from meshmpi.errors import MeshmpiError
from meshmpi.guard import flight
from meshmpi.training.metrics import read_metrics
from tests.soak import signals
from tests.soak.kills import START_SECONDS, Jobs, Trial, in_background, row, shares
from tests.soak.rows import Row

STEPS, SAVE_EVERY = 200, 4
KEEP = 6
"""All of them are compared after each kill, since one alone would seldom show a race."""
SETTINGS = (f"checkpoint.every={SAVE_EVERY}", "evaluate.every=25", "sample.tokens=0")
SAVE_SECONDS = 0.01
"""Delays into a save are drawn up to here; assumption: about what one takes."""
TOLD = re.compile(r"^wrote .*step-(\d+) in ", re.MULTILINE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--kills", type=int, help="in all: 60; --quick: 3")
    parser.add_argument("--ranks", type=int, choices=sorted(shares(None)), help="only with so many")


def run(options: argparse.Namespace) -> Iterator[Row]:
    """Kills, and runs that came to their end nevertheless; two rows for each number of ranks."""
    kills = options.kills or (3 if options.quick else 60)
    draw = random.Random(options.seed)
    for ranks, share in shares(options.ranks).items():
        with Trainings(ranks, draw) as trainings:
            plural = "s" if ranks > 1 else ""
            problem = trainings.train_without_kills()
            if problem:
                yield Row(f"`meshmpi train` without kills, {ranks} rank{plural}", 1, 0, problem)
                continue
            while len(trainings.kills) < max(round(kills * share), 1):
                trainings.kill()
            trainings.finish()
            trials = trainings.kills
            yield row(
                f"SIGKILL of a rank of `meshmpi train`, {ranks} rank{plural}",
                trials,
                f"{sum(t.inside for t in trials)} inside a save; {in_background(trials)}",
            )
            yield row(f"resumed to the end, {ranks} rank{plural}", trainings.ends)


class Trainings(Jobs):
    """Runs of the trainer, each killed and resumed until it ends.

    Attributes:
        kills: What came of each kill.
        ends: What came of each run that has ended.
    """

    program = b"-m\0meshmpi\0train\0"

    def __enter__(self) -> Trainings:
        super().__enter__()
        self.kills, self.ends = list[Trial](), list[Trial]()
        self._whole, self._run = self.folder / "whole", self.folder / "run"
        self._life = 0.0  # seconds of a run without kills
        self._committed, self._background, self._launcher = 0, False, 0
        self._before = list[str]()  # unfinished checkpoints when the last job started
        signals.prepare(self.folder, STEPS)
        return self

    # ---- one job -------------------------------------------------------------------------

    @contextlib.contextmanager
    def _job(self, run: Path, *settings: str, resume: bool) -> Iterator[subprocess.Popen[bytes]]:
        given = [word for setting in (*SETTINGS, *settings) for word in ("--set", setting)]
        command = [
            sys.executable,
            "-m",
            "meshmpi",
            "train",
            str(self.folder / "config.toml"),
            "--ranks",
            str(self.ranks),
            "--out",
            str(run),
            *given,
            *["--resume"] * resume,
        ]
        environment = {k: v for k, v in os.environ.items() if k != flight.FOLDER_VARIABLE}
        with self.started(command, environment) as process:
            self._launcher = process.pid
            yield process

    def _next_job(self) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        """Goes on with the run; saves in the background if the job before did not."""
        self._background, self._before = not self._background, self._hidden()
        how = f"checkpoint.background={str(self._background).lower()}"
        # One that was killed before its first checkpoint begins anew.
        some = bool(checkpoint.find(self._run / "checkpoints"))
        return self._job(self._run, f"checkpoint.keep={KEEP}", how, resume=some)

    def _hidden(self) -> list[str]:
        """Checkpoints that are not whole: being written, or being removed."""
        return sorted(p.name for p in (self._run / "checkpoints").glob(".*"))

    def train_without_kills(self) -> str:
        """The run that others are compared with keeps all checkpoints; returns what is wrong."""
        began = time.monotonic()
        with self._job(self._whole, "checkpoint.keep=0", resume=False) as process:
            problem = self._ended(process)
        self._life = time.monotonic() - began
        return problem

    def _ended(self, process: subprocess.Popen[bytes]) -> str:
        try:
            status = process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            status = f"none within {START_SECONDS:g} s"
        return "" if status == 0 else f"exit status {status}: {self.output()[-300:]}"

    # ---- kills ---------------------------------------------------------------------------

    def kill(self) -> None:
        """Kills a rank of the next job; one that ends before counts as an end, not as a kill."""
        with self._next_job() as process:
            members = self.await_ranks(process)
            if members and self.draw.random() < 0.5:
                self._await_save(process)
            elif members:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(self.draw.uniform(0, self._life))
            killed = False
            if members and process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.draw.choice(members), signal.SIGKILL)
                    killed = True
            problem = self.await_end(process)
        if process.returncode == 0:
            self._look_at_end()
            return
        if not killed:
            problem = f"exit status {process.returncode}: {self.output()[-300:]}"
        self.kills.append(self.look(problem))

    def _await_save(self, process: subprocess.Popen[bytes]) -> None:
        """Waits until one of the next saves is under way, and into it."""
        checkpoints = self._run / "checkpoints"
        first = max((_step(p) for p in checkpoint.find(checkpoints)), default=0)
        wanted = first + SAVE_EVERY * self.draw.randint(1, 8)
        deadline = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            found = checkpoints.glob(f".step-*{PARTIAL}")
            if any(_step(p) >= wanted for p in found):
                time.sleep(self.draw.uniform(0, SAVE_SECONDS))
                return
            time.sleep(0.0005)

    def finish(self) -> None:
        """A last job that nobody kills, of the run that the kills have left."""
        with self._next_job() as process:
            problem = self._ended(process)
        if problem:
            self.ends.append(Trial(0, self._committed, problem, self._background))
        else:
            self._look_at_end()

    # ---- what must be true afterwards ----------------------------------------------------

    def look(self, problem: str) -> Trial:
        """What a kill has left; ``problem`` is what went wrong before."""
        found = 0
        told = [self._committed, *(int(step) for step in TOLD.findall(self.output()))]
        self._committed = max(told)
        try:
            for path in checkpoint.find(self._run / "checkpoints"):
                manifest = checkpoint.read_manifest(path)
                found = max(found, manifest.step)
                problem = problem or self._wrong(manifest)
        except MeshmpiError as error:
            problem = problem or f"unreadable: {error}"
        if found < self._committed:
            problem = problem or f"step {self._committed} was told of, the newest is {found}"
        problem = problem or self._too_much() or self.litter()
        inside = any(name not in self._before for name in self._hidden())
        return Trial(found, self._committed, problem, self._background, inside)

    def _wrong(self, manifest: checkpoint.Manifest) -> str:
        """How a checkpoint differs from that of the run without kills."""
        damage = list(problems(manifest))
        if damage:
            return f"step {manifest.step} is damaged: {damage[0]}"
        whole = self._whole / "checkpoints" / f"step-{manifest.step:08d}"
        differing = [d.name for d in differences(manifest, checkpoint.read_manifest(whole))]
        if differing:
            return f"step {manifest.step} differs in {len(differing)} tensors: {differing[0]}"
        return ""

    def _too_much(self) -> str:
        """A kill may leave one checkpoint half-written or half-removed, not the next kill two."""
        hidden, whole = self._hidden(), len(checkpoint.find(self._run / "checkpoints"))
        if len(hidden) > 1 or whole > KEEP + 1:
            return f"{whole} checkpoints, and unfinished: {' '.join(hidden)}"
        return ""

    def litter(self) -> str:
        """As of all jobs, and the folder of the last launcher."""
        for place in flight.places():
            left = list(place.glob(f"meshmpi-{os.geteuid()}-{self._launcher}-*"))
            if left:
                return f"left in shared memory: {left[0]}"
        return super().litter()

    def _look_at_end(self) -> None:
        """Compares a run that has ended with the one without kills; the next begins anew."""
        trial = self.look("")
        trial.problem = trial.problem or self.differs()
        self.ends.append(trial)
        shutil.rmtree(self._run)
        self._committed = 0

    def differs(self) -> str:
        """How a run that has ended differs from the one without kills."""
        for what in (signals.records, signals.variables, names):
            if what(self._run) != what(self._whole):
                return f"{what.__name__} differ from those of a run without kills"
        for rank in range(self.ranks):
            steps = [r["step"] for r in read_metrics(self._run, rank) if "held_out_loss" not in r]
            if steps != list(range(1, STEPS + 1)):
                return f"rank {rank} has {len(steps)} records of {len(set(steps))} steps"
        kept = sorted(p.name for p in (self._run / "checkpoints").iterdir())
        last = sorted(p.name for p in (self._whole / "checkpoints").iterdir())[-KEEP:]
        return "" if kept == last else f"left among the checkpoints: {' '.join(kept)}"


def names(run: Path) -> list[str]:
    """All files of a run but its checkpoints."""
    return sorted(str(p.relative_to(run)) for p in run.rglob("*") if run / "checkpoints" not in p.parents)


def _step(path: Path) -> int:
    """The step of a checkpoint, whole or not."""
    match = re.match(r"\.?step-(\d+)", path.name)
    return int(match[1]) if match else 0
