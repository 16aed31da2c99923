"""Programs of one instruction, run with the NumPy kernels on every rank of a mesh in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshmpi.dims import MeshShape, Shape
from meshmpi.ir.kinds import KINDS
from meshmpi.ir.program import Instruction, LocalType, Program
from meshmpi.kernels import Runtime, bind, numpy_dtype, workspace_bytes

MESH = MeshShape("rows:2;cols:3")
TOLERANCE = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 8e-3}
FLOAT_DTYPES = ("float64", "float32", "bfloat16")
GUARD = 64


def local_type(shape: str, dtype: str = "float32", **splits: str) -> LocalType:
    """``local_type("batch:4;io:5", batch="rows+cols")``."""
    dims = Shape(shape)
    axes = tuple(tuple(splits[n].split("+")) if n in splits else () for n in dims.names)
    return LocalType(dims, dtype, axes)


def one_instruction(
    kind: str, inputs: Sequence[LocalType], outputs: Sequence[LocalType], seed: int = 0, **attrs: Any
) -> tuple[Instruction, Program]:
    """An instruction and a program that holds its types: inputs 0, 1, ..., then outputs."""
    n = len(inputs)
    numbers = tuple(range(n)), tuple(range(n, n + len(outputs)))
    instruction = Instruction(KINDS[kind](**attrs), *numbers)
    types = dict(enumerate([*inputs, *outputs]))
    return instruction, Program(MESH, types, (instruction,), {}, {}, {}, seed)


def aligned_bytes(n: int) -> np.ndarray:
    """n bytes at an address that is a multiple of 64, full of rubbish."""
    raw = np.full(n + 64, 0xA5, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + n]


class Ran(NamedTuple):
    """What one rank computed."""

    coordinates: Mapping[str, int]
    outputs: list[np.ndarray]
    blocks: list[tuple[slice, ...]]


def held(array: np.ndarray, block: Sequence[tuple[int, int]]) -> np.ndarray:
    """A block; what it reaches beyond the array is 0."""
    out = np.zeros([stop - start for start, stop in block], array.dtype)
    here, there = [], []
    for (start, stop), n in zip(block, array.shape, strict=True):
        first, end = max(0, start), max(0, start, min(n, stop))
        here.append(slice(first - start, end - start))
        there.append(slice(first, end))
    out[tuple(here)] = array[tuple(there)]
    return out


def run(
    kind: str,
    inputs: Sequence[LocalType],
    outputs: Sequence[LocalType],
    arrays: Sequence[np.ndarray],
    step: int = 0,
    seed: int = 0,
    in_place: Mapping[int, int] | None = None,
    **attrs: Any,
) -> Iterator[Ran]:
    """Runs one instruction on every rank, twice, in a workspace of exactly the size it asks for.

    ``in_place`` maps outputs to the inputs whose memory they take (then it runs once).
    """
    instruction, program = one_instruction(kind, inputs, outputs, seed, **attrs)
    for rank in range(MESH.size):
        at = MESH.coordinates(rank)
        ins = [held(a.astype(numpy_dtype(t.dtype)), t.block(MESH, at)) for a, t in zip(arrays, inputs, strict=True)]
        outs = [
            aligned_bytes(int(np.prod(t.local_sizes(MESH, at))) * numpy_dtype(t.dtype).itemsize)
            .view(numpy_dtype(t.dtype))
            .reshape(t.local_sizes(MESH, at))
            for t in outputs
        ]
        for o, i in (in_place or {}).items():
            outs[o] = ins[i]
        n = workspace_bytes(instruction, program, at)
        memory = aligned_bytes(n + GUARD)
        kernel = bind(instruction, program, at, dict(enumerate([*ins, *outs])), memory[:n], Runtime(step))
        kernel()
        if not in_place:
            first = [o.copy() for o in outs]
            kernel()
            for a, b in zip(first, outs, strict=True):
                assert a.tobytes() == b.tobytes(), "the second call gives something else"
        assert (memory[n:] == 0xA5).all(), "the workspace was overrun"
        blocks = [tuple(slice(*b) for b in t.block(MESH, at)) for t in outputs]
        yield Ran(at, outs, blocks)


def check(
    kind: str,
    inputs: Sequence[LocalType],
    outputs: Sequence[LocalType],
    arrays: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    tolerance: float | None = None,
    **options: Any,
) -> None:
    """Runs on every rank and compares with the blocks of the expected global results."""
    for ran in run(kind, inputs, outputs, arrays, **options):
        for got, block, want, t in zip(ran.outputs, ran.blocks, expected, outputs, strict=True):
            compare(got, want[block], t.dtype, tolerance, f"{kind} at {ran.coordinates}")


def compare(got: np.ndarray, want: np.ndarray, dtype: str, tolerance: float | None, what: str) -> None:
    assert got.shape == want.shape, what
    assert got.dtype == numpy_dtype(dtype), what
    if dtype in TOLERANCE:
        bound = TOLERANCE[dtype] if tolerance is None else tolerance
        np.testing.assert_allclose(
            got.astype(np.float64), want.astype(np.float64), rtol=bound, atol=bound, err_msg=what
        )
    else:
        np.testing.assert_array_equal(got, want.astype(got.dtype), err_msg=what)


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """What the kernel is given: ``array`` rounded to ``dtype``, as float64."""
    return array.astype(numpy_dtype(dtype)).astype(np.float64)


def mixed(*sizes: int, seed: int = 0) -> np.ndarray:
    """Values of both signs."""
    return np.random.default_rng(seed).normal(size=sizes) * 2
