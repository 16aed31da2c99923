"""Generated C against the NumPy kernels: functions, data types, reductions, fused kernels, layouts.

Tolerances: arithmetic, comparisons, choices and roundings to bfloat16 are exact; functions are
within 4 units in the last place of float32 and float64 (each side has an error of 2), and 1 of
bfloat16 (a float32 result that differs may be rounded the other way).  Sums are formed in another
order: native_build.TOLERANCE.  All functions of this file are one library.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.dims import MeshShape, Shape
from meshmpi.errors import ProgramError
from meshmpi.ir.kinds import KINDS, Fused, Map, Reduce
from meshmpi.ir.program import Instruction, LocalType, Program
from meshmpi.ir.scalar import FLOATS, INTEGERS, SCALAR_FUNCTIONS, Expr, Step, call
from meshmpi.kernels import Runtime, numpy_dtype, workspace_bytes
from meshmpi.kernels.native import CompilerError, NativeKernels, Site, available, scratch_bytes, storage
from meshmpi.kernels.native.compiler import load_library
from meshmpi.kernels.native.prelude import PRELUDE
from tests.kernels.build import aligned_bytes, local_type
from tests.kernels.native_build import Task, build, check, tasks_of
from tests.kernels.test_map import ADAM, IN_PLACE, INTEGER

pytestmark = pytest.mark.skipif(not available(), reason="there is no C compiler")

TASKS: dict[str, Task] = {}
ONE = MeshShape("rows:1;cols:1")
ROUGH = ("exp", "log", "log1p", "sin", "cos", "tanh", "sigmoid", "erf", "power")
"""Functions that are not rounded exactly."""


@pytest.fixture(scope="module")
def kernels() -> NativeKernels:
    return build(list(TASKS.values()))


def add(name: str, kind: str, inputs: list[LocalType], outputs: list[LocalType], arrays=(), **options):
    """A task for one instruction; ``attrs`` are those of the instruction."""
    attrs = options.pop("attrs")
    types = dict(enumerate([*inputs, *outputs]))
    numbers = list(types)
    i = Instruction(KINDS[kind](**attrs), tuple(numbers[: len(inputs)]), tuple(numbers[len(inputs) :]))
    program = Program(ONE, types, (i,), {}, {}, {}, 7)
    TASKS[name] = Task(name, program, i, arrays=dict(enumerate(arrays)), **options)


# -- every scalar function with every data type ----------------------------------------------------

_NUMBERS = [0.0, 1.0, 0.5, 1.5, 2.5, 3.0, 0.1, 0.3, 1e-3, 1e-7, 0.6499, 0.6501, 20.0, 87.3, 88.5, 104.0]
_LARGE = {
    "float32": [1e10, 3e38, 1e-39, 1e-45],
    "float64": [1e10, 1e300, 1e-310, 5e-324],
    "bfloat16": [1e10, 3e38, 1e-39],
}


def numbers(dtype: str) -> np.ndarray:
    """Zeros, small, large, denormal and infinite numbers of both signs, NaN, and common ones."""
    if dtype == "bool":
        return np.array([False, True, True])
    if dtype not in FLOATS:
        low, high = (0, 255) if dtype == "uint8" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        whole = [0, 1, 2, 3, 7, 11, 100, 254, high - 1, high, low, low + 1]
        signed = [] if dtype == "uint8" else [-1, -2, -3, -7, -255]
        return np.array([*whole, *signed], dtype)
    positive = np.array([*_NUMBERS, *_LARGE[dtype], np.inf, 89.5, 700.0])
    common = np.random.default_rng(1).standard_normal(200) * np.geomspace(0.01, 20, 200)
    with np.errstate(over="ignore"):
        out = np.concatenate([positive, -positive, [np.nan], common]).astype(numpy_dtype(dtype))
    if dtype == "float32":
        out[-1:].view(np.uint32)[:] = 0x7FFFFFFF  # a NaN all of whose bits are set
    return out


def arguments(function: str, dtypes: list[str]) -> list[np.ndarray]:
    lists = [numbers(d) for d in dtypes]
    if len(lists) == 1:
        return lists
    if len(lists) == 3:
        lists[1:] = [lists[1][:20], lists[2][:20]]
    lists = [x[:60] if x.dtype != bool else x for x in lists]
    return [np.ascontiguousarray(x.reshape(-1)) for x in np.meshgrid(*lists, indexing="ij")]


def add_function(function: str, dtype: str) -> None:
    row = SCALAR_FUNCTIONS[function]
    dtypes = [dtype] * row.arity
    if function == "where":
        dtypes[0] = "bool"
    arrays = arguments(function, dtypes)
    if function in ("floordiv", "mod") and dtype in INTEGERS:
        # NumPy gives 0 for a divisor 0, and so does C; MIN // -1 overflows in both.
        assert (arrays[1] == 0).any()
    out = "bool" if row.result == "bool" else dtype
    n = f"n:{len(arrays[0])}"
    ulps = (1 if dtype == "bfloat16" else 4) if function in ROUGH else 0
    add(
        f"{function} {dtype}",
        "map",
        [local_type(n, d) for d in dtypes],
        [local_type(n, out)],
        arrays,
        attrs={"expr": call(function, row.arity, out)},
        ulps=ulps,
        flushes=function == "exp" and dtype in ("float32", "bfloat16"),
    )


_LOGICAL = ("logical_and", "logical_or", "logical_not")
_FOR_BOOL = ("where", "identity", "equal", "not_equal", *_LOGICAL)
for _f in SCALAR_FUNCTIONS:
    for _d in FLOATS:
        if _f not in _LOGICAL and _f != "cast":
            add_function(_f, _d)
    for _d in INTEGERS:
        if _f in INTEGER:
            add_function(_f, _d)
    if _f in _FOR_BOOL:
        add_function(_f, "bool")


def add_cast(source: str, target: str) -> None:
    x = numbers(source)
    if source in FLOATS and target not in (*FLOATS, "bool"):
        # Beyond the range C says nothing, nor does NumPy.
        low, high = (0, 255) if target == "uint8" else (-(2.0**31), 2.0**31 - 129)
        wide = x.astype(np.float64)
        x = x[np.isfinite(wide) & (wide >= low) & (wide <= high)]
    n = f"n:{len(x)}"
    expr = Expr((Step("cast", ("i0",), target),), ("t0",))
    add(
        f"cast {source} {target}",
        "map",
        [local_type(n, source)],
        [local_type(n, target)],
        [x],
        attrs={"expr": expr},
        ulps=0,
    )


for _s, _t in itertools.product((*FLOATS, *INTEGERS, "bool"), repeat=2):
    add_cast(_s, _t)


def add_tape(name: str, steps: Sequence[tuple], inputs: list[LocalType], results=None, **options) -> None:
    """Steps are (function, args, dtype); the last one's (or the given) results are returned."""
    code = tuple(Step(*s) for s in steps)
    results = results or [f"t{len(code) - 1}"]
    by_name = {f"t{k}": s.dtype for k, s in enumerate(code)}
    full = max(inputs, key=lambda t: len(t.shape))
    full = options.pop("full", full.shape)
    outputs = [LocalType(full, by_name.get(r, inputs[0].dtype), ((),) * len(full)) for r in results]
    add(name, "map", inputs, outputs, attrs={"expr": Expr(code, tuple(results))}, **options)


