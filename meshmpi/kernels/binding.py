"""The arguments of a kernel: the blocks of its operands, a workspace, the current step.

A kernel is planned from types alone, so its memory is known before any array exists, and then bound once to arrays at
fixed addresses. No MPI, no graph, no meaning of instructions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from meshmpi.dims import Shape
from meshmpi.errors import ProgramError
from meshmpi.ir.program import Instruction, LocalType, Program, Row
from meshmpi.kernels.steps import Bound, nothing
from meshmpi.kernels.views import contiguous, numpy_dtype, strided

ALIGNMENT_BYTES = 64
"""Alignment of every slot of a workspace: a cache line, and the widest vector register."""

Arrays = Sequence[np.ndarray]


@dataclass(slots=True)
class Runtime:
    """What kernels need besides their arrays.

    Attributes:
        step: Changes from step to step; kernels read it when they are called.
        blas: Name of the library of matrix products, the same on all ranks; empty for the first there is.
        native: The generated kernels, from which a tiled region takes those of its body; or None.
        threads: How many threads share a tiled region.
    """

    step: int = 0
    blas: str = ""
    native: Any = None
    threads: int = 1


class Operand(NamedTuple):
    """One value of an instruction, as the block a rank holds of it.

    ``steps`` are its strides where it is a part of a larger array: only a contract takes such.
    """

    value: int
    type: LocalType
    block: tuple[tuple[int, int], ...]
    steps: Mapping[str, int] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return self.type.shape.names

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.block)

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def dtype(self) -> np.dtype:
        return numpy_dtype(self.type.dtype)

    def extents(self) -> dict[str, int]:
        """Dimension name -> local size."""
        return dict(zip(self.names, self.sizes, strict=True))

    def restricted(self, names: Sequence[str]) -> Operand:
        """The same block without the dims that are not in ``names``; those have one element."""
        kept = [k for k, n in enumerate(self.names) if n in names]
        t = self.type
        shape, splits = Shape([t.shape[k] for k in kept]), tuple(t.splits[k] for k in kept)
        block = tuple(self.block[k] for k in kept)
        kind = LocalType(shape, t.dtype, splits, t.partial, t.pending)
        return Operand(self.value, kind, block, self.steps)

    def start(self, dim: str) -> int:
        """Index in the whole dim of the first element of the block."""
        return self.block[self.names.index(dim)][0]

    def strides(self) -> dict[str, int]:
        """Dimension name -> distance between neighbours, in elements (C order without steps)."""
        if self.steps is not None:
            return {n: self.steps[n] for n in self.names}
        return contiguous(self.names, self.extents())


class Call(NamedTuple):
    """An instruction with the blocks of its operands on one rank.

    ``ranges`` (dim -> start, stop) narrows the blocks of what is in its body; set within tiled regions.
    """

    instruction: Instruction
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    program: Program
    coordinates: Mapping[str, int] = {}
    ranges: Mapping[str, tuple[int, int]] = {}

    def of(self, row: type[Row]) -> Row:
        """The attributes of an instruction that is known to be of this kind."""
        return self.instruction.of(row)

    def operand(self, v: int, t: LocalType) -> Operand:
        """A value of its body, as far as the rank and the ranges hold it."""
        block = t.block(self.program.mesh, self.coordinates)
        names = t.shape.names
        return Operand(v, t, tuple(self.ranges.get(n, b) for n, b in zip(names, block, strict=True)))

    def fail(self, problem: str, remedy: str = "This is a bug in lowering or in a pass.") -> ProgramError:
        return ProgramError(f"{self.instruction.kind}: {problem}", remedy, str(self.instruction.source))


def local_call(instruction: Instruction, program: Program, coordinates: Mapping[str, int]) -> Call:
    """The instruction as the rank at ``coordinates`` sees it."""
    whole = Call(instruction, (), (), program, coordinates)
    inputs, outputs = (
        tuple(whole.operand(v, program.types[v]) for v in vs) for vs in (instruction.inputs, instruction.outputs)
    )
    return whole._replace(inputs=inputs, outputs=outputs)


class Slot(NamedTuple):
    """A typed array inside a workspace."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def array(self, workspace: np.ndarray) -> np.ndarray:
        n = math.prod(self.shape) * self.dtype.itemsize
        return workspace[self.offset : self.offset + n].view(self.dtype).reshape(self.shape)


@dataclass
class Scratch:
    """Hands out slots of a workspace one behind the other; ``bytes`` is what was handed out."""

    bytes: int = 0
    slots: list[Slot] = field(default_factory=list)

    def reserve(self, shape: Sequence[int], dtype: np.dtype) -> Slot:
        slot = Slot(self.bytes, tuple(shape), np.dtype(dtype))
        n = math.prod(slot.shape) * slot.dtype.itemsize
        self.bytes += -(-n // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.slots.append(slot)
        return slot


class Plan(NamedTuple):
    """How one instruction will be run, decided from types alone.

    Attributes:
        make: The instruction as a function without arguments on inputs, outputs and a workspace.
        workspace_bytes: The most that the bound kernel uses of the workspace.
        make_adding: As ``make``, but adds to the outputs; returns None where that cannot be done in place.
    """

    make: Callable[[Arrays, Arrays, np.ndarray, Runtime], Bound]
    workspace_bytes: int = 0
    make_adding: Callable[[Arrays, Arrays, np.ndarray, Runtime], Bound | None] | None = None

    def bind(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        """What `make` makes; nothing is done where all outputs are empty."""
        return self.make(inputs, outputs, workspace, runtime) if any(y.size for y in outputs) else nothing


def named_view(array: np.ndarray, operand: Operand, order: Sequence[str]) -> np.ndarray:
    """``array`` with its dims in ``order``; those it lacks have size 1."""
    strides, extents = operand.strides(), operand.extents()
    return strided(array, [extents.get(n, 1) for n in order], [strides.get(n, 0) for n in order])
