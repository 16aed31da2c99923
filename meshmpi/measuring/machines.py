"""Where descriptions of this host lie, and which one a mesh takes.

A description is of a mesh: cores share memory, so what a rank can do depends on how many there are.
"""

from __future__ import annotations

import os
from pathlib import Path

from meshmpi.dims import MeshShape
from meshmpi.planner.machine import Machine
from meshmpi.planner.machine_file import load_machine
from meshmpi.train.cache import cache_folder


def machine_path(mesh: MeshShape) -> Path:
    """Where `meshmpi calibrate` keeps what it measured on this host with a mesh."""
    axes = "-".join(f"{a}{n}" for a, n in mesh.axes) or "one"
    return cache_folder("machines") / f"{os.uname().nodename}-{axes}.toml"


def find_machine(name: str, mesh: MeshShape) -> Machine | None:
    """A machine by name or path; without one that of this host and mesh, if it was measured.

    Raises:
        ConfigError: The name or file given is no machine.
    """
    if name:
        return load_machine(name)
    path = machine_path(mesh)
    return load_machine(path) if path.exists() else None
