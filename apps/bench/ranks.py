"""Processor time to start many ranks, next to that of bare mpi4py.

    python -m apps.bench.ranks [--ranks 8 16] [--rounds 5]

A job of meshmpi builds a small graph, makes a mesh, compiles, runs one step and ends.  A bare job imports NumPy and
mpi4py and does one all-reduce.  Both are started by plain mpirun and take turns; user and system time of all
their processes count, the launcher's too.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from apps.bench import workers
from apps.bench.__main__ import processor_name

MESHMPI = """
import sys
import numpy as np
import meshmpi as mm

batch, io, hidden = mm.Dimension("batch", 64), mm.Dimension("io", 16), mm.Dimension("hidden", 32)
with mm.Graph() as graph:
    x, t = mm.placeholder("x", [batch, io]), mm.placeholder("t", [batch, io])
    w, v = mm.get_variable("w", [io, hidden]), mm.get_variable("v", [hidden, io])
    y = mm.einsum([mm.relu(mm.einsum([x, w], [batch, hidden])), v], [batch, io])
    loss = mm.reduce_mean(mm.square(y - t))
    updates = mm.optimize.SGD(0.1).minimize(loss)
mesh = mm.Mesh(f"rows:{sys.argv[1]}")
step = mm.compile(graph, mesh, layout="batch:rows", fetches=[loss], updates=updates)
data = np.ones((64, 16), np.float32)
step(x=data, t=data)
"""
BARE = """
import numpy as np
from mpi4py import MPI

MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, np.ones(1))
"""
JOBS = {"mpi4py": BARE, "meshmpi": MESHMPI}


class Cost(NamedTuple):
    """Seconds of one job."""

    user: float
    system: float
    wall: float


def main() -> int:
    """Prints a line for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    workers.forget_slowing_variables()
    print(f"{processor_name()}, {os.cpu_count()} cores; medians of {options.rounds} rounds; processor seconds (wall)")
    with tempfile.TemporaryDirectory() as folder:
        for name, text in JOBS.items():
            Path(folder, f"start_{name}.py").write_text(text)
            _run(Path(folder, f"start_{name}.py"), 2)  # bytecode and the cache are there from now on
        for n in options.ranks:
            found: dict[str, list[Cost]] = {name: [] for name in JOBS}
            for _ in range(options.rounds):
                for name in JOBS:
                    found[name].append(_run(Path(folder, f"start_{name}.py"), n))
            print(_line(n, found), flush=True)
    return 0


def _run(program: Path, ranks: int) -> Cost:
    command = ["mpirun", "-n", str(ranks), sys.executable, str(program), str(ranks)]
    allowed = {f"{name}_ALLOW_RUN_AS_ROOT{end}": "1" for name in ("OMPI", "PRTE") for end in ("", "_CONFIRM")}
    crowded = {"PRTE_MCA_rmaps_default_mapping_policy": ":OVERSUBSCRIBE"}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, env={**os.environ, **allowed, **crowded}, timeout=workers.LIMIT_SECONDS)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall = time.perf_counter() - began
    return Cost(after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime, wall)


def _line(ranks: int, found: dict[str, list[Cost]]) -> str:
    busy = {name: statistics.median(c.user + c.system for c in costs) for name, costs in found.items()}
    wall = {name: statistics.median(c.wall for c in costs) for name, costs in found.items()}
    jobs = ", ".join(f"{name} {busy[name]:.2f} ({wall[name]:.2f})" for name in found)
    pairs = [a.user + a.system - b.user - b.system for a, b in zip(found["meshmpi"], found["mpi4py"], strict=True)]
    more = 1e3 * statistics.median(pairs) / ranks
    return f"{ranks} ranks: {jobs}; ratio {busy['meshmpi'] / busy['mpi4py']:.2f}, {more:.0f} ms more per rank"


if __name__ == "__main__":
    sys.exit(main())
