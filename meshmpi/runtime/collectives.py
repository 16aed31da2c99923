"""The collectives on NumPy arrays over one group of ranks, by MPI; importing this initialises MPI.

A dimension that is split over mesh axes ``(a, b)`` has its blocks numbered in that order, MPI numbers the ranks of
a communicator in the order of the mesh; `Group.blocks` translates.  Messages are cut into pieces, the same on every
rank, so that scratch memory stays small.  Views and arguments are prepared once; a call does little more than call MPI.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from meshmpi.dims import Axes
from meshmpi.ir.collective_bytes import PIECE_BYTES, REDUCED_IN, all_to_all_rows, pieces
from meshmpi.ir.halos import pieces_to, sent_by, unfilled_positions
from meshmpi.kernels.steps import Bound, nothing, run_all
from meshmpi.runtime.operands import (
    AllGather,
    AllReduce,
    AllToAll,
    ReduceScatter,
    Shift,
    as_bits,
    block,
    piece_source,
    piece_target,
    replaced,
    scratch,
    starts,
)

_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}
_BOOL_OPS = {"sum": MPI.MAX, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.MIN}
_NUMPY_OPS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
_NUMPY_BOOL_OPS = {"sum": np.maximum, "max": np.maximum, "min": np.minimum, "prod": np.minimum}

REDUCE_SCATTER_ALGORITHMS = {"Open MPI": ((0, "reduce_scatter"), (4096, "all_to_all"))}
"""MPI library -> (bytes of a block from which on this way is used, how a reduce_scatter is done), ascending.

