"""Layers with variables: dense, products of them (gated units), norms, feed-forward.

A layer's variables get the prefix of its ``name`` and of the scopes around it.  No layout is known
here: the same layer is data-parallel, model-parallel or both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshmpi.dims import Dimension, Shape
from meshmpi.errors import ConfigError, ShapeError, suggest
from meshmpi.graph import Tensor, layer_name, scope
from meshmpi.graph.arguments import checked
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.contraction import einsum
from meshmpi.graph.ops.reductions import reduce_mean
from meshmpi.graph.ops.sources import VariableDType, get_variable
from meshmpi.graph.ops.structure import DimLike, dim_name
from meshmpi.graph.ops.structure import slice as slice_dim
from meshmpi.nn.activations import ACTIVATIONS, Activation, activation_function
from meshmpi.nn.functions import widened
from meshmpi.nn.initializers import ones_initializer, variance_scaling_initializer, zeros_initializer
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


def wide_type(dtype: VariableDType) -> VariableDType:
    """The same with an activation type of at least float32."""
    return VariableDType(dtype.master, "float32") if dtype.activation == "bfloat16" else dtype


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
    name = layer_name(name, "dense")
    parts = factors(activation)
    if len(parts) > 1:
        return dense_product(
            x,
            reduced_dims,
            new_dims,
            parts,
            name,
            expert_dims=expert_dims,
            use_bias=use_bias,
            variable_dtype=variable_dtype,
            kernel_initializer=kernel_initializer,
        )
    new, expert = as_list(new_dims), as_list(expert_dims)
    reduced = [x.at(-1, "dense")] if reduced_dims is None else _dims_of(x, reduced_dims)
    for d in new:
        if x.shape.find(d.name) >= 0:
            raise ShapeError(
                f"dense '{name}': the new dimension '{d.name}' is already in x {x.shape}.",
                "Rename one of them with mm.rename_dimension().",
                str(x.source),
            )
    dtype = variable_type(variable_dtype, x)
    if kernel_initializer is None:
        kernel_initializer = variance_scaling_initializer(fan_in=reduced)
    with scope(name):
        kernel = get_variable("kernel", Shape([*expert, *reduced, *new]), dtype, kernel_initializer)
        kept = x.shape.without(d.name for d in reduced)
        y = einsum([x, kernel], Shape([*kept, *new]))
        if use_bias:
            bias_shape = Shape([*expert, *new])
            bias = get_variable("bias", bias_shape, dtype, zeros_initializer(), decays=False)
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
        made = [
            layer(x, new_dims, reduced_dims, activation=a, name=f"dense_{i}", **options) for i, a in enumerate(parts)
        ]
    y = made[0]
    for other in made[1:]:
        y = ew.multiply(y, other)
    return y


def _dims_of(x: Tensor, dims: DimLike | Sequence[DimLike]) -> list[Dimension]:
    return [x.shape.dim(dim_name(d)) for d in as_list(dims)]


def layer_norm(
    x: Tensor,
    dim: DimLike,
    epsilon: float = 1e-6,
    name: str | None = None,
    use_scale: bool = True,
    use_bias: bool = True,
    variable_dtype: DTypeLike = None,
) -> Tensor:
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
    name = layer_name(name, "layer_norm")
    wide = widened(x)
    centred = ew.subtract(wide, reduce_mean(wide, reduced_dim=dim), output_shape=x.shape)
    return _normalised(x, centred, dim, epsilon, name, use_scale, use_bias, variable_dtype)


def rms_norm(
    x: Tensor,
    dim: DimLike,
    epsilon: float = 1e-6,
    name: str | None = None,
    use_scale: bool = True,
    variable_dtype: DTypeLike = None,
) -> Tensor:
    """x / sqrt(mean of x**2 over ``dim`` + epsilon) * scale.

    Args: as `layer_norm`.

    Source: Zhang and Sennrich 2019.
    """
    name = layer_name(name, "rms_norm")
    return _normalised(x, widened(x), dim, epsilon, name, use_scale, False, variable_dtype)


def scale_norm(
    x: Tensor, dim: DimLike, epsilon: float = 1e-6, name: str | None = None, variable_dtype: DTypeLike = None
) -> Tensor:
    """x / sqrt(mean of x**2 over ``dim`` + epsilon) times one learned number, first 1.

    Args: as `layer_norm`.

    Source: Nguyen and Salazar 2019, with a mean in place of their sum.
    """
    name = layer_name(name, "scale_norm")
    return _normalised(x, widened(x), dim, epsilon, name, True, False, variable_dtype, one=True)


def rms_norm_subsampled(
    x: Tensor,
    dim: DimLike,
    fraction: float = 0.25,
    epsilon: float = 1e-6,
    name: str | None = None,
    use_scale: bool = True,
    variable_dtype: DTypeLike = None,
) -> Tensor:
    """`rms_norm` whose mean square is that of the first ``fraction`` of ``dim`` only.

    Args: as `layer_norm`, and

        fraction: In (0, 1]; at least one element is taken.

    Source: partial RMS norm of Zhang and Sennrich 2019.
    """
    name = layer_name(name, "rms_norm")
    if not 0.0 < fraction <= 1.0:
        raise ShapeError(f"rms_norm_subsampled: the fraction is {fraction}.", "Give a number in (0, 1].")
    wide, whole = widened(x), x.shape.dim(dim_name(dim))
    sample = slice_dim(wide, 0, max(1, int(fraction * whole.size)), whole)
    return _normalised(x, wide, dim, epsilon, name, use_scale, False, variable_dtype, sample=sample)


def _normalised(
    x: Tensor,
    centred: Tensor,
    dim: DimLike,
    epsilon: float,
    name: str,
    use_scale: bool,
    use_bias: bool,
    variable_dtype: DTypeLike,
    *,
    one: bool = False,
    sample: Tensor | None = None,
) -> Tensor:
    """centred / sqrt(mean square + epsilon), scaled and moved, in the type of x.

    With ``one`` there is one scale for all; the mean square is that of ``sample`` if it is given.
    """
    shape = Shape([x.shape.dim(dim_name(dim))])
    dtype = wide_type(variable_type(variable_dtype, x))
    squares = ew.square(centred if sample is None else sample)
    mean_square = reduce_mean(squares, reduced_dim=dim_name(dim))
    y = ew.multiply(centred, ew.rsqrt(ew.add(mean_square, epsilon)), output_shape=x.shape)
    with scope(name):
        if use_scale:
            scale_shape = Shape() if one else shape
            scale = get_variable("scale", scale_shape, dtype, ones_initializer(), decays=False)
            y = ew.multiply(y, scale, output_shape=x.shape)
        if use_bias:
            bias = get_variable("bias", shape, dtype, zeros_initializer(), decays=False)
            y = ew.add(y, bias, output_shape=x.shape)
        return ew.cast(y, x.dtype)


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

    Args:
        x: [..., io].
        hidden_channels: The dim between.
        is_training: Whether dropout acts.
        dropout_rate: Share of hidden activations that is dropped.
        dropout_broadcast_dims: Dims along which dropout repeats its mask.
        activation: As `dense`: a name of `GATED_UNITS` makes the hidden layer a product of two.
        use_bias: Whether both layers have biases.
        variable_dtype: Types of the variables; default see `variable_type`.
        initializers: Initializers of the kernels in and out; default as `dense`.
        name: Variables are ``name/wi/kernel``, ``name/wi/bias`` and the same of ``wo``.

    Returns:
        A tensor of x's shape.

    Lowers: where ``hidden_channels`` is split, one all_reduce of the result.
    """
    name = layer_name(name, "feed_forward")
    io = x.at(-1, "dense_relu_dense")
    into, out_of = initializers
    with scope(name):
        h = dense(
            x,
            hidden_channels,
            io,
            use_bias=use_bias,
            activation=activation,
            variable_dtype=variable_dtype,
            kernel_initializer=into,
            name="wi",
        )
        h = dropout_over(h, is_training, dropout_rate, dropout_broadcast_dims)
        return dense(
            h,
            io,
            hidden_channels,
            use_bias=use_bias,
            variable_dtype=variable_dtype,
            kernel_initializer=out_of,
            name="wo",
        )


def dropout_over(
    x: Tensor, is_training: bool, rate: float, broadcast_dims: Sequence[DimLike] = (), name: str = "dropout"
) -> Tensor:
    """`dropout` with one mask for all indices of ``broadcast_dims`` (those that x has)."""
    noise_shape = x.shape.without(dim_name(d) for d in broadcast_dims)
    return dropout(x, is_training, rate=rate, noise_shape=noise_shape, name=name)
