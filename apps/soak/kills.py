"""SIGKILL of a random rank at a random time, again and again over one folder of checkpoints.

After each kill the newest checkpoint must be readable, bit-equal to what a training without kills
has at that step, and not older than the last one that the killed job had been told of; each start
goes on from it.  Nothing may be left behind: half-written checkpoints, shared memory, temporary
files, processes.
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
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import meshmpi as mm
from apps.soak import counting
from apps.soak.rows import Row
from meshmpi import checkpoint
from meshmpi.errors import MeshmpiError
from meshmpi.runtime import flight
from meshmpi.runtime.launch import launch_command

RANKS = {1: 0.4, 2: 0.4, 4: 0.2}
"""Ranks -> share of the trials."""
END_SECONDS = 30.0
"""Most time from the kill of one rank to the end of the job on this, perhaps crowded, machine."""
START_SECONDS = 90.0
SAVE_SECONDS = 0.02
"""Delays into a save are drawn up to here; assumption: about what one takes.  Kills that turn out
to have come after the save are counted as kills at a random time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--kills", type=int, help="in all: 1000; --quick: 20")
    parser.add_argument("--inside", type=int, help="of them inside a save: 200; --quick: 5")
    parser.add_argument("--ranks", type=int, choices=sorted(RANKS), help="only with so many")


def run(options: argparse.Namespace) -> Iterator[Row]:
    """Kills; a row for each number of ranks and kind of time."""
    kills = options.kills or (20 if options.quick else 1000)
    inside = options.inside if options.inside is not None else (5 if options.quick else 200)
    shares = {options.ranks: 1.0} if options.ranks else RANKS
    draw = random.Random(options.seed)
    for ranks, share in shares.items():
        with Chain(ranks, draw) as chain:
            wanted = round(inside * share)
            while len(chain.inside) < wanted:
                chain.kill_inside_a_save()
            rest = max(round(kills * share) - len(chain.inside) - len(chain.anywhere), 1)
            for _ in range(rest):
                chain.kill_at_any_time()
            chain.finish()
            plural = "s" if ranks > 1 else ""
            yield chain.row(f"SIGKILL inside a save, {ranks} rank{plural}", chain.inside)
            yield chain.row(f"SIGKILL at any time, {ranks} rank{plural}", chain.anywhere)
            yield Row(
                f"end without a kill, {ranks} rank{plural}", 1, int(not chain.left),
                chain.left or f"{chain.newest} steps in all",
            )  # fmt: skip


@dataclass
class Trial:
    """What came of one kill.

    Attributes:
        found: Step of the newest checkpoint; 0 for none.
        committed: Step of the last one the job had reported.
        problem: What was wrong, or empty.
    """

    found: int
    committed: int
    problem: str


