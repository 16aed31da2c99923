"""Operations that do not change values: placement of a tensor, and control of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshmpi.dims import Layout, LayoutLike, Shape
from meshmpi.errors import LayoutError, suggest
from meshmpi.graph import Operation, Tensor, Variable, only
from meshmpi.ir import kinds as ir


class Constrain(Operation):
    """x, kept in another layout than the computation layout.

    What is computed from it elementwise or by a reduction follows it; contractions, gathers and
    reshapes go back to the computation layout.  Its gradient is constrained likewise.
    Lowers: take_shard, all_gather or all_to_all; with a sum still pending, a reduce_scatter.
    Source: sharding constraints of GSPMD (Xu et al. 2021); sequence parallelism (Korthikanti et al. 2022).
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
                    f"constrain: '{self.layout}' names dimension '{rule.dim}', but the tensor is {x.shape}.",
                    suggest(rule.dim, x.shape.names),
                    str(self.source),
                )
        return super().infer()

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return [constrain(only(dys), self.layout)]

    def lower(self, lowering: Any) -> None:
        lowering.define(self.output, lowering.value(self.inputs[0]))


def constrain(x: Tensor, layout: LayoutLike) -> Tensor:
    """x with the dims named in ``layout`` split as it says: ``mm.constrain(x, "length:cols")``.

    An empty right side (``"length:"``) makes a dim whole.
    """
    return Constrain(x, Layout(layout)).output


Rule = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor | None]], Sequence[Any]]
"""(inputs, outputs, gradients of the outputs) -> gradients of the inputs, None for none."""


class CustomGradient(Operation):
    """y_i = value_i; the gradient of the inputs is what a rule says, and none passes the values.

    Lowers: nothing; with a ``barrier`` a local `view` of that name, which keeps what is computed
    from it apart from what was computed before.
    """

    follows = True

    def __init__(
        self, values: Sequence[Tensor], inputs: Sequence[Tensor], rule: Rule | None, name: str, barrier: str = ""
    ):
        self.count, self.rule, self.barrier = len(values), rule, barrier
        super().__init__([*values, *inputs], name)

    def infer(self) -> Sequence[tuple[Shape, str]]:
        return [(v.shape, v.dtype) for v in self.inputs[: self.count]]

    def followed(self, index: int) -> Sequence[Tensor]:
        return [self.inputs[index]]

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        inputs, none = self.inputs[self.count :], [None] * self.count
        if self.rule is None:
            return [*none, *(None for _ in inputs)]
        dxs = list(self.rule(inputs, self.outputs, dys))
        if len(dxs) != len(inputs):
            raise self.fail(
                f"the gradient function returned {len(dxs)} gradients for {len(inputs)} inputs.",
                "Return one tensor, or None, for each input.",
            )
        for x, dx in zip(inputs, dxs, strict=True):
            if dx is not None and (sorted(dx.shape), dx.dtype) != (sorted(x.shape), x.dtype):
                raise self.fail(f"the gradient of {x!r} is {dx!r}.", "Sum or cast it.")
        return [*none, *dxs]

    def lower(self, lowering: Any) -> None:
        for x, y in zip(self.inputs, self.outputs, strict=False):
            value = lowering.value(x)
            if self.barrier:
                value = lowering.emit(ir.View(self.barrier), [value], lowering.types[value])
            lowering.define(y, value)


def stop_gradient(x: Tensor) -> Tensor:
    """x, through which no gradient passes."""
    return CustomGradient([x], [], None, "stop_gradient").output


def barrier(x: Tensor, name: str) -> Tensor:
    """x; what is computed from it is computed anew, though equal operations on x exist.

    Lowers: a local `view` without any copy.  Gradient: dy.
    """
    return CustomGradient([x], [x], lambda inputs, outputs, dys: dys, "barrier", name).output


class AsStored(Operation):
    """x, placed as a variable is stored; used for gradients, so that they are reduced only to the
    stored block.  Lowers: take_shard; with a sum still pending, a reduce_scatter.
    """

    follows = True

    def __init__(self, x: Tensor, variable: Variable):
        self.follows_variable = variable
        super().__init__([x], "as_stored")

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return dys

    def lower(self, lowering: Any) -> None:
        lowering.define(self.output, lowering.value(self.inputs[0]))


def as_stored(x: Tensor, variable: Variable) -> Tensor:
    """x in the storage layout of ``variable``, for the dims that x has in common with it."""
    return AsStored(x, variable).output
