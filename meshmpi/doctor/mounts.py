"""On which file system a folder lies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_NETWORK = (
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb3",
    "afs",
    "9p",
    "panfs",
    "fuse.sshfs",
    "fuse.glusterfs",
    "fuse.ceph",
)
_TABLE = Path("/proc/self/mounts")


class Mount(NamedTuple):
    """A mounted file system: where, and of which kind."""

    at: str
    kind: str


def mount_of(folder: Path, table: str | None = None) -> Mount:
    """The file system of a folder, which need not exist yet.

    Args:
        folder: Any path.
        table: Text of ``/proc/self/mounts``; None reads it.
    """
    path = os.path.realpath(folder)
    text = _TABLE.read_text() if table is None else table
    best = Mount("/", "")
    for line in text.splitlines():
        at, kind = line.split()[1:3]
        at = at.encode().decode("unicode_escape")  # a blank is written as \040
        inside = path == at or path.startswith(at.rstrip("/") + "/")
        if inside and len(at) >= len(best.at):
            best = Mount(at, kind)
    return best


def is_network(kind: str) -> bool:
    """Whether files of such a system lie on other machines."""
    return kind in _NETWORK