_X = "a:5;b:6;c:70"
add_tape(
    "literals float32",
    [
        ("add", ("i0", 0.1), "float32"),
        ("multiply", (1e-40, "t0"), "float32"),
        ("maximum", ("t0", -1e30), "float32"),
        ("where", (True, "t2", 3.0), "float32"),
    ],
    [local_type(_X)],
    ["t1", "t2", "t3"],
    ulps=0,
)
add_tape(
    "literals bfloat16",
    [("less", ("i0", 0.1), "bool"), ("add", ("i0", 0.1), "bfloat16")],
    [local_type(_X, "bfloat16")],
    ["t0", "t1"],
    ulps=0,
)
add_tape(
    "literals int64",
    [("add", ("i0", 2**62), "int64"), ("equal", ("i0", -(2**63)), "bool")],
    [local_type(_X, "int64")],
    ["t0", "t1"],
    ulps=0,
)
add_tape(
    "bfloat16 is rounded after every step",
    [
        ("multiply", ("i0", 1.1), "bfloat16"),
        ("add", ("t0", "i0"), "bfloat16"),
        ("cast", ("t1",), "float32"),
        ("square", ("t2",), "float32"),
        ("cast", ("t3",), "bfloat16"),
        ("subtract", ("t4", "t1"), "bfloat16"),
    ],
    [local_type(_X, "bfloat16")],
    ["t1", "t3", "t5"],
    ulps=0,
)
add_tape(
    "what a sum loses is not simplified away",
    [
        ("add", ("i0", 1e8), "float32"),
        ("subtract", ("t0", "i0"), "float32"),
        ("subtract", ("i1", "i1"), "float32"),
        ("isfinite", ("t2",), "bool"),
        ("add", ("i0", "i1"), "float32"),
        ("subtract", ("t4", "i1"), "float32"),
    ],
    [local_type("n:4"), local_type("n:4")],
    ["t1", "t2", "t3", "t5"],
    ulps=0,
    arrays=[np.float32([1, np.inf, 2, 3]), np.float32([np.inf, -np.inf, np.nan, 1e8])],
)
for _name, _second in {
    "row": "c:70",
    "column": "b:6",
    "outer": "a:5",
    "scalar": "",
    "two": "a:5;c:70",
    "swapped": "c:70;a:5",
    "all swapped": "c:70;b:6;a:5",
}.items():
    add_tape(
        f"broadcast {_name}", [("multiply", ("i0", "i1"), "float32")], [local_type(_X), local_type(_second)], ulps=0
    )
