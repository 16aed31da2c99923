"""Rows of the table for composed functions: ranking, control, corners of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import meshmpi as mm
from meshmpi.graph import Tensor
from tests.ops.build import Builder
from tests.ops.elementwise_cases import case

# -- reductions ------------------------------------------------------------------------------------


@case()
def reduce_prod(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b c")
    return [
        mm.reduce_prod(x, reduced_dim=b.b),
        mm.reduce_prod(x, output_shape=b.shape("c")) * 1e-3,
        mm.reduce_prod(b.feed("i", "a b", "int32", "whole"), reduced_dim=b.a),
    ]


@case()
def reduce_prod_with_zeros(b: Builder) -> Sequence[Tensor]:
    # Rows with none, one and two zeros; the gradient of a product at 0 is smooth.
    values = b.rng.uniform(0.5, 2, (b.a.size, b.b.size)) * b.rng.choice([-1, 1], (b.b.size,))
    values[1::3, 1] = 0
    values[2::3, :2] = 0
    x = b.feed_array("x", b.shape("a b"), "float64", values)
    return [mm.reduce_prod(x, reduced_dim=b.b)]


@case()
def reduce_variance(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b c")
    return [mm.reduce_variance(x), mm.reduce_variance(x, reduced_dim=b.b), mm.reduce_std(x, output_shape=b.shape("a"))]


@case()
def reduce_first(b: Builder) -> Sequence[Tensor]:
    x, y = b.feed("x", "a b c"), b.feed("y", "a b", "bool", "bool")
    i = b.feed("i", "b", "int32", "whole")
    return [mm.reduce_first(x, "b"), mm.reduce_first(y, b.a), mm.reduce_first(i, "b")]


@case(limit=12)
def extra_logits(b: Builder) -> Sequence[Tensor]:
    x, extra = b.feed("x", "a b"), b.feed("extra", "a")
    return [
        mm.softmax(x, "b", extra),
        mm.log_softmax(x, "b", extra),
        mm.reduce_logsumexp(x, "b", extra),
        mm.softmax(x, "a", 0.5),
        mm.reduce_logsumexp(x, "b"),
    ]


# -- ranking ---------------------------------------------------------------------------------------


@case()
def sorting(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b")
    return [
        mm.sort(x, "b"),
        mm.sort(x, "a", descending=True),
        mm.argsort(x, b.b),
        mm.sort(b.feed("i", "b a", "uint8", "natural"), "b"),
    ]


@case(smooth=False, gradients=False)
def sorting_of_special_values(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b", kind="special")
    return [mm.sort(x, "b"), mm.sort(x, "b", descending=True), mm.argsort(x, "b", descending=True)]


@case()
def nth_elements(b: Builder) -> Sequence[Tensor]:
    n = mm.Dimension("n", 5 * b.b.size)
    x = b.feed("x", mm.Shape([b.a, n]))
    return [
        mm.nth_largest_element(x, 0, n),
        mm.nth_largest_element(x, 2, n),
        mm.nth_smallest_element(x, 3, "n"),
        mm.nth_smallest_element(x, n.size - 1, "n"),
    ]


@case()
def first_largest_and_smallest(b: Builder) -> Sequence[Tensor]:
    x, ties = b.feed("x", "a b"), b.feed("t", "b a", "int32", "whole")
    return [*mm.top_1(x, "b"), mm.argmin(x, "a"), mm.argmax(ties, "b"), mm.argmin(ties, "b")]


@case(gradients=False)
def first_largest_and_smallest_of_special_values(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b", kind="special")
    return [*mm.top_1(x, "b"), mm.argmin(x, "b"), mm.argmax(x, "a")]


@case()
def dynamic_shift(b: Builder) -> Sequence[Tensor]:
    x, one = b.feed("x", "a b c"), b.feed_array("one", b.shape(""), "int32", np.array(-2))
    rows = b.index("rows", "c a", -9, 9)
    return [
        mm.dynamic_shift(x, one, "b", wrap=True),
        mm.dynamic_shift(x, one, "a", wrap=False),
        mm.dynamic_shift(x, rows, b.b, wrap=True),
        mm.dynamic_shift(x, rows, b.b, wrap=False),
        mm.dynamic_shift(x, 1, b.b, wrap=False),
    ]


# -- elementwise corners ---------------------------------------------------------------------------


@case()
def modulus_has_a_gradient(b: Builder) -> Sequence[Tensor]:
    x, y = b.feed("x", "a b", kind="away"), b.feed("y", "b", kind="away")
    return [x % y, x % 0.75, 1.5 % y, x // y + x]


@case()
def steps_have_gradient_zero(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b", kind="away")
    return [mm.sign(x) * x, mm.floor(x) * x, mm.sign(x), mm.floor(x)]


@case(smooth=False)  # 0 ** y has no derivative by y at 0; every gradient must be finite
def power_at_corners(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b", kind="ties")  # -2, -1, 0, 1, 2
    whole = b.feed_array("y", b.shape("b"), "float64", np.arange(b.b.size) % 4.0)
    fixed = mm.stop_gradient(whole)
    return [x**fixed, x**whole, x**0, x**1, x**2, 0.0**whole, mm.pow(2.0, whole)]


@case()
def power_of_negative_base(b: Builder) -> Sequence[Tensor]:
    # Whole exponents: smooth in the base, also at 0 and below.
    x = b.feed("x", "a b")
    y = b.feed_array("y", b.shape("b"), "float64", np.arange(b.b.size) % 4.0)
    return [x ** mm.stop_gradient(y), x**3]


@case()
def conversions(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b", kind="away")
    i = b.feed("i", "a", "int32", "whole")
    return [mm.to_int32(x), mm.to_float(i), mm.cast(mm.to_bfloat16(i), "float64") + x]


@case()
def bools_are_chosen(b: Builder) -> Sequence[Tensor]:
    x, y = b.feed("x", "a b", "bool", "bool"), b.feed("y", "b", "bool", "bool")
    return [mm.where(b.feed("c", "a", "bool", "bool"), x, y)]


# -- control ---------------------------------------------------------------------------------------


@case()
def cwise(b: Builder) -> Sequence[Tensor]:
    x, y = b.feed("x", "a b"), b.feed("y", "b c")

    def rule(xs: list, z: Tensor, dz: Tensor) -> list:
        return [dz * z, 2.0 * dz * z]

    z = mm.cwise(lambda u, v: mm.exp(u + 2.0 * v), [x, y], rule)
    return [z, mm.cwise(lambda u: mm.sin(u) * u, [x])]


@case(limit=12)
def repeat(b: Builder) -> Sequence[Tensor]:
    def turn(x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        y = mm.tanh(x * mm.get_variable("scale", b.shape("b"), "float64", mm.ones_initializer()))
        return y, total + mm.reduce_sum(y, reduced_dim=b.b)

    b.variables.update({n: np.ones(b.b.size) for n in ("scale", "turn_0/scale", "turn_1/scale")})
    x, zero = b.feed("x", "a b"), mm.zeros(b.shape("a"), "float64")
    shared = mm.repeat(turn, 3, [x, zero], shared_variables=True)
    apart = mm.repeat(turn, 2, [x, zero], shared_variables=False, name="turn")
    return [*shared, *apart, *mm.repeat(turn, 0, [x], shared_variables=True)]


@case(limit=8)
def while_loop(b: Builder) -> Sequence[Tensor]:
    # Newton's square root: each row ends on its own, one of them at once, one never.
    x = b.feed("x", "a b", kind="positive")
    limits = np.full(b.a.size, 1e-3)
    limits[0], limits[-1] = 100.0, 0.0
    limit = b.feed_array("_limit", b.shape("a"), "float64", limits)

    def goes_on(y: Tensor, turns: Tensor) -> Tensor:
        return mm.reduce_max(mm.abs(y * y - mm.stop_gradient(x)), reduced_dim=b.b) > limit

    def turn(y: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        return mm.transpose(0.5 * (x / y + y), b.shape("b a")), turns + 1

    zero = mm.zeros(b.shape("a"), "int32")
    root, turns = mm.while_loop(goes_on, turn, [x, zero], max_steps=5)
    return [root, turns]


@case(limit=8)
def while_loop_without_infinities(b: Builder) -> Sequence[Tensor]:
    # x halves until it is below 1; in turns that do not count log(x - 0.4) would be NaN.
    x = b.feed("x", "b", kind="positive")
    first = mm.stop_gradient(x)

    def turn(y: Tensor, total: Tensor, more: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return y * 0.5, total + mm.log(y - 0.4), mm.less(first, 10.0)

    more = mm.greater(first, 0.0)
    inputs = [x + 1.0, mm.zeros(b.shape("b"), "float64"), more]
    return mm.while_loop(lambda y, total, more: y > 1.0, turn, inputs, max_steps=4)


@case(limit=12)
def sampling(b: Builder) -> Sequence[Tensor]:
    # Each row has its own temperature; at 0 the most probable is taken.
    temperatures = b.feed_array("t", b.shape("a"), "float64", np.arange(b.a.size) % 3 * 0.7)
    logits = b.feed("x", "a b c")
    masked = mm.where(mm.equal(mm.range(b.b), 1), float("-inf"), logits)
    return [
        mm.sample_with_temperature(masked, "b", temperatures),
        mm.sample_with_temperature(logits, "c", 1.5),
        mm.sample_with_temperature(logits, b.c, 0.0),
    ]


@case(gradients=False)
def a_nan_is_largest_and_smallest(b: Builder) -> Sequence[Tensor]:
    # Wherever it is, on whichever rank: MPI's own maximum depends on the order of the ranks.
    x, y = b.feed("x", "a b", kind="special"), b.feed("y", "b a", "float32", "special")
    half = b.feed("z", "a b", "bfloat16", "special")
    return [
        mm.reduce_max(x, reduced_dim=b.a),
        mm.reduce_min(x, reduced_dim=b.b),
        mm.reduce_max(y),
        mm.reduce_min(y, reduced_dim=b.a),
        mm.reduce_max(half, reduced_dim=b.b),
    ]


def _rows(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Products of each row of x with w over its last dim, and the sum over rows of their sines."""
    return x * w, np.sin(x * w).sum(0)


