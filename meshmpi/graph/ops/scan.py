"""Running sums along one dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshmpi.dims import DimLike, Shape, dim_name
from meshmpi.graph import Operation, Tensor, only
from meshmpi.ir import kinds as ir
from meshmpi.ir.program import LocalType


class Cumsum(Operation):
    """y[i] = x[0] + ... + x[i] along one dim; exclusive: without x[i]; reverse: from the other end.

    Gradient: the cumsum of dy from the other end.
    Lowers: local `cumsum`; where the dim is split into R blocks, a local `block_sum` and an
    all_gather of the R sums of blocks first.
    """

    follows = True

    def __init__(self, x: Tensor, dim: str, exclusive: bool, reverse: bool):
        self.dim, self.exclusive, self.reverse = dim, exclusive, reverse
        super().__init__([x])

    def infer(self) -> Sequence[tuple[Shape, str]]:
        (x,) = self.inputs
        x.dim(self.dim, "cumsum")
        if x.dtype == "bool":
            raise self.fail("the input is bool.", "Count with mm.cumsum(mm.cast(x, 'int32'), dim).")
        return [(x.shape, x.dtype)]

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        return [cumsum(only(dys), self.dim, self.exclusive, not self.reverse)]

    def lower(self, lowering: Any) -> None:
        value = lowering.value(self.inputs[0])
        x: LocalType = lowering.types[value]
        values, blocks = [value], ""
        if x.split(self.dim):
            blocks = f"_{self.dim}_blocks"
            t = ir.block_sums(lowering.mesh, x, self.dim, blocks)
            sums = lowering.emit(ir.BlockSum(self.dim, blocks), values, t)
            values.append(lowering.redistribute(sums, t.with_split(blocks, ()).splits))
        running = ir.Cumsum(self.dim, self.exclusive, self.reverse, blocks)
        lowering.define(self.output, lowering.emit(running, values, x))


def cumsum(x: Tensor, dim: DimLike, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """Running sums of x along ``dim``, in one pass over the elements.

    Args:
        x: Any numbers; sums over bfloat16 are formed in float32, those of integers wrap around.
        dim: The dim (or its name); may be split.
        exclusive: y[i] sums what comes before x[i] only.
        reverse: Sums from the last element to the first.

    Returns:
        A tensor of x's shape and data type.

    Lowers: where ``dim`` is split into R blocks, an all_gather of R sums for each row.
    Source: Mesh-TensorFlow's cumsum, whose cost is the square of the size.

    Example:
        >>> position = mm.cumsum(mm.cast(is_chosen, "int32"), "tokens", exclusive=True)
    """
    return Cumsum(x, dim_name(dim), exclusive, reverse).output
