"""Tables that are looked up by index; a split vocabulary stays split.  No layout is known here."""

from __future__ import annotations

from typing import Any

from meshmpi.dims import Dimension, Shape
from meshmpi.graph import Tensor, layer_name
from meshmpi.graph.ops.indexing import gather
from meshmpi.graph.ops.sources import get_variable
from meshmpi.nn.initializers import random_normal_initializer
from meshmpi.nn.layers import Dims, DTypeLike, as_list


def embedding_weights(
    vocab_dim: Dimension,
    output_dims: Dims,
    variable_dtype: DTypeLike = "float32",
    initializer: Any = None,
    name: str | None = None,
) -> Tensor:
    """The variable ``name`` [vocab_dim, output_dims]; default standard normal."""
    name = layer_name(name, "embedding")
    shape = Shape([vocab_dim, *as_list(output_dims)])
    if initializer is None:
        initializer = random_normal_initializer()
    return get_variable(name, shape, variable_dtype or "float32", initializer)


def embedding(
    indices: Tensor,
    vocab_dim: Dimension,
    output_dims: Dims,
    variable_dtype: DTypeLike = "float32",
    initializer: Any = None,
    name: str | None = None,
) -> Tensor:
    """Rows of a variable [vocab_dim, output_dims] at ``indices``.

    Args:
        indices: Integers over any dims that the table lacks; outside 0..size-1 a row is zeros.
        vocab_dim: The dim that is looked up.
        output_dims: One or more dims of a row.
        variable_dtype: Types of the table.
        initializer: Default standard normal.
        name: Name of the table.

    Returns:
        [dims of indices, output_dims].

    Lowers: where ``vocab_dim`` is split, an all_reduce of the result.
    """
    table = embedding_weights(vocab_dim, output_dims, variable_dtype, initializer, name)
    return gather(table, indices, vocab_dim)
