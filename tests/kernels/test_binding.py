"""What holds for every kernel: refusals, FLOP formulas, no memory taken inside a step."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from meshmpi.errors import ProgramError
from meshmpi.ir.flops import local_flops
from meshmpi.ir.kinds import Map
from meshmpi.ir.program import Instruction, Program
from meshmpi.ir.scalar import DTYPES, ITEM_BYTES, Expr, Step, call
from meshmpi.kernels import Runtime, bind, numpy_dtype, numpy_kernels, workspace_bytes
from meshmpi.kernels.steps import quiet
from meshmpi.kernels.views import collapse
from tests.kernels.build import MESH, aligned_bytes, local_type, one_instruction
from tests.kernels.test_map import LAYER_NORM

HERE = {"rows": 0, "cols": 0}


def test_data_types_have_the_size_the_planner_counts():
    assert {d: numpy_dtype(d).itemsize for d in DTYPES} == ITEM_BYTES


def test_collectives_and_executor_kinds_have_no_kernel():
    without = {"all_reduce": {"axes": ("rows",), "op": "sum"}, "feed": {"name": "x"}}
    without |= {kind: {"variable": "v"} for kind in ("read", "write")}
    for kind, attrs in without.items():
        instruction, program = one_instruction(kind, [local_type("n:4")], [local_type("n:4")], **attrs)
        with pytest.raises(ProgramError, match=f"no NumPy kernel for '{kind}'"):
            workspace_bytes(instruction, program, HERE)


def bound(kind, inputs, outputs, changed=None, shorter=0, **attrs):
    """A kernel on zeros, some arrays ``changed``, the workspace ``shorter`` than it asks for."""
    instruction, program = one_instruction(kind, inputs, outputs, **attrs)
    arrays = {
        k: np.zeros(t.local_sizes(program.mesh, HERE), numpy_dtype(t.dtype)) for k, t in enumerate([*inputs, *outputs])
    }
    arrays.update(changed or {})
    n = workspace_bytes(instruction, program, HERE)
    return bind(instruction, program, HERE, arrays, aligned_bytes(n - shorter), Runtime())


@pytest.mark.parametrize("wrong", [np.zeros((4, 6)), np.zeros((6, 4), np.float32), np.zeros((6, 4), np.float32).T])
def test_arrays_that_do_not_fit_are_refused(wrong):
    t = local_type("a:4;b:6")
    with pytest.raises(ProgramError, match=r"value 1 is float.*, its block is float32\(4, 6\)"):
        bound("map", [t], [t], {1: wrong}, expr=call("exp", 1, "float32"))


def test_a_workspace_that_is_too_small_is_refused():
    t = local_type("a:400;b:600")
    expr = Expr((Step("exp", ("i0",), "float32"), Step("add", ("t0", "i0"), "float32")), ("t1",))
    with pytest.raises(ProgramError, match="the workspace has .* are needed"):
        bound("map", [t], [t], shorter=1, expr=expr)


def test_flops_by_formula_on_the_own_block():
    """The first rank of a 2 x 3 mesh holds 3 of 5 rows and 3 of 7 columns."""
    x, w = local_type("b:5;d:7", b="rows", d="cols"), local_type("d:7;f:4", d="cols")
    expr = Expr(
        (Step("exp", ("i0",), "float32"), Step("cast", ("t0",), "float64"), Step("square", ("t1",), "float64")), ("t2",)
    )
    cases = [
        ("map", [x], [local_type("b:5;d:7", "float64", b="rows", d="cols")], {"expr": expr}, 18),
        ("reduce", [x], [local_type("b:5", b="rows")], {"op": "sum"}, 9),
        ("contract", [x, w], [local_type("b:5;f:4", b="rows")], {}, 2 * 3 * 3 * 4),
        ("scatter_add", [x, local_type("b:5", "int32", b="rows")], [w], {"dim": "f"}, 9),
        ("transpose", [x], [local_type("d:7;b:5", b="rows", d="cols")], {}, 0),
    ]
    for kind, inputs, outputs, attrs, expected in cases:
        instruction, program = one_instruction(kind, inputs, outputs, **attrs)
        assert local_flops(instruction, program, HERE) == local_flops(instruction, program) == expected
    instruction, program = one_instruction(*cases[2][:3])
    assert local_flops(instruction, program, {"rows": 1, "cols": 2}) == 2 * 2 * 2 * 4


BIG, ROWS, ROW = local_type("b:8;l:64;d:512"), local_type("b:8;l:64"), local_type("d:512")
SHORT = local_type("b:8;l:64;d:512", "bfloat16")
STEPS = [
    ("map", [BIG, ROWS, ROWS, ROW, ROW], [BIG], {"expr": LAYER_NORM}),
    ("map", [SHORT], [SHORT], {"expr": call("exp", 1, "bfloat16")}),
    ("map", [BIG], [BIG], {"expr": call("erf", 1, "float32")}),
    ("reduce", [BIG], [ROW], {"op": "sum"}),
    ("reduce", [SHORT], [local_type("d:512", "bfloat16")], {"op": "sum"}),
    ("contract", [BIG, local_type("d:512;f:64")], [local_type("f:64;l:64;b:8")], {}),
    ("contract", [BIG, BIG], [ROW], {}),
    ("contract", [SHORT, local_type("d:512;f:64", "bfloat16")], [local_type("b:8;l:64;f:64")], {}),
    ("random", [], [BIG], {"distribution": "uniform", "key": "k"}),
    ("random", [], [SHORT], {"distribution": "normal", "key": "k"}),
    ("transpose", [BIG], [local_type("d:512;b:8;l:64")], {}),
    ("gather", [local_type("v:99;d:512"), local_type("b:8;l:64", "int32")], [BIG], {"dim": "v"}),
    ("concat", [BIG, BIG], [local_type("b:8;l:64;d:1024")], {"dim": "d"}),
    ("scatter_add", [BIG, local_type("b:8;l:64", "int32")], [local_type("v:99;d:512")], {"dim": "v"}),
]


@pytest.mark.parametrize("step", STEPS, ids=lambda s: f"{s[0]}-{s[1][0] if s[1] else s[2][0]}")
def test_a_bound_kernel_takes_no_memory(step):
    """Arrays of the size of an operand (1 MB) would show; index vectors and objects may come."""
    kind, inputs, outputs, attrs = step
    kernel = bound(kind, inputs, outputs, **attrs)
    kernel()
    tracemalloc.start()
    kernel()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


def test_collapse_merges_what_memory_steps_through_evenly():
    assert collapse((2, 1, 3, 4), [(12, 12, 4, 1)]) == ((24,), [(1,)])
    sizes, strides = collapse((2, 3, 4), [(12, 4, 1), (3, 1, 0)])
    assert (sizes, strides) == ((6, 4), [(4, 1), (1, 0)])
    sizes, strides = collapse((2, 3, 4), [(12, 4, 1), (0, 0, 1)])
    assert (sizes, strides) == ((6, 4), [(4, 1), (0, 1)])
    assert collapse((2, 3), [(3, 1), (1, 2)])[0] == (2, 3)


def test_quiet_leaves_the_error_handling_of_the_caller_alone():
    zero = np.zeros(1)
    before = np.geterr()
    quiet(lambda: np.divide(zero, zero))()
    assert np.geterr() == before
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        np.divide(1.0, zero)


def test_equal_instructions_share_a_plan_and_others_do_not():
    """Numbers that compare equal may mean something else: 0.0 and -0.0, 2 and 2.0."""
    of_kind = {n: local_type("a:4;b:6", n) for n in ("float32", "int32")}

    def program(*rows):
        types, instructions = {}, []
        for dtype, value in rows:
            k = len(types)
            types.update({k: of_kind[dtype], k + 1: of_kind[dtype]})
            expr = Expr((Step("multiply", ("i0", value), dtype),), ("t0",))
            instructions.append(Instruction(Map(expr), (k,), (k + 1,)))
        return Program(MESH, types, tuple(instructions), {}, {}, {}, 0)

    p = program(("float32", 0.0), ("float32", -0.0), ("float32", 0.0), ("int32", 2), ("int32", 3))
    arrays = {v: np.ones((4, 6), t.dtype) for v, t in p.types.items()}
    workspace = aligned_bytes(max(workspace_bytes(i, p, HERE) for i in p.instructions))
    for i in p.instructions:
        bind(i, p, HERE, arrays, workspace, Runtime())()
    results = [arrays[i.outputs[0]] for i in p.instructions]
    assert [bool(np.signbit(y).all()) for y in results[:3]] == [False, True, False]
    assert [y[0, 0] for y in results[3:]] == [2, 3]
    first, second, third, *_ = (numpy_kernels.plan(i, p, HERE) for i in p.instructions)
    assert first is third and first is not second
