"""Finds the stored machine descriptions of this host, and the one for a given mesh.

A description belongs to a mesh: cores share memory, so the speed of a rank depends on the number of ranks.
"""

from __future__ import annotations

import os
from pathlib import Path

from meshmpi.dims import MeshShape
from meshmpi.files import cache
from meshmpi.planner.machine import Machine
from meshmpi.planner.machine_file import load_machine, machine_text, parse_machine

_FOLDER = "machines"


def keep_machine(machine: Machine, mesh: MeshShape) -> Path:
    """Keeps what `meshmpi calibrate` measured on this host with a mesh.

    Returns:
        Its file, in the cache.

    Raises:
        DataError: The cache has no folder.
        OSError: There is no room.
    """
    with cache.opened(_FOLDER) as folder:
        cache.write_sealed(folder, _file(mesh), machine_text(machine).encode())
        return folder.path / _file(mesh)


def find_machine(name: str, mesh: MeshShape) -> Machine | None:
    """A machine by name or path; without one that of this host and mesh, if it was measured.

    One of the cache that is damaged, or was changed by hand, is not used, and a line says so.

    Raises:
        ConfigError: The name or file is not a machine.
    """
    if name:
        return load_machine(name)
    with cache.opened(_FOLDER) as folder:
        path, data = folder.path / _file(mesh), cache.read_sealed(folder, _file(mesh))
        if data is None and folder.has(_file(mesh)):
            cache.tell(
                f"{path} is not as `meshmpi calibrate` wrote it, and is not used: calibrate again,"
                " or name the file in the option for the machine"
            )
    return None if data is None else parse_machine(data.decode(), str(path))


def _file(mesh: MeshShape) -> str:
    axes = "-".join(f"{a}{n}" for a, n in mesh.axes) or "one"
    return f"{os.uname().nodename}-{axes}.toml"
