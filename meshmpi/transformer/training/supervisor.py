"""Restarts a training whose job has died from a lost rank, a lost host or a crash.

Runs in the launching process, outside of the MPI job, and so works with every MPI. A job that ends by itself,
successfully or by an error of the user, is not restarted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from meshmpi.errors import ConfigError
from meshmpi.launch.launch import launch
from meshmpi.training.signals import STOPPED
from meshmpi.transformer.training.recovery import Checkpoints, next_mesh
from meshmpi.transformer.training.settings import Settings
from meshmpi.transformer.training.setup import mesh_shape

BY_ITSELF = (0, 1, 2, STOPPED, 130)
"""Exit statuses of jobs that are not started again: finished, errors, wrong arguments, stopped,
Ctrl-C.  A job that has lost a rank ends with another status, see `meshmpi.guard.outcome`."""
MOST_FRUITLESS = 2
"""After this many deaths in a row without a new checkpoint the job is given up: they are not chance."""
ANSWER_SECONDS = 30.0
"""A host is lost if a launcher cannot start a process on it within this time."""


class Host(NamedTuple):
    """A host and how many ranks it takes."""

    name: str
    ranks: int


def parse_hosts(text: str, ranks: int) -> list[Host]:
    """Hosts as ``n1:2,n2:2``; without numbers the ranks are dealt out evenly.

    Raises:
        ConfigError: A number is missing or wrong, or the numbers do not add up to ``ranks``.
    """
    names = [part.strip() for part in text.split(",") if part.strip()]
    hosts = []
    for k, part in enumerate(names):
        name, _, number = part.partition(":")
        share = ranks // len(names) + (k < ranks % len(names))
        if number and not (number.isdigit() and int(number)):
            raise ConfigError(f"--hosts: '{part}' has no number of ranks.", "Write it as n1:2,n2:2.")
        hosts.append(Host(name, int(number) if number else share))
    if (total := sum(h.ranks for h in hosts)) != ranks:
        raise ConfigError(f"--hosts {text} takes {total} ranks, --ranks is {ranks}.", "Make them equal.")
    return hosts


def joined(hosts: Sequence[Host]) -> str:
    """The text that `parse_hosts` reads."""
    return ",".join(f"{h.name}:{h.ranks}" for h in hosts)


Start = Callable[[int, Sequence[str], str], int]
"""Runs the job once: ranks, further arguments, hosts -> exit status."""


class Supervisor:
    """Runs a training until it ends by itself.

    Args:
        hosts: Hosts of the first start; empty: this one, or those of the batch system.
        resume: Value of --resume in the first start.
        start: Runs the job once.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        ranks: int,
        hosts: Sequence[Host],
        resume: bool | str,
        start: Start,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:
        self._settings, self._folder, self._ranks = settings, folder, ranks
        self._hosts, self._resume, self._start, self._say = list(hosts), resume, start, say
        self._wanted = mesh_shape(settings.mesh, ranks)
        self._made = Checkpoints(folder / "checkpoints")

    def run(self, restarts: int) -> int:
        """Starts the job, and again up to ``restarts`` times; returns the exit status of the last start."""
        more: list[str] = []
        fruitless, newest = 0, None
        for left in range(restarts, -1, -1):
            status = self._start(self._ranks, more, joined(self._hosts))
            if status in BY_ITSELF:
                return status
            made, newest = newest, self._made.newest()
            fruitless = fruitless + 1 if newest == made else 0
            what = f"the job died (exit status {status})"
            if fruitless >= MOST_FRUITLESS:
                what += f", {fruitless} times without a new checkpoint"
            elif not left:
                what += f"; no restart is left (--restarts {restarts})"
            elif (lost := self._drop_lost_hosts()) and not self._hosts:
                what += "; no host answers"
            else:
                more = self._arguments(newest)
                self._report_restart(what, lost, newest, left - 1)
                continue
            break
        self._say(f"{what}: giving up")
        return status or 1

    def _drop_lost_hosts(self) -> list[Host]:
        with ThreadPoolExecutor(max(1, len(self._hosts))) as pool:
            answers = pool.map(answering, [h.name for h in self._hosts])
        lost = [h for h, answers_ in zip(self._hosts, answers, strict=True) if not answers_]
        self._hosts = [h for h in self._hosts if h not in lost]
        ranks = sum(h.ranks for h in self._hosts)
        if lost and ranks:
            self._ranks = next_mesh(self._settings.mesh, self._wanted, ranks).size
            hosts, left = [], self._ranks  # the last ones get fewer ranks
            for h in self._hosts:
                if left:
                    hosts.append(Host(h.name, min(h.ranks, left)))
                    left -= hosts[-1].ranks
            self._hosts = hosts
        return lost

    def _arguments(self, newest: Path | None) -> list[str]:
        """What the next start needs besides the user's arguments; the last of equal ones counts."""
        given: list[str] = []
        if self._settings.mesh.shape:  # without one, the mesh has all ranks of the job
            mesh = next_mesh(self._settings.mesh, self._wanted, self._ranks)
            given = ["--mesh", ";".join(f"{axis}:{n}" for axis, n in mesh.axes)]
        if newest is None:
            return given
        return [*given, "--resume"] + ([] if isinstance(self._resume, bool) else [str(newest)])

    def _report_restart(self, what: str, lost: Sequence[Host], newest: Path | None, left: int) -> None:
        gone = f"; gone: host {', '.join(h.name for h in lost)}" if lost else ""
        where = f" on {joined(self._hosts)}" if self._hosts else ""
        source = f"from {newest}" if newest is not None else "from where it began"
        self._say(
            f"{what}{gone}: starting {self._ranks} rank{'s' if self._ranks > 1 else ''}{where}"
            f" again {source}; {left} restart{'' if left == 1 else 's'} left"
        )


def answering(host: str) -> bool:
    """Whether the launcher can start a process on a host."""
    done = launch(
        1, ["--", "echo", "meshmpi-alive"], hosts=f"{host}:1", capture_output=True, timeout_seconds=ANSWER_SECONDS
    )
    return "meshmpi-alive" in done.stdout
