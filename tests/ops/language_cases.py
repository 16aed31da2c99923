"""Rows of the table for indexing in batches, scans, ranking, control and composed functions."""

from __future__ import annotations

from collections.abc import Sequence

import meshmpi as mm
from meshmpi.graph import Tensor
from tests.ops.build import Builder
from tests.ops.elementwise_cases import BFLOAT16, FLOAT32, case

# -- gather and scatter_add with batch dims --------------------------------------------------------


@case()
def gather_in_batches(b: Builder) -> Sequence[Tensor]:
    # take_along_axis: a is the batch; some indices lie outside.
    index = b.index("i", "a e", -1, b.b.size + 1)
    return [mm.gather(b.feed("table", "a b"), index, "b")]


@case(limit=60)
def gather_in_batches_of_any_order(b: Builder) -> Sequence[Tensor]:
    # Two batch dims, in other orders, with the dim in the middle and a rest on both sides.
    index = b.index("i", "e c k", 0, b.b.size)
    return [mm.gather(b.feed("table", "a c b e"), index, "b") * 2.0]


@case()
def gather_in_batches_along_its_own_name(b: Builder) -> Sequence[Tensor]:
    index = b.index("i", "a b", -1, b.b.size)
    return [mm.gather(b.feed("table", "b a c"), index, "b")]


@case()
def scatter_add_in_batches(b: Builder) -> Sequence[Tensor]:
    index = b.index("i", "a b", -1, b.c.size + 1)
    return [mm.scatter_add(b.feed("x", "a b"), index, b.c, b.shape("a c"))]


@case(limit=60)
def scatter_add_in_batches_of_any_order(b: Builder) -> Sequence[Tensor]:
    index = b.index("i", "e a c", 0, b.b.size)
    updates = b.feed("x", "k c a e")
    return [
        mm.scatter_add(updates, index, b.b, b.shape("b k a")),
        mm.scatter_add(updates, index, b.b, b.shape("c k e b")) * 0.5,
    ]


@case(tolerance=BFLOAT16)
def scatter_add_in_batches_bfloat16(b: Builder) -> Sequence[Tensor]:
    index = b.index("i", "a b", 0, b.c.size)
    return [mm.scatter_add(b.feed("x", "a b", "bfloat16"), index, b.c, b.shape("a c"))]


@case(limit=60)
def top_k_of_many_rows(b: Builder) -> Sequence[Tensor]:
    values, index = mm.top_k(b.feed("x", "a b c"), "b", b.k)
    return [values * 2.0, index]


# -- running sums ----------------------------------------------------------------------------------


@case()
def cumsum(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b c")
    return [
        mm.cumsum(x, "b"), mm.cumsum(x, b.a, exclusive=True), mm.cumsum(x, "c", reverse=True),
        mm.cumsum(x, "b", exclusive=True, reverse=True),
    ]  # fmt: skip


@case()
def cumsum_of_integers(b: Builder) -> Sequence[Tensor]:
    x, y = b.feed("x", "a b", "int32", "whole"), b.feed("y", "b", "uint8", "natural")
    return [mm.cumsum(x, "b", exclusive=True), mm.cumsum(y, "b", reverse=True)]


@case(tolerance=FLOAT32)
def cumsum_float32(b: Builder) -> Sequence[Tensor]:
    return [mm.cumsum(b.feed("x", "a b", "float32"), "b")]


@case(tolerance=BFLOAT16)
def cumsum_bfloat16(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b", "bfloat16")
    return [mm.cumsum(x, "b"), mm.cumsum(x, "a", exclusive=True, reverse=True)]


@case(refuses=True)
def cumsum_of_constrained(b: Builder) -> Sequence[Tensor]:
    x = mm.constrain(b.feed("x", "a b") * 2.0, "b:cols")
    return [mm.cumsum(x, "b") + 1.0]