def _rows_gradient(inputs: Sequence, outputs: Sequence, dys: Sequence) -> list:
    (x, w), (dy, ds) = inputs, dys
    inner = dy + ds * np.cos(x * w)
    return [inner * w, (inner * x).sum(0)]


@case()
def local_function(b: Builder) -> Sequence[Tensor]:
    x, w = b.feed("x", "a b"), b.variable("w", "b")
    made = mm.local_function(_rows, [x, w], [x, w], batch_dims=[b.a], gradient=_rows_gradient)
    whole = mm.local_function(lambda t: np.cumsum(t, 1), [made[0]], [x], "a", gradient=_running_gradient)
    other = mm.local_function(lambda t: 2 * t, [made[0]], [x], "a", gradient=lambda xs, ys, dys: [2 * dys[0]])
    return [*made, whole, other]


def _running_gradient(inputs: Sequence, outputs: Sequence, dys: Sequence) -> list:
    return [np.flip(np.cumsum(np.flip(dys[0], 1), 1), 1)]


@case(gradients=False)
def local_function_of_several_types(b: Builder) -> Sequence[Tensor]:
    x, n = b.feed("x", "b a", "float32"), b.index("n", "a c", 0, 4)
    results = [(b.shape("c"), "int32"), (b.shape("b a"), "bool")]
    return mm.local_function(lambda t, k: (k.sum(0, np.int32), t > 0), [x, n], results, batch_dims=[b.a])
