"""What the operating system has measured of this process and its host.

The runtime's own tallies (bytes sent, arenas) follow from formulas: they are *accounted*.  These
figures are *measured*; they hold all that a process and a host do.  None where Linux does not tell.
"""

from __future__ import annotations

import resource
from pathlib import Path

NETWORK, FABRIC = Path("/proc/net/dev"), Path("/sys/class/infiniband")
_SENT_COLUMN = 8  # of a line of /proc/net/dev, behind the name
_FABRIC_WORD = 4  # bytes of one count of port_xmit_data


def peak_resident_bytes() -> int:
    """The most memory that this process has held so far, libraries and shared pages included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def network_bytes_sent() -> int | None:
    """Bytes that this host has sent to others, by all processes, since it started.

    Its network interfaces but the loopback, and InfiniBand, whose traffic those do not see.
    """
    try:
        lines = NETWORK.read_text().splitlines()[2:]
    except OSError:
        return None
    rows = [line.replace(":", " ", 1).split() for line in lines]
    sent = sum(int(row[1 + _SENT_COLUMN]) for row in rows if row and row[0] != "lo")
    return sent + sum(_counted(path) for path in FABRIC.glob("*/ports/*/counters/port_xmit_data"))


def _counted(path: Path) -> int:
    try:
        return _FABRIC_WORD * int(path.read_text())
    except (OSError, ValueError):
        return 0
