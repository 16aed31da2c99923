"""The elementwise rows of the table (`tests.ops.cases`), and how a row is added."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import meshmpi as mm
from meshmpi.graph import Tensor
from tests.ops.build import Builder, Case

FLOAT32 = 2e-5
BFLOAT16 = 4e-2

Build = Callable[[Builder], Sequence[Tensor]]
CASES: list[Case] = []


def case(**options: object) -> Callable[[Build], Build]:
    """Adds the decorated function to the table under its own name."""

    def register(build: Build) -> Build:
        CASES.append(Case(build.__name__, build, **options))  # type: ignore[arg-type]
        return build

    return register


def row(name: str, build: Build, **options: object) -> None:
    CASES.append(Case(name, build, **options))  # type: ignore[arg-type]


# -- every function of scalar.SCALAR_FUNCTIONS ----------------------------------------

_UNARY = {
    "signed": "negative square exp sin cos tanh sigmoid erf floor identity",
    "away": "abs sign reciprocal",
    "positive": "sqrt rsqrt log log1p",
}
for _kind, _names in _UNARY.items():
    for _name in _names.split():
        row(_name, lambda b, n=_name, k=_kind: [getattr(mm, n)(b.feed("x", "a b", kind=k))])

for _name in ("add", "subtract", "multiply", "divide", "minimum", "maximum"):
    # One row per way to broadcast: b into [a, b]; and neither holds the other.
    for _way, _dims in (("into", "b"), ("union", "c a")):
        row(
            f"{_name}_{_way}",
            lambda b, n=_name, d=_dims, k="away" if _name == "divide" else "signed": [
                getattr(mm, n)(b.feed("x", "a b", kind=k), b.feed("y", d, kind=k))
            ],
        )
for _name in ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal"):
    row(
        _name,
        lambda b, n=_name: [
            getattr(mm, n)(b.feed("x", "a b", kind="ties"), b.feed("y", "b a", kind="ties")),
            getattr(mm, n)(b.feed("i", "a", "int32", "natural"), 3),
        ],
    )
for _name in ("logical_and", "logical_or"):
    row(
        _name, lambda b, n=_name: [getattr(mm, n)(b.feed("x", "a b", "bool", "bool"), b.feed("y", "b", "bool", "bool"))]
    )


row("logical_not", lambda b: [mm.logical_not(b.feed("x", "a b", "bool", "bool"))])
row("isfinite", lambda b: [mm.isfinite(b.feed("x", "a b", kind="special"))])


@case(gradients=False)
def special_values_travel(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b", kind="special")
    return [x + 1.0, mm.exp(x), mm.maximum(x, 0.5), mm.where(mm.isfinite(x), x, 7.0)]


@case(gradients=False)
def special_values_meet_in_reductions(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b", kind="special")
    infinite = mm.where(mm.isfinite(x), x, float("-inf"))
    return [mm.reduce_max(infinite, reduced_dim=b.a), mm.reduce_sum(x, reduced_dim=b.b)]


@case()
def numbers_left_and_right(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b", kind="away")
    return [2.0 - x, x - 2.0, 3.0 / x, x / 3.0, 1.5 * x + 0.5, -x, abs(x), x > 0.25, x <= 0.25]


@case()
def power_of_numbers(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b", kind="away")
    return [x**2, x**3.0, x**-2.0, 2.0 ** b.feed("y", "b")]


row("power_of_tensors", lambda b: [b.feed("x", "a b", kind="positive") ** b.feed("y", "b c")])


@case(smooth=False)
def maximum_shares_ties(b: Builder) -> Sequence[Tensor]:
    x, y = b.feed("x", "a b", kind="ties"), b.feed("y", "b", kind="ties")
    return [mm.maximum(x, y), mm.minimum(x, y), mm.maximum(x, 0.0), mm.minimum(x, 1.0)]


@case()
def where_of_tensors(b: Builder) -> Sequence[Tensor]:
    condition = b.feed("condition", "b c", "bool", "bool")
    return [mm.where(condition, b.feed("x", "a b"), b.feed("y", "c"))]


@case()
def where_of_numbers(b: Builder) -> Sequence[Tensor]:
    condition, x = b.feed("condition", "b a", "bool", "bool"), b.feed("x", "a b")
    return [
        mm.where(condition, 2.5, -1.0),
        mm.where(condition, x, 0.0),
        mm.where(condition, 1.5, x),
        mm.where(condition, mm.ones(b.shape("b"), "float64"), mm.zeros(b.shape("a"), "float64")),
        mm.where(mm.less(x, 0.5), 3, -2),
    ]


@case()
def where_hides_nan(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b", kind="away")
    positive = mm.greater(x, 0.0)
    return [mm.where(positive, mm.log(mm.where(positive, x, 1.0)), -1.0)]


@case()
def integer_arithmetic(b: Builder) -> Sequence[Tensor]:
    x, y = b.feed("x", "a b", "int32", "whole"), b.feed("y", "b", "int32", "whole")
    return [x + y, x - 3, x * y, x // y, x % y, mm.maximum(x, y), mm.minimum(x, 0), -x, mm.abs(x)]


@case()
def integer_types(b: Builder) -> Sequence[Tensor]:
    x, y = b.feed("x", "a b", "int64", "whole"), b.feed("y", "a", "uint8", "natural")
    return [x * 1_000_000_007, y + 1, mm.reduce_sum(x, reduced_dim=b.a), mm.square(x)]


@case(gradients=False)
def float_floordiv_and_mod(b: Builder) -> Sequence[Tensor]:
    x, y = b.feed("x", "a b", kind="away"), b.feed("y", "b", kind="away")
    return [x // y, x % y, x // 2.0, x % 0.75]


@case(tolerance=FLOAT32)
def casts(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b", "float32", "away")
    i = b.feed("i", "b", "int32", "whole")
    return [
        mm.cast(x, "float64"),
        mm.cast(mm.floor(x), "int32"),
        mm.cast(x, "int32"),
        mm.cast(i, "float64"),
        mm.cast(i, "int64"),
        mm.cast(mm.greater(x, 0.0), "float32"),
        mm.cast(mm.greater(i, 0), "int32"),
        mm.cast(i, "bool"),
    ]


@case(tolerance=FLOAT32)
def elementwise_float32(b: Builder) -> Sequence[Tensor]:
    x, y = b.feed("x", "a b", "float32", "away"), b.feed("y", "b", "float32", "away")
    return [mm.tanh(x * y) / y + mm.exp(-mm.square(x)), mm.sigmoid(x), mm.erf(x)]


@case(tolerance=BFLOAT16)
def elementwise_bfloat16(b: Builder) -> Sequence[Tensor]:
    x, y = b.feed("x", "a b", "bfloat16", "away"), b.feed("y", "b", "bfloat16", "away")
    return [x * y + x, mm.cast(x, "float32") * 3.0, mm.cast(mm.tanh(x), "float64")]


@case()
def broadcast(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "b")
    return [mm.broadcast(x, b.shape("a b c")), mm.broadcast(x, b.shape("b c"))]


@case()
def ordered_output(b: Builder) -> Sequence[Tensor]:
    x, y = b.feed("x", "a b"), b.feed("y", "c")
    return [mm.add(x, y, output_shape=b.shape("c b a")), mm.multiply(x, x, b.shape("b a"))]


@case()
def add_n(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b")
    return [mm.add_n([x, b.feed("y", "b"), x, b.feed("z", "a"), x])]


@case()
def one_tensor_many_times(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b")
    y = x * x + x
    return [y * x - y / (x * x + 1.0)]
