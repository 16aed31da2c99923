"""Running sums along one dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshmpi.dims import Dimension, Shape
from meshmpi.graph import Operation, Tensor, only
from meshmpi.ops.structure import DimLike, dim_name
from meshmpi.program import LocalType


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
        attrs = {"dim": self.dim, "exclusive": self.exclusive, "reverse": self.reverse}
        values, axes = [value], x.split(self.dim)
        if axes:
            attrs["blocks"] = f"_{self.dim}_blocks"
            blocks = Dimension(attrs["blocks"], lowering.mesh.count(axes))
            shape = Shape([blocks if d.name == self.dim else d for d in x.shape])
            t = LocalType(shape, "float32" if x.dtype == "bfloat16" else x.dtype, x.splits)
            sums = lowering.emit("block_sum", values, t, dim=self.dim, blocks=blocks.name)
            values.append(lowering.redistribute(sums, t.with_split(blocks.name, ()).splits))
        lowering.define(self.output, lowering.emit("cumsum", values, x, **attrs))


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
