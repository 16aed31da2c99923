"""map against NumPy in float64: every scalar function, long expressions, broadcasting, memory in place."""

from __future__ import annotations

import numpy as np
import pytest

from meshmpi.errors import ProgramError
from meshmpi.ir.scalar import FLOATS, SCALAR_FUNCTIONS, Expr, Step, call, fill
from meshmpi.kernels import expressions
from tests.kernels.build import check, local_type, mixed, rounded, run
from tests.oracle import FUNCTIONS

TYPE = "batch:5;length:4;d_model:7"
SPLITS = {"batch": "rows", "d_model": "cols"}

POSITIVE = ("sqrt", "rsqrt", "log", "log1p", "power")
OF_FLOATS = ("divide", "sqrt", "rsqrt", "reciprocal", "exp", "log", "log1p", "sin", "cos", "tanh", "sigmoid", "erf")
INTEGER = [f for f in SCALAR_FUNCTIONS if f not in (*OF_FLOATS, "cast") and not f.startswith("logical")]


def test_every_scalar_function_has_an_oracle():
    assert set(FUNCTIONS) == set(SCALAR_FUNCTIONS)


def arguments(function: str, dtype: str) -> tuple[list, list]:
    """Global arrays and dtypes of the arguments of one function."""
    arity = SCALAR_FUNCTIONS[function].arity
    arrays = [mixed(5, 4, 7, seed=k) for k in range(arity)]
    if function in POSITIVE:
        arrays = [np.abs(a) + 0.01 for a in arrays]
    dtypes = [dtype] * arity
    if dtype not in FLOATS:
        arrays = [np.rint(a * 3) for a in arrays]
        arrays = [np.abs(a) for a in arrays] if function == "power" or dtype == "uint8" else arrays
    if function.startswith("logical"):
        arrays, dtypes = [a > 0 for a in arrays], ["bool"] * arity
    if function == "where":
        arrays[0], dtypes[0] = arrays[0] > 0, "bool"
    if function in ("equal", "not_equal", "minimum", "less_equal"):
        arrays[1] = np.where(arrays[1] > 0, arrays[0], arrays[1])
    return arrays, dtypes


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_function(function: str, dtype: str):
    arrays, dtypes = arguments(function, dtype)
    held = [rounded(a, d) if d in FLOATS else a for a, d in zip(arrays, dtypes, strict=True)]
    if function in ("floordiv", "mod"):  # these jump: keep away from whole quotients
        keep = np.abs(held[0] / held[1] - np.rint(held[0] / held[1])) > 0.02
        held[0] = np.where(keep, held[0], rounded(held[1] * 1.5, dtype))
        arrays = held
    result = SCALAR_FUNCTIONS[function].result
    out = "bool" if result == "bool" else dtype
    check(
        "map",
        [local_type(TYPE, d, **SPLITS) for d in dtypes],
        [local_type(TYPE, out, **SPLITS)],
        arrays,
        [FUNCTIONS[function](*held)],
        expr=call(function, len(arrays), out),
        tolerance=5e-6 if (function, dtype) == ("power", "float32") else None,
    )


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
@pytest.mark.parametrize("function", INTEGER)
def test_integer_function(function: str, dtype: str):
    arrays, dtypes = arguments(function, dtype)
    if function in ("floordiv", "mod"):
        arrays[1] = np.where(arrays[1] == 0, 3, arrays[1])
    if function == "power":
        arrays[1] = np.minimum(arrays[1], 3)
    types = [np.dtype(d) for d in dtypes]
    held = [a.astype(t) for a, t in zip(arrays, types, strict=True)]
    result = "bool" if SCALAR_FUNCTIONS[function].result == "bool" else dtype
    check(
        "map",
        [local_type(TYPE, d, **SPLITS) for d in dtypes],
        [local_type(TYPE, result, **SPLITS)],
        arrays,
        [FUNCTIONS[function](*held)],
        expr=call(function, len(arrays), result),
    )


