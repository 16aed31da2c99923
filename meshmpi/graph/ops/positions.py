"""Index ranges along dimensions, and the bands of index pairs that define masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshmpi.dims import Dimension, Shape
from meshmpi.graph import Operation, Tensor
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.sources import constant
from meshmpi.ir.bands import Band
from meshmpi.ir.kinds import Iota
from meshmpi.ir.scalar import DType


class Range(Operation):
    """0, 1, 2, ... along one dimension.  Lowers: local `iota` of global indices; no traffic."""

    def __init__(self, dim: Dimension):
        self.dim = dim
        super().__init__([], "range")

    def infer(self) -> Sequence[tuple[Shape, str]]:
        return [(Shape([self.dim]), "int32")]

    def lower(self, lowering: Any) -> None:
        t = lowering.type_of(self.output)
        lowering.define(self.output, lowering.emit(Iota(self.dim.name), [], t))


def range(dim: Dimension, dtype: DType = "int32") -> Tensor:
    """The index along ``dim``: [0, 1, ..., dim.size - 1]."""
    return ew.cast(Range(dim).output, dtype)


def check_band(operation: Operation, band: Band, shapes: Sequence[Shape]) -> None:
    """ShapeError unless one of ``shapes`` has both dims of the band."""
    if band.rows != band.columns and any({band.rows, band.columns} <= set(s.names) for s in shapes):
        return
    raise operation.fail(
        f"no tensor here has both dimensions of the band {band}: {' and '.join(map(str, shapes))}.",
        "Name two different dimensions that one of the tensors has.",
    )


def band_mask(band: Band, query: Dimension, memory: Dimension) -> Tensor:
    """bool [query, memory], True for pairs in the band; the sizes are those of its dims."""
    rows, columns = range(query), range(memory)
    shape, tests = Shape([query, memory]), list[Tensor]()
    for compare, bound in ((ew.greater_equal, band.least), (ew.less_equal, band.most)):
        if bound is not None:
            start = ew.subtract(rows, bound) if bound else rows
            tests.append(compare(start, columns, output_shape=shape))
    if not tests:
        return constant(True, shape, "bool")
    return tests[0] if len(tests) == 1 else ew.logical_and(tests[0], tests[1])


def inside_band(x: Tensor, band: Band | None) -> Tensor:
    """x, and 0 outside the band."""
    if band is None:
        return x
    mask = band_mask(band, x.shape.dim(band.rows), x.shape.dim(band.columns))
    return ew.where(mask, x, 0, output_shape=x.shape)
