"""A kind that the package does not have: its row, its meaning in NumPy, an operation; the case is the fourth place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.dims import Axes, Shape
from meshmpi.graph import Operation, Tensor, only
from meshmpi.ir import verify
from meshmpi.ir.flops import local_flops
from meshmpi.ir.kinds import KINDS
from meshmpi.ir.kinds.shaping import AlongDim
from meshmpi.ir.program import Extents, LocalType, Traits, Violation, Work
from meshmpi.kernels import numpy_kernels
from meshmpi.kernels.binding import Arrays, Call, Plan, Runtime
from meshmpi.kernels.steps import Bound
from meshmpi.planner.machine_file import load_machine


@dataclass(frozen=True)
class PairSum(AlongDim, kind="pair_sum", traits=Traits(repeatable=True)):
    """Every element plus the one before (or behind) it along a whole dimension; beyond the end is 0."""

    dim: str
    behind: bool

    def linear_in(self, marks: Sequence[bool], axes: Axes) -> bool:
        return True

    def flops(self, ins: Sequence[Extents], outs: Sequence[Extents]) -> int:
        return int(np.prod(list(ins[0].values())))

    @property
    def work(self) -> Work:
        return Work(("simple",), "input")


del KINDS["pair_sum"]  # other tests go through the table


def plan_pair_sum(call: Call) -> Plan:
    attrs, axis = call.of(PairSum), call.inputs[0].names.index(call.of(PairSum).dim)

    def bind(inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        x, y = (np.moveaxis(a, axis, 0)[:: -1 if attrs.behind else 1] for a in (inputs[0], outputs[0]))

        def run() -> None:
            y[...] = x
            y[1:] += x[:-1]

        return run

    return Plan(bind)


class PairSumOperation(Operation):
    def __init__(self, x: Tensor, dim: str, behind: bool = False):
        self.dim, self.behind = dim, behind
        super().__init__([x])

    def infer(self) -> Sequence[tuple[Shape, str]]:
        return [(self.inputs[0].shape, self.inputs[0].dtype)]

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return [PairSumOperation(only(dys), self.dim, not self.behind).output]

    def lower(self, lowering: Any) -> None:
        x = lowering.whole(self.inputs[0], self.dim)
        lowering.define(self.output, lowering.emit(PairSum(self.dim, self.behind), [x], lowering.types[x]))


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(KINDS, "pair_sum", PairSum)
    monkeypatch.setitem(numpy_kernels.PLANS, "pair_sum", plan_pair_sum)
    yield


X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
W = np.random.default_rng(1).normal(size=6).astype(np.float32)


def _graph() -> tuple[mm.Graph, mm.Tensor, Any]:
    with mm.Graph() as graph:
        x = mm.placeholder("x", "a:4;b:6")
        w = mm.get_variable("w", x.shape[1:], initializer=W)
        loss = mm.reduce_sum(mm.square(PairSumOperation(x * w, "b").output))
        return graph, loss, mm.optimize.SGD(0.01).minimize(loss)


def _loss(w: np.ndarray) -> float:
    h = X * w
    return float(np.square(h + np.pad(h, ((0, 0), (1, 0)))[:, :-1]).sum())


def _stepped() -> np.ndarray:
    """w after one step, the gradient by central differences."""
    unit = np.eye(6) * 1e-3
    return W - 0.01 * np.array([(_loss(W + e) - _loss(W - e)) / 2e-3 for e in unit])


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("layout", ["", "a:rows", "b:cols", "a:rows;b:cols"])
def test_it_is_compiled_priced_and_run(layout: str, optimize: bool):
    graph, loss, updates = _graph()
    mesh = mm.SimulatedMesh("rows:2;cols:3")
    step = mm.compile(graph, mesh, layout, fetches=[loss], updates=updates, optimize=optimize)
    assert step.program.counts()["pair_sum"] == 2, "forward and backward"
    verify.verify(step.program)
    rows = 2 if "a:rows" in layout else 1
    found = [i for i in step.program.instructions if i.kind == "pair_sum"]
    assert sum(local_flops(i, step.program) for i in found) == 2 * X.size // rows < step.cost.flops
    timed = [t.instruction for t in mm.predict_time(step.program, load_machine("tpuv2")).timings]
    assert all(i in timed for i in found)
    np.testing.assert_allclose(step(x=X)[loss], _loss(W), rtol=1e-5)
    np.testing.assert_allclose(step.variables["w"], _stepped(), rtol=1e-3, atol=1e-4)


def test_the_interpreter_and_the_verifier_of_layouts_know_it():
    graph, loss, updates = _graph()
    found = mm.interpret(graph, {"x": X}, fetches=[loss])
    np.testing.assert_allclose(found[loss], _loss(W), rtol=1e-5)
    assert mm.verify(graph, mesh="rows:2;cols:3", fetches=[loss], updates=updates, feeds={"x": X}).ok


def test_its_rule_refuses_a_split_dim():
    graph, loss, _ = _graph()
    program = mm.plan(graph, "rows:2;cols:3", "a:rows", fetches=[loss], optimize=False).program
    spoilt: Mapping[int, LocalType] = {
        v: t.with_split("b", ("cols",)) if t.shape.find("b") >= 0 else t for v, t in program.types.items()
    }
    i = next(i for i in program.instructions if i.kind == "pair_sum")
    with pytest.raises(Violation, match="works along 'b', which is split"):
        i.attrs.check(replace(program, types=spoilt), i, [spoilt[v] for v in i.inputs])