add_tape(
    "broadcast union",
    [("add", ("i0", "i1"), "float32")],
    [local_type("a:9"), local_type("b:11")],
    full=Shape("a:9;b:11"),
    ulps=0,
)
add_tape(
    "dims of one element",
    [("add", ("i0", "i1"), "float32")],
    [local_type("a:1;b:6;c:1;d:3;e:1"), local_type("d:3")],
    ulps=0,
)
add_tape("one element", [("exp", ("i0",), "float32")], [local_type("")], ulps=4)
for _n in (70_000, 1 << 17, 99_991):
    add_tape(
        f"long vector {_n}",
        [("add", ("i0", "i1"), "float32"), ("square", ("t0",), "float32")],
        [local_type(f"n:{_n}"), local_type("")],
        ulps=1,
    )

for _in_place, _shape in itertools.product(IN_PLACE, ("a:300;b:211", "a:512;b:256")):
    _inputs = [local_type(_shape)] * 4 + [local_type("")]
    add_tape(f"adam {_shape} {_in_place}", ADAM.steps, _inputs, ADAM.results, in_place=_in_place)
add_tape(
    "an input that is read later is overwritten",
    [("add", ("i0", 1.0), "float32"), ("multiply", ("t0", "i0"), "float32")],
    [local_type(_X)],
    ["t0", "t1"],
    in_place={0: 0},
    ulps=0,
)
add_tape(
    "results that are inputs",
    [("negative", ("i0",), "float32")],
    [local_type(_X), local_type("c:70")],
    ["i1", "t0", "t0", "i0"],
    ulps=0,
)


# -- reductions ------------------------------------------------------------------------------------


def add_reduction(op: str, shape: str, kept: str, dtype: str = "float32", x=None, **options) -> None:
    dims = Shape(shape)
    t = LocalType(dims, dtype, ((),) * len(dims))
    y = Shape([d for d in dims if d.name in kept])
    out = LocalType(y, dtype, ((),) * len(y))
    name = options.pop("name", f"{op} {dtype} {shape} to '{kept}'")
    add(name, "reduce", [t], [out], [] if x is None else [x], attrs={"op": op}, **options)


for _op, _d in itertools.product(("sum", "max", "min", "prod"), (*FLOATS, *INTEGERS, "bool")):
    if _d == "bool" and _op == "sum":
        continue
    _exact = 0 if _op in ("max", "min") else None
    for _kept in ("ab", "a", "") if _op != "prod" or _d not in FLOATS else ("ab",):
        add_reduction(_op, "a:3;b:5;c:19", _kept, _d, ulps=_exact)
    if _op == "sum":
        for _kept in ("bc", "c"):
            add_reduction(_op, "a:300;b:5;c:19", _kept, _d)
for _n in (4095, 4097, 12_345, 100_000, 3_000_000):
    _r = np.random.default_rng(2).random((1 if _n > 1e6 else 3, _n)).astype(np.float32)
    add_reduction("sum", f"a:{len(_r)};n:{_n}", "a", x=_r)
    add_reduction("max", f"a:{len(_r)};n:{_n}", "a", x=_r, ulps=0)
for _rows, _columns in ((3, 20_000), (8, 70_000), (500, 5000), (700, 4099), (1, 9000), (70_000, 3), (1000, 96)):
    _r = np.random.default_rng(3).random((_rows, _columns)).astype(np.float32)
    add_reduction("sum", f"a:{_rows};n:{_columns}", "n", x=_r)
