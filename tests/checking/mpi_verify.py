"""Run on 4 ranks: verifies layouts of the two layers; with "broken", rank 3 adds up wrongly."""

from __future__ import annotations

import sys

import numpy as np

from apps.two_layer.model import Sizes, build
from meshmpi.checking import verify
from meshmpi.runtime.executor import Executor

LAYOUTS = ["", "batch:rows", "hidden:cols", "batch:rows;hidden:cols", "io:cols+rows", "batch:cols"]

if __name__ == "__main__":
    b = build(Sizes(6, 5, 7))
    if "broken" in sys.argv:
        right = Executor._bind_collective

        def wrong(self, i):
            run, one = right(self, i), self.states[0]
            y = one.arrays[i.outputs[0]]
            if one.rank != 3 or i.attrs.axes != ("rows",) or y.ndim != 2:
                return run
            return lambda: (run(), np.add(y, 1e-6, out=y))

        Executor._bind_collective = wrong
    report = verify(b.graph, LAYOUTS, "rows:2;cols:2", b.fetches, b.updates, ranks="mpi", kernels="numpy")
    from mpi4py import MPI

    texts = MPI.COMM_WORLD.gather(str(report))
    if MPI.COMM_WORLD.rank == 0:
        assert texts.count(texts[0]) == len(texts), "ranks disagree"
        print(texts[0])
    sys.exit(0 if report.ok != ("broken" in sys.argv) else 1)
