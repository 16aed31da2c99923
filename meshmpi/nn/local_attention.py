"""Local attention along one or two dimensions: blocks of positions with halos.

A dimension of positions becomes a dimension of blocks, which keeps its name and so its layout, and a dimension of
positions in a block. A block attends to itself and to a halo of positions of the neighbouring blocks. If blocks are
split, neighbouring ranks exchange halos by `mm.shift` and nothing else. The distance between positions decides what a
query attends to, independent of the blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshmpi.dims import Dimension, Shape
from meshmpi.errors import ShapeError
from meshmpi.graph import Tensor, layer_name
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.positions import band_mask
from meshmpi.graph.ops.positions import range as index_range
from meshmpi.graph.ops.structure import DimLike, concat, dim_name, pad, rename_dimension, reshape, shift, transpose
from meshmpi.graph.ops.structure import slice as slice_dim
from meshmpi.ir.bands import Band
from meshmpi.nn.attention import AttentionInitializers, AttentionOptions, Projections, Weighting
from meshmpi.nn.layers import DTypeLike, variable_type

IN_BLOCK, MEMORY = "_in_block", "_memory"


def halo_exchange(
    x: Tensor, blocks_dim: DimLike, block_size_dim: DimLike, halo_size: int, wrap: bool = False
) -> Tensor:
    """Every block with ``halo_size`` elements of the blocks on both sides; zeros at the ends.

    Args:
        x: [..., blocks, block].
        blocks_dim: Dim (or name) of blocks.
        block_size_dim: Dim (or name) of positions in a block; grows by 2 * ``halo_size``.
        halo_size: May be larger than a block.
        wrap: Whether the first block follows the last.

    Lowers: where blocks are split, shifts of the halos between neighbouring ranks.

    Source: Mesh-TensorFlow's halo_exchange.
    """
    return _with_halo(x, blocks_dim, block_size_dim, halo_size, halo_size, wrap)


def left_halo_exchange(
    x: Tensor, blocks_dim: DimLike, block_size_dim: DimLike, halo_size: int, wrap: bool = False
) -> Tensor:
    """`halo_exchange` with the elements before every block only."""
    return _with_halo(x, blocks_dim, block_size_dim, halo_size, 0, wrap)


def _with_halo(
    x: Tensor, blocks_dim: DimLike, block_size_dim: DimLike, before: int, after: int, wrap: bool = False
) -> Tensor:
    """Every block with ``before`` elements of what precedes it and ``after`` of what follows."""
    blocks, name = dim_name(blocks_dim), dim_name(block_size_dim)
    size = x.shape.dim(name).size
    if before < 0 or after < 0:
        raise ShapeError(f"halo: sizes are {before} and {after}.", "Give numbers from 0.")
    parts = [x]
    for start in range(0, before, size):  # from the nearest block to the farthest
        part = min(size, before - start)
        parts.insert(0, shift(slice_dim(x, size - part, part, name), start // size + 1, blocks, wrap))
    for start in range(0, after, size):
        parts.append(shift(slice_dim(x, 0, min(size, after - start), name), -(start // size) - 1, blocks, wrap))
    return concat(parts, name)


class _Axis:
    """One dim of positions as blocks with halos; positions less than ``window`` away are near."""

    def __init__(self, dim: Dimension, window: int, causal: bool, block: int | None):
        if window < 1 or (block is not None and block < 1):
            raise ShapeError(
                f"local attention: the window along '{dim.name}' is {window}, the block {block}.",
                "Give at least 1 position.",
            )
        self.dim, self.window, self.causal = dim, window, causal
        size = min(block or window, dim.size)
        self.blocks = Dimension(dim.name, -(-dim.size // size))
        self.inside = Dimension(dim.name + IN_BLOCK, size)
        self.before = min(window, dim.size) - 1
        self.after = 0 if causal else self.before
        self.memory = Dimension(dim.name + MEMORY, size + self.before + self.after)

    def cut(self, x: Tensor) -> Tensor:
        """The dim of x as [blocks, inside], padded at its end."""
        i = x.shape.position(self.dim.name)
        missing = self.blocks.size * self.inside.size - self.dim.size
        x = pad(x, [0, missing], self.dim)
        return reshape(x, Shape([*x.shape[:i], self.blocks, self.inside, *x.shape[i + 1 :]]))

    def join(self, x: Tensor) -> Tensor:
        """The opposite of `cut`."""
        i = x.shape.position(self.blocks.name)
        whole = Dimension(self.dim.name, self.blocks.size * self.inside.size)
        x = reshape(x, Shape([*x.shape[:i], whole, *x.shape[i + 2 :]]))
        return slice_dim(x, 0, self.dim.size, self.dim)

    def with_halo(self, x: Tensor) -> Tensor:
        """[blocks, memory] of [blocks, inside]."""
        x = _with_halo(x, self.blocks, self.inside, self.before, self.after)
        return rename_dimension(x, self.inside.name, self.memory.name)

    def distance(self) -> Tensor:
        """Query minus memory position, [blocks, inside, memory]."""
        far = ew.subtract(index_range(self.inside), index_range(self.memory))
        shape = Shape([self.blocks, self.inside, self.memory])
        return ew.broadcast(ew.add(far, self.before), shape)

    def band(self) -> Band:
        """Pairs of positions inside a block and in its memory that are near each other."""
        near = Band.local(self.inside.name, self.memory.name, self.window, self.causal)
        least, most = (far - self.before for far in (near.least or 0, near.most or 0))
        return near._replace(least=least, most=most)

    def mask(self) -> Tensor:
        """bool [blocks, inside, memory]: no position before 0 or behind the end.

        Padding behind the end sees itself, so that no row of the softmax is empty.
        """
        distance = self.distance()
        begin = ew.multiply(index_range(self.blocks), self.inside.size)
        own = ew.add(begin, index_range(self.inside))
        other = ew.subtract(ew.add(begin, index_range(self.memory)), self.before)
        exists = ew.logical_and(ew.greater_equal(other, 0), ew.less(other, self.dim.size))
        padding = ew.logical_and(ew.equal(distance, 0), ew.greater_equal(own, self.dim.size))
        return ew.logical_or(exists, padding, output_shape=distance.shape)


def local_attention_1d(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    length_dim: DimLike,
    key_dim: DimLike,
    value_dim: DimLike,
    window: int,
    autoregressive: bool = True,
    *,
    block_length: int | None = None,
    segments: Tensor | None = None,
    dropout_rate: float = 0.0,
    dropout_broadcast_dims: Sequence[DimLike] = (),
    is_training: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention to the memories less than ``window`` positions away.

    Equal to `dot_product_attention` with `attention_mask_local`, at the cost of
    length * (block_length + window) instead of length**2.

    The other arguments are those of `dot_product_attention`.

    Args:
        q, k, v: [batch dims, length, heads, key_dim], or value_dim; k and v may lack dims of heads.
        length_dim: Dim (or name) of positions of all three.
        window: Positions that a query sees: itself and the window - 1 before it; both sides alike
            unless autoregressive.
        autoregressive: Whether no query sees later positions.
        block_length: Positions in a block, default ``window``; changes the cost, not the result.
        segments: Integers [batch dims, length]: only positions of one segment see each other.

    Lowers: where length is split into equal parts of whole blocks, a shift of the last
    ``window - 1`` positions of k and v to the next rank (and of the first to the one before); where
    parts are no whole blocks, an exchange of the length dim before and after.

    Source: Mesh-TensorFlow's local_attention_1d and masked_local_attention_1d.  The latter ignores
    its window_size and attends to zeros before the first position; here neither is so.

    Example:
        >>> with mm.Graph():
        ...     q, k, v = (mm.placeholder(n, "length:64;heads:2;d_kv:4") for n in "qkv")
        ...     mm.local_attention_1d(q, k, v, "length", "d_kv", "d_kv", window=16).shape
        [length=64, heads=2, d_kv=4]
    """
    how = Weighting(is_training, dropout_rate, dropout_broadcast_dims, scale)
    axis = _Axis(q.shape.dim(dim_name(length_dim)), window, autoregressive, block_length)
    return _along(axis, how, segments, q, k, v, key_dim, value_dim)


