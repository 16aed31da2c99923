"""Until when a run may go on: its own setting, or the time limit of its Slurm job.

A run stops by itself while there is time for one more step and for saving, so that it need not be
killed.  Knows nothing of ranks; rank 0 asks.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from meshmpi.errors import ConfigError

LEAVE_SECONDS = 10.0
"""Left for the end of processes after the last save; assumption."""
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
        seconds: From now; None: no limit.
        name: What sets it, for the message.
        save: Seconds that the first save may take, before one was measured.

    Attributes:
        counts: Whether it counts yet: not before the first step, since a job that is requeued
            without having made one would be so for ever.
    """

    def __init__(self, seconds: float | None = None, name: str = "", save: float = 0.0) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._name, self._save, self._step, self._measured = name, save, 0.0, False
        self.counts = False

    @property
    def margin(self) -> float:
        """Seconds that must be left: for a step, a save and the end."""
        return STEP_FACTOR * self._step + SAVE_FACTOR * self._save + LEAVE_SECONDS

    def took(self, *, step: float = 0.0, save: float = 0.0) -> None:
        """Notes how long a step or a save took, in seconds."""
        self._step, self.counts = max(self._step, step), self.counts or step > 0
        if save:
            self._save = max(self._save, save) if self._measured else save
            self._measured = True

    def reached(self) -> str:
        """Why the run must stop now, or empty."""
        if self._end is None or not self.counts:
            return ""
        left = self._end - time.monotonic()
        if left > self.margin:
            return ""
        return f"{self._name}, which leaves {max(0.0, left):.0f} s"

    def __str__(self) -> str:
        if self._end is None:
            return "no time limit"
        left = self._end - time.monotonic()
        return f"{self._name} leaves {clock(left)}; the run stops {self.margin:.0f} s or more before"


def find_limit(setting: str, save_bytes: float = 0.0) -> TimeLimit:
    """The limit that comes first: of the setting ``train.time_limit``, or of this Slurm job.

    Args:
        setting: As `seconds_of`, counted from the start of the process; empty: none.
        save_bytes: What a checkpoint of this process takes.

    Raises:
        ConfigError: The setting is not a time.
    """
    found = []
    if setting:
        found.append((seconds_of(setting) - process_age(), f"train.time_limit of {setting}"))
    left = slurm_seconds_left(os.environ)
    if left is not None:
        found.append((left, f"the time limit of Slurm job {os.environ['SLURM_JOB_ID']}"))
    if not found:
        return TimeLimit()
    seconds, name = min(found)
    return TimeLimit(seconds, name, save_bytes / SAVE_BYTES_PER_SECOND)


def seconds_of(text: str) -> float:
    """Seconds of a time such as "7200", "2:00", "2:00:30" or "1-12:00" (days-hours:minutes).

    Raises:
        ConfigError: It is none of these.
    """
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


def slurm_seconds_left(environment: Mapping[str, str]) -> float | None:
    """Seconds until the time limit of the Slurm job of this process; None: no job, or no limit.

    Asks ``squeue``, since a limit may have been changed after the start; where it does not answer,
    the job's own variable must do.
    """
    job = environment.get("SLURM_JOB_ID")
    if not job:
        return None
    try:
        asked = subprocess.run(
            ["squeue", "-h", "-j", job, "-o", "%L"],
            capture_output=True,
            text=True,
            timeout=_ASK_SECONDS,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
        )
        answer = asked.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        answer = ""
    if re.fullmatch(r"[\d:-]*\d", answer):
        return slurm_duration(answer)
    if answer == "UNLIMITED":
        return None
    end = environment.get("SLURM_JOB_END_TIME", "")
    return float(end) - time.time() if end.isdigit() else None


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
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    return max(0.0, uptime - started / os.sysconf("SC_CLK_TCK"))


def clock(seconds: float) -> str:
    """As hours:minutes:seconds."""
    minutes, seconds = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
