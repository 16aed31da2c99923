"""Layers with variables: dense, gated units, feed-forward, embeddings.

A layer's variables get the prefix of its ``name`` and of the enclosing scopes. The same layer can be data-parallel,
model-parallel or both: it does not know the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshmpi.dims import Dimension, Shape
from meshmpi.errors import ConfigError, ShapeError, suggest
from meshmpi.graph import Tensor, layer_name, scope
from meshmpi.graph.arguments import asked, checked
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.contraction import einsum
from meshmpi.graph.ops.indexing import gather
from meshmpi.graph.ops.sources import VariableDType, get_variable
from meshmpi.graph.ops.structure import DimLike, dim_name
from meshmpi.nn.activations import ACTIVATIONS, Activation, activation_function
from meshmpi.nn.initializers import random_normal_initializer, variance_scaling_initializer, zeros_initializer
from meshmpi.nn.randomness import dropout

Dims = Dimension | Sequence[Dimension]
DTypeLike = str | VariableDType | None
GATED_UNITS = {
    "bilinear": ("linear", "linear"),
    "glu": ("sigmoid", "linear"),
    "reglu": ("relu", "linear"),
    "geglu": ("gelu", "linear"),
    "swiglu": ("swish", "linear"),
}
"""Names of activations that are products of two dense layers.  Source: Shazeer 2020."""
Activations = Activation | Sequence[Activation]
"""An activation; several, or the name of a gated unit, make a `dense_product`."""


def factors(activation: Activations) -> Sequence[Activation]:
    """The activations of the dense layers whose product ``activation`` stands for.

    Raises:
        ConfigError: There is no activation or gated unit of that name.
    """
    if isinstance(activation, str):
        if activation in GATED_UNITS:
            return GATED_UNITS[activation]
        if activation not in ACTIVATIONS:
            raise ConfigError(
                f"there is no activation '{activation}'.", suggest(activation, [*ACTIVATIONS, *GATED_UNITS])
            )
        return (activation,)
    if isinstance(activation, Sequence) and not activation:
        raise ConfigError("there is no activation in an empty list.", "Give None for none.")
    return (activation,) if activation is None or callable(activation) else activation


def variable_type(dtype: DTypeLike, x: Tensor) -> VariableDType:
    """Types of a layer's variables: as given, else those that fit its input.

    Computed with in the type of x; stored in it too, but for bfloat16 in float32.
    """
    if isinstance(dtype, VariableDType):
        return dtype
    if dtype is not None:
        return VariableDType(dtype, dtype)
    return VariableDType("float32" if x.dtype == "bfloat16" else x.dtype, x.dtype)


def as_list(dims: Any) -> list:
    """One dim or several as a list."""
    return [dims] if isinstance(dims, (str, Dimension)) else list(dims)


def dense(
    x: Tensor,
    new_dims: Dims,
    reduced_dims: DimLike | Sequence[DimLike] | None = None,
    expert_dims: Dims = (),
    use_bias: bool = True,
    activation: Activations = None,
    variable_dtype: DTypeLike = None,
    kernel_initializer: Any = None,
    name: str | None = None,
) -> Tensor:
    """activation(sum over ``reduced_dims`` of x * kernel + bias).

    Args:
        x: Any shape.
        new_dims: Dims that the kernel produces.
        reduced_dims: Dims of x to sum over; default the last.
        expert_dims: Dims of x for each index of which there is a kernel and bias of its own.
        use_bias: Whether there is a bias.
        activation: A name of `ACTIVATIONS`, a function, or None; several, or a name of
            `GATED_UNITS`, make this a `dense_product`.
        variable_dtype: Types of the variables; default those that fit x.
        kernel_initializer: Default normal with variance 1 / (product of ``reduced_dims``).
        name: Variables are ``name/kernel`` [expert, reduced, new] and ``name/bias`` [expert, new].

    Returns:
        The dims of x that are left, then ``new_dims``, which must have other names.

    Lowers: where a reduced dim is split, an all_reduce of the result.

    Example:
        >>> with mm.Graph():
        ...     x = mm.placeholder("x", "batch:8;io:16")
        ...     mm.dense(x, mm.Dimension("hidden", 32), activation="relu").shape
        [batch=8, hidden=32]
    """
    name = layer_name(name, "dense")
    parts = factors(activation)
    if len(parts) > 1:
        options = {"expert_dims": expert_dims, "use_bias": use_bias, "variable_dtype": variable_dtype}
        return dense_product(x, reduced_dims, new_dims, parts, name, kernel_initializer=kernel_initializer, **options)
    new, expert = as_list(new_dims), as_list(expert_dims)
    reduced = [x.at(-1, "dense")] if reduced_dims is None else [x.shape.dim(dim_name(d)) for d in as_list(reduced_dims)]
    taken = [d.name for d in new if x.shape.find(d.name) >= 0]
    if taken:
        raise ShapeError(
            f"dense '{name}': the new dimension '{taken[0]}' is already in x {x.shape}.",
            "Rename one of them with mm.rename_dimension().",
            str(x.source),
        )
    dtype = variable_type(variable_dtype, x)
    if kernel_initializer is None:
        kernel_initializer = variance_scaling_initializer(fan_in=reduced)
    with scope(name):
        kernel = get_variable("kernel", Shape([*expert, *reduced, *new]), dtype, kernel_initializer)
        y = einsum([x, kernel], Shape([*x.shape.without(d.name for d in reduced), *new]))
        if use_bias:
            bias = get_variable("bias", Shape([*expert, *new]), dtype, zeros_initializer(), decays=False)
            y = ew.add(y, bias, output_shape=y.shape)
        return activation_function(parts[0])(y)


def dense_product(
    x: Tensor,
    reduced_dims: DimLike | Sequence[DimLike] | None,
    new_dims: Dims,
    activation_functions: Activations = "glu",
    name: str | None = None,
    **options: Any,
) -> Tensor:
    """The product at every point of dense layers of x, one for each activation: gated units.

    Args:
        x: Any shape.
        reduced_dims: As `dense`.
        new_dims: As `dense`.
        activation_functions: One activation for each layer, or a name of `GATED_UNITS`.
        name: Variables are ``name/dense_0/kernel``, ``name/dense_1/kernel``, ... and biases.
        options: Other arguments of `dense`, for every layer.

    Returns:
        As `dense`.

    Lowers: as `dense`, for each layer.

    Source: Mesh-TensorFlow's dense_product; Dauphin et al. 2017; Shazeer 2020.

    Example:
        >>> with mm.Graph():
        ...     x = mm.placeholder("x", "batch:8;d_model:16")
        ...     mm.dense_product(x, "d_model", mm.Dimension("d_ff", 32), "swiglu").shape
        [batch=8, d_ff=32]
    """
    name = layer_name(name, "dense_product")
    parts = factors(activation_functions)
    layer = checked(dense)  # its options came unread
    with scope(name):
        y, *others = [
            layer(x, new_dims, reduced_dims, activation=a, name=f"dense_{i}", **options) for i, a in enumerate(parts)
        ]
    for other in others:
        y = ew.multiply(y, other)
    return y


def dense_relu_dense(
    x: Tensor,
    hidden_channels: Dimension,
    is_training: bool = False,
    dropout_rate: float = 0.0,
    dropout_broadcast_dims: Sequence[DimLike] = (),
    *,
    activation: Activations = "relu",
    use_bias: bool = True,
    variable_dtype: DTypeLike = None,
    initializers: tuple[Any, Any] = (None, None),
    name: str | None = None,
) -> Tensor:
    """Two dense layers with an activation between, over the last dim of x.

    The other arguments are those of `dense`.

    Args:
        x: [..., io].
        hidden_channels: The dim between.
        dropout_rate: Share of hidden activations that is dropped where ``is_training``.
        dropout_broadcast_dims: Dims along which dropout repeats its mask.
        initializers: Initializers of the kernels in and out; default as `dense`.
        name: Variables are ``name/wi/kernel``, ``name/wi/bias`` and the same of ``wo``.

    Returns:
        A tensor of x's shape.

    Lowers: where ``hidden_channels`` is split, one all_reduce of the result.
    """
    name, io = layer_name(name, "feed_forward"), x.at(-1, "dense_relu_dense")
    with scope(name):
        h = dense(x, hidden_channels, io, (), use_bias, activation, variable_dtype, initializers[0], "wi")
        h = dropout_over(h, is_training, dropout_rate, dropout_broadcast_dims)
        return dense(h, io, hidden_channels, (), use_bias, None, variable_dtype, initializers[1], "wo")


def dropout_over(x: Tensor, is_training: bool, rate: float, broadcast_dims: Sequence[DimLike] = ()) -> Tensor:
    """`dropout` with one mask for all indices of ``broadcast_dims`` (those that x has)."""
    return dropout(x, is_training, rate=rate, noise_shape=x.shape.without(dim_name(d) for d in broadcast_dims))


def residual(x: Tensor, sublayers: Callable[[Tensor], Tensor]) -> Tensor:
    """x + sublayers(x)."""
    return ew.add(x, asked(sublayers, "residual", x), output_shape=x.shape)


def embedding_weights(
    vocab_dim: Dimension,
    output_dims: Dims,
    variable_dtype: DTypeLike = "float32",
    initializer: Any = None,
    name: str | None = None,
) -> Tensor:
    """The variable ``name`` [vocab_dim, output_dims]; default standard normal."""
    name = layer_name(name, "embedding")
    first = random_normal_initializer() if initializer is None else initializer
    return get_variable(name, Shape([vocab_dim, *as_list(output_dims)]), variable_dtype or "float32", first)


def embedding(
    indices: Tensor,
    vocab_dim: Dimension,
    output_dims: Dims,
    variable_dtype: DTypeLike = "float32",
    initializer: Any = None,
    name: str | None = None,
) -> Tensor:
    """Rows of a variable [vocab_dim, output_dims] at ``indices``; a split vocabulary stays split.

    The other arguments are those of `embedding_weights`.

    Args:
        indices: Integers over any dims that the table lacks; outside 0..size-1 a row is zeros.

    Returns:
        [dims of indices, output_dims].

    Lowers: where ``vocab_dim`` is split, an all_reduce of the result.
    """
    table = embedding_weights(vocab_dim, output_dims, variable_dtype, initializer, name)
    return gather(table, indices, vocab_dim)
