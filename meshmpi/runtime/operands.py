"""Operands of collectives, checked once; `AnyMesh.bind` prepares them on a real and on a simulated mesh."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np

from meshmpi.dims import Axes, MeshShape, block_range
from meshmpi.errors import ProgramError, suggest
from meshmpi.ir.halos import HaloExchange, Piece

OPS = ("sum", "max", "min", "prod")
"""The reductions.  On bool, sum and max mean "or", prod and min mean "and", as in NumPy."""

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Handed(NamedTuple):
    """What is counted and compared: elements and type handed in, extents that are equal on all ranks of the group."""

    elements: int
    dtype: np.dtype
    shared: tuple[int, ...]


class Collective(ABC):
    """A collective as one rank takes part in it."""

    kind: ClassVar[str]
    axes: Iterable[str]
    op: str = ""

    @abstractmethod
    def check(self, n: int, block: int) -> Handed:
        """Raises ProgramError unless block number ``block`` of ``n`` can be handed in."""

    def of_rank(self, rank: int) -> Collective:
        """The part of one rank, where the arrays are lists by rank."""
        arrays = {name: getattr(self, name)[rank] for name in ("x", "out") if hasattr(self, name)}
        return replace(self, **arrays)  # type: ignore[type-var]


@dataclass(eq=False)
class AllReduce(Collective):
    """Reduces ``x`` in place over the ranks that differ only in ``axes``.

    bfloat16 is reduced in float32 and rounded once.  On bool, sum and max mean "or", prod and min
    mean "and".  NaN is the largest and the smallest number.

    Args:
        x: C-contiguous array of the same shape on all ranks of the group.
        axes: Mesh axes.
        op: sum, max, min or prod.
        workspace: uint8 array of `all_reduce_workspace_bytes`; allocated when not given.
    """

    kind = "all_reduce"
    x: np.ndarray
    axes: Iterable[str]
    op: str = "sum"
    workspace: np.ndarray | None = None

    def check(self, n: int, block: int) -> Handed:
        check_op(self.op)
        check_array("all_reduce", "array", self.x)
        return Handed(self.x.size, self.x.dtype, self.x.shape)


@dataclass(eq=False)
class AllGather(Collective):
    """Joins the blocks ``x`` of the group along array axis ``axis`` into ``out``.

    Args:
        x: This rank's block.
        out: Takes the whole.
        axis: Array axis along which the blocks follow each other.
        sizes: Extent of each block along it; may differ, may be 0.
        axes: Mesh axes over which it is split, major first: they number the blocks.
        workspace: uint8 array of `all_gather_workspace_bytes`; allocated when not given.
    """

    kind = "all_gather"
    x: np.ndarray
    out: np.ndarray
    axis: int
    sizes: Sequence[int]
    axes: Iterable[str]
    workspace: np.ndarray | None = None

    def check(self, n: int, block: int) -> Handed:
        x, out, axis, sizes = self.x, self.out, self.axis, self.sizes
        check_out("all_gather", x, out, replaced(x.shape, axis, sum(sizes)))
        check_sizes("all_gather", sizes, n, out.shape[axis], "an output")
        check_sizes("all_gather", [x.shape[axis]], 1, sizes[block], "a block")
        return Handed(x.size, x.dtype, out.shape)


@dataclass(eq=False)
class ReduceScatter(Collective):
    """Reduces ``x`` over the group and keeps in ``out`` this rank's block along ``axis``.

    Args:
        x: Array of the same shape on all ranks of the group; it is not changed.
        out: Takes this rank's block.
        axis: Array axis that is cut.
        sizes: Extent of each block along it; may differ, may be 0.
        axes: Mesh axes, major first: they number the blocks.
        op: sum, max, min or prod, as in `AllReduce`.
        workspace: uint8 array of `reduce_scatter_workspace_bytes`; allocated when not given.
    """

    kind = "reduce_scatter"
    x: np.ndarray
    out: np.ndarray
    axis: int
    sizes: Sequence[int]
    axes: Iterable[str]
    op: str = "sum"
    workspace: np.ndarray | None = None

    def check(self, n: int, block: int) -> Handed:
        check_op(self.op)
        x, axis, sizes = self.x, self.axis, self.sizes
        check_sizes("reduce_scatter", sizes, n, x.shape[axis], "an input")
        check_out("reduce_scatter", x, self.out, replaced(x.shape, axis, sizes[block]))
        return Handed(x.size, x.dtype, x.shape)


@dataclass(eq=False)
class AllToAll(Collective):
    """Moves a cut from array axis ``concat_axis`` to ``split_axis``.

    Args:
        x: Whole along ``split_axis``, this rank's block along ``concat_axis``.
        out: The other way round.
        split_axis: Array axis that is cut after.
        concat_axis: Array axis that was cut before.
        split_sizes: Extent of each block along ``split_axis``.
        concat_sizes: Extent of each block along ``concat_axis``.
        axes: Mesh axes, major first: they number the blocks of both.
        workspace: uint8 array of `all_to_all_workspace_bytes`; allocated when not given.
    """

    kind = "all_to_all"
    x: np.ndarray
    out: np.ndarray
    split_axis: int
    concat_axis: int
    split_sizes: Sequence[int]
    concat_sizes: Sequence[int]
    axes: Iterable[str]
    workspace: np.ndarray | None = None

    def check(self, n: int, block: int) -> Handed:
        x, out, split, concat = self.x, self.out, self.split_axis, self.concat_axis
        if split == concat:
            raise ProgramError(f"all_to_all from axis {split} to itself.", "Give two axes.")
        check_sizes("all_to_all", self.split_sizes, n, x.shape[split], "an input")
        check_sizes("all_to_all", self.concat_sizes, n, out.shape[concat], "an output")
        check_sizes("all_to_all", [x.shape[concat]], 1, self.concat_sizes[block], "a block")
        whole = replaced(x.shape, concat, sum(self.concat_sizes))
        check_out("all_to_all", x, out, replaced(whole, split, self.split_sizes[block]))
        return Handed(x.size, x.dtype, whole)


@dataclass(eq=False)
class Shift(Collective):
    """Each rank gets the elements along array axis ``axis`` that ``exchange`` says.

    Only ranks that need something of each other exchange messages, all at the same time.

    Args:
        xs: This rank's block of each input.
        out: Takes this rank's block of the result, or its halo region.
        axis: Array axis along which elements move.
        exchange: Which elements go where.
        axes: Mesh axes over which they are split, major first: they number the blocks.
        value: Fills elements that no input has.
        workspace: uint8 array of `shift_workspace_bytes`; allocated when not given.
    """

    kind = "shift"
    xs: Sequence[np.ndarray]
    out: np.ndarray
    axis: int
    exchange: HaloExchange
    axes: Iterable[str]
    value: float = 0
    workspace: np.ndarray | None = None

    def of_rank(self, rank: int) -> Shift:
        return replace(self, xs=[x[rank] for x in self.xs], out=self.out[rank])

    def check(self, n: int, block: int) -> Handed:
        xs, out, axis, e = self.xs, self.out, self.axis, self.exchange
        check_sizes("shift", [1] * e.blocks, n, e.blocks, "a dimension")
        if len(xs) != len(e.sizes):
            raise ProgramError(f"shift: {len(xs)} inputs for an exchange of {len(e.sizes)}.", "Give one array each.")
        first, end = e.target(block)
        for x, size in zip(xs, e.sizes, strict=True):
            start, stop = block_range(size, e.blocks, block)
            check_sizes("shift", [x.shape[axis]], 1, stop - start, "a block")
            check_out("shift", x, out, replaced(x.shape, axis, end - first))
        elements = e.rows_sent(block) * math.prod(replaced(out.shape, axis, 1))
        return Handed(elements, out.dtype, replaced(out.shape, axis, e.size))


def as_method(run: Callable[..., None], collective: Callable[..., Collective]) -> None:
    """Gives the method that does a collective at once the name, text and parameters of its operands."""
    (own, *_), theirs = inspect.signature(run).parameters.values(), inspect.signature(collective).parameters.values()
    run.__name__, run.__doc__ = getattr(collective, "kind", ""), collective.__doc__
    run.__signature__ = inspect.Signature([own, *theirs])  # type: ignore[attr-defined]


def check_op(op: str) -> None:
    """Raises ProgramError unless ``op`` is one of `OPS`."""
    if op not in OPS:
        raise ProgramError(f"'{op}' is not a reduction.", suggest(op, OPS))


def check_array(kind: str, what: str, x: np.ndarray) -> None:
    """Raises ProgramError unless ``x`` is an array whose elements lie one after another."""
    if not isinstance(x, np.ndarray):
        raise ProgramError(f"{kind}: the {what} is a {type(x).__name__}, not an array.", "Give a NumPy array.")
    if not x.flags.c_contiguous:
        raise ProgramError(
            f"{kind}: the {what} of shape {x.shape} is not C-contiguous (strides {x.strides}).",
            "Give numpy.ascontiguousarray of it.",
        )


def check_out(kind: str, x: np.ndarray, out: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raises ProgramError unless ``out`` can take a result of ``shape`` made from ``x``."""
    check_array(kind, "input", x)
    check_array(kind, "output", out)
    if out.shape != shape or out.dtype != x.dtype:
        raise ProgramError(
            f"{kind}: the output is {out.dtype}{list(out.shape)}, but the result is {x.dtype}{list(shape)}.",
            "Give an output array of that shape and data type.",
        )


