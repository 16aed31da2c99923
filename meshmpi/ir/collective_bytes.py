"""Bytes that a rank sends in a collective, and the scratch memory that it needs.

The runtime counts and allocates by these functions, so predicted and accounted bytes agree exactly. The actual
traffic of an MPI library is not measured. No arrays, no MPI, no programs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from meshmpi.ir.halos import HaloExchange
from meshmpi.ir.scalar import ITEM_BYTES

PIECE_BYTES = 16 * 2**20
"""Longest single message of a reduction, and longest scratch buffer.  Measured with Open MPI 5 on
two ranks of one machine: reducing 64 MB at once takes 2.3 times as long as in pieces of 16 MB."""

REDUCED_IN = {"bfloat16": "float32", "uint8": "int32"}
"""Data types that are reduced, and travel, in another one.  MPI knows no bfloat16; the vector code
of Open MPI saturates sums of integers narrower than 32 bits where NumPy wraps (its issue 8045)."""


def reduced_bytes(dtype: object) -> int:
    """Bytes of one element on the wire of a reduction."""
    name = str(dtype)
    return ITEM_BYTES[REDUCED_IN.get(name, name)]


def pieces(rows: int, widths: Sequence[int], item_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    """Cuts rows, each made of one block of ``widths`` elements per rank, into messages of `PIECE_BYTES` at most.

    Yields:
        (first row, end row, first element, end element): the elements count within each block, so
        blocks that are shorter contribute less.  Whole rows where they fit, parts of one otherwise.
    """
    row_bytes, widest = sum(widths) * item_bytes, max(widths, default=0)
    if not rows or not row_bytes:
        return
    if row_bytes <= PIECE_BYTES:
        step = min(rows, PIECE_BYTES // row_bytes)
        for row in range(0, rows, step):
            yield row, min(row + step, rows), 0, widest
        return
    chunk = max(1, PIECE_BYTES // (len(widths) * item_bytes))
    for row in range(rows):
        for start in range(0, widest, chunk):
            yield row, row + 1, start, min(start + chunk, widest)


def piece_elements(widths: Sequence[int], piece: tuple[int, int, int, int]) -> int:
    """Elements of all ranks' blocks in one of the `pieces`."""
    row, row_end, start, end = piece
    return (row_end - row) * sum(min(w, end) - min(w, start) for w in widths)


def all_reduce_workspace_bytes(shape: Sequence[int], dtype: object) -> int:
    """Scratch bytes of an all_reduce among more than one rank: none but for the data types of `REDUCED_IN`."""
    if str(dtype) not in REDUCED_IN:
        return 0
    return min(math.prod(shape) * reduced_bytes(dtype), PIECE_BYTES)


def all_gather_workspace_bytes(shape: Sequence[int], dtype: object, axis: int, sizes: Sequence[int]) -> int:
    """Scratch bytes of an all_gather of blocks along ``axis``, whose extents there are ``sizes``.

    0 where the blocks are contiguous in the result, `PIECE_BYTES` at most otherwise.
    """
    rows, post = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    item = ITEM_BYTES[str(dtype)]
    if len(sizes) == 1 or rows == 1 or sum(sizes) * post * item > PIECE_BYTES:
        return 0
    widths = [s * post for s in sizes]
    first = next(pieces(rows, widths, item), None)
    return 0 if first is None else piece_elements(widths, first) * item


def reduce_scatter_workspace_bytes(shape: Sequence[int], dtype: object, axis: int, sizes: Sequence[int]) -> int:
    """Scratch bytes that are enough for a reduce_scatter by any of the runtime's algorithms.

    It is planned before the MPI library is known, hence no exact figure; about twice `PIECE_BYTES`
    at most.  ``sizes`` are the extents of the blocks along ``axis``.
    """
    if len(sizes) == 1:
        return 0
    rows, post = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    widths, item = [s * post for s in sizes], reduced_bytes(dtype)
    first = next(pieces(rows, widths, item), None)
    if first is None:
        return 0
    packed, received = (piece_elements(blocks, first) * item for blocks in (widths, [max(widths)] * len(widths)))
    lies_ready = rows == 1 and str(dtype) not in REDUCED_IN
    return max(packed, received) if lies_ready else packed + received


def all_to_all_workspace_bytes(
    shape: Sequence[int],
    dtype: object,
    split_axis: int,
    concat_axis: int,
    split_sizes: Sequence[int],
    concat_sizes: Sequence[int],
    index: int = 0,
) -> int:
    """Scratch bytes of an all_to_all for the rank that holds block ``index``.

    ``shape`` is whole along ``split_axis`` and a block along ``concat_axis``; after it is the other
    way round.  ``split_sizes`` and ``concat_sizes`` are the extents of all blocks.
    """
    if len(split_sizes) == 1:
        return 0
    item = ITEM_BYTES[str(dtype)]
    lead = min(split_axis, concat_axis)
    sent = [n for i, n in enumerate(shape) if i >= lead]
    kept = list(sent)
    kept[split_axis - lead], kept[concat_axis - lead] = split_sizes[index], sum(concat_sizes)
    rows = all_to_all_rows(shape, item, split_axis, concat_axis, split_sizes, concat_sizes)
    total = 0
    if math.prod(shape[:split_axis]) != 1:
        total += rows * math.prod(sent) * item
    if math.prod(shape[:lead]) * math.prod(kept[: concat_axis - lead]) != 1:
        total += rows * math.prod(kept) * item
    return total


def all_to_all_rows(
    shape: Sequence[int],
    item_bytes: int,
    split_axis: int,
    concat_axis: int,
    split_sizes: Sequence[int],
    concat_sizes: Sequence[int],
) -> int:
    """Leading rows of one message of an all_to_all: the same on every rank of the group.

    A row is what follows the extents before both axes.  It is priced for the largest blocks, since
    all ranks must cut alike although their blocks may differ.
    """
    lead, tail = min(split_axis, concat_axis), max(split_axis, concat_axis) + 1
    between = math.prod(shape[lead + 1 : tail - 1]) * math.prod(shape[tail:])
    sent = sum(split_sizes) * max(concat_sizes)
    kept = max(split_sizes) * sum(concat_sizes)
    row_bytes = max(sent, kept) * between * item_bytes
    rows = math.prod(shape[:lead])
    return min(rows, max(1, PIECE_BYTES // row_bytes)) if row_bytes else rows


def shift_workspace_bytes(shape: Sequence[int], dtype: object, axis: int, exchange: HaloExchange) -> int:
    """Scratch bytes of a shift into ``shape``: what a rank sends and receives at most, the same on all."""
    others = math.prod(n for k, n in enumerate(shape) if k != axis)
    rows = exchange.most_rows_sent() + exchange.most_rows_received()
    return rows * others * ITEM_BYTES[str(dtype)]
