"""Layers with variables: dense, norms, embedding, feed-forward.

A layer's variables get the prefix of its ``name`` and of the scopes around it.  No layout is known
here: the same layer is data-parallel, model-parallel or both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshmpi.dims import Dimension, Shape
from meshmpi.errors import ShapeError
from meshmpi.graph import Tensor, scope
from meshmpi.nn.activations import Activation, activation_function
from meshmpi.nn.functions import widened
from meshmpi.nn.initializers import (
    ones_initializer,
    random_normal_initializer,
    variance_scaling_initializer,
    zeros_initializer,
)
from meshmpi.nn.randomness import dropout
from meshmpi.ops import elementwise as ew
from meshmpi.ops.contraction import einsum
from meshmpi.ops.indexing import gather
from meshmpi.ops.reductions import reduce_mean
from meshmpi.ops.sources import VariableDType, get_variable
from meshmpi.ops.structure import DimLike, dim_name

Dims = Dimension | Sequence[Dimension]
DTypeLike = str | VariableDType | None


def variable_type(dtype: DTypeLike, x: Tensor) -> VariableDType:
    """Types of a layer's variables: as given, else those that fit its input.

    Computed with in the type of x; stored in it too, but for bfloat16 in float32.
    """
    if isinstance(dtype, VariableDType):
        return dtype
    if dtype is not None:
        return VariableDType(dtype, dtype)
    return VariableDType("float32" if x.dtype == "bfloat16" else x.dtype, x.dtype)


def wide_type(dtype: VariableDType) -> VariableDType:
    """The same with an activation type of at least float32."""
    return VariableDType(dtype.master, "float32") if dtype.activation == "bfloat16" else dtype


def _as_list(dims: Any) -> list:
    return [dims] if isinstance(dims, (str, Dimension)) else list(dims)


def dense(
    x: Tensor, new_dims: Dims, reduced_dims: DimLike | Sequence[DimLike] | None = None,
    expert_dims: Dims = (), use_bias: bool = True, activation: Activation = None,
    variable_dtype: DTypeLike = None, kernel_initializer: Any = None, name: str = "dense",
) -> Tensor:  # fmt: skip
    """activation(sum over ``reduced_dims`` of x * kernel + bias).

    Args:
        x: Any shape.
        new_dims: Dims that the kernel produces.
        reduced_dims: Dims of x to sum over; default the last.
        expert_dims: Dims of x for each index of which there is a kernel and bias of its own.
        use_bias: Whether there is a bias.
        activation: A name of `ACTIVATIONS`, a function, or None.
        variable_dtype: Types of the variables; default see `variable_type`.
        kernel_initializer: Default normal with variance 1 / (product of ``reduced_dims``).
        name: Variables are ``name/kernel`` [expert, reduced, new] and ``name/bias`` [expert, new].

    Returns:
        The dims of x that are left, then ``new_dims``.

    Raises:
        ShapeError: A new dim has the name of a dim of x.

    Lowers: where a reduced dim is split, an all_reduce of the result.

    Example:
        >>> with mm.Graph():
        ...     x = mm.placeholder("x", "batch:8;io:16")
        ...     mm.dense(x, mm.Dimension("hidden", 32), activation="relu").shape
        [batch=8, hidden=32]
    """
    new, expert = _as_list(new_dims), _as_list(expert_dims)
    reduced = [x.shape[-1]] if reduced_dims is None else _dims_of(x, reduced_dims)
    for d in new:
        if x.shape.find(d.name) >= 0:
            raise ShapeError(
                f"dense '{name}': the new dimension '{d.name}' is already in x {x.shape}.",
                "Rename one of them with mm.rename_dimension().", str(x.source),
            )  # fmt: skip
    dtype = variable_type(variable_dtype, x)
    if kernel_initializer is None:
        kernel_initializer = variance_scaling_initializer(fan_in=reduced)
    with scope(name):
        kernel = get_variable("kernel", Shape([*expert, *reduced, *new]), dtype, kernel_initializer)
        kept = x.shape.without(d.name for d in reduced)
        y = einsum([x, kernel], Shape([*kept, *new]))
        if use_bias:
            bias_shape = Shape([*expert, *new])
            bias = get_variable("bias", bias_shape, dtype, zeros_initializer())
            y = ew.add(y, bias, output_shape=y.shape)
        return activation_function(activation)(y)


def _dims_of(x: Tensor, dims: DimLike | Sequence[DimLike]) -> list[Dimension]:
    return [x.shape.dim(dim_name(d)) for d in _as_list(dims)]


def layer_norm(
    x: Tensor, dim: DimLike, epsilon: float = 1e-6, name: str = "layer_norm",
    use_scale: bool = True, use_bias: bool = True, variable_dtype: DTypeLike = None,
) -> Tensor:  # fmt: skip
    """(x - mean) / sqrt(variance + epsilon) * scale + bias, mean and variance over ``dim``.

    Args:
        x: Any shape; bfloat16 is normalised in float32.
        dim: The dim (or its name) that is normalised.
        epsilon: Added to the variance (of the whole population, not n - 1).
        name: Variables are ``name/scale`` (ones) and ``name/bias`` (zeros), both [dim].
        use_scale: Whether there is a scale.
        use_bias: Whether there is a bias.
        variable_dtype: Types of the variables; default see `variable_type`.

    Source: Ba et al. 2016.
    """
    wide = widened(x)
    centred = ew.subtract(wide, reduce_mean(wide, reduced_dim=dim), output_shape=x.shape)
    return _normalised(x, centred, dim, epsilon, name, use_scale, use_bias, variable_dtype)


def rms_norm(
    x: Tensor, dim: DimLike, epsilon: float = 1e-6, name: str = "rms_norm",
    use_scale: bool = True, variable_dtype: DTypeLike = None,
) -> Tensor:  # fmt: skip
    """x / sqrt(mean of x**2 over ``dim`` + epsilon) * scale.

    Args: as `layer_norm`.

    Source: Zhang and Sennrich 2019.
    """
    return _normalised(x, widened(x), dim, epsilon, name, use_scale, False, variable_dtype)


def _normalised(
    x: Tensor, centred: Tensor, dim: DimLike, epsilon: float, name: str, use_scale: bool,
    use_bias: bool, variable_dtype: DTypeLike,
) -> Tensor:  # fmt: skip
    """centred / sqrt(mean square + epsilon), scaled and moved, in the type of x."""
    shape = Shape([x.shape.dim(dim_name(dim))])
    dtype = wide_type(variable_type(variable_dtype, x))
    mean_square = reduce_mean(ew.square(centred), reduced_dim=dim)
    y = ew.multiply(centred, ew.rsqrt(ew.add(mean_square, epsilon)), output_shape=x.shape)
    with scope(name):
        if use_scale:
            scale = get_variable("scale", shape, dtype, ones_initializer())
            y = ew.multiply(y, scale, output_shape=x.shape)
        if use_bias:
            bias = get_variable("bias", shape, dtype, zeros_initializer())
            y = ew.add(y, bias, output_shape=x.shape)
        return ew.cast(y, x.dtype)


def embedding_weights(
    vocab_dim: Dimension, output_dims: Dims, variable_dtype: DTypeLike = "float32",
    initializer: Any = None, name: str = "embedding",
) -> Tensor:  # fmt: skip
    """The variable ``name`` [vocab_dim, output_dims]; default standard normal."""
    shape = Shape([vocab_dim, *_as_list(output_dims)])
    if initializer is None:
        initializer = random_normal_initializer()
    return get_variable(name, shape, variable_dtype or "float32", initializer)


def embedding(
    indices: Tensor, vocab_dim: Dimension, output_dims: Dims, variable_dtype: DTypeLike = "float32",
    initializer: Any = None, name: str = "embedding",
) -> Tensor:  # fmt: skip
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


def dense_relu_dense(
    x: Tensor, hidden_channels: Dimension, is_training: bool = False, dropout_rate: float = 0.0,
    dropout_broadcast_dims: Sequence[DimLike] = (), *, activation: Activation = "relu",
    use_bias: bool = True, variable_dtype: DTypeLike = None,
    initializers: tuple[Any, Any] = (None, None), name: str = "feed_forward",
) -> Tensor:  # fmt: skip
    """Two dense layers with an activation between, over the last dim of x.

    Args:
        x: [..., io].
        hidden_channels: The dim between.
        is_training: Whether dropout acts.
        dropout_rate: Share of hidden activations that is dropped.
        dropout_broadcast_dims: Dims along which dropout repeats its mask.
        activation: A name of `ACTIVATIONS`, or a function.
        use_bias: Whether both layers have biases.
        variable_dtype: Types of the variables; default see `variable_type`.
        initializers: Of the kernels in and out; default as `dense`.
        name: Variables are ``name/wi/kernel``, ``name/wi/bias`` and the same of ``wo``.

    Returns:
        A tensor of x's shape.

    Lowers: where ``hidden_channels`` is split, one all_reduce of the result.
    """
    io = x.shape[-1]
    into, out_of = initializers
    with scope(name):
        h = dense(
            x, hidden_channels, io, use_bias=use_bias, activation=activation,
            variable_dtype=variable_dtype, kernel_initializer=into, name="wi",
        )  # fmt: skip
        h = dropout_over(h, is_training, dropout_rate, dropout_broadcast_dims)
        return dense(
            h, io, hidden_channels, use_bias=use_bias, variable_dtype=variable_dtype,
            kernel_initializer=out_of, name="wo",
        )  # fmt: skip


def dropout_over(
    x: Tensor, is_training: bool, rate: float, broadcast_dims: Sequence[DimLike] = (),
    name: str = "dropout",
) -> Tensor:  # fmt: skip
    """`dropout` with one mask for all indices of ``broadcast_dims`` (those that x has)."""
    noise_shape = x.shape.without(dim_name(d) for d in broadcast_dims)
    return dropout(x, is_training, rate=rate, noise_shape=noise_shape, name=name)
