"""SIGKILL of a random rank at a random time, again and again over one folder of checkpoints.

After each kill the newest checkpoint must be readable, bit-equal to what a training without kills
has at that step, and not older than the last one that the killed job had been told of; each start
goes on from it.  Every other job saves in the background.  Nothing may be left behind: half-written
checkpoints, shared memory, temporary files, processes.
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
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

import meshmpi as mm
from meshmpi import checkpoint
from meshmpi.errors import MeshmpiError
from meshmpi.guard import flight
from meshmpi.launch.command import launch_command
from tests.soak import counting
from tests.soak.rows import Row

RANKS = {1: 0.4, 2: 0.4, 4: 0.2}
"""Ranks -> share of the trials."""
END_SECONDS = 30.0
"""Most time from the kill of one rank to the end of the job on this, perhaps crowded, machine."""
ORPHAN_SECONDS = 15.0
"""Most time from the kill of a launcher to the end of its ranks: what is promised."""
LAUNCHERS = ("our launcher", "mpirun")
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
    """Kills; rows for each number of ranks, for each kind of time."""
    kills = options.kills or (20 if options.quick else 1000)
    inside = options.inside if options.inside is not None else (5 if options.quick else 200)
    draw = random.Random(options.seed)
    for ranks, share in shares(options.ranks).items():
        with Chain(ranks, draw) as chain:
            wanted = max(round(inside * share / 2), int(inside > 0))
            while any(len(found) < wanted for found in chain.inside.values()):
                chain.kill_inside_a_save()
            done = len(chain.anywhere) + sum(map(len, chain.inside.values()))
            for _ in range(max(round(kills * share) - done, 2)):
                chain.kill_at_any_time()
            for background in (False, True):
                chain.finish(background)
            plural = "s" if ranks > 1 else ""
            for background, trials in chain.inside.items() if wanted else ():
                how = " in the background" if background else ""
                yield row(f"SIGKILL inside a save{how}, {ranks} rank{plural}", trials)
            for who in LAUNCHERS if ranks > 1 else ():
                trials = [chain.kill_a_launcher(who) for _ in range(max(round(kills / 50), 2))]
                yield row(f"SIGKILL of {who}, {ranks} ranks: they end with it", trials)
            what = f"SIGKILL at any time, {ranks} rank{plural}"
            yield row(what, chain.anywhere, in_background(chain.anywhere))
            yield row(f"end without a kill, {ranks} rank{plural}", chain.ends, f"{chain.newest} steps in all")


def shares(ranks: int | None) -> dict[int, float]:
    """Ranks -> share of the trials, where one number of them may be asked for."""
    return {ranks: 1.0} if ranks else RANKS


@dataclass
class Trial:
    """What came of one kill, or of a job that nobody kills.

    Attributes:
        found: Step of the newest checkpoint; 0 for none.
        committed: Step of the last one the job had reported.
        problem: What was wrong, or empty.
        background: Whether the job saved in the background.
        inside: Whether the killed rank was inside a save.
    """

    found: int
    committed: int
    problem: str
    background: bool = False
    inside: bool = False


def row(what: str, trials: Sequence[Trial], note: str = "") -> Row:
    """As `Row.of`."""
    return Row.of(what, [t.problem for t in trials], note)


def in_background(trials: Sequence[Trial]) -> str:
    """How many of the kills hit jobs that save in the background."""
    found = [t for t in trials if t.background]
    return f"{len(found)} of jobs that save in the background, of these {sum(t.inside for t in found)} inside a save"


@dataclass
class Jobs:
    """Jobs that are killed, in a folder of their own, and what they leave elsewhere.

    Args:
        ranks: Of each job.
        draw: For ranks and times.

    Attributes:
        folder: Of everything the jobs write on purpose.
        shared: Shared memory of these jobs alone, to see what stays of it.
        temporary: Their /tmp.
    """

    program: ClassVar[bytes]
    """What the command line of each rank contains."""
    ranks: int
    draw: random.Random

    def __enter__(self) -> Jobs:
        self.folder = Path(tempfile.mkdtemp(prefix="meshmpi-kills-"))
        self.shared = Path(tempfile.mkdtemp(prefix="meshmpi-kills-", dir="/dev/shm"))
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        for folder in (self.folder, self.shared):
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def started(self, command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
        """Starts a job; nothing of it runs on afterwards."""
        own = {"TMPDIR": str(self.temporary), "OMPI_MCA_btl_sm_backing_directory": str(self.shared)}
        with (
            open(self.folder / "output", "wb") as output,
            subprocess.Popen(
                command,
                env={**environment, **own},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            ) as process,
        ):
            try:
                yield process
            finally:
                for pid in [*_descendants(process.pid), process.pid]:
                    if process.poll() is None or pid != process.pid:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)

    def await_ranks(self, process: subprocess.Popen[bytes]) -> list[int]:
        """The processes of all ranks, as soon as they are there; or none, if they do not come."""
        deadline, members = time.monotonic() + START_SECONDS, list[int]()
        while len(members) < self.ranks:
            if process.poll() is not None or time.monotonic() > deadline:
                return []
            time.sleep(0.001)
            members = [
                pid
                for pid in (process.pid, *_descendants(process.pid))
                if self.program in (c := _command(pid))
                and b"mpirun" not in c
                and b"prterun" not in c
                and b"--ranks" not in c
                and b"meshmpi.launch" not in c
            ]
        return members

    def await_end(self, process: subprocess.Popen[bytes]) -> str:
        """Waits for the end of a job that has lost a rank; returns what is wrong, or nothing."""
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return f"the job still runs {END_SECONDS:g} s after the kill"
        return ""

    def output(self) -> str:
        """All that the last job has printed."""
        return (self.folder / "output").read_text(errors="replace")

    def litter(self) -> str:
        """What jobs have left in shared memory, in /tmp and as processes."""
        for folder in (self.shared, self.temporary):
            # Empty folders do not count: Open MPI makes one for each process alone, in /tmp.
            names = [
                str(p.relative_to(folder)) for p in sorted(folder.rglob("*")) if not p.is_dir() and not self.swept(p)
            ]
            if names:
                return f"{len(names)} left in {folder}: {' '.join(names)[:200]}"
        # The last of a job that was killed needs a moment to go.
        deadline = time.monotonic() + ORPHAN_SECONDS
        while alive := [p for p in _everything() if str(self.folder).encode() in _command(p)]:
            if time.monotonic() > deadline:
                return f"processes {alive} still run {ORPHAN_SECONDS:g} s after the end"
            time.sleep(0.05)
        return ""

    def swept(self, path: Path) -> bool:
        """Whether a later job is to remove a file."""
        return False


class Chain(Jobs):
    """Jobs of `counting`, each killed, each going on from what the one before has left.

    Attributes:
        inside: Kills inside a save: at once, and in the background.
        anywhere: Kills at any time.
        ends: Jobs that nobody killed.
        newest: Step of the newest checkpoint that was seen.
    """

    program = b"tests.soak.counting"

    def __enter__(self) -> Chain:
        super().__enter__()
        self.inside: dict[bool, list[Trial]] = {False: [], True: []}
        self.anywhere, self.ends = list[Trial](), list[Trial]()
        self.newest = 0
        self._background = True  # of the last job
        self._started = self._mesh_made = 0.0
        self._over = list[float]()  # when each job was
        self._start_seconds = 1.0  # until it is measured
        self.expected = counting.Expected()
        self.store = counting.build(mm.SimulatedMesh("all:1")).variables
        return self

    # ---- one job -------------------------------------------------------------------------

    def _job(self, *more: str) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        """The next job, which saves in the background if the one before did not."""
        self._started, self._background = time.time(), not self._background
        for path in self.folder.glob("state-*"):
            path.unlink()
        how = ["--background"] if self._background else []
        command, environment = launch_command(
            self.ranks,
            ["-m", "tests.soak.counting", str(self.folder), *how, *more],
            threads=1,
            environment={flight.FOLDER_VARIABLE: str(self.shared)},
        )
        return self.started(command, environment)

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
                    problem = f"no save was begun: {self.output()[-300:]}"
                    self.inside[self._background].append(Trial(0, 0, problem, self._background))
                    return
                time.sleep(0.0005)
            time.sleep(delay)
            trial = self._killed(process, self._states()[rank][0])
        (self.inside[self._background] if trial.inside else self.anywhere).append(trial)

    def kill_at_any_time(self) -> None:
        """Kills a rank at a random time from its start on."""
        with self._job() as process:
            members = self.await_ranks(process)
            if not members:
                problem = f"not started: {self.output()[-300:]}"
                self.anywhere.append(Trial(0, 0, problem, self._background))
                return
            time.sleep(self.draw.uniform(0, 2 * self._start_seconds + 1.0))
            self.anywhere.append(self._killed(process, self.draw.choice(members)))

    def kill_a_launcher(self, who: str) -> Trial:
        """Kills what has started the ranks of a job, at a random time; all of them must end."""
        words = ["-m", "tests.soak.counting", str(self.folder)]
        words = ["-m", "meshmpi.launch", "-n", str(self.ranks), "--threads", "1", *words]
        environment = {**os.environ, flight.FOLDER_VARIABLE: str(self.shared)}
        for path in self.folder.glob("state-*"):
            path.unlink()
        with self.started([sys.executable, *words], environment) as process:
            members = self.await_ranks(process)
            if not members:
                return Trial(0, 0, f"not started: {self.output()[-300:]}")
            time.sleep(self.draw.uniform(0, 2 * self._start_seconds + 1.0))
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                os.kill(process.pid if who == LAUNCHERS[0] else _parent(members[0]), signal.SIGKILL)
            deadline = time.monotonic() + ORPHAN_SECONDS
            while left := [pid for pid in members if self.program in _command(pid)]:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            problem = f"ranks {left} still run {ORPHAN_SECONDS:g} s after the kill" if left else ""
            problem = problem or self.await_end(process)
        for folder in (self.shared, self.temporary):  # MPI had no time to remove what is its own
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)  # processes that end remove files too
                else:
                    path.unlink(missing_ok=True)
        return self.look(problem)

    def _killed(self, process: subprocess.Popen[bytes], pid: int) -> Trial:
        """Kills a rank and looks what is left of its job."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        trial = self.look(self.await_end(process))
        trial.inside = any(p == pid and begun > ended for p, begun, ended in self._states().values())
        return trial

    def finish(self, background: bool) -> None:
        """A job that nobody kills: goes on, ends well and leaves nothing behind."""
        self._background = not background
        with self._job("--steps", str(2 * counting.SAVE_EVERY)) as process:
            try:
                status = process.wait(START_SECONDS)
            except subprocess.TimeoutExpired:
                status = "none, it hangs"
        before = self.newest
        trial = self.look("" if status == 0 else f"exit status {status}: {self.output()[-300:]}")
        if not trial.problem and trial.found <= before:
            trial.problem = f"the newest step is {trial.found}, not after {before}"
        names = [p.name for p in (self.folder / "checkpoints").iterdir()]
        if not all(name.startswith("step-") for name in names):
            trial.problem = trial.problem or f"left among the checkpoints: {' '.join(names)}"
        self.ends.append(trial)

    # ---- what must be true afterwards ----------------------------------------------------

    def look(self, problem: str) -> Trial:
        """What a kill has left; ``problem`` is what went wrong before."""
        self._over.append(time.time())
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
        return Trial(found, committed, problem or self.litter(), self._background)

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

    def litter(self) -> str:
        """As of all jobs; the next job tells of what it has found among the checkpoints."""
        with contextlib.suppress(FileNotFoundError):
            return f"among the checkpoints: {(self.folder / 'litter').read_text()[:200]}"
        return super().litter()

    def swept(self, path: Path) -> bool:
        """Whether a file tells what a killed rank did, and a mesh of later is to remove it."""
        if not re.fullmatch(r"\d+-\d+", path.stem):
            return False
        with contextlib.suppress(FileNotFoundError):
            made = path.stat().st_mtime
            over = min((end for end in self._over if end >= made), default=time.time())
            return over > self._mesh_made
        return True


def _descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [int(child), *_descendants(int(child))]
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _everything() -> list[int]:
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]
