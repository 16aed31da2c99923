"""Lowering, every pass and the cost do work in proportion to the number of instructions.

Lines that Python runs are counted, and bytes that it holds, not seconds: the same on every machine.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import meshmpi as mm
from meshmpi.compiler.lowering import lower
from meshmpi.compiler.passes.maxflow import UNLIMITED, minimum_cut
from meshmpi.compiler.passes.pipeline import PASSES
from meshmpi.ir.verify import verify
from meshmpi.planner.machine_file import load_machine
from meshmpi.runtime.compiled import predict_cost

FEW, MANY = 6, 20
MARGIN = (1.2, 1.7)
"""A stage that runs this many times the lines, or holds this many times the bytes (tables grow by doubling), for each
instruction of the larger program is not linear."""
LEAST = (5, 200)
"""Lines and bytes for each instruction below which a stage does not count: rounding shows there."""
MACHINE = load_machine("tpuv2")


def _times(x: mm.Tensor, name: str, *last: mm.Dimension) -> mm.Tensor:
    w = mm.get_variable(name, [x.shape[-1], *last])
    return mm.einsum([x, w], [*x.shape[:-1], *last])


def products(h: mm.Tensor) -> mm.Tensor:
    return h + _times(mm.relu(_times(h, "w", mm.Dimension("hidden", 48))), "v", h.shape[-1])


def normalised(h: mm.Tensor) -> mm.Tensor:
    return h + mm.tanh(mm.layer_norm(h, "d"))


def attention(h: mm.Tensor) -> mm.Tensor:
    q, k, v = (_times(h, name, mm.Dimension("d_kv", 4)) for name in "qkv")
    k, v = (mm.rename(x, {"length": "memory"}) for x in (k, v))
    weights = mm.softmax(mm.einsum([q, k], "batch:4;length:512;memory:512"), "memory")
    return h + _times(mm.einsum([weights, v], q.shape), "o", h.shape[-1])


def built(layer: Callable[[mm.Tensor], mm.Tensor], layers: int) -> tuple[mm.Graph, mm.Tensor, Any]:
    with mm.Graph() as graph:
        h = mm.placeholder("x", "batch:4;length:512;d:8")
        for k in range(layers):
            with mm.scope(f"layer_{k}"):
                h = layer(h)
        loss = mm.reduce_mean(mm.square(h))
        return graph, loss, mm.optimize.SGD(0.1).minimize(loss)


def counted(f: Callable[[], Any]) -> tuple[Any, int, int]:
    """What f returns, the lines that Python runs for it, and the most bytes held meanwhile.

    The least of three runs: one may enlarge a table of all that this process has remembered, in other tests too.
    """
    lines = 0

    def count(frame: Any, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before, found = sys.gettrace(), list[tuple[int, int]]()
    gc.collect()
    gc.disable()  # the garbage of other tests runs lines too where it is collected
    try:
        for _ in range(3):
            lines = 0
            sys.settrace(count)
            f()
            sys.settrace(before)
            tracemalloc.start()
            result = f()
            found.append((lines, tracemalloc.get_traced_memory()[1]))
            tracemalloc.stop()
        fewest, least = map(min, zip(*found, strict=True))
        return result, fewest, least
    finally:
        sys.settrace(before)
        tracemalloc.stop()
        gc.enable()


def work(layer: Callable[[mm.Tensor], mm.Tensor], layers: int) -> tuple[int, dict[str, tuple[int, int]]]:
    """Instructions as lowered, and for each stage lines run and bytes held."""
    graph, loss, updates = built(layer, layers)
    layout = mm.Layout("batch:rows" + (";hidden:cols" if layer is products else ""))
    stages: dict[str, tuple[int, int]] = {}
    mesh = mm.MeshShape("rows:2;cols:2")
    program, *stages["lower"] = counted(lambda: lower(graph, mesh, layout, {"loss": loss}, updates))
    size = len(program.instructions)
    _, *stages["verify"] = counted(partial(verify, program))
    for n, one in enumerate(PASSES):
        program, *stages[f"{n} {one.__name__}"] = counted(partial(one, program))
    _, *stages["cost"] = counted(lambda: predict_cost(replace(program)))
    _, *stages["time"] = counted(lambda: mm.predict_time(program, MACHINE))
    return size, stages


@pytest.mark.quick(1)
@pytest.mark.parametrize("layer", [products, normalised, attention], ids=lambda f: f.__name__)
def test_work_and_memory_grow_with_the_number_of_instructions(layer: Callable[[mm.Tensor], mm.Tensor]):
    work(layer, 2)  # what is remembered for good is made before
    (size, few), (more, many) = work(layer, FEW), work(layer, MANY)
    assert more > 3 * size
    grown = {
        name: (many[name][k] / few[name][k]) / (more / size)
        for k in range(2)
        for name in few
        if many[name][k] > LEAST[k] * more and many[name][k] / few[name][k] > MARGIN[k] * more / size
    }
    assert grown == {}


def test_a_network_with_all_layers_in_it_is_cut_in_linear_time():
    def lines(layers: int) -> int:
        edges, same = [], []
        for k in range(layers):
            edges.append(("start", ("in", k), UNLIMITED, 0))
            edges.append((("in", k), ("out", k), 3 + k % 2, UNLIMITED))
            same.append((("out", k), ("next", k)))
            edges.append((("next", k), ("last", k), 2, UNLIMITED))
            edges.append((("last", k), "end" if k % 3 == 0 else ("in", k + 1), UNLIMITED, 0))
        return counted(lambda: minimum_cut(edges, same, "start", "end"))[1]

    assert lines(400) <= MARGIN[0] * 4 * lines(100)
