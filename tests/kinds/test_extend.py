"""Operations and kinds from outside the package: registering them, and what checking them finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import meshmpi as mm
from meshmpi import extend
from meshmpi.checking import bounds
from meshmpi.dims import Shape
from meshmpi.graph import Operation, Tensor
from meshmpi.ir.kinds import KINDS, Map
from meshmpi.kernels import numpy_kernels


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    with patch.dict(KINDS), patch.dict(numpy_kernels.PLANS), patch.dict(bounds.RULES):
        yield


def kind_of_squares(halves: float = 1.0) -> type[extend.Kind]:
    """A kind that sums squares along a dim, times ``halves``; along a split one a sum is pending."""

    @dataclass(frozen=True)
    class Squares(extend.Kind, kind="squares", traits=extend.Traits()):
        dim: str

        def check(self, program: Any, i: Any, xs: Sequence[extend.LocalType]) -> None:
            (x,), y = xs, extend.result_type(program, i)
            extend.same_splits(x, y, y.shape.names)
            extend.check_pending(program.mesh, y, x.split(self.dim), "sum")

    def plan(call: extend.Call) -> extend.Plan:
        axis = call.inputs[0].names.index(call.of(Squares).dim)
        return extend.Plan(lambda ins, outs, *_: lambda: np.multiply((ins[0] ** 2).sum(axis), halves, out=outs[0]))

    return extend.register(Squares, plan)


class Squares(Operation):
    """Sum of squares; ``wrong`` leaves out the gradient's factor, or the pending sum."""

    def __init__(self, x: Tensor, dim: str, kind: type[Any], wrong: str = ""):
        self.dim, self.kind, self.wrong = dim, kind, wrong
        super().__init__([x])

    def infer(self) -> Sequence[tuple[Shape, str]]:
        return [(self.inputs[0].shape.without([self.dim]), self.inputs[0].dtype)]

    def grad(self, dys: Sequence[Any]) -> Sequence[Any]:
        return [(1.0 if self.wrong == "grad" else 2.0) * self.inputs[0] * dys[0]]

    def lower(self, lowering: Any) -> None:
        value = lowering.computed(self.inputs[0])
        axes = lowering.types[value].split(self.dim)
        y = lowering.like_input(value, self.output)
        made = lowering.emit(self.kind(self.dim), [value], lowering.pending(y, axes))
        if self.wrong == "lower":  # every rank's own sum, said to be the whole
            made = lowering.emit(Map(mm_identity(y.dtype)), [made], lowering.types[made])
            lowering.types[made] = y
        lowering.define(self.output, made)


def mm_identity(dtype: str) -> Any:
    from meshmpi.ir.scalar import call

    return call("identity", 1, dtype)


def checked(kind: type[Any], wrong: str = "", **options: Any) -> Any:
    case = [("a:5;b:3", np.random.default_rng(0).normal(size=(5, 3)))]

    def squares(x: Tensor) -> Tensor:
        return Squares(x, "b", kind, wrong).output

    return extend.check_operation(squares, case, lambda x: (x**2).sum(1), **options)


def test_a_right_operation_passes_in_every_layout():
    report = checked(kind_of_squares())
    assert report.ok and len(report.tried) > 10


@pytest.mark.parametrize(
    "halves, wrong, words",
    [
        (0.5, "", "result 0 differs from its definition"),
        (1.0, "grad", "the gradient by input 0"),
        (1.0, "lower", "WRONG|fails"),
    ],
    ids=["plan", "grad", "lower"],
)
def test_wrong_ones_are_found(halves: float, wrong: str, words: str):
    kind = kind_of_squares(halves)
    with pytest.raises(mm.ProgramError, match=words):
        checked(kind, wrong)


def test_an_operation_without_a_gradient_is_checked_without_it():
    assert checked(kind_of_squares(), "grad", gradient=False).ok


def test_a_shape_that_differs_from_the_definition_is_told():
    case = [("a:5;b:3", np.ones((5, 3)))]
    with pytest.raises(mm.ProgramError, match=r"result 0 is \[a=5\], its definition returns the shape \(3,\)"):
        extend.check_operation(lambda x: mm.reduce_sum(x, reduced_dim="b"), case, lambda x: x.sum(0))
    with pytest.raises(mm.ProgramError, match="has 1 results, its definition returns 2"):
        extend.check_operation(mm.exp, case, lambda x: (x, x))


def test_what_is_registered_must_be_a_kind_of_its_own():
    with pytest.raises(mm.ArgumentError, match="no kind of instruction"):
        extend.register(dict, lambda call: extend.Plan(lambda *_: lambda: None))  # type: ignore[arg-type]
    with pytest.raises(mm.ArgumentError, match="'map' is a kind of the package"):
        extend.register(Map, lambda call: extend.Plan(lambda *_: lambda: None))
    with pytest.raises(mm.ProgramError, match="Mine is kind 'map', and so is Map"):

        @dataclass(frozen=True)
        class Mine(extend.Kind, kind="map"):
            pass

    assert KINDS["map"] is Map


def test_a_kind_without_a_plan_is_told_when_it_is_to_run():
    kind = kind_of_squares()
    del numpy_kernels.PLANS["squares"]
    with pytest.raises(mm.ProgramError, match="there is no NumPy kernel for 'squares'"):
        checked(kind)
