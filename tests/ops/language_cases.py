"""Rows of the table for indexing in batches, scans, ranking, control and composed functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import meshmpi as mm
from meshmpi.graph import Tensor
from tests.ops.build import Builder
from tests.ops.elementwise_cases import BFLOAT16, FLOAT32, case, row

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


# -- put -------------------------------------------------------------------------------------------


def _different(b: Builder, name: str, dims: str, low: int, high: int) -> Tensor:
    """Indices that differ along the last dim, some outside."""
    shape = b.shape(dims)
    rows = [b.rng.permutation(np.arange(low, high)) for _ in range(shape.size)]
    return b.feed_array(
        name,
        shape,
        "int32",
        np.reshape([r[: shape[-1].size] for r in rows], (-1, shape[-1].size))[: shape.size // shape[-1].size].reshape(
            shape.sizes
        ),
    )


@case()
def put_rows(b: Builder) -> Sequence[Tensor]:
    index = _different(b, "i", "k", -1, b.b.size + 1 + b.k.size)
    return [mm.put(b.feed("x", "b c"), b.feed("u", "k c"), index, b.b)]


@case(limit=60)
def put_rows_in_batches_of_any_order(b: Builder) -> Sequence[Tensor]:
    index = _different(b, "i", "a k", -2, b.b.size + b.k.size)
    y = mm.put(b.feed("x", "c b a e"), b.feed("u", "e k a c"), index, "b")
    return [y * 2.0]


@case()
def put_rows_along_its_own_name(b: Builder) -> Sequence[Tensor]:
    index = _different(b, "i", "a b", 0, b.b.size)
    return [mm.put(b.feed("x", "b a"), b.feed("u", "b a"), index, "b")]


@case()
def put_one_row_for_every_batch(b: Builder) -> Sequence[Tensor]:
    # As a cache grows: in place, and what is read of it afterwards is new.
    cache = b.variable("cache", "b a c", trainable=False)
    index = b.index("i", "a", -1, b.b.size)
    new = mm.put(cache, b.feed("u", "a c"), index, "b")
    b.assign(cache, new)
    return [mm.reduce_sum(mm.slice(new, 0, 2, "b") * 2.0, reduced_dim=b.c), new]


@case()
def put_beside_the_old_value(b: Builder) -> Sequence[Tensor]:
    cache, other = b.variable("cache", "b a"), b.variable("other", "b a")
    index = b.index("i", "a", 0, b.b.size)
    b.assign(cache, mm.put(cache, b.feed("u", "a"), index, "b"))
    b.assign(other, mm.put(cache, mm.reduce_sum(other, reduced_dim=b.b), index, "b"))
    return [mm.slice(cache, 0, 2, "b"), cache + other]


@case(tolerance=BFLOAT16)
def put_bfloat16(b: Builder) -> Sequence[Tensor]:
    index = b.index("i", "a", -1, b.b.size)
    return [mm.put(b.feed("x", "a b", "bfloat16"), b.feed("u", "a", "bfloat16"), index, "b")]


@case(limit=60)
def top_k_of_many_rows(b: Builder) -> Sequence[Tensor]:
    values, index = mm.top_k(b.feed("x", "a b c"), "b", b.k)
    return [values * 2.0, index]


# -- running sums ----------------------------------------------------------------------------------


@case()
def cumsum(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b c")
    return [
        mm.cumsum(x, "b"),
        mm.cumsum(x, b.a, exclusive=True),
        mm.cumsum(x, "c", reverse=True),
        mm.cumsum(x, "b", exclusive=True, reverse=True),
    ]


@case()
def cumsum_of_integers(b: Builder) -> Sequence[Tensor]:
    x, y = b.feed("x", "a b", "int32", "whole"), b.feed("y", "b", "uint8", "natural")
    return [mm.cumsum(x, "b", exclusive=True), mm.cumsum(y, "b", reverse=True)]


row("cumsum_float32", lambda b: [mm.cumsum(b.feed("x", "a b", "float32"), "b")], tolerance=FLOAT32)


@case(tolerance=BFLOAT16)
def cumsum_bfloat16(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b", "bfloat16")
    return [mm.cumsum(x, "b"), mm.cumsum(x, "a", exclusive=True, reverse=True)]


@case(refuses=True)
def cumsum_of_constrained(b: Builder) -> Sequence[Tensor]:
    x = mm.constrain(b.feed("x", "a b") * 2.0, "b:cols")
    return [mm.cumsum(x, "b") + 1.0]


# -- gradients of one's own ------------------------------------------------------------------------


@case()
def custom_gradient(b: Builder) -> Sequence[Tensor]:
    # The rule is the true gradient, written in another way, so that central differences agree.
    def product(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return mm.exp(x) * y, mm.square(y)

    def rule(xs: list, ys: list, dys: list) -> list:
        (_, y), (first, _), (d_first, d_second) = xs, ys, dys
        shared = mm.reduce_sum(first / y * d_first, output_shape=y.shape)
        return [first * d_first, shared + 2.0 * y * d_second]

    y, squared = mm.custom_gradient(product, rule, [b.feed("x", "a b"), b.feed("y", "b", kind="away")])
    return [y, squared * 3.0]


@case(smooth=False)  # it is meant to differ from the derivative
def custom_gradient_is_straight_through(b: Builder) -> Sequence[Tensor]:
    x = mm.custom_gradient(mm.floor, lambda xs, ys, dys: dys, [b.feed("x", "a b")])
    return [x * x]


@case(refuses=True, smooth=False)
def custom_gradient_of_constrained(b: Builder) -> Sequence[Tensor]:
    # The two results follow their own constraints.
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return mm.constrain(x * 2.0, "b:cols"), mm.constrain(x * 3.0, "a:rows;b:")

    xs = mm.custom_gradient(both, lambda xs, ys, dys: [dys[0]], [b.feed("x", "a b")])
    return [xs[0] + 1.0, xs[1] + 1.0]


@case(limit=60)
def recompute_grad(b: Builder) -> Sequence[Tensor]:
    w, v = b.variable("w", "b c"), b.variable("v", "c b")

    def layer(x: Tensor) -> tuple[Tensor, Tensor]:
        h = mm.tanh(mm.einsum([x, w], b.shape("a c")))
        keep = mm.less(mm.random_uniform(b.shape("a c")), 0.75)
        return mm.einsum([mm.where(keep, h, 0.0), v], b.shape("a b")), mm.reduce_sum(h)

    x, first = mm.recompute_grad(layer, [b.feed("x", "a b")])
    y, second = mm.recompute_grad(layer, [x])
    return [y, first * second, mm.recompute_grad(mm.sin, [y])]


@case(limit=30)
def recompute_grad_inside_itself(b: Builder) -> Sequence[Tensor]:
    w = b.variable("w", "b")

    def inner(x: Tensor) -> Tensor:
        return mm.exp(mm.sin(x) * w)

    def outer(x: Tensor) -> Tensor:
        return mm.cos(mm.recompute_grad(inner, [x]) + mm.recompute_grad(inner, [x * 0.5]))

    return [mm.recompute_grad(outer, [b.feed("x", "a b") * 0.5])]


# -- ranking ---------------------------------------------------------------------------------------


@case()
def top_k_of_long_rows(b: Builder) -> Sequence[Tensor]:
    # Blocks hold more than k elements: ranks send candidates only, ties by the lowest global index.
    n = mm.Dimension("n", 4 * b.b.size)
    ties = b.feed_array("t", mm.Shape([b.a, n]), "int32", b.rng.integers(-3, 4, (b.a.size, n.size)))
    x = b.feed("x", mm.Shape([n, b.a]))
    return [*mm.top_k(x, n, b.k), *mm.top_k(ties, n, b.k)]


@case()
def top_k_smallest(b: Builder) -> Sequence[Tensor]:
    n = mm.Dimension("n", 4 * b.b.size)
    x = b.feed("x", mm.Shape([n]), "float64")
    i = b.feed("i", "a b", "int64", "whole")
    return [*mm.top_k(x, n, b.k, smallest=True), *mm.top_k(i, "b", b.k, smallest=True)]


@case(gradients=False)
def top_k_of_special_values(b: Builder) -> Sequence[Tensor]:
    n = mm.Dimension("n", 3 * b.b.size)
    x = b.feed("x", mm.Shape([b.a, n]), kind="special")
    return [*mm.top_k(x, n, b.k), *mm.top_k(x, n, b.k, smallest=True)]


@case(limit=30)
def second_derivatives_through_recomputing(b: Builder) -> Sequence[Tensor]:
    x, w = b.feed("x", "a b"), b.feed("w", "b c")
    y = mm.recompute_grad(lambda t: mm.tanh(t @ w), [x])
    gx, gw = mm.gradients(mm.reduce_sum(y), [x, w])
    assert gx is not None and gw is not None
    return [mm.square(gx), gw * 0.5]
