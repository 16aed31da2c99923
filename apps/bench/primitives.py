"""Nanoseconds per element of the loops of a Transformer step, NumPy and generated C side by side.

python -m apps.bench.primitives [--scale 1] [--repeats 15] [--only softmax]

Each row is a small graph, compiled as a model is: what is measured is what the passes make of it,
without the copying of feeds.  The least time of the repeats is shown; set OMP_NUM_THREADS.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import meshmpi as mm
from meshmpi.graph.ops.sources import ReadVariable
from meshmpi.kernels.native import available

KERNELS = ("numpy", "native")


class Row(NamedTuple):
    """A loop to time.

    Attributes:
        name: What it does.
        rows, columns: Its size.
        build: (rows, columns) -> fetches and updates; called inside a graph.
    """

    name: str
    rows: int
    columns: int
    build: Callable[[int, int], tuple[list[mm.Tensor], list[Any]]]


def _feed(name: str, rows: int, columns: int) -> mm.Tensor:
    return mm.placeholder(name, [("rows", rows), ("columns", columns)])


def _forward(function: Callable[[mm.Tensor], mm.Tensor]) -> Callable:
    return lambda r, c: ([function(_feed("x", r, c))], [])


def _variables(graph: mm.Graph) -> list[mm.Tensor]:
    return [o.output for o in graph.operations if isinstance(o, ReadVariable)]


def _both(function: Callable[[mm.Tensor], mm.Tensor], variables: bool = False) -> Callable:
    """Forward and backward of a function of x (and of the variables it makes)."""

    def build(rows: int, columns: int) -> tuple[list[mm.Tensor], list[Any]]:
        x, dy = _feed("x", rows, columns), _feed("dy", rows, columns)
        y = function(x)
        wanted = [x, *_variables(y.graph)] if variables else [x]
        found = mm.gradients([y], wanted, [dy])
        return [y, *(g for g in found if g is not None)], []

    return build


def _cross_entropy(rows: int, columns: int) -> tuple[list[mm.Tensor], list[Any]]:
    x = _feed("x", rows, columns)
    targets = mm.placeholder("targets", [("rows", rows)], "int32")
    loss = mm.reduce_mean(mm.softmax_cross_entropy_with_logits(x, targets, "columns"))
    return [loss, *mm.gradients(loss, [x])], []  # type: ignore[list-item]


def _update(optimizer: Any) -> Callable:
    def build(rows: int, columns: int) -> tuple[list[mm.Tensor], list[Any]]:
        g = _feed("g", rows, columns)
        w = mm.get_variable("w", g.shape, initializer=mm.zeros_initializer())
        return [], optimizer.apply_gradients([(g, w)])

    return build


def _biased_relu(x: mm.Tensor) -> mm.Tensor:
    bias = mm.get_variable("bias", [x.shape[-1]], initializer=mm.zeros_initializer())
    return mm.relu(x + bias)


def _masked_softmax(x: mm.Tensor) -> mm.Tensor:
    rows, columns = x.shape
    seen = mm.greater_equal(mm.range(rows), mm.range(columns), output_shape=[rows, columns])
    return mm.softmax(mm.where(seen, x * 0.125, -1e9), "columns")


def _transposed(rows: int, columns: int) -> tuple[list[mm.Tensor], list[Any]]:
    x = _feed("x", rows, columns)
    t = mm.placeholder("t", [("columns", columns), ("rows", rows)])
    return [mm.add(x, t, output_shape=x.shape)], []


def _norm(x: mm.Tensor) -> mm.Tensor:
    return mm.layer_norm(x, "columns", epsilon=1e-5)


def _softmax(x: mm.Tensor) -> mm.Tensor:
    return mm.softmax(x, "columns")


ROWS = (
    Row("softmax forward", 8192, 256, _forward(_softmax)),
    Row("softmax forward", 1024, 8192, _forward(_softmax)),
    Row("softmax both", 8192, 256, _both(_softmax)),
    Row("masked softmax both", 2048, 256, _both(_masked_softmax)),
    Row("layer norm forward", 2048, 512, _forward(_norm)),
    Row("layer norm both", 2048, 512, _both(_norm, variables=True)),
    Row("bias + relu forward", 2048, 1024, _forward(_biased_relu)),
    Row("bias + relu both", 2048, 1024, _both(_biased_relu, variables=True)),
    Row("gelu both", 2048, 1024, _both(mm.gelu)),
    Row("dropout forward", 2048, 1024, _forward(lambda x: mm.dropout(x, True, rate=0.1))),
    Row("cross-entropy both", 1024, 8192, _cross_entropy),
    Row("Adam", 1024, 1024, _update(mm.optimize.Adam(1e-3))),
    Row("Adafactor", 1024, 1024, _update(mm.optimize.Adafactor(1e-3))),
    Row("sum of squares", 1024, 1024, _forward(lambda x: mm.reduce_sum(mm.square(x)))),
    Row("sum over rows", 2048, 1024, _forward(lambda x: mm.reduce_sum(x, output_shape=[x.shape[1]]))),
    Row("sum over few rows", 8, 131072, _forward(lambda x: mm.reduce_sum(x, output_shape=[x.shape[1]]))),
    Row("transpose + add", 1024, 1024, _transposed),
)


def seconds(row: Row, rows: int, columns: int, kernels: str, repeats: int) -> float:
    """The least time of one run of the row's program."""
    with mm.Graph() as graph:
        fetches, updates = row.build(rows, columns)
    step = mm.compile(graph, mm.SimulatedMesh("all:1"), fetches=fetches, updates=updates, kernels=kernels)
    rng = np.random.default_rng(0)
    feeds = {
        name: rng.standard_normal(t.shape.sizes, np.float32)
        if t.dtype == "float32"
        else rng.integers(0, columns, t.shape.sizes, np.int32)
        for name, t in graph.placeholders.items()
        if name in step.program.feeds
    }
    step(feeds)
    run = step._executor.run
    least = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        least = min(least, time.perf_counter() - start)
    return least


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="apps.bench.primitives", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of rows")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    options = parser.parse_args(arguments)
    kinds = KERNELS if available() else KERNELS[:1]
    print(f"{'ns per element':24}{'rows x columns':>16}" + "".join(f"{k:>9}" for k in kinds))
    for row in ROWS:
        if options.only not in row.name:
            continue
        rows = max(1, int(row.rows * options.scale))
        times = [seconds(row, rows, row.columns, k, options.repeats) for k in kinds]
        figures = "".join(f"{t / (rows * row.columns) * 1e9:9.3f}" for t in times)
        ratio = f"{times[0] / times[-1]:8.1f}x" if len(times) > 1 else ""
        print(f"{row.name:24}{f'{rows} x {row.columns}':>16}{figures}{ratio}", flush=True)


if __name__ == "__main__":
    main()