def _along(
    axis: _Axis, how: Weighting, segments: Tensor | None, q: Tensor, k: Tensor, v: Tensor, key: DimLike, value: DimLike
) -> Tensor:
    """Attention to what is near along one dim."""
    mask = axis.mask()
    if segments is not None:
        own = axis.cut(segments)
        mask = ew.logical_and(mask, ew.equal(own, axis.with_halo(axis.cut(segments))))
    how = how._replace(mask=mask, band=axis.band(), dropout_broadcast_dims=_broadcast(how, axis))
    q, k, v = axis.cut(q), axis.with_halo(axis.cut(k)), axis.with_halo(axis.cut(v))
    return axis.join(how.attend(q, k, v, axis.memory, key, value))


def _broadcast(how: Weighting, *axes: _Axis) -> list[DimLike]:
    """Dims along which dropout repeats its mask, with both that a dim of positions became."""
    names = [dim_name(d) for d in how.dropout_broadcast_dims]
    return [*names, *(axis.inside for axis in axes if axis.dim.name in names)]


def local_self_attention(
    x: Tensor,
    kv_channels: Dimension,
    heads: Dimension,
    window: int,
    autoregressive: bool = True,
    *,
    block_length: int | None = None,
    segments: Tensor | None = None,
    is_training: bool = False,
    dropout_rate: float = 0.0,
    dropout_broadcast_dims: Sequence[DimLike] = (),
    use_bias: bool = False,
    scale: float | None = None,
    initializers: AttentionInitializers | None = None,
    variable_dtype: DTypeLike = None,
    name: str | None = None,
    options: AttentionOptions = AttentionOptions(),  # noqa: B008
) -> Tensor:
    """`local_attention_1d` of x [batch dims, length, io] to itself, with its projections.

    The arguments are those of `local_attention_1d` and `multihead_attention`.

    Source: Mesh-TensorFlow's masked_local_attention_1d and LocalSelfAttention.
    """
    name, kv, dtype = layer_name(name, "attention"), kv_channels, variable_type(variable_dtype, x)
    io, length = x.at(-1, "local_self_attention"), x.at(-2, "local_self_attention")
    layer = Projections(io, kv, heads, options, initializers, dtype, use_bias)
    how = Weighting(is_training, dropout_rate, dropout_broadcast_dims, scale)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _along(_Axis(length, window, autoregressive, block_length), how, segments, q, k, v, kv, kv)

    return layer.around(attend, x, x, name)


