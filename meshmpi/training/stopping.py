"""Decides when a run must stop: after a signal to any rank, or before its time is over.

The time limit is the run's own setting or that of its Slurm job; a run stops while there is time for one more step
and a save. All ranks decide identically, at points that all of them reach.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from meshmpi.errors import ConfigError
from meshmpi.runtime.agreement import Flag, gathered
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.runtime.processes import start_time
from meshmpi.training import signals
from meshmpi.training.callback import Callback, Interrupted, Step

LEAVE_SECONDS = 10.0
"""Time left for the processes to end after the last save; assumption."""
SAVE_FACTOR = 2.0
"""The last save may take this many times as long as the longest before it.  Assumption: disks are shared."""
STEP_FACTOR = 2.0
"""The same for the last step."""
SAVE_BYTES_PER_SECOND = 200e6
"""Speed of a first save, before one was measured; assumption, on the slow side."""
_ASK_SECONDS = 20.0


class TimeLimit:
    """The end of the time that a run has.

    Args:
        seconds: From now; infinity: no limit.
        name: What sets it, for the message.
        save: Seconds that the first save may take, before one was measured.

    Attributes:
        counts: Whether the limit counts yet; not before the first step, or a job that made none would be
            requeued for ever.
    """

    def __init__(self, seconds: float = math.inf, name: str = "no time limit", save: float = 0.0) -> None:
        self._end = time.monotonic() + seconds
        self._name, self._save, self._step, self._measured = name, save, 0.0, False
        self.counts = False

    @property
    def margin(self) -> float:
        """Seconds that must be left: for a step, a save and the end."""
        return STEP_FACTOR * self._step + SAVE_FACTOR * self._save + LEAVE_SECONDS

    def took(self, *, step: float = 0.0, save: float = 0.0) -> None:
        self._step, self.counts = max(self._step, step), self.counts or step > 0
        if save:
            self._save = max(self._save, save) if self._measured else save
            self._measured = True

    def reached(self) -> str:
        """Why the run must stop now, or empty."""
        left = self._end - time.monotonic()
        must = self.counts and left <= self.margin
        return f"{self._name}, which leaves {max(0.0, left):.0f} s" if must else ""

    def __str__(self) -> str:
        if self._end == math.inf:
            return self._name
        minutes, seconds = divmod(round(max(0.0, self._end - time.monotonic())), 60)
        left = f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
        return f"{self._name} leaves {left}; the run stops {self.margin:.0f} s or more before"


def find_limit(setting: str, save_bytes: float = 0.0) -> TimeLimit:
    """The earlier limit: of the setting ``train.time_limit``, or of this Slurm job.

    Args:
        setting: As `seconds_of`, counted from the start of the process; empty: none.
        save_bytes: Size of a checkpoint of this process.
    """
    found = [(math.inf, "no time limit")]
    if setting:
        found.append((seconds_of(setting) - process_age(), f"train.time_limit of {setting}"))
    left = slurm_seconds_left()
    if left is not None:
        found.append((left, f"the time limit of Slurm job {os.environ['SLURM_JOB_ID']}"))
    return TimeLimit(*min(found), save_bytes / SAVE_BYTES_PER_SECOND)


def seconds_of(text: str) -> float:
    """Seconds of a time such as "7200", "2:00", "2:00:30" or "1-12:00" (days-hours:minutes); or ConfigError."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d)(?::(\d\d))?", text.strip())
    if match:
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return 86400.0 * days + 3600 * hours + 60 * minutes + seconds
    if re.fullmatch(r"\d+(?:\.\d+)?", text.strip()):
        return float(text)
    raise ConfigError(
        f"'train.time_limit' is '{text}', which is not a time.",
        "Give seconds, hours:minutes, hours:minutes:seconds or days-hours:minutes.",
    )


def slurm_seconds_left() -> float | None:
    """Seconds until the time limit of the Slurm job of this process; None: no job, or no limit."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return None
    asked = squeue("-h", "-j", job, "-o", "%L")  # first: a limit may have been changed after the start
    answer = "" if asked is None else asked.stdout.strip()
    if re.fullmatch(r"[\d:-]*\d", answer):
        return slurm_duration(answer)
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    return float(end) - time.time() if end.isdigit() and answer != "UNLIMITED" else None


def squeue(*arguments: str) -> subprocess.CompletedProcess[str] | None:
    """What Slurm's queue says; None where it does not answer."""
    try:
        return subprocess.run(
            ["squeue", *arguments], capture_output=True, text=True, timeout=_ASK_SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def slurm_duration(text: str) -> float:
    """Seconds of Slurm's [days-][[hours:]minutes:]seconds."""
    days, _, rest = text.rpartition("-")
    total = 0.0
    for part in rest.split(":"):
        total = 60 * total + int(part)
    return 86400.0 * int(days or 0) + total


def process_age() -> float:
    """Seconds since this process was started; 0 where the system does not tell."""
    try:
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, uptime - start_time(os.getpid()) / os.sysconf("SC_CLK_TCK"))


class Stopping(Callback):
    """Asks on all ranks whether a run must stop.

    Attributes:
        limit: The time limit, set when it is known; only that of rank 0 counts.
    """

    def __init__(self, mesh: AnyMesh) -> None:
        self.limit = TimeLimit()
        self._mesh, self._flag, self._reason = mesh, Flag(mesh), ""

    def check(self) -> None:
        """Raises Interrupted when the run must stop.  Collective, one small all-reduce."""
        if not self._reason:
            mine = signals.noted() or (self.limit.reached() if self._mesh.rank == 0 else "")
            if not self._flag.agree(bool(mine)):
                return
            self._reason = _reason(gathered(self._mesh, signals.described() or mine))
        raise Interrupted(self._reason)

    def on_step(self, step: Step) -> None:
        self.limit.took(step=step.seconds)

    def on_save(self, path: Path, seconds: float) -> None:
        self.limit.took(save=seconds)


def _reason(reasons: Sequence[str]) -> str:
    """The reason of the launching process, or of the first rank that has one."""
    for reason in reasons:
        if reason.endswith(signals.AT_LAUNCH):
            return reason
    rank = next(r for r, reason in enumerate(reasons) if reason)
    by_signal = len(reasons) > 1 and reasons[rank].startswith("SIG")
    return reasons[rank] + (f" on rank {rank}" if by_signal else "")
