"""Generated C kernels for maps, reductions and segments.

`NativeKernels` generates the source of all such instructions of a program, builds it once and binds
instructions to its functions.  NumPy stays the oracle; whatever has no native form is left to it.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from meshmpi.kernels.native.compiler import CompilerError, available, load_library
from meshmpi.kernels.native.prelude import PRELUDE
from meshmpi.kernels.native.source import Unsupported, function_body
from meshmpi.program import Instruction, Program

__all__ = ["CompilerError", "NativeKernels", "available"]
NATIVE_KINDS = ("map", "reduce", "segment")


class NativeKernels:
    """The native functions of a program, for the ranks that this process plays.

    Args:
        program: A verified program.
        coordinates: Of each rank played.

    Raises:
        CompilerError: There is no compiler, or it failed.
    """

    def __init__(self, program: Program, coordinates: Sequence[Mapping[str, int]]):
        self._names: dict[tuple, str] = {}
        functions: dict[str, str] = {}
        for where in coordinates:
            for i in program.instructions:
                if i.kind not in NATIVE_KINDS:
                    continue
                try:
                    body = function_body(i, program.types, program.mesh, where)
                except Unsupported:
                    continue
                body = _renumbered(body)
                name = "k" + hashlib.sha256(body.encode()).hexdigest()[:20]
                functions[name] = body
                self._names[(i.outputs, tuple(where.items()))] = name
        source = [PRELUDE, *(f"void {n}(void **p) {{\n{b}\n}}" for n, b in functions.items())]
        self.functions = len(functions)
        self._library = load_library("\n".join(source)) if functions else None

    def bind(
        self, i: Instruction, coordinates: Mapping[str, int], arrays: Mapping[int, np.ndarray]
    ) -> Callable[[], None] | None:
        """The instruction as a function without arguments; None where NumPy must do it."""
        name = self._names.get((i.outputs, tuple(coordinates.items())))
        if name is None:
            return None
        function = getattr(self._library, name)
        function.restype, function.argtypes = None, [ctypes.c_void_p]
        used = [arrays[v] for v in (*i.inputs, *i.outputs)]
        addresses = (ctypes.c_void_p * len(used))(*(a.ctypes.data for a in used))
        pointer = ctypes.cast(addresses, ctypes.c_void_p)

        def run() -> None:
            function(pointer)

        run.keep = (addresses, used)  # type: ignore[attr-defined]
        return run


def _renumbered(body: str) -> str:
    """The body with values numbered in order of appearance, so that equal layers share a function."""
    import re

    number: dict[str, str] = {}

    def renamed(match: re.Match) -> str:
        prefix, digits, rest = match.groups()
        return prefix + number.setdefault(digits, str(len(number))) + rest

    return re.sub(r"\b(t|v|x|a|b|sum|part)(\d+)((?:_\d+)?)\b", renamed, body)