def local_attention_2d(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dims: Sequence[DimLike],
    key_dim: DimLike,
    value_dim: DimLike,
    window: tuple[int, int],
    autoregressive: bool = False,
    *,
    block: tuple[int, int] | None = None,
    dropout_rate: float = 0.0,
    dropout_broadcast_dims: Sequence[DimLike] = (),
    is_training: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention of points of an image to those less than ``window`` rows and columns away.

    The other arguments are those of `dot_product_attention`.

    Args:
        q, k, v: [batch dims, rows, columns, heads, key_dim], or value_dim; k and v may lack dims of heads.
        dims: The two dims (or names) of positions.
        window: Number of rows and of columns that a point sees; 1 is the point itself.
        autoregressive: Whether a point sees, of those, earlier rows, and of its own row itself and
            what is before it (raster order).
        block: Rows and columns of a block, default ``window``; changes the cost, not the result.

    Lowers: as `local_attention_1d`, for both dims, which may be split over different axes; corners
    travel in two steps.

    Source: Mesh-TensorFlow's local_2d_self_attention_spatial_blocks (Parmar et al. 2018).
    """
    if len(dims) != 2:
        raise ShapeError(f"local_attention_2d: dims are {list(dims)}.", "Give the two dims of positions.")
    names, sizes = [dim_name(d) for d in dims], block or (None, None)
    rows = _Axis(q.shape.dim(names[0]), window[0], autoregressive, sizes[0])
    columns = _Axis(q.shape.dim(names[1]), window[1], False, sizes[1])

    def memory(x: Tensor) -> Tensor:
        x = columns.with_halo(rows.with_halo(columns.cut(rows.cut(x))))
        return _joined_memory(x, rows, columns)

    mask = _mask_2d(rows, columns, autoregressive)
    how = Weighting(is_training, dropout_rate, dropout_broadcast_dims, scale, mask)
    how = how._replace(dropout_broadcast_dims=_broadcast(how, rows, columns))
    y = how.attend(columns.cut(rows.cut(q)), memory(k), memory(v), MEMORY, key_dim, value_dim)
    return rows.join(columns.join(y))


def _joined_memory(x: Tensor, rows: _Axis, columns: _Axis) -> Tensor:
    """The two dims of memory positions as one, behind the two of blocks."""
    parts = [rows.blocks, columns.blocks, rows.memory, columns.memory]
    length = Dimension(MEMORY, rows.memory.size * columns.memory.size)
    i = x.shape.position(rows.blocks.name)
    rest = [d for d in x.shape if d not in parts]
    x = transpose(x, Shape([*rest[:i], *parts, *rest[i:]]))
    return reshape(x, Shape([*rest[:i], *parts[:2], length, *rest[i:]]))


def _mask_2d(rows: _Axis, columns: _Axis, autoregressive: bool) -> Tensor:
    """bool over blocks, positions in them and the joined memory."""
    mask = ew.logical_and(rows.mask(), columns.mask())
    for axis in (rows, columns):
        near = band_mask(axis.band(), axis.inside, axis.memory)
        mask = ew.logical_and(mask, near, output_shape=mask.shape)
    if autoregressive:
        before = ew.logical_or(ew.greater(rows.distance(), 0), ew.greater_equal(columns.distance(), 0))
        mask = ew.logical_and(mask, before, output_shape=mask.shape)
    return _joined_memory(mask, rows, columns)


def local_self_attention_2d(
    x: Tensor,
    kv_channels: Dimension,
    heads: Dimension,
    window: tuple[int, int],
    autoregressive: bool = False,
    *,
    block: tuple[int, int] | None = None,
    is_training: bool = False,
    dropout_rate: float = 0.0,
    dropout_broadcast_dims: Sequence[DimLike] = (),
    use_bias: bool = False,
    scale: float | None = None,
    initializers: AttentionInitializers | None = None,
    variable_dtype: DTypeLike = None,
    name: str | None = None,
    num_memory_heads: int = 0,
    shared_kv: bool = False,
) -> Tensor:
    """`local_attention_2d` of x [batch dims, rows, columns, io] to itself, with its projections.

    The arguments are those of `local_attention_2d`, `multihead_attention` and `AttentionOptions`.
    """
    name, kv, dtype = layer_name(name, "attention"), kv_channels, variable_type(variable_dtype, x)
    if x.shape.ndims < 3:
        raise ShapeError(f"local_self_attention_2d: x is {x.shape}.", "Give [..., rows, columns, io].", str(x.source))
    options = AttentionOptions(num_memory_heads, shared_kv)
    layer = Projections(x.shape[-1], kv, heads, options, initializers, dtype, use_bias)
    dropout = {"dropout_rate": dropout_rate, "dropout_broadcast_dims": dropout_broadcast_dims}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        near = (x.shape[-3:-1], kv, kv, window, autoregressive)
        return local_attention_2d(q, k, v, *near, block=block, is_training=is_training, scale=scale, **dropout)

    return layer.around(attend, x, x, name)
