"""Starts a program on several ranks with the settings for this machine (``python -m meshmpi.launch -n 4 ...``).

It forwards signals and enforces a time limit without leaving processes behind. The launching process is not part of
the MPI job and does not import mpi4py.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshmpi.guard import flight, outcome
from meshmpi.guard.exit_status import LOST
from meshmpi.launch import links as launcher_links
from meshmpi.launch.command import launch_command, nodes_of
from meshmpi.launch.notices import Notices, filtered
from meshmpi.launch.start import is_wrapped
from meshmpi.runtime.processes import end_marked, guarded, stop_session

TIMED_OUT = 124
"""Exit status after a time limit, the same as that of coreutils' timeout."""
JOB_VARIABLE = "MESHMPI_JOB"
"""Tells the processes of a started job from all others: unguessable, in their environment."""
_REPEATS = 10
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def launch(
    n: int,
    argv: Sequence[str],
    *,
    timeout_seconds: float | None = None,
    capture_output: bool = False,
    cwd: str | os.PathLike[str] | None = None,
    mpi: str | None = None,
    threads: int | None = None,
    bind: str = "auto",
    launcher_options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    hosts: str = "",
    recover: bool = False,
    stop_by: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
    shared: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a program on n ranks and waits for its end.

    Args:
        n: Number of ranks; this and the arguments not listed are as in `launch_command`.
        argv: The program and its arguments.
        timeout_seconds: Then all processes of the job are stopped, and the exit status is 124.
        capture_output: Return what the ranks print instead of passing it through.
        cwd: The folder to run in.
        stop_by: A signal by which ranks save and leave: SIGTERM and SIGINT are handed on as this one, since
            a launcher that gets those soon kills its ranks.  A second SIGINT ends the job.
        stopped: Asked once before the start: whether a signal came already, which is handed on.
        shared: With several hosts, a folder that all of them see; default: ``cwd``.

    Returns:
        The exit status, and with ``capture_output`` what was printed.  The status is 0 only where
        every rank of a Python program has said that it came to its end; 69 where some have not.

    Example:
        >>> launch(1, ["-c", "print('one rank')"], capture_output=True).stdout.strip()
        'one rank'
    """
    several_hosts = bool(hosts or launcher_options or nodes_of({**os.environ, **(environment or {})}) > 1)
    mark = secrets.token_hex(16)
    with outcome.place(several_hosts, shared or (Path(cwd) if cwd else None)) as folder:
        own = {JOB_VARIABLE: mark, outcome.OUTCOME_VARIABLE: str(folder)}
        settings = {"launcher_options": launcher_options, "environment": {**(environment or {}), **own}}
        command, variables = launch_command(
            n, argv, mpi=mpi, threads=threads, bind=bind, hosts=hosts, recover=recover, **settings
        )
        alone = list(argv) in (command[1:], ["--", *command])
        with guarded(f"{JOB_VARIABLE}={mark}"), flight.folder_of_job(variables):
            job = _Job(command, variables, timeout_seconds, capture_output, cwd, stop_by, stopped, alone, several_hosts)
            done, notices = _run_at_most_twice(job, n, folder)
        if is_wrapped(command) and done.returncode not in (TIMED_OUT, LOST):
            patience = outcome.PATIENCE_SECONDS if several_hosts else 0.0
            done.returncode, note = outcome.judged(folder, n, done.returncode, patience)
            if done.returncode == 1 and not notices.said:
                note += outcome.of_silence(folder, n, command[0], done.returncode)
            _add(done, note)
    return done


@dataclass
class _Job:
    """A job to start, with the arguments of `launch` that say how."""

    command: list[str]
    variables: dict[str, str]
    seconds: float | None
    capture: bool
    cwd: str | os.PathLike[str] | None
    stop_by: int | None
    stopped: Callable[[], bool]
    alone: bool  # the program itself, without an MPI launcher
    several_hosts: bool
    signalled: bool = False  # whether a signal was handed on


def _run_at_most_twice(job: _Job, n: int, folder: Path) -> tuple[subprocess.CompletedProcess[str], Notices]:
    """Runs a job, and once more where the launcher failed by itself before any rank began.

    Seen under load with Open MPI 5.0.11.  Nothing has happened then that could happen twice.
    """
    notices = Notices(n)
    done = _run(job, notices)
    silent = done.returncode == 1 and not notices.said
    by_chance = (silent or (done.returncode and notices.not_started)) and not job.signalled
    if not by_chance or job.several_hosts or not is_wrapped(job.command) or outcome.read(folder).begun:
        return done, notices
    again = Notices(n)
    if not job.capture:  # else only what the second start says is returned
        sys.stderr.write(f"meshmpi: {job.command[0]} failed before any rank began; trying once more\n")
    return _run(job, again), again


def _run(job: _Job, notices: Notices) -> subprocess.CompletedProcess[str]:
    """Starts a job and waits for its end."""
    command, variables = job.command, job.variables
    pipe = subprocess.PIPE if job.capture else None
    # A terminal belongs to this session only; a file or a pipe may be read by the job.
    own_input = sys.__stdin__ is not None and not sys.__stdin__.closed and not os.isatty(0)
    errors = contextlib.nullcontext(pipe) if job.capture or job.alone else filtered(notices)
    with (
        _Signals(job) as signals,
        errors as stderr,
        subprocess.Popen(
            command,
            env=variables,
            cwd=job.cwd,
            text=True,
            stdout=pipe,
            stderr=stderr,
            stdin=None if own_input and not job.capture else subprocess.DEVNULL,
            start_new_session=True,
        ) as process,
    ):
        if job.stopped():
            signals.forward(signal.SIGTERM)
        signals.begin(process)
        if job.several_hosts:
            launcher_links.watch(process)
        # With ULFM survivors may go on; of several hosts, the folder's file system is spared.
        watched = is_wrapped(command) and "--with-ft" not in command and not job.several_hosts
        folder = Path(variables[outcome.OUTCOME_VARIABLE])
        ending = outcome.ended_by_silence(folder, process) if watched else None
        with ending or contextlib.nullcontext(list[str]()) as notes:
            done = _ended(process, command, job.seconds)
        if notes and done.returncode != TIMED_OUT:
            done.returncode = LOST
            _add(done, notes[0])
        if not job.alone and (done.returncode < 0 or done.returncode in (TIMED_OUT, LOST)):
            # A launcher that was killed has ended nobody, and nobody can save without it.
            end_marked(f"{JOB_VARIABLE}={variables[JOB_VARIABLE]}", grace_seconds=1.0)
    if done.stderr:
        shown = notices.feed(done.stderr.encode(errors="surrogateescape")) + notices.end()
        done.stderr = shown.decode(errors="surrogateescape")
    return done


def _add(done: subprocess.CompletedProcess[str], note: str) -> None:
    if done.stderr is None:  # it was passed through
        sys.stderr.write(note)
    else:
        done.stderr += note


def _ended(
    process: subprocess.Popen[str], command: list[str], seconds: float | None
) -> subprocess.CompletedProcess[str]:
    """Waits at most this long for the end of a job; nothing of it runs on."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        stop_session(process)
        done = subprocess.CompletedProcess(command, TIMED_OUT, *process.communicate())
        _add(done, f"meshmpi: stopped after the time limit of {seconds:g} s\n")
        return done
    except BaseException:
        stop_session(process)
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


class _Signals:
    """Hands signals on to a job; those that come before it has begun, then.

    A launcher that has not yet started its ranks forgets ``stop_by``, so it is sent a few times.
    """

    def __init__(self, job: _Job) -> None:
        self._job, self._stop_by, self._stopping = job, job.stop_by, threading.Event()
        self._folder = Path(job.variables[outcome.OUTCOME_VARIABLE])
        self._process: subprocess.Popen[str] | None = None
        self._waiting: list[int] = []
        self._interrupted = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        with contextlib.suppress(ValueError):  # only the main thread may set them
            for number in _FORWARDED:
                self._previous[number] = signal.signal(number, self.forward)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def forward(self, number: int, _frame: object = None) -> None:
        self._job.signalled = True
        stop_by = self._stop_by if number in (signal.SIGTERM, signal.SIGINT, self._stop_by) else None
        if stop_by is None:
            stop_by = outcome.stopping_signal(self._folder, number)
        if stop_by is not None:
            if number == signal.SIGINT and self._interrupted:
                raise KeyboardInterrupt  # `launch` then ends the whole job
            self._interrupted |= number == signal.SIGINT
            number = stop_by
            self._stopping.set()
        if self._process is None:
            self._waiting.append(number)
        else:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def begin(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        if self._stop_by is not None:
            threading.Thread(target=self._repeat, args=(process,), daemon=True).start()
        while self._waiting:
            process.send_signal(self._waiting.pop(0))

    def _repeat(self, process: subprocess.Popen[str]) -> None:
        self._stopping.wait()
        for _ in range(_REPEATS):
            time.sleep(1.0)
            if process.returncode is not None:
                return
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(self._stop_by or 0)
