"""Operations that change no value: where a tensor is kept, and what gradients pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshmpi.dims import Layout, LayoutLike, Shape
from meshmpi.errors import LayoutError, suggest
from meshmpi.graph import Operation, Tensor, Variable, only


class Constrain(Operation):
    """x, kept in another layout than the computation layout.

    What is computed from it elementwise or by a reduction follows it; contractions, gathers and
    reshapes go back to the computation layout.  Its gradient is constrained likewise.
    Lowers: take_shard, all_gather or all_to_all; with a sum still pending, a reduce_scatter.
    Source: sharding constraints of GSPMD (Xu et al. 2021); sequence parallelism (Korthikanti et al.
    2022).
    """

    follows = True

    def __init__(self, x: Tensor, layout: Layout):
        self.layout = layout
        super().__init__([x])

    def infer(self) -> Sequence[tuple[Shape, str]]:
        (x,) = self.inputs
        for rule in self.layout:
            if x.shape.find(rule.dim) < 0 and not rule.optional:
                raise LayoutError(
                    f"constrain: '{self.layout}' names dimension '{rule.dim}', but the tensor is"
                    f" {x.shape}.",
                    suggest(rule.dim, x.shape.names), str(self.source),
                )  # fmt: skip
        return [(x.shape, x.dtype)]

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return [constrain(only(dys), self.layout)]

    def lower(self, lowering: Any) -> None:
        lowering.define(self.output, lowering.value(self.inputs[0]))


def constrain(x: Tensor, layout: LayoutLike) -> Tensor:
    """x with the dims named in ``layout`` split as it says: ``mm.constrain(x, "length:cols")``.

    An empty right side (``"length:"``) makes a dim whole.
    """
    return Constrain(x, Layout(layout)).output


class StopGradient(Operation):
    """x; no gradient passes.  Lowers: nothing."""

    follows = True

    def infer(self) -> Sequence[tuple[Shape, str]]:
        return [(self.inputs[0].shape, self.inputs[0].dtype)]

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return [None]

    def lower(self, lowering: Any) -> None:
        lowering.define(self.output, lowering.value(self.inputs[0]))


def stop_gradient(x: Tensor) -> Tensor:
    """x, through which no gradient passes."""
    return StopGradient([x], "stop_gradient").output


class AsStored(Operation):
    """x, placed as a variable is stored; used for gradients, so that they are reduced only to the
    stored block.  Lowers: take_shard; with a sum still pending, a reduce_scatter.
    """

    follows = True

    def __init__(self, x: Tensor, variable: Variable):
        self.follows_variable = variable
        super().__init__([x], "as_stored")

    def infer(self) -> Sequence[tuple[Shape, str]]:
        (x,) = self.inputs
        return [(x.shape, x.dtype)]

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return [dys[0]]

    def lower(self, lowering: Any) -> None:
        lowering.define(self.output, lowering.value(self.inputs[0]))


def as_stored(x: Tensor, variable: Variable) -> Tensor:
    """x in the storage layout of ``variable``, for the dims that x has in common with it."""
    return AsStored(x, variable).output