add_reduction("sum", "a:130;b:1;c:70", "c", "bfloat16")
# 259 is halfway between two numbers of bfloat16: the sum is rounded to even, not cut.
_ones = np.ones((259, 3), np.float32).astype(numpy_dtype("bfloat16"))
add_reduction("sum", "a:259;c:3", "c", "bfloat16", _ones, ulps=0, name="sum of ones bfloat16")
add_reduction("max", "a:4;b:3;c:5", "ac", native=False)
_SPECIAL = np.float32(
    [
        [1, np.nan, 3, -1],
        [-np.inf] * 4,
        [np.inf, -np.inf, 0, 0],
        [-0.0, 0, -0.0, -1],
        [np.nan] * 4,
        [-1, -2, -1e-45, -3],
        [1, 2, 3, 3e38],
    ]
)
for _op, _d in itertools.product(("sum", "max", "min", "prod"), FLOATS):
    with np.errstate(over="ignore"):
        add_reduction(_op, "a:7;c:4", "a", _d, _SPECIAL.astype(numpy_dtype(_d)), name=f"special {_op} {_d}")


# -- scatter_add -----------------------------------------------------------------------------------


def add_scatter(width: int) -> None:
    """Updates by indices of which some lie just outside, before and behind the rows."""
    plain = [local_type(s) for s in (f"n:9;w:{width}", f"r:5;w:{width}")]
    index = local_type("n:9", "int32")
    rows = np.array([0, 5, 4, -1, 2, 2, 6, 0, 5], np.int32)
    add(f"scatter_add {width}", "scatter_add", [plain[0], index], [plain[1]], [None, rows], attrs={"dim": "r"})


for _width in (1, 7):
    add_scatter(_width)


@pytest.mark.parametrize("name", TASKS)
def test_instruction(name: str, kernels: NativeKernels):
    check(TASKS[name], kernels)


@pytest.mark.parametrize("shape", ["", "b:1", "b:1;c:1", "b:6"])
def test_one_value_twice(shape: str):
    """x * x + x * x: the C function has one operand, whatever holds it."""
    x = local_type(shape)
    types = {0: x, 1: x, 2: LocalType(Shape([]), "float32", ())}
    square = Expr((Step("multiply", ("i0", "i1"), "float32"),), ("t0",))
    body = (Instruction(Map(square), (0, 0), (1,)), Instruction(Reduce("sum"), (1,), (2,)))
    fused = Instruction(Fused(Shape([]), body, {1: x}), (0, 0), (2,))
    for i in (body[0], fused):
        program = Program(ONE, types, (i,), {}, {}, {}, 7)
        task = Task(f"{i.kind} of x and x", program, i)
        kernels = build([task])
        assert not kernels.refused
        check(task, kernels)


@pytest.mark.parametrize("name", ["softmax", "layer_norm", "tanh"])
def test_wide_buffers_lie_in_the_workspace(name: str):
    """No array fits on the stack: all lie in the workspace, which is full of rubbish before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "STACK_BYTES", 0)
        _check_wide_buffers(name)


def _check_wide_buffers(name: str) -> None:
    with mm.Graph() as graph:
        x = mm.placeholder("x", "n:300;d:70", "float64")
        scale = mm.get_variable("w", "d:70", "float64", initializer=mm.ones_initializer())
        y = mm.tanh(x) if name == "tanh" else getattr(mm, name)(x, "d")
        y = y * scale
        y = y * mm.reduce_sum(mm.exp(y), reduced_dim="d")
        loss = mm.reduce_sum(mm.square(y))
        alone = mm.reduce_sum(mm.placeholder("z", "n:300;d:70"), output_shape="d:70")
        fetches = [loss, alone, *mm.gradients([loss], [x, scale])]
    program = mm.plan(graph, ONE, fetches=fetches).program
    tasks = tasks_of(program, name, factor=10)
    needed = [scratch_bytes(Site(t.instruction, program.types, program.mesh, t.coordinates)) for t in tasks]
    assert max(needed) >= 8 * 70
    kernels = build(tasks)
    for task, nbytes in zip(tasks, needed, strict=True):
        assert workspace_bytes(task.instruction, program, task.coordinates) >= nbytes
        check(task, kernels)
    widest = tasks[needed.index(max(needed))]
    with pytest.raises(ProgramError, match="its C function needs"):
        kernels.bind(widest.instruction, program, widest.coordinates, {}, aligned_bytes(0), Runtime())


def test_generated_code_cannot_allocate():
    with pytest.raises(CompilerError, match="malloc"):
        load_library(PRELUDE + "void k(void **p) { p[0] = malloc(4); }")