def test_python_semantics_of_integer_division_and_negative_powers():
    a = np.arange(-10, 10).reshape(1, 20)
    t = local_type("one:1;n:20", "int32")
    for function, divisor in (("floordiv", 3), ("floordiv", -3), ("mod", 3), ("mod", -3)):
        expr = Expr((Step(function, ("i0", divisor), "int32"),), ("t0",))
        python = [x // divisor if function == "floordiv" else x % divisor for x in a.ravel().tolist()]
        check("map", [t], [t], [a], [np.reshape(python, a.shape)], expr=expr)
    expr = Expr((Step("power", ("i0", -1), "int32"),), ("t0",))
    expected = np.where(a == 1, 1, np.where(a == -1, -1, 0))
    check("map", [t], [t], [a], [expected], expr=expr)


CASTS = {
    "float32": ("int32", "bfloat16", "bool"),
    "float64": ("float32",),
    "bfloat16": ("float64", "int32"),
    "int32": ("float32", "bool", "uint8"),
    "int64": ("bfloat16",),
    "bool": ("float32", "bfloat16"),
}


@pytest.mark.parametrize(("source", "target"), [(s, t) for s, targets in CASTS.items() for t in targets])
def test_cast(source: str, target: str):
    a = np.rint(np.abs(mixed(5, 4, 7)) * 3)
    held = a > 0 if source == "bool" else a
    expected = held != 0 if target == "bool" else held.astype(np.float64)
    expr = Expr((Step("cast", ("i0",), target),), ("t0",))
    types = [local_type(TYPE, source, **SPLITS)], [local_type(TYPE, target, **SPLITS)]
    check("map", *types, [held], [expected], expr=expr)


def test_special_values_pass_without_warnings():
    a = np.array([[0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, -1e30, 89.0]])
    t = local_type("one:1;n:8", "float32")
    functions = ("reciprocal", "rsqrt", "log", "exp", "sqrt", "sigmoid", "tanh", "erf", "sin", "square", "sign")
    for function in functions:
        with np.errstate(all="ignore"):
            oracle = FUNCTIONS[function]
            expected = oracle(a.astype(np.float32)).astype(np.float32)
        check("map", [t], [t], [a], [expected], expr=call(function, 1, "float32"))
    before = np.geterr()
    condition = np.isfinite(a)
    expr = Expr((Step("isfinite", ("i0",), "bool"), Step("where", ("t0", "i0", 7.0), "float32")), ("t1",))
    check("map", [t], [t], [a], [np.where(condition, a, 7)], expr=expr)
    assert np.geterr() == before


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_erf_is_accurate(dtype: str):
    x = np.concatenate(
        [np.linspace(-6.5, 6.5, 20001), np.geomspace(1e-12, 1, 2000), -np.geomspace(1e-12, 1, 2000)]
    ).astype(dtype)
    x[0], x[1] = np.inf, -np.inf
    t = local_type(f"n:{x.size}", dtype)
    ran = next(run("map", [t], [t], [x], expr=call("erf", 1, dtype)))
    want = FUNCTIONS["erf"](x.astype(np.float64))
    error = np.abs(ran.outputs[0].astype(np.float64) - want) / np.maximum(np.abs(want), 1e-300)
    assert error.max() <= (1e-15 if dtype == "float64" else 3e-7)


# Long expressions ---------------------------------------------------------------------------------------

LAYER_NORM = Expr(
    (
        Step("subtract", ("i0", "i1"), "float32"),
        Step("add", ("i2", 1e-6), "float32"),
        Step("rsqrt", ("t1",), "float32"),
        Step("multiply", ("t0", "t2"), "float32"),
        Step("multiply", ("t3", "i3"), "float32"),
        Step("add", ("t4", "i4"), "float32"),
    ),
    ("t5",),
)


@pytest.mark.parametrize("batch", [3, 5, 40])
def test_layer_norm_with_broadcasting_by_name(batch: int):
    length, d_model = 24, 70  # 40 x 24 x 70 takes several pieces
    x = mixed(batch, length, d_model)
    mean, variance = x.mean(-1), x.var(-1).T  # variance comes as [length, batch]
    scale, bias = mixed(d_model, seed=1), mixed(d_model, seed=2)
    full = f"batch:{batch};length:{length};d_model:{d_model}"
    inputs = [
        local_type(full, batch="rows", d_model="cols"),
        local_type(f"batch:{batch};length:{length}", batch="rows"),
        local_type(f"length:{length};batch:{batch}", batch="rows"),
        local_type(f"d_model:{d_model}", d_model="cols"),
        local_type(f"d_model:{d_model}", d_model="cols"),
    ]
    expected = (x - mean[..., None]) / np.sqrt(variance.T[..., None] + 1e-6) * scale + bias
    check("map", inputs, inputs[:1], [x, mean, variance, scale, bias], [expected], expr=LAYER_NORM, tolerance=2e-5)


@pytest.mark.parametrize("piece", [1, 7, 30, 400])
def test_pieces_of_any_size(piece: int, monkeypatch):
    monkeypatch.setattr(expressions, "PIECE_ELEMENTS", piece)
    test_layer_norm_with_broadcasting_by_name(3)
    test_output_in_another_order_of_dims()
    test_result_that_is_read_later_in_place()
    test_results_may_be_inputs_or_twice_the_same()
    for forms in (("x", "y"), ("y", 0)):
        test_where_with_numbers_and_repeated_conditions("bfloat16", forms)


ADAM = Expr(
    (
        Step("multiply", ("i1", 0.9), "float32"),
        Step("multiply", ("i0", 0.1), "float32"),
        Step("add", ("t0", "t1"), "float32"),
        Step("square", ("i0",), "float32"),
        Step("multiply", ("t3", 0.001), "float32"),
        Step("multiply", ("i2", 0.999), "float32"),
        Step("add", ("t4", "t5"), "float32"),
        Step("abs", ("t6",), "float32"),  # where the second moment is drawn
        Step("sqrt", ("t7",), "float32"),
        Step("add", ("t8", 1e-8), "float32"),
        Step("divide", ("t2", "t9"), "float32"),
        Step("multiply", ("t10", "i4"), "float32"),
        Step("subtract", ("i3", "t11"), "float32"),
    ),
    ("t2", "t6", "t12"),
)
IN_PLACE = ({}, {0: 1, 1: 2, 2: 3}, {2: 0}, {0: 3, 1: 0, 2: 1})
"""Result of `ADAM` -> the operand whose memory it takes."""


@pytest.mark.parametrize("in_place", IN_PLACE)
def test_several_results_also_in_the_memory_of_inputs(in_place):
    shape = "d_model:300;d_ff:211"
    g, m, w = (mixed(300, 211, seed=k) for k in range(3))
    v, rate = np.abs(mixed(300, 211, seed=4)), np.array(0.01)
    t = local_type(shape, d_model="rows", d_ff="cols")
    m1, v1 = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    expected = [m1, v1, w - 0.01 * m1 / (np.sqrt(v1) + 1e-8)]
    options = {"expr": ADAM, "in_place": in_place, "tolerance": 1e-5}
    check("map", [t, t, t, t, local_type("")], [t, t, t], [g, m, v, w, rate], expected, **options)


def test_result_that_is_read_later_in_place():
    """The second result needs the input whose memory the first result takes."""
    expr = Expr((Step("add", ("i0", 1.0), "float32"), Step("multiply", ("t0", "i0"), "float32")), ("t0", "t1"))
    x, t = mixed(5, 4, 7), local_type(TYPE, **SPLITS)
    for in_place in (None, {0: 0}, {1: 0}):
        check("map", [t], [t, t], [x], [x + 1, (x + 1) * x], expr=expr, in_place=in_place)


def test_results_may_be_inputs_or_twice_the_same():
    expr = Expr((Step("negative", ("i0",), "float32"),), ("i1", "t0", "t0", "i0"))
    x, y = mixed(5, 4, 7), mixed(7, seed=1)
    t, row = local_type(TYPE, **SPLITS), local_type("d_model:7", d_model="cols")
    expected = [np.broadcast_to(y, x.shape), -x, -x, x]
    check("map", [t, row], [t] * 4, [x, y], expected, expr=expr)
    check("map", [t, row], [t] * 4, [x, y], expected, expr=expr, in_place={0: 0})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int32", "bool", "uint8"])
@pytest.mark.parametrize("forms", [("x", "y"), ("x", 0), ("x", 1), (0, "y"), (1, 0), ("y", "x")])
def test_where_with_numbers_and_repeated_conditions(dtype: str, forms):
    condition = np.random.default_rng(0).random((5, 4)) > 0.5
    arrays = {"x": np.abs(mixed(5, 4, 7)).round() % 2, "y": np.abs(mixed(7, seed=1)).round() % 2}
    number = bool if dtype == "bool" else float if dtype in FLOATS else int
    inputs = [local_type("batch:5;length:4", "bool", batch="rows")]
    data, args = [condition], []
    for form in forms:
        if isinstance(form, str):
            args.append(f"i{len(inputs)}")
            shape = TYPE if form == "x" else "d_model:7"
            inputs.append(local_type(shape, dtype, **{k: v for k, v in SPLITS.items() if k in shape}))
            data.append(arrays[form])
        else:
            args.append(number(form))
    expr = Expr((Step("where", ("i0", *args), dtype),), ("t0",))
    a, b = (arrays.get(f, f) if isinstance(f, str) else f for f in forms)
    want = np.broadcast_to(np.where(condition[..., None], a, b), (5, 4, 7))
    check("map", inputs, [local_type(TYPE, dtype, **SPLITS)], data, [want], expr=expr)


@pytest.mark.parametrize("condition", [True, False])
def test_where_with_a_number_as_condition(condition: bool):
    x, y, t = mixed(5, 4, 7), mixed(5, 4, 7, seed=1), local_type(TYPE, **SPLITS)
    expr = Expr((Step("where", (condition, "i0", "i1"), "float32"),), ("t0",))
    check("map", [t, t], [t], [x, y], [x if condition else y], expr=expr)


def test_where_keeps_nan_and_does_not_spread_it():
    x = np.array([[np.nan, 1.0, np.inf, -np.inf]])
    t = local_type("one:1;n:4", "float32")
    expr = Expr((Step("less", ("i0", 2.0), "bool"), Step("where", ("t0", "i0", 0.0), "float32")), ("t1",))
    check("map", [t], [t], [x], [np.array([[0.0, 1.0, 0.0, -np.inf]])], expr=expr)
    expr = Expr((Step("less", ("i0", 2.0), "bool"), Step("where", ("t0", 5.0, "i0"), "float32")), ("t1",))
    check("map", [t], [t], [x], [np.array([[np.nan, 5.0, np.inf, 5.0]])], expr=expr)


def test_bfloat16_is_rounded_after_every_step():
    """A fused expression gives the bits of its steps run one by one."""
    steps = (
        Step("multiply", ("i0", 1.1), "bfloat16"),
        Step("add", ("t0", "i0"), "bfloat16"),
        Step("exp", ("t1",), "bfloat16"),
    )
    x, t = mixed(5, 4, 7), local_type(TYPE, "bfloat16", **SPLITS)
    fused = list(run("map", [t], [t], [x], expr=Expr(steps, ("t2",))))
    value = x
    singles = [("multiply", ("i0", 1.1)), ("add", ("i0", "i1")), ("exp", ("i0",))]
    for function, args in singles:
        inputs = [t, t] if function == "add" else [t]
        arrays = [value, x] if function == "add" else [value]
        expr = Expr((Step(function, args, "bfloat16"),), ("t0",))
        whole = np.zeros((5, 4, 7))
        ran = list(run("map", inputs, [t], arrays, expr=expr))
        for r in ran:
            whole[r.blocks[0]] = r.outputs[0]
        value = whole
    for a, b in zip(fused, ran, strict=True):
        assert a.outputs[0].tobytes() == b.outputs[0].tobytes()


def test_fill_and_scalars_and_empty_blocks():
    for dtype, value in (("float32", -2.5), ("int32", 7), ("bool", True), ("bfloat16", 1.5)):
        t = local_type("batch:3;io:5", dtype, batch="rows", io="cols")
        check("map", [], [t], [], [np.full((3, 5), value)], expr=fill(value, dtype))
    scalar = local_type("", "float32")
    check("map", [scalar], [scalar], [np.array(3.0)], [np.array(9.0)], expr=call("square", 1, "float32"))
    tiny = local_type("batch:1;io:2", batch="rows", io="cols")  # some blocks are empty
    x = mixed(1, 2)
    check("map", [tiny], [tiny], [x], [np.exp(x)], expr=call("exp", 1, "float32"))


def test_output_in_another_order_of_dims():
    x, y = mixed(5, 4, 7), mixed(7, 5, seed=1)
    inputs = [local_type(TYPE, **SPLITS), local_type("d_model:7;batch:5", **SPLITS)]
    out = local_type("d_model:7;batch:5;length:4", **SPLITS)
    expected = x.transpose(2, 0, 1) * y[..., None]
    check("map", inputs, [out], [x, y], [expected], expr=call("multiply", 2, "float32"))


def test_overlap_other_than_in_place_is_refused():
    from meshmpi.kernels import Runtime, bind
    from tests.kernels.build import aligned_bytes, one_instruction

    t = local_type("n:8")
    instruction, program = one_instruction("map", [t], [t], expr=call("exp", 1, "float32"))
    memory = np.zeros(12, np.float32)
    arrays = {0: memory[:8], 1: memory[4:]}
    with pytest.raises(ProgramError, match="overlaps input 0"):
        bind(instruction, program, {"rows": 0, "cols": 0}, arrays, aligned_bytes(0), Runtime())


def test_numbers_that_do_not_fit_are_refused():
    t = local_type("n:8", "uint8")
    expr = Expr((Step("add", ("i0", 300), "uint8"),), ("t0",))
    with pytest.raises(ProgramError, match="300 does not fit data type uint8"):
        list(run("map", [t], [t], [np.zeros(8)], expr=expr))


def test_steps_that_nobody_reads_give_their_place_back_once():
    """A dead step may lie in the slot of its argument, which then is free for one value only."""
    steps = (
        Step("exp", ("i0",), "float64"),
        Step("multiply", (0.5, "t0"), "float64"),  # t1 is dead
        Step("add", ("i0", 1.0), "float64"),
        Step("add", ("i0", 2.0), "float64"),
        Step("multiply", ("t2", "t3"), "float64"),
        Step("add", ("t4", "t2"), "float64"),
        Step("multiply", ("t5", "t3"), "float64"),
    )
    t = local_type(TYPE, "float64")
    x = mixed(5, 4, 7)
    a, b = x + 1.0, x + 2.0
    check("map", [t], [t], [x], [(a * b + a) * b], expr=Expr(steps, ("t6",)))