@dataclass
class Chain:
    """Jobs over one folder, each killed, each going on from what the one before has left.

    Args:
        ranks: Of each job.
        draw: For ranks and times.
    """

    ranks: int
    draw: random.Random
    inside: list[Trial] = field(default_factory=list)
    anywhere: list[Trial] = field(default_factory=list)
    left: str = ""
    newest: int = 0

    def __enter__(self) -> Chain:
        self.folder = Path(tempfile.mkdtemp(prefix="meshmpi-kills-"))
        # Shared memory of these jobs alone, to see what stays of it.
        self.shared = Path(tempfile.mkdtemp(prefix="meshmpi-kills-", dir="/dev/shm"))
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        self._started = self._mesh_made = 0.0
        self._start_seconds = 1.0  # until it is measured
        self.expected = counting.Expected()
        self.store = counting.build(mm.SimulatedMesh("all:1")).variables
        return self

    def __exit__(self, *_: object) -> None:
        for folder in (self.folder, self.shared):
            shutil.rmtree(folder, ignore_errors=True)

    # ---- one job -------------------------------------------------------------------------

    @contextlib.contextmanager
    def _job(self, *more: str) -> Iterator[subprocess.Popen[bytes]]:
        self._started = time.time()
        for path in self.folder.glob("state-*"):
            path.unlink()
        command, environment = launch_command(
            self.ranks, ["-m", "apps.soak.counting", str(self.folder), *more], threads=1,
            environment={
                "TMPDIR": str(self.temporary), "MESHMPI_FLIGHT_DIR": str(self.shared),
                "OMPI_MCA_btl_sm_backing_directory": str(self.shared),
            },
        )  # fmt: skip
        with (
            open(self.folder / "output", "wb") as output,
            subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            ) as process,
        ):  # fmt: skip
            try:
                yield process
            finally:
                for pid in [*_descendants(process.pid), process.pid]:
                    if process.poll() is None or pid != process.pid:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)

    def _states(self) -> dict[int, tuple[int, int, int]]:
        """Rank -> process, saves begun, saves ended; of those that have come so far."""
        found = {}
        for rank in range(self.ranks):
            with contextlib.suppress(FileNotFoundError):
                data = (self.folder / f"state-{rank}").read_bytes()
                if len(data) == counting.STATE.size:
                    found[rank] = counting.STATE.unpack(data)
        return found

    # ---- kills ---------------------------------------------------------------------------

    def kill_inside_a_save(self) -> None:
        """Kills a rank at a random time of one of the first saves of a job."""
        rank, wanted = self.draw.randrange(self.ranks), self.draw.randint(1, 4)
        delay = self.draw.uniform(0, SAVE_SECONDS)
        with self._job() as process:
            deadline = time.monotonic() + START_SECONDS
            while (begun := self._states().get(rank, (0, 0, 0))[1]) < wanted:
                if not begun:
                    self._start_seconds = time.time() - self._started
                if process.poll() is not None or time.monotonic() > deadline:
                    self.inside.append(Trial(0, 0, f"no save was begun: {self._output()}"))
                    return
                time.sleep(0.0005)
            time.sleep(delay)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._states()[rank][0], signal.SIGKILL)
            problem = self._await_end(process)
            _, begun, ended = self._states()[rank]
        (self.inside if begun > ended else self.anywhere).append(self.look(problem))

    def kill_at_any_time(self) -> None:
        """Kills a rank at a random time from its start on."""
        with self._job() as process:
            began, members = time.monotonic(), list[int]()
            while len(members) < self.ranks:
                members = self._ranks_of(process)
                if process.poll() is not None or time.monotonic() > began + START_SECONDS:
                    self.anywhere.append(Trial(0, 0, f"not started: {self._output()}"))
                    return
                time.sleep(0.001)
            time.sleep(self.draw.uniform(0, 2 * self._start_seconds + 1.0))
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.draw.choice(members), signal.SIGKILL)
            problem = self._await_end(process)
        self.anywhere.append(self.look(problem))

    def _ranks_of(self, process: subprocess.Popen[bytes]) -> list[int]:
        if self.ranks == 1:
            return [process.pid]
        return [
            pid for pid in _descendants(process.pid)
            if b"apps.soak.counting" in (c := _command(pid)) and b"mpirun" not in c
            and b"prterun" not in c
        ]  # fmt: skip

    def _await_end(self, process: subprocess.Popen[bytes]) -> str:
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return f"the job still runs {END_SECONDS:g} s after the kill"
        return ""

    def finish(self) -> None:
        """A last job that nobody kills: goes on, ends well and leaves nothing behind."""
        with self._job("--steps", str(2 * counting.SAVE_EVERY)) as process:
            try:
                status = process.wait(START_SECONDS)
            except subprocess.TimeoutExpired:
                status = "none, it hangs"
        trial = self.look("" if status == 0 else f"exit status {status}: {self._output()}")
        self.left = trial.problem
        if trial.found != self.newest or not self.newest:
            self.left = self.left or f"the newest step is {trial.found}, not {self.newest}"
        names = [p.name for p in (self.folder / "checkpoints").iterdir()]
        if not all(name.startswith("step-") for name in names):
            self.left = f"left among the checkpoints: {' '.join(names)}"

    # ---- what must be true afterwards ----------------------------------------------------

    def look(self, problem: str) -> Trial:
        """What a kill has left; ``problem`` is what went wrong before."""
        found, committed = 0, self._committed()
        if len(self._states()) == self.ranks:  # the killed job had come as far as to a mesh
            self._mesh_made = self._started
        try:
            newest = checkpoint.find(self.folder / "checkpoints")
            if newest:
                found = checkpoint.load(newest[0], self.store).step
        except MeshmpiError as error:
            problem = problem or f"unreadable: {error}"
        else:
            problem = problem or self._wrong(found, committed)
        self.newest = max(self.newest, found)
        return Trial(found, committed, problem or self._litter())

    def _wrong(self, found: int, committed: int) -> str:
        if found < committed:
            return f"step {committed} was committed, the newest is {found}"
        for name, value in self.expected.after(found).items():
            if found and self.store[name].tobytes() != value.tobytes():
                where = np.argwhere(self.store[name] != value)
                return f"'{name}' of step {found} differs in {len(where)} elements"
        return ""

    def _committed(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / "commits").read_text().split("\n")
            return int(lines[-2]) if len(lines) > 1 else 0
        return 0

    def _litter(self) -> str:
        """What jobs have left: told by the next start, in shared memory, in /tmp, as processes."""
        with contextlib.suppress(FileNotFoundError):
            return f"among the checkpoints: {(self.folder / 'litter').read_text()[:200]}"
        for folder in (self.shared, self.temporary):
            # Empty folders do not count: Open MPI makes one for each process alone, in /tmp.
            names = [
                str(p.relative_to(folder))
                for p in sorted(folder.rglob("*"))
                if not p.is_dir() and not self._swept(p)
            ]
            if names:
                return f"{len(names)} left in {folder}: {' '.join(names)[:200]}"
        alive = [p for p in _everything() if str(self.folder).encode() in _command(p)]
        return f"processes {alive} still run" if alive else ""

    def _swept(self, path: Path) -> bool:
        """Whether a file tells what a killed rank did, and the next mesh is to remove it."""
        if not re.fullmatch(r"\d+-\d+", path.stem):
            return False
        with contextlib.suppress(FileNotFoundError):
            return path.stat().st_mtime > self._mesh_made - flight.SWEEP_SECONDS
        return True

    def _output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")[-300:]

    def row(self, what: str, trials: list[Trial]) -> Row:
        """Trials of one kind, with the steps that were done after the last commit in vain."""
        bad = [t.problem for t in trials if t.problem]
        return Row(what, len(trials), len(trials) - len(bad), bad[0] if bad else "")


def _descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [int(child), *_descendants(int(child))]
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _everything() -> list[int]:
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]