def check_sizes(kind: str, sizes: Sequence[int], n: int, extent: int, what: str) -> None:
    """Raises ProgramError unless ``sizes`` are ``n`` block extents that add up to ``extent``."""
    if len(sizes) != n or sum(sizes) != extent or min(sizes, default=0) < 0:
        raise ProgramError(
            f"{kind}: {len(sizes)} block sizes {list(sizes)} (sum {sum(sizes)}) for a group of {n}"
            f" ranks and {what} of {extent} elements.",
            "Give one size per rank of the group, adding up to the extent.",
        )


def checked_axes(shape: MeshShape, axes: Iterable[str]) -> Axes:
    """Mesh axes as a tuple, one name too.

    Raises:
        MeshError: The mesh lacks one.
        ProgramError: One is named twice.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    for axis in names:
        shape.axis_size(axis)
        if names.count(axis) > 1:
            raise ProgramError(
                f"a collective over {'+'.join(names)} names mesh axis '{axis}' twice.", "Name each axis once."
            )
    return names


# ---- blocks of arrays, and scratch memory --------------------------------------------------------


def replaced(shape: Sequence[int], axis: int, extent: int) -> tuple[int, ...]:
    """``shape`` with another extent along ``axis``."""
    return (*shape[:axis], extent, *shape[axis + 1 :])


def starts(sizes: Sequence[int]) -> list[int]:
    """Where each block begins when blocks of ``sizes`` follow each other; the end comes last."""
    out = [0]
    for size in sizes:
        out.append(out[-1] + size)
    return out


def block(x: np.ndarray, axis: int, start: int, stop: int) -> np.ndarray:
    """The view of ``x`` from ``start`` to ``stop`` along ``axis``."""
    return x[(slice(None),) * axis + (slice(start, stop),)]


def piece_source(xs: Sequence[np.ndarray], axis: int, e: HaloExchange, p: Piece) -> np.ndarray:
    """The view of the inputs' blocks on rank ``p.source`` that a piece is taken from."""
    start = p.start - block_range(e.sizes[p.operand], e.blocks, p.source)[0]
    cut = slice(start, start + (p.count - 1) * p.step + 1, p.step)
    return xs[p.operand][(slice(None),) * axis + (cut,)]


def piece_target(out: np.ndarray, axis: int, e: HaloExchange, p: Piece) -> np.ndarray:
    """The view of the output on rank ``p.target`` that a piece goes to."""
    start = p.to - e.target(p.target)[0]
    return block(out, axis, start, start + p.count)


def as_bits(x: np.ndarray) -> np.ndarray:
    """The elements in memory order, flat, as unsigned integers of the same width.

    Every data type moves like this, so that those MPI does not know (bfloat16, bool) move too.
    """
    return x.reshape(-1).view(_UNSIGNED[x.dtype.itemsize])


def scratch(workspace: np.ndarray | None, elements: int, dtype: np.dtype) -> np.ndarray:
    """A flat array of ``elements`` at the start of ``workspace``, or a fresh one without it."""
    if workspace is None:
        return np.empty(elements, dtype)
    size = elements * np.dtype(dtype).itemsize
    if workspace.dtype != np.uint8 or workspace.ndim != 1 or workspace.nbytes < size:
        raise ProgramError(
            f"a collective needs {size} bytes of workspace, but was given {workspace.dtype}{list(workspace.shape)}.",
            "Give a flat uint8 array of as many bytes as its *_workspace_bytes function says.",
        )
    return workspace[:size].view(dtype)
