"""Detects whether the launcher still gets answers from the hosts of its ranks.

When Open MPI's mpirun must end a job, it waits a quarter of an hour for a host without power. The kernel knows
earlier: /proc counts how often it has retransmitted the same bytes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

MOST_REPEATS = 4
"""Bytes that were sent again this often, each time after twice the pause, have gone unanswered for 6 s
(from 0.2 s on).  With one in five packets lost each way, that is chance in 1 message of 200, and a
launcher sends hardly any while ranks compute."""
LOOK_SECONDS = 1.0
_ESTABLISHED = "01"


def unanswered(pid: int) -> tuple[str, int]:
    """The other end of a process's connection whose bytes were sent again most often, and how often; else ("", 0)."""
    inodes, worst = set[str](), ("", 0)
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(entry.path).removeprefix("socket:[").removesuffix("]"))
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
            _, _, other, state, _, _, repeats, _, _, inode, *_ = line.split()
            if state == _ESTABLISHED and inode in inodes and int(repeats, 16) > worst[1]:
                worst = (_address(other), int(repeats, 16))
    return worst


def _address(text: str) -> str:
    number = socket.inet_ntoa(int(text.partition(":")[0], 16).to_bytes(4, sys.byteorder))
    with contextlib.suppress(OSError):
        return f"{socket.gethostbyaddr(number)[0]} ({number})"
    return number


def watch(process: subprocess.Popen[str]) -> None:
    """Ends a launcher hard once a host does not answer it; in a thread of its own."""
    threading.Thread(target=_watch, args=(process,), daemon=True).start()


def _watch(process: subprocess.Popen[str]) -> None:
    while process.returncode is None:
        time.sleep(LOOK_SECONDS)
        other, repeats = unanswered(process.pid)
        if repeats >= MOST_REPEATS and process.returncode is None:
            sys.stderr.write(f"meshmpi: the launcher gets no answer from host {other}: the job is ended\n")
            # Daemons on the other hosts end their ranks when the launcher is gone.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return