``reduce_scatter``, also for libraries not named, calls MPI's; ``all_to_all`` sends each rank its
block and reduces what arrives with NumPy, in order of rank; ``all_reduce`` reduces whole pieces and
takes the own block.  Measured with Open MPI 5.0.11 on two ranks of one machine, in this order: 64 B
1.6, 2.1, 2.8 us; 64 KB 14, 9, 26 us; 1 MB 117, 80, 190 us; 64 MB 69-74, 18-26, 57-75 ms.
"""


@dataclass(frozen=True)
class Group:
    """The ranks that hold the blocks of one split dimension, seen by one of them."""

    axes: Axes  # mesh axes, major first, in the order in which blocks are numbered
    comm: MPI.Intracomm  # communicator of the group
    blocks: tuple[int, ...]  # number of the block that each rank of ``comm`` holds
    index: int  # number of this rank's block

    @functools.cached_property
    def n(self) -> int:
        """Number of ranks."""
        return len(self.blocks)

    @functools.cached_property
    def in_order(self) -> bool:
        """Whether rank k holds block k."""
        return self.blocks == tuple(range(self.n))

    @functools.cached_property
    def name(self) -> str:
        """The axes joined by +."""
        return "+".join(self.axes)

    def by_rank(self, sizes: Sequence[int], scale: int = 1) -> tuple[list[int], list[int]]:
        """Counts and displacements for MPI of blocks of ``sizes`` that lie in block order."""
        begin = starts(sizes)
        counts = [sizes[b] * scale for b in self.blocks]
        return counts, [begin[b] * scale for b in self.blocks]


def _reducible(x: np.ndarray) -> np.ndarray:
    flat = x.reshape(-1)
    return flat.view(np.uint8) if x.dtype == np.bool_ else flat


def _mpi_op(op: str, dtype: np.dtype) -> MPI.Op:
    if dtype == np.bool_:
        return _BOOL_OPS[op]
    if op in ("max", "min") and dtype.kind not in "iu":
        return _nan_keeping_op(op, _wire_dtype(dtype))
    return _OPS[op]


@functools.cache
def _nan_keeping_op(op: str, dtype: np.dtype) -> MPI.Op:
    """max or min of which NaN is the result wherever it is among the numbers, as in the kernels.

    That of MPI_MAX depends on the order of the ranks.
    """
    combine = _NUMPY_OPS[op]

    def reduce(given: Any, total: Any, datatype: MPI.Datatype) -> None:
        into = np.frombuffer(total, dtype)
        combine(np.frombuffer(given, dtype), into, out=into)

    return MPI.Op.Create(reduce, commute=True)


def _wire_dtype(dtype: np.dtype) -> np.dtype:
    if dtype == np.bool_:
        return np.dtype(np.uint8)  # as 0 and 1, by max and min
    return np.dtype(REDUCED_IN.get(dtype.name, dtype))


def _bind_all_reduce(group: Group, c: AllReduce) -> Bound:
    x = c.x
    if group.n == 1 or x.size == 0:
        return nothing
    flat, wire, mpi_op = _reducible(x), _wire_dtype(x.dtype), _mpi_op(c.op, x.dtype)
    step = PIECE_BYTES // wire.itemsize
    parts = [flat[start : start + step] for start in range(0, flat.size, step)]
    reduce = functools.partial(group.comm.Allreduce, MPI.IN_PLACE)
    if flat.dtype == wire:
        return run_all([functools.partial(reduce, part, mpi_op) for part in parts])
    buffer, steps = scratch(c.workspace, min(flat.size, step), wire), list[Bound]()
    for part in parts:
        sent = buffer[: part.size]
        steps += [_copy(sent, part), functools.partial(reduce, sent, mpi_op), _copy(part, sent)]
    return run_all(steps)


def _copy(to: np.ndarray, source: np.ndarray) -> Bound:
    return functools.partial(np.copyto, to, source, casting="unsafe")


def start_all_reduce(group: Group, x: np.ndarray, op: str, requests: list[MPI.Request]) -> None:
    """Begins to reduce ``x`` in place; it must not be touched before the ``requests`` added here are complete."""
    if group.n == 1 or x.size == 0:
        return
    flat, mpi_op = _reducible(x), _mpi_op(op, x.dtype)
    step = PIECE_BYTES // flat.itemsize
    for start in range(0, flat.size, step):
        part = flat[start : start + step]
        requests.append(group.comm.Iallreduce(MPI.IN_PLACE, part, mpi_op))


def _bind_all_gather(group: Group, c: AllGather) -> Bound:
    x, out, axis = c.x, c.out, c.axis
    if group.n == 1:
        return _copy(out, x)
    rows, post = math.prod(out.shape[:axis]), math.prod(out.shape[axis + 1 :])
    widths = [size * post for size in c.sizes]
    total = sum(widths)
    mine = as_bits(x).reshape(rows, widths[group.index])
    whole = as_bits(out).reshape(rows, total)
    if rows == 1 or total * out.itemsize > PIECE_BYTES:
        return run_all([_gather(group, mine[row], whole[row], widths) for row in range(rows)])
    begin, buffer, steps = starts(widths), None, list[Bound]()
    for first, end, _, _ in pieces(rows, widths, out.itemsize):
        n = end - first
        if buffer is None:  # the first piece is the largest
            buffer = scratch(c.workspace, n * total, whole.dtype)
        received = buffer[: n * total]
        steps.append(_gather(group, mine[first:end], received, [n * width for width in widths]))
        for start, width in zip(begin[:-1], widths, strict=True):
            part = received[n * start : n * (start + width)]
            steps.append(_copy(whole[first:end, start : start + width], part.reshape(n, width)))
    return run_all(steps)


def _gather(group: Group, mine: np.ndarray, whole: np.ndarray, widths: Sequence[int]) -> Bound:
    if group.in_order and len(set(widths)) == 1:
        return functools.partial(group.comm.Allgather, mine, whole)
    return functools.partial(group.comm.Allgatherv, mine, [whole, group.by_rank(widths)])


def _bind_reduce_scatter(group: Group, c: ReduceScatter) -> Bound:
    x, out, axis, op = c.x, c.out, c.axis, c.op
    if group.n == 1:
        return _copy(out, x)
    rows, post = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    widths, wire = [size * post for size in c.sizes], _wire_dtype(x.dtype)
    whole = _reducible(x).reshape(rows, sum(widths))
    mine = _reducible(out).reshape(rows, widths[group.index])
    algorithm = reduce_scatter_algorithm(rows * max(widths) * wire.itemsize)
    contiguous, mpi_op = rows == 1 and whole.dtype == wire, _mpi_op(op, x.dtype)
    direct = contiguous and algorithm == "all_to_all"  # what is sent lies ready
    in_one = contiguous and algorithm == "reduce_scatter" and whole.nbytes <= PIECE_BYTES
    if in_one and group.in_order and len(set(widths)) == 1:
        return functools.partial(group.comm.Reduce_scatter_block, whole[0], mine[0], mpi_op)
    if in_one and group.in_order:
        return functools.partial(group.comm.Reduce_scatter, whole[0], mine[0], widths, mpi_op)
    combine = (_NUMPY_BOOL_OPS if x.dtype == np.bool_ else _NUMPY_OPS)[op]
    begin, buffer, steps = starts(widths), None, list[Bound]()
    for first, end, low, high in pieces(rows, widths, wire.itemsize):
        cuts = [(begin[b] + min(w, low), begin[b] + min(w, high)) for b, w in enumerate(widths)]
        counts = [(end - first) * (stop - start) for start, stop in cuts]
        if buffer is None:  # the first piece is the largest
            received = counts[group.index] * group.n if algorithm == "all_to_all" else 0
            buffer = scratch(c.workspace, received + (0 if direct else sum(counts)), wire)
        rows_now = whole[first:end]
        start, stop = (c - begin[group.index] for c in cuts[group.index])
        target = mine[first:end, start:stop]
        if direct:
            layout = [counts[b] for b in group.blocks], [cuts[b][0] for b in group.blocks]
            steps += _exchange_and_reduce(group, [rows_now[0], layout], target, buffer, combine)
            continue
        packed = buffer[: sum(counts)]
        by_rank = [counts[b] for b in group.blocks]
        steps += _pack_piece(rows_now, [cuts[b] for b in group.blocks], packed)
        if algorithm == "all_to_all":
            room = buffer[packed.size :]
            steps += _exchange_and_reduce(group, [packed, by_rank], target, room, combine)
        else:
            steps += _reduce_packed(group, packed, by_rank, mpi_op, algorithm, target)
    return run_all(steps)


def _pack_piece(rows: np.ndarray, cuts: Sequence[tuple[int, int]], packed: np.ndarray) -> list[Bound]:
    """Lays the columns ``cuts`` of ``rows`` one after another, converted, into ``packed``."""
    at, n, steps = 0, rows.shape[0], list[Bound]()
    for start, stop in cuts:
        part = packed[at : at + n * (stop - start)]
        steps.append(_copy(part.reshape(n, stop - start), rows[:, start:stop]))
        at += part.size
    return steps


def _reduce_packed(
    group: Group, packed: np.ndarray, counts: Sequence[int], op: MPI.Op, algorithm: str, target: np.ndarray
) -> list[Bound]:
    """Reduces blocks packed in the order of ranks by MPI; copies the own one to ``target``."""
    rank, comm = group.comm.rank, group.comm
    own = sum(counts[:rank])
    if algorithm == "reduce_scatter":
        own = 0  # in place, MPI leaves the result at the front
        reduce: Bound = functools.partial(comm.Reduce_scatter, MPI.IN_PLACE, packed, list(counts), op)
    else:
        reduce = functools.partial(comm.Allreduce, MPI.IN_PLACE, packed, op)
    return [reduce, _copy(target, packed[own : own + counts[rank]].reshape(target.shape))]


def _exchange_and_reduce(
    group: Group, sent: list[Any], target: np.ndarray, buffer: np.ndarray, combine: np.ufunc
) -> list[Bound]:
    """Sends each rank its block and reduces those that arrive, in order of rank, into target."""
    size = target.size
    received = buffer[: group.n * size]
    blocks = received.reshape(group.n, *target.shape)
    total = target if target.dtype == buffer.dtype else blocks[0]
    steps: list[Bound] = [
        functools.partial(group.comm.Alltoallv, sent, [received, [size] * group.n]),
        functools.partial(combine, blocks[0], blocks[1], total),
        *(functools.partial(combine, total, part, total) for part in blocks[2:]),
    ]
    return steps if total is target else [*steps, _copy(target, total)]


def reduce_scatter_algorithm(block_bytes: int) -> str:
    """The algorithm of `REDUCE_SCATTER_ALGORITHMS` for the running library and its largest block on the wire."""
    rows = REDUCE_SCATTER_ALGORITHMS.get(MPI.get_vendor()[0], ((0, "reduce_scatter"),))
    return [algorithm for limit, algorithm in rows if block_bytes >= limit][-1]


def _bind_all_to_all(group: Group, c: AllToAll) -> Bound:
    x, out, split_axis, concat_axis = c.x, c.out, c.split_axis, c.concat_axis
    split_sizes, concat_sizes = c.split_sizes, c.concat_sizes
    if group.n == 1:
        return _copy(out, x)
    lead = min(split_axis, concat_axis)
    total_rows = math.prod(x.shape[:lead])
    rows = all_to_all_rows(x.shape, x.itemsize, split_axis, concat_axis, split_sizes, concat_sizes)
    sent = as_bits(x).reshape(total_rows, *x.shape[lead:])
    kept = as_bits(out).reshape(total_rows, *out.shape[lead:])
    row_sent, row_kept = math.prod(x.shape[lead:]), math.prod(out.shape[lead:])
    pack = math.prod(x.shape[:split_axis]) != 1
    unpack = math.prod(out.shape[:concat_axis]) != 1
    buffer = scratch(c.workspace, rows * (pack * row_sent + unpack * row_kept), sent.dtype)
    send, split, concat = buffer[: pack * rows * row_sent], split_axis - lead, concat_axis - lead
    receive, steps = buffer[pack * rows * row_sent :], list[Bound]()
    # Decided by what all ranks see alike: the two calls of MPI do not match each other.
    even = group.in_order and len(set(split_sizes)) == len(set(concat_sizes)) == 1
    for first in range(0, total_rows, max(rows, 1)):
        piece, target = sent[first : first + rows], kept[first : first + rows]
        n = piece.shape[0]
        if pack:
            steps += _pack(piece, split + 1, split_sizes, send)
        sending = send[: piece.size] if pack else piece.reshape(-1)
        arriving = receive[: target.size] if unpack else target.reshape(-1)
        if even:
            steps.append(functools.partial(group.comm.Alltoall, sending, arriving))
        else:
            row = math.prod(replaced(x.shape[lead:], split, 1))
            to = [sending, group.by_rank(split_sizes, n * row)]
            row = math.prod(replaced(out.shape[lead:], concat, 1))
            come = [arriving, group.by_rank(concat_sizes, n * row)]
            steps.append(functools.partial(group.comm.Alltoallv, to, come))
        if unpack:
            steps += _unpack(receive, concat + 1, concat_sizes, target)
    return run_all(steps)


def _pack(x: np.ndarray, axis: int, sizes: Sequence[int], flat: np.ndarray) -> list[Bound]:
    return [_copy(part, own) for part, own in _parts(x, axis, sizes, flat)]


def _unpack(flat: np.ndarray, axis: int, sizes: Sequence[int], out: np.ndarray) -> list[Bound]:
    return [_copy(own, part) for part, own in _parts(out, axis, sizes, flat)]


def _parts(x: np.ndarray, axis: int, sizes: Sequence[int], flat: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pieces of ``flat`` one after another, each with the block of ``x`` that it has room for."""
    at = 0
    for start, size in zip(starts(sizes)[:-1], sizes, strict=True):
        own = block(x, axis, start, start + size)
        yield flat[at : at + own.size].reshape(own.shape), own
        at += own.size


