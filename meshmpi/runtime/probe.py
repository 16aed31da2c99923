"""``python -m meshmpi.runtime.probe [--alone]``: reports facts about each rank of a job, for the doctor.

Rank 0 prints one line that begins with `MARK`, a list of one object per rank. Ranks that do not form a job are each
rank 0 of 1 and print a line each. ``--alone`` loads MPI without initialising it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import resource
import socket
import sys
import time
from pathlib import Path
from typing import Any

MARK = "meshmpi-probe: "
_MESSAGE_BYTES = 1 << 20
"""Long enough for every way that MPI libraries have to hand over messages inside a host."""


def main() -> int:
    """Prints what this process, or its job, is."""
    about = _before_mpi()
    try:
        from mpi4py import rc

        rc.initialize = False
        from mpi4py import MPI
    except Exception as error:  # a loader's fault may be of any kind
        _say([{**about, "error": f"{type(error).__name__}: {error}"}])
        return 1  # so that a launcher ends the others, which wait for this one
    about |= {"library_file": _loaded_library(), "library": MPI.Get_library_version().strip("\0")}
    if "--alone" in sys.argv[1:]:
        _say([about])
        return 0
    began = time.perf_counter()
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    world = MPI.COMM_WORLD
    world.Barrier()
    about |= {
        "rank": world.rank,
        "size": world.size,
        "clock": time.time(),
        "init_seconds": round(time.perf_counter() - began, 3),
        "affinity": sorted(os.sched_getaffinity(0)),
        "thread_level": MPI.Query_thread(),
    }
    about["message_intact"] = _exchange(world)
    gathered = world.gather(about)
    if world.rank == 0:
        _say(gathered or [])
    MPI.Finalize()
    return 0


def _say(ranks: list[dict[str, Any]]) -> None:
    # One write, so that lines of several processes do not mix.
    os.write(1, f"{MARK}{json.dumps(ranks)}\n".encode())


def _before_mpi() -> dict[str, Any]:
    import importlib.metadata

    versions = {"Python": platform.python_version()}
    for name in ("numpy", "mpi4py", "ml_dtypes", "opt_einsum"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    package = Path(__file__).parent.parent
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": sys.executable,
        "versions": versions,
        "package": str(package),
        "sources": _digest(package),
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
        "address_space": resource.getrlimit(resource.RLIMIT_AS)[0],
    }


def _digest(package: Path) -> str:
    total = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.c")]):
        total.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return total.hexdigest()[:12]


def _loaded_library() -> str:
    """The file of the MPI library in this process, as the kernel mapped it."""
    names = ("libmpi.so", "libmpich.so", "libmpi_abi.so", "libmpi_cray.so")
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.startswith("/") and os.path.basename(path).startswith(names):
            return path
    return ""


def _exchange(world: Any) -> bool:
    """Whether a long message to the next rank arrives as it was sent."""
    sent = bytearray(os.urandom(_MESSAGE_BYTES // 16) * 16)
    got = bytearray(_MESSAGE_BYTES)
    world.Sendrecv(sent, (world.rank + 1) % world.size, 0, got, (world.rank - 1) % world.size)
    digest, expected = hashlib.sha256(got).digest(), hashlib.sha256(sent).digest()
    return digest == world.sendrecv(expected, (world.rank + 1) % world.size, 1, source=(world.rank - 1) % world.size)


if __name__ == "__main__":
    sys.exit(main())
