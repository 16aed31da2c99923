"""Who may attend to whom: bool tensors over query and memory positions, True where allowed.

Masks are combined with `mm.logical_and`, which unites their dims by name.
"""

from __future__ import annotations

from meshmpi.dims import Dimension, Shape
from meshmpi.graph import Tensor
from meshmpi.ops import elementwise as ew
from meshmpi.ops.sources import range as index_range


def attention_mask_autoregressive(query_length: Dimension, memory_length: Dimension) -> Tensor:
    """True where a query may see a memory: [query_length, memory_length], memory <= query."""
    return ew.greater_equal(
        index_range(query_length), index_range(memory_length),
        output_shape=Shape([query_length, memory_length]),
    )  # fmt: skip


def attention_mask_ignore_padding(memory_ids: Tensor, padding_id: int = 0) -> Tensor:
    """True where a memory position holds a token: not_equal(ids, padding_id)."""
    return ew.not_equal(memory_ids, padding_id)


def attention_mask_same_segment(query_segment: Tensor, memory_segment: Tensor) -> Tensor:
    """True where both are of one segment, so that packed sequences do not see each other.

    Args:
        query_segment: Integers [batch dims, query length], the number of each position's sequence.
        memory_segment: The same over [batch dims, memory length].
    """
    return ew.equal(query_segment, memory_segment)


def attention_mask_local(
    query_length: Dimension, memory_length: Dimension, window: int, autoregressive: bool = True
) -> Tensor:
    """True where a memory is less than ``window`` positions away, and not later if autoregressive.

    Returns:
        [query_length, memory_length].  With ``window`` 1 a position sees itself only.
    """
    shape = Shape([query_length, memory_length])
    distance = ew.subtract(
        index_range(query_length), index_range(memory_length), output_shape=shape
    )  # fmt: skip
    return within_window(distance, window, autoregressive)


def within_window(distance: Tensor, window: int, autoregressive: bool) -> Tensor:
    """Whether query - memory position is in [0, window), or within it on both sides."""
    least = 0 if autoregressive else 1 - window
    return ew.logical_and(ew.greater_equal(distance, least), ew.less(distance, window))