class BoundShift:
    """A `shift` on fixed arrays: copies between views, one message to and from each other block."""

    def __init__(self, group: Group, c: Shift):
        xs, out, axis, exchange = c.xs, c.out, c.axis, c.exchange
        self.comm, self.value = group.comm, c.value
        rank_of = {block: rank for rank, block in enumerate(group.blocks)}
        mine = group.index
        arriving = [p for p in pieces_to(exchange, mine) if p.source != mine]
        leaving = sent_by(exchange, mine)
        others = math.prod(replaced(out.shape, axis, 1))
        rows = sum(p.count for p in (*leaving, *arriving))
        buffer = scratch(c.workspace, rows * others, as_bits(out[:0]).dtype).view(out.dtype)
        self.fills = [block(out, axis, start, stop) for start, stop in unfilled_positions(exchange, mine)]
        self.copies = [
            (piece_target(out, axis, exchange, p), piece_source(xs, axis, exchange, p))
            for p in pieces_to(exchange, mine)
            if p.source == mine
        ]
        self.packs, self.unpacks, at = [], [], 0
        self.sends: list[tuple[np.ndarray, int]] = []
        self.receives: list[tuple[np.ndarray, int]] = []
        for target, run in itertools.groupby(leaving, key=lambda p: p.target):
            start = at
            for p in run:
                source = piece_source(xs, axis, exchange, p)
                self.packs.append((buffer[at : at + source.size].reshape(source.shape), source))
                at += source.size
            self.sends.append((as_bits(buffer[start:at]), rank_of[target]))
        for source, run in itertools.groupby(arriving, key=lambda p: p.source):
            start = at
            for p in run:
                to = piece_target(out, axis, exchange, p)
                self.unpacks.append((to, buffer[at : at + to.size].reshape(to.shape)))
                at += to.size
            self.receives.append((as_bits(buffer[start:at]), rank_of[source]))

    def __call__(self) -> None:
        comm = self.comm
        requests = [comm.Irecv(part, rank) for part, rank in self.receives]
        for part, source in self.packs:
            part[...] = source
        requests += [comm.Isend(part, rank) for part, rank in self.sends]
        # What stays on this rank is copied while messages travel.
        for part in self.fills:
            part[...] = self.value
        for to, source in self.copies:
            to[...] = source
        if requests:
            MPI.Request.Waitall(requests)
        for to, part in self.unpacks:
            to[...] = part


BINDERS: dict[str, Callable[[Group, Any], Bound]] = {
    "all_reduce": _bind_all_reduce,
    "all_gather": _bind_all_gather,
    "reduce_scatter": _bind_reduce_scatter,
    "all_to_all": _bind_all_to_all,
    "shift": BoundShift,
}
"""Kind of collective -> what prepares it."""
