"""Who may attend to whom: bool tensors over query and memory positions, True where allowed.

Masks are combined with `mm.logical_and`, which unites their dims by name.  They are data: every
pair is computed.  What depends on the distance of two positions only is better declared as a
`mm.Band`, as ``causal=True`` does: other pairs do not exist then, and blocks of them are skipped.
"""

from __future__ import annotations

from meshmpi.dims import Dimension
from meshmpi.graph import Tensor
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.positions import band_mask
from meshmpi.ir.bands import Band


def attention_mask_autoregressive(query_length: Dimension, memory_length: Dimension) -> Tensor:
    """True where a query may see a memory: [query_length, memory_length], memory <= query."""
    band = Band.causal(query_length.name, memory_length.name)
    return band_mask(band, query_length, memory_length)


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
    band = Band.local(query_length.name, memory_length.name, window, autoregressive)
    return band_mask(band, query_length, memory_length)


def within_window(distance: Tensor, window: int, autoregressive: bool) -> Tensor:
    """Whether query - memory position is in [0, window), or within it on both sides."""
    least = 0 if autoregressive else 1 - window
    return ew.logical_and(ew.greater_equal(distance, least), ew.less(distance, window))
