"""Instructions run by generated C and by NumPy on the same arrays; one library for many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshmpi.ir.program import Instruction, Program
from meshmpi.ir.scalar import FLOATS
from meshmpi.kernels import Runtime, bind, numpy_dtype, workspace_bytes
from meshmpi.kernels.native import NativeKernels
from tests.kernels.build import aligned_bytes

ORIGIN = {"rows": 0, "cols": 0}
STEP = 3
TOLERANCE = {"float64": 1e-12, "float32": 4e-6, "bfloat16": 2e-2}
"""Relative to the largest magnitude of an output: sums are formed in another order."""
GUARD = 512
"""Bytes behind each output that a kernel must leave alone."""
SMALLEST_NORMAL = 2.0**-126
"""The smallest normal number of float32 and bfloat16."""


@dataclass
class Task:
    """One instruction on one rank.

    Attributes:
        label: Of the failure message.
        program, instruction, coordinates: What runs where.
        arrays: Of the inputs; the others are random.
        ulps: Largest difference in units in the last place; None: by TOLERANCE.
        in_place: Output -> the input whose memory it takes.
        native: Whether a native form is required (None: allowed).
        factor: Of TOLERANCE, where sums are smaller than what is summed.
        flushes: Whether C may give 0 for subnormal results, for which exp needs a second factor.
    """

    label: str
    program: Program
    instruction: Instruction
    coordinates: Mapping[str, int] = field(default_factory=lambda: ORIGIN)
    arrays: Mapping[int, np.ndarray] = field(default_factory=dict)
    ulps: int | None = None
    in_place: Mapping[int, int] = field(default_factory=dict)
    native: bool | None = True
    factor: float = 1.0
    flushes: bool = False


def tasks_of(program: Program, label: str, ranks: Iterable[int] = (0,), **options) -> list[Task]:
    """A task for every instruction of a program that may have a native form."""
    return [
        Task(
            f"{label}, rank {rank}: {i.kind} {program._line(i, _Numbers(), False)[:300]}",
            program,
            i,
            program.mesh.coordinates(rank),
            **options,
        )
        for rank in ranks
        for i in program.instructions
        if i.traits.native
    ]


class _Numbers(dict):
    def __missing__(self, key: int) -> int:
        return key


def build(tasks: Sequence[Task]) -> NativeKernels:
    """One library for all tasks."""
    programs = {id(t.program): t.program for t in tasks}
    ranks = {tuple(t.coordinates.items()): t.coordinates for t in tasks}
    return NativeKernels(list(programs.values()), list(ranks.values()))


def random_block(dtype: str, sizes: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    if dtype == "bool":
        return np.asarray(rng.integers(0, 2, sizes)).astype(bool)
    if dtype in FLOATS:
        return np.asarray(rng.standard_normal(sizes) * 2).astype(numpy_dtype(dtype))
    return np.asarray(rng.integers(0, 9, sizes)).astype(dtype)


def check(task: Task, kernels: NativeKernels) -> None:
    """AssertionError says which element differs."""
    i, program, here = task.instruction, task.program, task.coordinates
    rng = np.random.default_rng(5)
    inputs = {}
    counting = [j.outputs[0] for j in program.instructions if j.kind == "iota"]
    for v in i.inputs:
        t = program.types[v]
        sizes = t.local_sizes(program.mesh, here)
        given = task.arrays.get(v)
        if v in counting:  # of any block
            given = (np.arange(sizes[0]) + rng.integers(0, 9)).astype(t.dtype)
        inputs[v] = random_block(t.dtype, sizes, rng) if given is None else given
        assert inputs[v].shape == sizes
    expected = _run(task, inputs, None)
    if i.outputs and all(a.size for a in [*inputs.values(), *expected]) and task.native is not None:
        names = kernels._names
        found = (id(program), i.outputs, tuple(here.items())) in names
        assert found is task.native, f"{task.label}: native form {found}"
    got = _run(task, inputs, kernels)
    for a, b, v in zip(got, expected, i.outputs, strict=True):
        dtype = program.types[v].dtype
        bound = TOLERANCE.get(dtype, 0) * task.factor
        if task.flushes:
            b = np.where((a == 0) & (np.abs(b) < SMALLEST_NORMAL), np.zeros_like(b), b)
        compare(a, b, dtype, task.ulps, bound, f"{task.label}, output {v}")


def _run(task: Task, inputs: Mapping[int, np.ndarray], kernels: NativeKernels | None) -> list:
    i, program, here = task.instruction, task.program, task.coordinates
    arrays = {v: a.copy() for v, a in inputs.items()}
    guards: list[np.ndarray] = []
    for o, v in enumerate(i.outputs):
        t = program.types[v]
        sizes = t.local_sizes(program.mesh, here)
        dtype = numpy_dtype(t.dtype)
        size = int(np.prod(sizes)) * dtype.itemsize
        raw = aligned_bytes(size + GUARD)
        raw[size:] = 0xA5
        guards.append(raw[size:])
        arrays[v] = raw[:size].view(dtype).reshape(sizes)
        if o in task.in_place:
            arrays[v] = arrays[i.inputs[task.in_place[o]]]
    bound = None
    memory = aligned_bytes(workspace_bytes(i, program, here))
    if kernels is not None:
        bound = kernels.bind(i, program, here, arrays, memory, Runtime(STEP))
    if bound is None:
        bound = bind(i, program, here, arrays, memory, Runtime(STEP))
    bound()
    assert all((g == 0xA5).all() for g in guards), f"{task.label}: written behind an output"
    return [arrays[v] for v in i.outputs]


def compare(got: np.ndarray, want: np.ndarray, dtype: str, ulps: int | None, bound: float, what: str) -> None:
    """Exact for integers and 0 ulps; NaN and infinities must agree; else as the task says."""
    if dtype not in FLOATS or ulps == 0:
        same = (got == want) | ((got != got) & (want != want))
        assert same.all(), f"{what}: {_first(got, want, ~same)}"
        return
    nan = np.isnan(got.astype(np.float64))
    assert (nan == np.isnan(want.astype(np.float64))).all(), f"{what}: {_first(got, want, nan)}"
    if ulps is not None:
        away = np.abs(_key(got, dtype) - _key(want, dtype)) * ~nan
        assert (away <= ulps).all(), f"{what}: {away.max()} ulps, {_first(got, want, away > ulps)}"
        return
    a, b = (np.where(nan, 0, x.astype(np.float64)) for x in (got, want))
    infinite = np.isinf(a) | np.isinf(b)
    assert (a[infinite] == b[infinite]).all(), f"{what}: {_first(got, want, infinite)}"
    a, b = (np.where(infinite, 0, x) for x in (a, b))
    wrong = np.abs(a - b) > bound * np.maximum(1, np.abs(b).max(initial=0))
    assert not wrong.any(), f"{what}: {_first(got, want, wrong)}"


def _key(x: np.ndarray, dtype: str) -> np.ndarray:
    """Integers in the order of the numbers; neighbours differ by 1."""
    width = numpy_dtype(dtype).itemsize
    bits = x.view({2: np.int16, 4: np.int32, 8: np.int64}[width]).astype(object if width == 8 else np.int64)
    low = -(1 << (8 * width - 1))
    return np.where(bits < 0, low - bits, bits)


def _first(got: np.ndarray, want: np.ndarray, wrong: np.ndarray) -> str:
    first = tuple(int(k) for k in np.argwhere(wrong)[0])
    return f"{wrong.sum()} of {wrong.size}, at {first}: {got[first]!r}, NumPy {want[first]!r}"
