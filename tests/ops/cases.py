"""The table of cases: one row per operation, function and data type that matters.

A row alone gets its operation the oracle, gradient, every-layout and MPI tests.  Tolerances:
float64 1e-12 (a few roundings of sums in another order); float32 2e-5 and bfloat16 4e-2, because
each result is rounded to 24 or 8 bits and the float64 oracle is not.
A row is a function under ``@case()``, or a call of ``row()`` where many look alike; those of
elementwise functions are in elementwise_cases.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import meshmpi as mm
import tests.ops.composed_cases
import tests.ops.convolution_cases
import tests.ops.language_cases
import tests.ops.layer_cases
import tests.ops.pending_cases  # noqa: F401  (adds its rows)
from meshmpi.graph import Tensor
from tests.ops.build import Builder
from tests.ops.elementwise_cases import BFLOAT16, CASES, FLOAT32, case, row

__all__ = ["CASES", "case", "row"]

# -- reductions ------------------------------------------------------------------------------------

for _name, _op in (("sum", mm.reduce_sum), ("max", mm.reduce_max), ("min", mm.reduce_min)):
    row(
        f"reduce_{_name}",
        lambda b, f=_op: [
            f(x := b.feed("x", "a b c"), reduced_dim=b.b),
            f(x, reduced_dim=["a", "c"]),
            f(x),
            f(x, output_shape=b.shape("c a")),
        ],
    )
    row(f"reduce_{_name}_int32", lambda b, f=_op: [f(x := b.feed("x", "a b", "int32", "whole"), reduced_dim=b.a), f(x)])
    row(
        f"reduce_{_name}_float32",
        lambda b, f=_op: [f(x := b.feed("x", "a b", "float32"), reduced_dim=b.a), f(x)],
        tolerance=FLOAT32,
    )


@case()
def reduce_mean(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b c")
    return [mm.reduce_mean(x), mm.reduce_mean(x, reduced_dim=b.b), mm.reduce_mean(x, output_shape=[b.a])]


@case(smooth=False)
def reduce_max_shares_ties(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b", kind="ties")
    return [mm.reduce_max(x, reduced_dim=b.b), mm.reduce_min(x, reduced_dim=b.a), mm.reduce_max(x)]


@case()
def reduce_any_and_all(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b", "bool", "bool")
    return [mm.reduce_any(x, reduced_dim=b.a), mm.reduce_all(x, reduced_dim=b.b), mm.reduce_all(x)]


@case(tolerance=BFLOAT16)
def reduce_bfloat16(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b", "bfloat16")
    return [mm.reduce_sum(x, reduced_dim=b.a), mm.reduce_max(x, reduced_dim=b.b)]


@case()
def reduction_feeds_map_and_reduction(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b")
    centered = x - mm.reduce_mean(x, reduced_dim=b.b)
    return [mm.reduce_sum(mm.square(centered), reduced_dim=b.a) + mm.reduce_sum(x, reduced_dim=b.a)]


@case()
def softmax_by_hand(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b c")
    e = mm.exp(x - mm.stop_gradient(mm.reduce_max(x, reduced_dim=b.c)))
    return [e / mm.reduce_sum(e, reduced_dim=b.c)]


# -- contractions ----------------------------------------------------------------------------------


row("matmul", lambda b: [mm.einsum([b.feed("x", "a b"), b.feed("y", "b c")], b.shape("a c"))])
row(
    "matmul_transposed",
    lambda b: [b.feed("x", "b a") @ b.feed("y", "c b"), mm.matmul(b.feed("z", "a b"), b.feed("w", "b c"))],
)


@case()
def matmul_of_itself(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b")
    return [mm.einsum([x, x], b.shape("a")), mm.einsum([x, x], b.shape("b")), mm.einsum([x, x], [])]


row("batched_matmul", lambda b: [mm.einsum([b.feed("x", "e a b"), b.feed("y", "b e c")], b.shape("e a c"))])
row("outer_product", lambda b: [mm.einsum([b.feed("x", "a"), b.feed("y", "b")], b.shape("b a"))])


@case()
def einsum_with_lonely_dims(b: Builder) -> Sequence[Tensor]:
    # b is in one input only and not in the output; so is c.
    return [mm.einsum([b.feed("x", "a b"), b.feed("y", "a c")], b.shape("a"))]


@case(limit=40)
def einsum_of_three(b: Builder) -> Sequence[Tensor]:
    xs = [b.feed("x", "a b"), b.feed("y", "b c"), b.feed("z", "c e")]
    return [mm.einsum(xs, b.shape("e a")), mm.einsum(xs, b.shape("b"))]


@case()
def einsum_of_one(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b")
    return [mm.einsum([x], b.shape("b")), mm.einsum([x], b.shape("b a"))]


@case()
def einsum_reduced_dims(b: Builder) -> Sequence[Tensor]:
    x, y = b.feed("x", "a b c"), b.feed("y", "b c")
    return [mm.einsum([x, y], reduced_dims=[b.b]), mm.einsum([x, y])]


row(
    "einsum_float32",
    lambda b: [mm.einsum([b.feed("x", "a b", "float32"), b.feed("y", "b c", "float32")], b.shape("a c"))],
    tolerance=FLOAT32,
)
row(
    "einsum_bfloat16",
    lambda b: [mm.einsum([b.feed("x", "a b", "bfloat16"), b.feed("y", "b c", "bfloat16")], b.shape("a c"))],
    tolerance=BFLOAT16,
)


@case()
def einsum_int32(b: Builder) -> Sequence[Tensor]:
    x, y = b.feed("x", "a b", "int32", "whole"), b.feed("y", "b c", "int32", "whole")
    return [mm.einsum([x, y], b.shape("a c"))]


@case()
def sum_of_two_products(b: Builder) -> Sequence[Tensor]:
    # Two sums over one split dim that are added: the passes may reduce once.
    x, w = b.feed("x", "a b"), b.feed("w", "b c")
    return [(x @ w) + 2.0 * (mm.sin(x) @ mm.cos(w)) - 1.0]


# -- structure -------------------------------------------------------------------------------------


@case()
def transpose(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b c")
    return [mm.transpose(x, b.shape("c a b")), mm.transpose(x, b.shape("b a c")) * 2.0]


@case(limit=60)
def reshape_merges_dims(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b c")
    merged = mm.Dimension("m", b.a.size * b.b.size)
    return [mm.reshape(x, [merged, b.c])]


@case(limit=60)
def reshape_divides_dims(b: Builder) -> Sequence[Tensor]:
    merged = mm.Dimension("m", b.a.size * b.b.size)
    x = b.feed("x", mm.Shape([b.c, merged]))
    return [mm.reshape(x, [b.c, b.a, b.b])]


@case(limit=60)
def reshape_across_dims(b: Builder) -> Sequence[Tensor]:
    # [a, b] -> [p, q] with p = b and q = a in size: no boundary between dims stays where it was.
    x = b.feed("x", "a b")
    return [mm.reshape(x, [mm.Dimension("p", b.b.size), mm.Dimension("q", b.a.size)])]


@case(limit=60)
def reshape_with_size_one(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b")
    y = mm.reshape(x, [b.a, mm.Dimension("u", 1), b.b])
    return [y, mm.reshape(mm.reduce_sum(x), [mm.Dimension("u", 1)])]


@case(limit=60)
def rename(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b")
    return [mm.rename(x, {"a": "p"}) * 3.0, mm.rename_dimension(x, "b", "q")]


@case(limit=60)
def rename_swaps(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", mm.Shape([("p", b.a.size), ("q", b.a.size)]))
    return [mm.rename(x, {"p": "q", "q": "p"}) + x]


@case(limit=60)
def rename_meets_itself(b: Builder) -> Sequence[Tensor]:
    # Attention's pattern: x against itself under another name.
    x = b.feed("x", "a b")
    memory = mm.rename(x, {"a": "p"})
    return [mm.einsum([x, memory], [b.a, mm.Dimension("p", b.a.size)])]


@case(limit=60)
def replace_dimensions(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b c")
    y = mm.replace_dimensions(x, [b.a, b.b], mm.Dimension("m", b.a.size * b.b.size))
    return [mm.reduce_max(y, reduced_dim="m"), mm.replace_dimensions(y, "m", [b.a, b.b])]


@case()
def slice_of_dim(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b")
    n = b.b.size
    return [mm.slice(x, 1, n - 2, "b") * 2.0, mm.slice(x, 0, n, "b", stride=2)]


@case()
def slice_with_stride(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b")
    return [mm.slice(x, 1, b.b.size - 1, b.b, stride=3)]


@case()
def pad(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b")
    return [mm.pad(x, [2, 1], b.a), mm.pad(x, [0, 3], b.b, value=-1.5)]


@case()
def concat(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b")
    y = b.feed("y", mm.Shape([("b", 2), b.a]))
    return [mm.concat([x, y, x], "b")]


@case()
def split(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b")
    first, second, third = mm.split(x, "b", [1, b.b.size - 3, 2])
    return [mm.exp(first), second * second, third + mm.slice(x, 0, 2, "b")]


@case(limit=60)
def stack_and_unstack(b: Builder) -> Sequence[Tensor]:
    x, y = b.feed("x", "a b"), b.feed("y", "a b")
    stacked = mm.stack([x, y, x * y], "s", axis=1)
    first, _, last = mm.unstack(stacked, "s")
    return [stacked * 2.0, first - last]


@case()
def shift(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b")
    return [mm.shift(x, 2, "b", wrap=True), mm.shift(x, -1, "a", wrap=False), mm.shift(x, 1, "a", True)]


# -- indexing --------------------------------------------------------------------------------------


@case()
def gather(b: Builder) -> Sequence[Tensor]:
    # Some indices lie outside the table: zeros in every layout.
    index = b.index("i", "a", -2, b.b.size + 2)
    return [mm.gather(b.feed("table", "b c"), index, b.b)]


@case(limit=60)
def gather_from_the_middle(b: Builder) -> Sequence[Tensor]:
    index = b.index("i", "a e", 0, b.b.size)
    return [mm.gather(b.feed("table", "c b"), index, "b") * 2.0]


@case()
def gather_along_its_own_name(b: Builder) -> Sequence[Tensor]:
    index = b.index("i", "b", 0, b.b.size)
    return [mm.gather(b.feed("table", "b c"), index, "b")]


@case()
def scatter_add(b: Builder) -> Sequence[Tensor]:
    # More updates than rows: duplicates are summed; indices outside are dropped.
    index = b.index("i", "b", -1, b.a.size + 1)
    return [mm.scatter_add(b.feed("x", "b c"), index, b.a)]


@case(limit=60)
def scatter_add_ordered(b: Builder) -> Sequence[Tensor]:
    index = b.index("i", "a e", 0, b.b.size)
    updates = b.feed("x", "e c a")
    return [mm.scatter_add(updates, index, b.b, b.shape("c b")) * 0.5]


@case()
def embedding_used_twice(b: Builder) -> Sequence[Tensor]:
    table = b.variable("table", "b c")
    x = mm.gather(table, b.index("i", "a", 0, b.b.size), "b")
    return [mm.einsum([mm.tanh(x), table], b.shape("a b"))]


row("top_k", lambda b: list(mm.top_k(b.feed("x", "a b"), "b", b.k)))
row("top_k_of_ties", lambda b: list(mm.top_k(b.feed("x", "b a", kind="ties"), b.b, b.k)), smooth=False)


@case()
def one_hot_by_hand(b: Builder) -> Sequence[Tensor]:
    index = b.index("i", "a", 0, b.b.size)
    hit = mm.equal(index, mm.range(b.b))
    return [mm.reduce_sum(mm.where(hit, b.feed("x", "a b"), 0.0), reduced_dim=b.b)]


# -- sources ---------------------------------------------------------------------------------------


@case()
def constants(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b")
    ones, zeros = mm.ones(b.shape("b c"), "float64"), mm.zeros(b.shape("a"), "float64")
    return [x * 2.0 + ones, mm.constant(-1.5, b.shape("a b"), "float64") + zeros, mm.zeros_like(x)]


@case()
def ranges(b: Builder) -> Sequence[Tensor]:
    i, j = mm.range(b.a), mm.range(b.b)
    causal = mm.greater_equal(i, j)
    return [i, mm.range(b.b, "float64") * b.feed("x", "a b"), mm.cast(causal, "float32"), i * 10 + j]


row("step_number", lambda b: [mm.step_number() + 1, mm.cast(mm.step_number(), "float64") * b.feed("x", "a b")])


@case(tolerance=1e-6)  # float32 draws, transcendental functions of the platform
def random_numbers(b: Builder) -> Sequence[Tensor]:
    u = mm.random_uniform(b.shape("a b"), -1.0, 2.0)
    z = mm.random_normal(b.shape("b c"), 1.0, 2.0)
    return [u, z, mm.random_uniform(b.shape("b"), dtype="float64")]


@case()
def dropout_by_hand(b: Builder) -> Sequence[Tensor]:
    keep = mm.less(mm.random_uniform(b.shape("a c")), 0.75)
    return [mm.where(keep, b.feed("x", "a b c") / 0.75, 0.0)]


@case()
def variables(b: Builder) -> Sequence[Tensor]:
    w = b.variable("w", "a b")
    return [w @ b.variable("v", "b c"), w + 1.0, b.variable("n", "b", "int32", trainable=False) * 2]


@case(tolerance=BFLOAT16)
def variable_in_two_types(b: Builder) -> Sequence[Tensor]:
    w = b.variable("w", "b c", mm.VariableDType("float32", "bfloat16"))
    return [b.feed("x", "a b", "bfloat16") @ w]


@case()
def updates_read_old_values(b: Builder) -> Sequence[Tensor]:
    # Swapping two variables works only when all reads come before all writes.
    v, w, n = b.variable("v", "a b"), b.variable("w", "a b"), b.variable("n", "", "int32")
    b.assign(v, w + 0.5)
    b.assign(w, v)
    b.assign(n, n + 1)
    return [v - w]


@case()
def swap_of_variables(b: Builder) -> Sequence[Tensor]:
    v, w = b.variable("v", "a b"), b.variable("w", "a b")
    b.assign(v, w)
    b.assign(w, v)
    return [mm.reduce_sum(v)]


@case()
def updates_by_transposed_and_copied_variables(b: Builder) -> Sequence[Tensor]:
    # Every value is computed, and every fetch taken, before the first variable changes.
    v, w = b.variable("v", "a b"), b.variable("w", "b a")
    b.assign(v, w)
    b.assign(w, mm.identity(mm.stop_gradient(mm.identity(v))))
    return [v, w, v - 1.0]


@case(limit=60)
def sgd_by_hand(b: Builder) -> Sequence[Tensor]:
    w, bias = b.variable("w", "b c"), b.variable("bias", "c")
    y = mm.tanh(b.feed("x", "a b") @ w + bias)
    loss = mm.reduce_mean(mm.square(y - b.feed("t", "a c")))
    for variable, g in zip((w, bias), mm.gradients(loss, [w, bias]), strict=True):
        b.assign(variable, variable - 0.1 * g)
    return [loss, y]


# -- placement -------------------------------------------------------------------------------------


@case(refuses=True)
def stored_elsewhere(b: Builder) -> Sequence[Tensor]:
    # Kept split over rows, computed with as the layout says (ZeRO-3); updated as stored.
    w = b.variable("w", "b c", storage="b:rows")
    y = b.feed("x", "a b") @ w
    loss = mm.reduce_sum(mm.square(y))
    (g,) = mm.gradients(loss, [w])
    b.assign(w, mm.read_stored(w.variable) - 0.01 * mm.as_stored(g, w.variable))
    return [y, loss]


@case(refuses=True)
def slots_stored_elsewhere(b: Builder) -> Sequence[Tensor]:
    # The optimizer's slot is split further than its variable (ZeRO-1): the update follows the slot.
    w = b.variable("w", "b c")
    m = b.variable("m", "b c", storage="c:cols", trainable=False)
    (g,) = mm.gradients(mm.reduce_sum(mm.square(b.feed("x", "a b") @ w)), [w])
    new_m = 0.9 * mm.read_stored(m.variable) + mm.as_stored(g, m.variable)
    b.assign(m, new_m)
    b.assign(w, mm.read_stored(w.variable) - 0.01 * new_m)
    return [mm.reduce_sum(new_m)]


@case(refuses=True)
def constrained_and_released(b: Builder) -> Sequence[Tensor]:
    # Sequence parallelism: between two products the rows are split over cols.
    x = b.feed("x", "a b")
    y = mm.constrain(x @ b.feed("w", "b c"), "a:cols")
    return [mm.tanh(y) @ b.feed("v", "c e"), y * 2.0]


@case()
def constrained_to_be_whole(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b")
    return [mm.constrain(x * 2.0, "a:;b:") + 1.0, mm.reduce_sum(mm.constrain(x, "b:"), reduced_dim=b.b)]


@case(smooth=False)  # central differences do not know where a gradient is stopped
def stop_gradient(b: Builder) -> Sequence[Tensor]:
    x = b.feed("x", "a b")
    return [mm.stop_gradient(x) * x, mm.stop_gradient(mm.exp(x)) + x]


# -- small models ----------------------------------------------------------------------------------


@case(limit=60)
def two_layer_network(b: Builder) -> Sequence[Tensor]:
    x, w, v = b.feed("x", "a b"), b.variable("w", "b c"), b.variable("v", "c b")
    h = mm.maximum(mm.einsum([x, w], b.shape("a c")) + b.variable("bias", "c"), 0.0)
    return [mm.reduce_mean(mm.square(mm.einsum([h, v], b.shape("a b")) - x))]


@case(limit=60)
def attention_by_hand(b: Builder) -> Sequence[Tensor]:
    # a: length, b: d_model, c: heads, e: d_kv, p: memory length
    x, w = b.feed("x", "a b"), b.variable("w", "b c e")
    q = mm.einsum([x, w], b.shape("a c e")) * 0.05
    k = mm.einsum([mm.rename(x, {"a": "p"}), b.variable("u", "b c e")])
    k = mm.einsum([k], [mm.Dimension("p", b.a.size), b.c, b.e])
    logits = mm.einsum([q, k], [b.c, b.a, mm.Dimension("p", b.a.size)])
    causal = mm.greater_equal(mm.range(b.a), mm.range(mm.Dimension("p", b.a.size)))
    logits = mm.where(causal, logits, -1e9)
    e = mm.exp(logits - mm.stop_gradient(mm.reduce_max(logits, reduced_dim="p")))
    weights = e / mm.reduce_sum(e, reduced_dim="p")
    return [mm.einsum([weights, k, b.variable("o", "c e b")], b.shape("a b"))]


@case()
def sums_over_a_band(b: Builder) -> Sequence[Tensor]:
    x, w = b.feed("x", "a b"), b.feed("w", "b c")
    near, earlier = mm.Band("a", "b", -1, 1), mm.Band("b", "a", least=2)
    return [
        mm.einsum([x, w], b.shape("a c"), band=near),
        mm.einsum([w, b.feed("v", "a c")], b.shape("a b"), band=earlier),
        mm.reduce_sum(x, reduced_dim="b", band=near),
        mm.reduce_sum(x, reduced_dim="a", band=earlier),
        mm.maximum(mm.reduce_max(x, reduced_dim="b", band=earlier), -9.0),
        mm.softmax(x, "b", band=near),
    ]


@case()
def second_derivatives(b: Builder) -> Sequence[Tensor]:
    x, w = b.feed("x", "a b"), b.feed("w", "b c")
    (g,) = mm.gradients(mm.reduce_sum(mm.tanh(x @ w)), [w])
    return [mm.square(g)]


@case()
def functions_behind_operators(b: Builder) -> Sequence[Tensor]:
    x, y = b.feed("x", "a b", kind="away"), b.feed("y", "b", kind="away")
    return [mm.floordiv(x, y), mm.mod(x, 0.75), x - 2.0 * mm.ones_like(x)]
