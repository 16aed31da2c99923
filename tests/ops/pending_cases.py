"""Rows of the table (`tests.ops.cases`) that a seeded bug once survived without.

Sums still pending over mesh axes meet everything that must not, or may, see them unfinished; and
corners of reductions.
"""

from __future__ import annotations

from collections.abc import Sequence

import meshmpi as mm
from meshmpi.graph import Tensor
from tests.ops.build import Builder
from tests.ops.elementwise_cases import BFLOAT16, case


@case()
def reduce_max_of_negative_numbers(b: Builder) -> Sequence[Tensor]:
    # Ranks with empty blocks must not bring in a 0.
    x = b.feed("x", "a b", kind="positive")
    return [mm.reduce_max(-x), mm.reduce_min(x, reduced_dim=b.a), mm.reduce_max(-x, reduced_dim="b")]


@case(tolerance=BFLOAT16)
def reduce_many_bfloat16(b: Builder) -> Sequence[Tensor]:
    # A running sum kept in bfloat16 would stop growing at 256 times its terms.
    x = b.feed("x", mm.Shape([("m", 900), b.a]), "bfloat16", "positive")
    return [mm.reduce_sum(x, reduced_dim="m"), mm.reduce_sum(x)]


@case()
def numbers_folded_together(b: Builder) -> Sequence[Tensor]:
    three, x = mm.constant(3.0, (), "float64"), b.feed("x", "a b")
    return [(three - mm.constant(1.25, (), "float64")) * x, mm.square(three - 0.5) - x]


@case()
def centered_over_rows(b: Builder) -> Sequence[Tensor]:
    # A sum over the leading dim is known after all rows only: batch norm's pattern.
    x = b.feed("x", "a b")
    centered = x - mm.reduce_mean(x, reduced_dim=b.a)
    scaled = centered / mm.sqrt(mm.reduce_mean(mm.square(centered), reduced_dim=b.a) + 0.5)
    return [scaled, x - mm.reduce_sum(mm.square(x), reduced_dim=b.a)]


class _Products:
    """Sums over the dim b, a new one at each call: two uses of one value would finish it."""

    def __init__(self, b: Builder):
        self.x, self.w, self.b, self.n = b.feed("x", "a b"), b.feed("w", "b c"), b, 0

    def __call__(self, names: str = "a c") -> Tensor:
        self.n += 1
        return mm.einsum([self.x * (1.0 + 0.25 * self.n), self.w], self.b.shape(names))


@case(limit=40)
def products_of_products(b: Builder) -> Sequence[Tensor]:
    # Neither their product, square nor maximum may be taken while the sums are pending.
    y = _Products(b)
    other = mm.einsum([y.w, b.feed("u", "b e")], b.shape("c e"))
    return [
        mm.einsum([y(), other], b.shape("a e")),
        mm.reduce_sum(mm.square(y()), reduced_dim=b.c),
        mm.reduce_max(y(), reduced_dim=b.c),
        mm.reduce_mean(y() + 1.5, reduced_dim=b.a),
    ]


@case(limit=40)
def shapes_of_products(b: Builder) -> Sequence[Tensor]:
    # What only moves elements may move a pending sum, but not put numbers beside it.
    y, z = _Products(b), b.feed("z", "a c")
    padded = mm.pad(y(), [1, 2], "a", value=-1.5)
    return [
        mm.reduce_sum(padded, reduced_dim="a"),
        mm.concat([y(), z], "a"),
        mm.concat([y(), y()], "c"),
        mm.slice(y(), 1, b.a.size - 1, "a") * 0.5,
        mm.transpose(y(), b.shape("c a")) + z,
    ]


@case(refuses=True)
def constrained_and_whole(b: Builder) -> Sequence[Tensor]:
    # One use takes a block of the sum, the other all of it.
    y = b.feed("x", "a b") @ b.feed("w", "b c")
    return [mm.constrain(y, "a:cols") * 2.0, mm.reduce_max(y, reduced_dim=b.c)]
