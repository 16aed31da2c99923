"""Under mpirun: traces a few steps in which one rank is slow by itself; writes file and table."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

import meshmpi as mm
from meshmpi.runtime.trace import Tracer, describe_trace, write_trace

SLOW_RANK, SLEEP_SECONDS, STEPS = 1, 0.02, 3


def main(folder: Path, overlap: bool) -> None:
    """Rank `SLOW_RANK` sleeps before one of its own instructions."""
    mesh = mm.Mesh("rows:2;cols:1")
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:8;io:64")
        w = mm.get_variable("w", "io:64;hidden:512")
        h = mm.tanh(mm.einsum([x, w], "batch:8;hidden:512"))
        loss = mm.reduce_mean(mm.square(h))
        updates = mm.optimize.SGD(0.1).minimize(loss)
    step = mm.compile(graph, mesh, "batch:rows", fetches=[loss], updates=updates, overlap=overlap)
    data = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    plain = [step(x=data)[loss] for _ in range(2)]
    if mesh.rank == SLOW_RANK:
        _slow_down(step)
    tracer = Tracer(step, STEPS)
    plain += [step(x=data)[loss] for _ in range(STEPS + 1)]  # one more than is recorded
    assert tracer.done
    assert step.executor.tracer is None
    trace = tracer.collect()
    assert (trace is None) == (mesh.rank != 0)
    assert plain == sorted(plain, reverse=True), "traced steps train as others do"
    if trace is not None:
        write_trace(trace, folder / "trace.json")
        write_trace(trace, folder / "trace.json.gz")
        (folder / "table.txt").write_text(describe_trace(trace))


def _slow_down(step: mm.CompiledStep) -> None:
    calls = step.executor._calls
    k = next(k for k, (_, i) in enumerate(step.executor.calls) if i.kind == "contract")
    quick = calls[k]

    def slow() -> None:
        time.sleep(SLEEP_SECONDS)
        quick()

    calls[k] = slow


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "overlap")
