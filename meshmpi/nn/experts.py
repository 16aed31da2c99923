"""Mixtures of experts: every token is sent to few of many feed-forward networks.

Tokens are sent by index: a place of an expert gathers the row of its token (no arithmetic), where
the reference multiplies with a one-hot matrix (2 * tokens * experts * capacity * io FLOP per group,
each way).  Then dims are renamed: ``all_experts`` becomes ``experts``, and every dim of groups, say
``batch``, becomes ``expert_batch``.  Where a layout sends ``batch`` and ``experts`` to one mesh
axis, this is an all_to_all: each rank gets what all ranks have for its experts.  No layout is known
here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from meshmpi.dims import Dimension, Shape
from meshmpi.errors import ShapeError
from meshmpi.graph import Tensor, layer_name, scope
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.indexing import gather, scatter_add
from meshmpi.graph.ops.sources import VariableDType, ones
from meshmpi.graph.ops.structure import DimLike, pad, rename, reshape, transpose
from meshmpi.graph.ops.structure import slice as slice_dim
from meshmpi.nn.layers import Activations, DTypeLike, dense, dropout_over, variable_type
from meshmpi.nn.routing import Gating, Routing, route

TOKENS = "group_tokens"
"""Dim of the tokens of a group, whole in most layouts."""


class ExpertsOutput(NamedTuple):
    """What a mixture of experts returns.

    Attributes:
        output: A tensor of the input's shape; 0 for tokens that found no place.
        loss: To be added to the training loss: balance and router z-loss with their factors.
        balance_loss: Load-balancing loss without its factor, 1 when even; of two levels their sum.
        z_loss: Router z-loss without its factor; of two levels their sum.
        dropped: Share of what tokens asked for that found no place; of two levels, at the last.
    """

    output: Tensor
    loss: Tensor
    balance_loss: Tensor
    z_loss: Tensor
    dropped: Tensor


class _Losses(NamedTuple):
    loss: Tensor
    balance: Tensor
    z: Tensor
    dropped: Tensor


class _Level(NamedTuple):
    """One level of choosing experts."""

    experts: Dimension
    outer: tuple[Dimension, ...]  # experts of the level before
    old_prefix: str  # which names of dims lose,
    new_prefix: str  # which they get instead inside the experts
    groups: str  # name of the dim that cuts rows into groups
    gating: Gating
    name: str  # scope of the router

    def inside(self, name: str) -> str:
        """The name of a dim of groups once its tokens are with the experts."""
        return self.new_prefix + name.removeprefix(self.old_prefix)


Body = Callable[[Tensor, Callable[[], Tensor]], tuple[Tensor, list[_Losses]]]
"""(Tokens of each expert, their mask when asked for) -> (results, losses of inner levels)."""


def mixture_of_experts(
    x: Tensor,
    experts: Dimension | tuple[Dimension, Dimension],
    hidden: Dimension,
    gating: Gating | tuple[Gating, Gating] = Gating(),  # noqa: B008
    is_training: bool = False,
    *,
    mask: Tensor | None = None,
    activation: Activations = "relu",
    use_bias: bool = False,
    dropout_rate: float = 0.0,
    dropout_broadcast_dims: Sequence[DimLike] = (),
    variable_dtype: DTypeLike = None,
    initializers: tuple[Any, Any] = (None, None),
    router_initializer: Any = None,
    name: str | None = None,
) -> ExpertsOutput:
    """Each token's result is the sum, weighted by gates, of those of its chosen experts.

    Args:
        x: [token dims, io]; by default each row along the last token dim is a group, whose tokens
            share the capacities of experts (see `Gating`).
        experts: Their dim; or (outer, inner) for two levels: a token first chooses one or more of
            the outer experts, then within each, inner ones.
        hidden: Dim of the hidden layer of every expert.
        gating: How tokens choose; for two levels one for each or a common one.
        is_training: Whether training capacities, jitter, sampling and dropout act.
        mask: bool over token dims: those that are not padding.  Padding takes no place and gets 0.
        activation: Activation of the hidden layer, as `dense`.
        use_bias: Whether the experts' layers have biases.
        dropout_rate: Share of hidden activations that is dropped.
        dropout_broadcast_dims: Dims along which dropout repeats its mask.
        variable_dtype: Types of the variables; default see `variable_type`.
        initializers: Initializers of the kernels in and out; default as `dense`.
        router_initializer: Initializer of the router.
        name: Variables are ``name/router`` [io, all_experts], ``name/wi/kernel`` [experts, io,
            hidden], ``name/wo/kernel`` [experts, hidden, io]; the inner router of two levels is
            ``name/inner/router`` [outer, io, all_inner].

    Returns:
        See `ExpertsOutput`.

    Lowers: with ``batch`` and ``experts`` split over one axis, one all_to_all of the chosen tokens
    to the experts and one back, each twice more for gradients.  Inside, dims of groups have the
    prefix ``expert_`` (at the first of two levels ``outer_``).  Where a layout does not mention
    them they stay split as outside, but for axes that other dims use there: with
    ``"batch:rows;experts:cols"`` each row of ranks keeps its tokens, with
    ``"batch:rows+cols;experts:cols"`` they move over cols only.

    Raises:
        ShapeError: x has no token dim, or the mask has other dims.
        ConfigError: A token chooses more experts than there are.

    Source: Shazeer et al. 2017; Mesh-TensorFlow's moe.py.

    Example:
        >>> with mm.Graph():
        ...     x = mm.placeholder("x", "batch:8;length:16;d_model:32")
        ...     experts, d_ff = mm.Dimension("experts", 4), mm.Dimension("d_ff", 64)
        ...     mm.mixture_of_experts(x, experts, d_ff, mm.Gating(choices=2)).output.shape
        [batch=8, length=16, d_model=32]
    """
    name = layer_name(name, "experts")
    if x.shape.ndims < 2:
        raise ShapeError(f"mixture_of_experts: the input is {x.shape}.", "Give [token dims, io].", str(x.source))
    dtype = variable_type(variable_dtype, x)
    levels = _levels(experts, gating)

    def feed_forward(h: Tensor, mask: Callable[[], Tensor]) -> tuple[Tensor, list[_Losses]]:
        io, per_expert = h.shape[-1], [level.experts for level in levels]
        into, out_of = initializers
        h = dense(h, hidden, io, per_expert, use_bias, activation, dtype, into, "wi")
        h = dropout_over(h, is_training, dropout_rate, dropout_broadcast_dims)
        return dense(h, io, hidden, per_expert, use_bias, None, dtype, out_of, "wo"), []

    def inner(h: Tensor, filled: Callable[[], Tensor]) -> tuple[Tensor, list[_Losses]]:
        return _send(h, levels[1], is_training, filled(), dtype, router_initializer, feed_forward)

    with scope(name):
        body = feed_forward if len(levels) == 1 else inner
        y, losses = _send(x, levels[0], is_training, mask, dtype, router_initializer, body)
    loss, balance, z = (ew.add_n([one[i] for one in losses]) for i in (0, 1, 2))
    return ExpertsOutput(y, loss, balance, z, losses[-1].dropped)


def _levels(experts: Dimension | tuple[Dimension, Dimension], gating: Gating | tuple[Gating, Gating]) -> list[_Level]:
    if isinstance(experts, Dimension):
        if not isinstance(gating, Gating):
            raise ShapeError(
                f"mixture_of_experts: there are {len(gating)} gatings for one level of experts {experts}.",
                "Give one gating, or two dimensions of experts.",
            )
        return [_Level(experts, (), "", "expert_", "groups", gating, "")]
    outer, last = experts
    first, second = (gating, gating) if isinstance(gating, Gating) else gating
    return [
        _Level(outer, (), "", "outer_", "groups", first, ""),
        _Level(last, (outer,), "outer_", "expert_", "inner_groups", second, "inner"),
    ]


def _send(
    x: Tensor,
    level: _Level,
    is_training: bool,
    mask: Tensor | None,
    dtype: VariableDType,
    router_initializer: Any,
    body: Body,
) -> tuple[Tensor, list[_Losses]]:
    """Tokens to experts, through ``body``, and back."""
    groups, gating = _Groups(x, level), level.gating
    grouped, tokens = groups.cut(x), groups.tokens
    everyone = Dimension(f"all_{level.experts.name}", level.experts.size)
    size = gating.capacity(tokens.size, everyone.size, is_training)
    capacity = Dimension(f"{level.new_prefix}capacity", size)
    with scope(level.name) if level.name else nullcontext():
        routing = route(
            grouped,
            tokens,
            everyone,
            capacity,
            gating,
            is_training,
            groups.real(mask),
            level.outer,
            dtype,
            router_initializer,
        )
    there = {d.name: level.inside(d.name) for d in groups.kept}
    for old, new in there.items():
        x.graph.align(new, old)
    there[everyone.name] = level.experts.name
    first = Shape([*level.outer, level.experts])

    def sent(t: Tensor) -> Tensor:
        t = rename(t, there)
        return transpose(t, first + t.shape.without(first.names))

    chosen = gather(grouped, routing.token, tokens, may_miss=True)
    y, inner = body(sent(chosen), lambda: sent(ew.greater_equal(routing.token, 0)))
    y = rename(y, {new: old for old, new in there.items()})
    y = ew.multiply(y, ew.cast(routing.weight, y.dtype), output_shape=chosen.shape)
    y = scatter_add(y, routing.token, tokens, grouped.shape, may_miss=True)
    return groups.join(y), [_losses(routing, gating), *inner]


def _losses(routing: Routing, gating: Gating) -> _Losses:
    loss = ew.add(ew.multiply(routing.balance_loss, gating.balance_loss), ew.multiply(routing.z_loss, gating.z_loss))
    return _Losses(loss, routing.balance_loss, routing.z_loss, routing.dropped)


class _Groups:
    """Cuts the last token dim into groups of equal size, or joins whole rows of it to groups.

    What is missing in the last group is padding, which takes no place.

    Attributes:
        tokens: Dim of the tokens of a group.
        kept: The other dims of tokens after the cut.
    """

    def __init__(self, x: Tensor, level: _Level):
        self.places = x.shape.without([x.at(-1, "mixture_of_experts").name])
        self.io = x.at(-1, "mixture_of_experts")
        row, wanted = self.places[-1], level.gating.group_size or self.places[-1].size
        before = [d for d in self.places[:-1] if d not in level.outer]
        rows = min(wanted // row.size, before[-1].size) if before else 1
        if rows > 1:  # as many rows as fit, and equally many in every group
            self.padded = before[-1]
            count = -(-self.padded.size // rows)
            rows = -(-self.padded.size // count)
            self.tokens = Dimension(TOKENS, rows * row.size)
            new = [Dimension(self.padded.name, count), self.tokens]
            self.missing, old = count * rows - self.padded.size, [self.padded, row]
        else:
            self.padded, count = row, -(-row.size // wanted)
            self.tokens = Dimension(TOKENS, -(-row.size // count))
            new = [Dimension(level.groups, count)] * (count > 1) + [self.tokens]
            self.missing, old = count * self.tokens.size - row.size, [row]
        same = Shape([d for d in self.places if d not in old])
        self.cut_places = same + new
        self.kept = [d for d in self.cut_places[:-1] if d not in level.outer]

    def cut(self, t: Tensor) -> Tensor:
        """A tensor over places (and io) with its tokens in groups."""
        rest = t.shape.without(self.places.names)
        t = pad(t, [0, self.missing], self.padded)
        return reshape(t, self.cut_places + rest)

    def join(self, t: Tensor) -> Tensor:
        """The opposite of `cut`, padding taken off."""
        rest = t.shape.without(self.cut_places.names)
        size = self.padded.size + self.missing
        padded = [Dimension(d.name, size) if d == self.padded else d for d in self.places]
        return slice_dim(reshape(t, Shape(padded) + rest), 0, self.padded.size, self.padded)

    def real(self, mask: Tensor | None) -> Tensor | None:
        """bool: which tokens of the groups are neither padding nor masked."""
        if mask is None and not self.missing:
            return None
        if mask is None:
            counts = ones(self.places, "int32")
        else:
            if any(d not in self.places for d in mask.shape) or mask.dtype != "bool":
                raise ShapeError(
                    f"mixture_of_experts: the mask is {mask.dtype}{mask.shape}.",
                    f"Give bool over dimensions of {self.places}.",
                    str(mask.source),
                )
            counts = ew.broadcast(ew.cast(mask, "int32"), self.places)
        return ew.greater(self.cut(counts), 0)
