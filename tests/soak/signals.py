"""SIGTERM, SIGUSR1 and SIGINT to a random rank, or to the launching process, at a random time.

The time is uniform over the whole life of a small training, from the start of the command to its
end.  A trial passes when the command ends by itself within the limit, with exit status 75 (or 0
when it was finished already), on all ranks, without a traceback; and when a resumed run ends with
the losses, evaluations and variables of one that was never stopped, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from meshmpi import checkpoint
from meshmpi.runtime import processes
from meshmpi.training.metrics import read_metrics
from meshmpi.training.signals import STOPPED
from tests.soak.rows import Row

CONFIG = """
[data]
corpus = "{text}"
[model]
length = 8
d_model = 16
d_ff = 32
heads = 2
d_kv = 8
layers = 1
residual_dropout = 0.1
[train]
steps = {steps}
batch = 12
plot = false
[evaluate]
every = {evaluate}
[checkpoint]
every = {save}
[sample]
tokens = 100
"""
RANKS = (1, 2, 4)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_MARK = "MESHMPI_SOAK_TRIAL"


class Trial(NamedTuple):
    """One trial.

    Attributes:
        ranks: Of the job.
        target: Rank that is signalled; -1: the launching process.
        number: The signal.
        seconds: After the start.
        resumed: Whether the run is resumed and compared afterwards.
    """

    ranks: int
    target: int
    number: int
    seconds: float
    resumed: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--trials", type=int, default=0, help="(default 210; --quick: 6)")
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS, help="sizes of jobs")
    parser.add_argument("--steps", type=int, default=600, help="of a training, divided by ranks")
    parser.add_argument("--limit", type=float, default=40.0, help="seconds from signal to end")
    parser.add_argument("--resumed", type=float, default=1.0, help="share of trials resumed")


def run(options: argparse.Namespace) -> Iterator[Row]:
    """One row for each number of ranks."""
    draw = random.Random(options.seed)
    trials = (options.trials or (6 if options.quick else 210)) // len(options.ranks)
    with tempfile.TemporaryDirectory(prefix="meshmpi-soak-") as name:
        folder = Path(name)
        for ranks in options.ranks:
            prepare(folder, options.steps // ranks)
            _job(folder, "warm", ranks).communicate()  # compiles kernels: no part of a life
            began = time.monotonic()
            out, _ = _job(folder, "whole", ranks).communicate()
            life, whole = time.monotonic() - began, folder / f"whole-{ranks}"
            if not checkpoint.find(whole / "checkpoints"):
                yield Row(f"{ranks} ranks, never stopped", 1, 0, out.strip().replace("\n", " | "))
                continue
            places, problems, slowest = Counter[str](), list[str](), 0.0
            for k in range(trials):
                trial = Trial(
                    ranks,
                    draw.randrange(-1, ranks),
                    draw.choice(SIGNALS),
                    draw.uniform(0, life),
                    draw.random() < options.resumed,
                )
                failure, place, seconds = one_trial(folder, f"trial{k}", trial, options.limit)
                places[place] += 1
                slowest = max(slowest, seconds)
                problems.append(failure and f"{trial}: {failure}")
                if failure:
                    sys.stderr.write(f"{k + 1} of {trials}: {problems[-1]}\n")
            where = ", ".join(f"{n} {place}" for place, n in places.items())
            yield Row.of(f"signals, {ranks} ranks", problems, f"{where}; at most {slowest:.1f} s")


def config(text: Path, steps: int) -> str:
    """Settings of a training that evaluates and saves a few times."""
    return CONFIG.format(text=text, steps=steps, evaluate=steps // 6, save=steps // 4)


def prepare(folder: Path, steps: int) -> None:
    """Writes a text and ``config.toml``, a training of so many steps with it."""
    text = folder / "text.txt"
    text.write_text("".join(f"the {k % 7} foxes jump over {k % 5} dogs\n" for k in range(120)))
    (folder / "config.toml").write_text(config(text, steps))


def one_trial(folder: Path, name: str, trial: Trial, limit: float) -> tuple[str, str, float]:
    """Starts a training, signals it, waits, resumes.

    Returns:
        What went wrong or empty; whether the signal came before, during or after the steps; and
        the seconds from signal to end.
    """
    process = _job(folder, name, trial.ranks)
    time.sleep(trial.seconds)
    _signal(folder, name, process, trial)
    began = time.monotonic()
    try:
        out, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        for pid, _ in _members(folder / name):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        return (f"did not end within {limit:.0f} s: {process.communicate()[0][-500:]}", "during", limit)
    seconds, status = time.monotonic() - began, process.returncode
    stopped = "stopping after step" in out
    place = "during" if stopped else "after" if status == 0 else "before"
    if status not in (0, STOPPED) or "Traceback" in out:
        return f"exit status {status}: {out[-800:]}", place, seconds
    if _members(folder / name):
        return "processes are left", place, seconds
    failure = _resumed(folder, name, trial.ranks) if trial.resumed else ""
    return failure, place, seconds


def _resumed(folder: Path, name: str, ranks: int) -> str:
    run_folder, whole = folder / f"{name}-{ranks}", folder / f"whole-{ranks}"
    some = bool(checkpoint.find(run_folder / "checkpoints"))
    process = _job(folder, name, ranks, *(["--resume"] if some else []))
    out, _ = process.communicate()
    if process.returncode:
        return f"resuming: exit status {process.returncode}: {out[-800:]}"
    for what in (records, variables):
        if what(run_folder) != what(whole):
            return f"{what.__name__} differ from those of a run that was never stopped"
    return ""


def records(run_folder: Path) -> list[tuple[object, ...]]:
    """Every loss and evaluation of a run, as written.

    One that was stopped between its last evaluation and its end evaluates once more: two records
    count as one where they are equal in every digit.
    """
    found = set()
    for record in read_metrics(run_folder):
        found.add((record.get("step"), record.get("loss"), record.get("held_out_loss")))
    return sorted(found, key=str)


def variables(run_folder: Path) -> list[bytes]:
    """The numbers of the last checkpoint, as stored, without the headers of files."""
    newest, found = checkpoint.find(run_folder / "checkpoints")[0], []
    for path in sorted(newest.rglob("*.safetensors")):
        data = path.read_bytes()
        found.append(data[8 + int.from_bytes(data[:8], "little") :])
    return [newest.name.encode(), *found]


def _job(folder: Path, name: str, ranks: int, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "meshmpi", "train", str(folder / "config.toml"), *more]
    return subprocess.Popen(
        [*command, "--ranks", str(ranks), "--out", str(folder / f"{name}-{ranks}")],
        env={**os.environ, _MARK: str(folder / name)},
        cwd=folder,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _signal(folder: Path, name: str, process: subprocess.Popen[str], trial: Trial) -> None:
    """Signals the target as soon as it exists."""
    while process.poll() is None:
        if trial.target < 0 and _catches(process.pid, trial.number):
            process.send_signal(trial.number)  # earlier, Python itself starts up
            return
        for pid, rank in _members(folder / name):
            if rank == trial.target:
                try:
                    os.kill(pid, trial.number)
                except ProcessLookupError:
                    break
                return
        time.sleep(0.002)


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def _members(mark: Path) -> Sequence[tuple[int, int]]:
    """(Process id, rank) of the ranks of the job that was started with a mark."""
    found = []
    for pid in processes.marked(f"{_MARK}={mark}"):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            variables = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        program = os.path.basename(words[0])
        if b"--ranks" not in words and b"train" in words and program.startswith((b"python", b"env")):
            found.append((pid, _rank(variables)))
    return found


def _rank(variables: bytes) -> int:
    for line in variables.split(b"\0"):
        key, _, value = line.partition(b"=")
        if key in (b"OMPI_COMM_WORLD_RANK", b"PMI_RANK"):
            return int(value)
    return 0
