"""Generated C kernels for maps, reductions, uniform random numbers, segments, scatter_add and
top_k.

`NativeKernels` generates the source of all such instructions of its programs, builds it once and
binds instructions to its functions.  NumPy stays the oracle; whatever has no native form is left to
it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from meshmpi.kernels.binding import Runtime
from meshmpi.kernels.native.compiler import CompilerError, available, load_library
from meshmpi.kernels.native.indexing import first_ranked, first_row
from meshmpi.kernels.native.nest import Unsupported, first_counter
from meshmpi.kernels.native.prelude import PRELUDE
from meshmpi.kernels.native.source import function_body
from meshmpi.kernels.random_numbers import stream_key
from meshmpi.loops import Ranges, iteration_counts, sizes_key
from meshmpi.program import Instruction, LocalType, Program

__all__ = ["CompilerError", "NativeKernels", "Unsupported", "available", "function_body"]
NATIVE_KINDS = ("map", "reduce", "random", "segment", "scatter_add", "top_k")


class NativeKernels:
    """The native functions of programs, for the ranks that this process plays.

    Args:
        programs: A verified program, or several to be built together.
        coordinates: Of each rank played.

    Attributes:
        functions: How many C functions were made; instructions of equal form share one.

    Raises:
        CompilerError: There is no compiler, or it failed.
    """

    def __init__(
        self, programs: Program | Iterable[Program], coordinates: Sequence[Mapping[str, int]]
    ):
        self._names: dict[tuple, str] = {}
        self._types: dict[int, dict[int, LocalType]] = {}
        self._counting: dict[int, list[int]] = {}
        functions: dict[str, str] = {}
        for program in [programs] if isinstance(programs, Program) else programs:
            inside = [i.inner_types() for i in program.instructions if i.kind == "loop"]
            self._types[id(program)] = dict(ChainMap(*inside, dict(program.types)))
            self._counting[id(program)] = _counting(program)
            for where in coordinates:
                for i, ranges in _everything(program, where):
                    body = self._body(i, program, where, ranges)
                    if body is not None:
                        name = "k" + hashlib.sha256(body.encode()).hexdigest()[:20]
                        functions[name] = body
                        self._names[_key(program, i, where, ranges)] = name
        source = [PRELUDE, *(f"void {n}(void **p) {{\n{b}\n}}" for n, b in functions.items())]
        self.functions = len(functions)
        self._library = load_library("\n".join(source)) if functions else None

    def _body(
        self, i: Instruction, program: Program, coordinates: Mapping[str, int],
        ranges: Ranges | None = None,
    ) -> str | None:  # fmt: skip
        if i.kind not in NATIVE_KINDS:
            return None
        try:
            types, counting = self._types[id(program)], self._counting[id(program)]
            return function_body(i, types, program.mesh, coordinates, ranges, counting)
        except Unsupported:
            return None

    def bind(
        self, i: Instruction, program: Program, coordinates: Mapping[str, int],
        arrays: Mapping[int, np.ndarray], runtime: Runtime, ranges: Ranges | None = None,
    ) -> Callable[[], None] | None:  # fmt: skip
        """The instruction as a function without arguments; None where NumPy must do it.

        Args:
            i: Of ``program``, one of those the kernels were made for.
            program: The same object.
            coordinates: Of the rank.
            arrays: Value number -> array of its block, C-contiguous.
            runtime: Read when the function is called.
            ranges: Of an instruction in the body of a loop: the block to compute.
        """
        name = self._names.get(_key(program, i, coordinates, ranges))
        if name is None:
            return None
        function = getattr(self._library, name)
        function.restype, function.argtypes = None, [ctypes.c_void_p]
        types = self._types[id(program)]
        parameters = _Parameters(i, program, types, coordinates, runtime, ranges)
        used = [*(arrays[v] for v in (*i.inputs, *i.outputs)), *parameters.arrays]
        addresses = (ctypes.c_void_p * len(used))(*(a.ctypes.data for a in used))
        pointer = ctypes.cast(addresses, ctypes.c_void_p)

        def run_random() -> None:
            parameters.advance()
            function(pointer)

        chosen = run_random if parameters.names else functools.partial(function, pointer)
        chosen.keep = (addresses, used)  # type: ignore[attr-defined]
        return chosen


class _Parameters:
    """What a function is told besides its operands, since ranks and steps differ in nothing else.

    For each tensor of random numbers its key and the global index of the first element of the
    block, for a scatter_add the first row of the block, for a top_k the first index.
    """

    def __init__(
        self, i: Instruction, program: Program, types: Mapping[int, LocalType],
        coordinates: Mapping[str, int], runtime: Runtime, ranges: Ranges | None,
    ):  # fmt: skip
        body = [j for j in i.leaves() if j.kind == "random"]
        types = {**types, **i.inner_types()}
        mesh = program.mesh
        self.names = [j.attrs["key"] for j in body]
        self.seed, self.runtime = program.seed, runtime
        starts = [first_counter(types[j.outputs[0]], mesh, coordinates, ranges) for j in body]
        self.arrays = [np.array([0, n], np.uint64) for n in starts]
        if i.kind == "scatter_add":
            self.arrays = [np.array([first_row(i, types, mesh, coordinates)], np.int64)]
        if i.kind == "top_k":
            self.arrays = [np.array([first_ranked(i, types, mesh, coordinates)], np.int64)]

    def advance(self) -> None:
        """Sets the keys of the running step."""
        for a, name in zip(self.arrays, self.names, strict=True):
            a[0] = stream_key(self.seed, name, self.runtime.step)


def _counting(program: Program) -> list[int]:
    """Values whose elements are consecutive integers of the type's own arithmetic."""
    made = [i.outputs[0] for i in program.instructions if i.kind == "iota"]
    return [v for v in made if program.types[v].dtype in ("int32", "int64")]


def _everything(
    program: Program, coordinates: Mapping[str, int]
) -> Iterator[tuple[Instruction, Ranges | None]]:
    """All instructions; those in the body of a loop once for each size of its blocks."""
    for i in program.instructions:
        if i.kind != "loop":
            yield i, None
            continue
        for _, ranges in iteration_counts(i, program, coordinates):
            yield from ((one, ranges) for one in i.attrs["body"])


def _key(
    program: Program, i: Instruction, coordinates: Mapping[str, int], ranges: Ranges | None
) -> tuple:
    size = () if ranges is None else (sizes_key(ranges),)
    return (id(program), i.outputs, tuple(coordinates.items()), *size)
