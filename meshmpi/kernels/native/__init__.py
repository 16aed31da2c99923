"""Generated C kernels for maps, reductions, uniform random numbers, fused kernels, scatter_add and top_k.

NumPy stays the oracle, and does whatever has no native form.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from meshmpi.dims import MeshShape, Ranges
from meshmpi.errors import ProgramError
from meshmpi.hashes import sha256
from meshmpi.ir.kinds import Iota, Map, Random, Reduce, ScatterAdd, Tiled, TopK
from meshmpi.ir.kinds.regions import iteration_counts, sizes_key
from meshmpi.ir.program import Instruction, LocalType, Program
from meshmpi.kernels.binding import Runtime
from meshmpi.kernels.native.compiler import CompilerError, available, load_library
from meshmpi.kernels.native.nest import LoopNest, Site, Unsupported, bands_in, first_counter, first_distance
from meshmpi.kernels.native.prelude import PRELUDE
from meshmpi.kernels.native.source import Body, Writer
from meshmpi.kernels.random_numbers import stream_key

__all__ = ["CompilerError", "NativeKernels", "Site", "Unsupported", "available", "function_body", "scratch_bytes"]


class NativeKernels:
    """The native functions of programs, for the ranks that this process plays.

    Args:
        programs: A verified program, or several to be built together.

    Attributes:
        functions: How many C functions were made; instructions of equal form share one.
        refused: Results of an instruction -> the compiler's words, where it did not take the C of
            that instruction: NumPy does it.

    Raises:
        CompilerError: There is no compiler, or it fails whatever it is given.
    """

    def __init__(self, programs: Program | Iterable[Program], coordinates: Sequence[Mapping[str, int]]):
        self._names: dict[tuple, str] = {}
        self._types: dict[int, dict[int, LocalType]] = {}
        self._bodies: dict[str, Body] = {}
        for program in [programs] if isinstance(programs, Program) else programs:
            inside = [i.inner_types() for i in program.instructions if isinstance(i.attrs, Tiled)]
            self._types[id(program)] = dict(ChainMap(*inside, dict(program.types)))
            types, counting = self._types[id(program)], _counting(program)
            for where in coordinates:
                for i, ranges in _everything(program, where):
                    with contextlib.suppress(Unsupported):
                        body = function_body(Site(i, types, program.mesh, where, ranges), counting)
                        name = "k" + sha256(body.text.encode()).hexdigest()[:20]
                        self._bodies[name] = body
                        self._names[_key(program, i, where, ranges)] = name
        self.functions = len(self._bodies)
        self._loaded, refused = _built({n: b.text for n, b in self._bodies.items()})
        self.refused = {k[1]: refused[n] for k, n in self._names.items() if n in refused}
        self.leave_to_numpy(self.refused)

    def leave_to_numpy(self, results: Collection[tuple[int, ...]]) -> None:
        """From now on `bind` returns None for the instructions that make these.

        All ranks must leave the same: what is replicated must stay equal to the last bit.
        """
        self._names = {k: n for k, n in self._names.items() if k[1] not in results}

    def bind(
        self,
        i: Instruction,
        program: Program,
        coordinates: Mapping[str, int],
        arrays: Mapping[int, np.ndarray],
        workspace: np.ndarray,
        runtime: Runtime,
        ranges: Ranges | None = None,
    ) -> Callable[[], None] | None:
        """The instruction as a function without arguments; None where NumPy must do it.

        Args:
            ranges: For an instruction in the body of a tiled region, the block to compute.

        Raises:
            ProgramError: The workspace is too small.
        """
        name = self._names.get(_key(program, i, coordinates, ranges))
        if name is None:
            return None
        function, scratch = self._loaded[name], self._bodies[name].scratch_bytes
        if workspace.nbytes < scratch:
            raise ProgramError(
                f"{i.kind}: the workspace has {workspace.nbytes} bytes, its C function needs {scratch}.",
                "Size it by workspace_bytes().",
                str(i.source),
            )
        streams, parameters = _parameters(Site(i, self._types[id(program)], program.mesh, coordinates, ranges))
        used = [*(arrays[v] for v in (*i.inputs, *i.outputs)), *parameters]
        used += [workspace] if scratch else []
        addresses = (ctypes.c_void_p * len(used))(*(a.ctypes.data for a in used))
        pointer = ctypes.cast(addresses, ctypes.c_void_p)

        def run_random() -> None:
            for key, array in streams:
                array[0] = stream_key(program.seed, key, runtime.step)
            function(pointer)

        chosen = run_random if streams else functools.partial(function, pointer)
        chosen.keep = (addresses, used)  # type: ignore[attr-defined]
        return chosen


def _built(bodies: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The functions by name; and for those that the compiler does not take, its words.

    One library holds all.  Where the compiler fails, halves are tried, down to single functions.
    """
    if not bodies:
        return {}, {}
    try:
        library = load_library(_source(bodies))
    except CompilerError as error:
        load_library(_source({}))  # fails too where it is not for a function
        if len(bodies) == 1:
            return {}, {name: str(error) for name in bodies}
        found, refused = _built(dict(list(bodies.items())[: len(bodies) // 2]))
        more, also = _built(dict(list(bodies.items())[len(bodies) // 2 :]))
        return {**found, **more}, {**refused, **also}
    functions: dict[str, Any] = {}
    for name in bodies:
        functions[name] = getattr(library, name)
        functions[name].restype, functions[name].argtypes = None, [ctypes.c_void_p]
    return functions, {}


def _source(bodies: Mapping[str, str]) -> str:
    return "\n".join([PRELUDE, *(f"void {n}(void **p) {{\n{b}\n}}" for n, b in bodies.items())])


def _parameters(site: Site) -> tuple[list[tuple[str, np.ndarray]], list[np.ndarray]]:
    """What a function gets besides its operands, all that differs between ranks and steps: keys of streams, and all.

    For each tensor of random numbers its key and the global index of the first element, for each band
    the distance of the first pair, for scatter_add and top_k where the block begins along their dim.
    """
    i, site = site.instruction, site.whole()
    streams: list[tuple[str, np.ndarray]] = []  # of one key there may be two
    for j in i.leaves():
        if isinstance(j.attrs, Random):
            streams.append((j.attrs.key, np.array([0, first_counter(site, j.outputs[0])], np.uint64)))
    far = [first_distance(site, band) for band in bands_in(i.leaves())]
    if isinstance(i.attrs, (ScatterAdd, TopK)):
        far = [site.block(i.outputs[0] if isinstance(i.attrs, ScatterAdd) else i.inputs[0])[i.attrs.dim][0]]
    return streams, [*(array for _, array in streams), *(np.array([n], np.int64) for n in far)]


def _counting(program: Program) -> list[int]:
    """Values whose elements are consecutive integers of the type's own arithmetic."""
    made = [i.outputs[0] for i in program.instructions if isinstance(i.attrs, Iota)]
    return [v for v in made if program.types[v].dtype in ("int32", "int64")]


def _everything(program: Program, coordinates: Mapping[str, int]) -> Iterator[tuple[Instruction, Ranges | None]]:
    """All instructions; those in the body of a tiled region once for each size of its blocks."""
    for i in program.instructions:
        if not isinstance(i.attrs, Tiled):
            yield i, None
            continue
        for _, ranges in iteration_counts(i, program, coordinates):
            yield from ((one, ranges) for one in i.body)


def _key(program: Program, i: Instruction, coordinates: Mapping[str, int], ranges: Ranges | None) -> tuple:
    size = () if ranges is None else (sizes_key(ranges),)
    return (id(program), i.outputs, tuple(coordinates.items()), *size)


def function_body(site: Site, counting: Collection[int] = ()) -> Body:
    """The C function of one instruction.

    Values in ``counting`` hold consecutive integers (`iota`): of them only the first is read.

    Raises:
        Unsupported: Nothing native is generated for it.
    """
    if isinstance(site.instruction.attrs, (ScatterAdd, TopK)):
        from meshmpi.kernels.native.indexing import scatter_add_body, top_k_body  # late: few programs have any

        return Body((top_k_body if isinstance(site.instruction.attrs, TopK) else scatter_add_body)(site))
    return _writer(site, counting).body()


def _writer(site: Site, counting: Collection[int] = ()) -> Writer:
    i = site.instruction
    body = i.body or (i,)
    if not i.traits.native:
        raise Unsupported("a kind without a native form")
    if any(isinstance(one.attrs, Random) and one.attrs.distribution != "uniform" for one in body):
        raise Unsupported("a distribution other than uniform")
    if not i.inputs and isinstance(body[0].attrs, Map):
        raise Unsupported("no inputs")
    return Writer(LoopNest(site.whole()), counting)


def scratch_bytes(site: Site) -> int:
    """Bytes of the workspace that the C function of an instruction needs; 0 where it has none.

    Only what reduces needs any: maps keep their numbers in registers.
    """
    if not any(isinstance(j.attrs, Reduce) for j in site.instruction.leaves()):
        return 0
    try:
        return _writer(site).scratch_bytes
    except Unsupported:
        return 0
