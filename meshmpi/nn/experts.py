"""Mixtures of experts: every token is sent to few of many feed-forward networks.

Tokens are sent by index: a place of an expert gathers the row of its token (no arithmetic), where
the reference multiplies with a one-hot matrix (2 * tokens * experts * capacity * io FLOP per group,
each way).  Then dims are renamed: ``all_experts`` becomes ``experts``, and every dim of groups, say
``batch``, becomes ``expert_batch``.  Where a layout sends ``batch`` and ``experts`` to one mesh
axis, this is an all_to_all: each rank gets what all ranks have for its experts.  No layout is known here.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from meshmpi.nn.routing import Gating, route

TOKENS = "group_tokens"
"""Dim of the tokens of a group, whole in most layouts."""


class ExpertsOutput(NamedTuple):
    """What a mixture of experts returns.

    Attributes:
        output: A tensor of the input's shape; 0 for tokens that found no place.
        loss: To be added to the training loss: balance and router z-loss with their factors.
        balance_loss: Load-balancing loss without its factor, 1 when even; for two levels their sum.
        z_loss: Router z-loss without its factor; for two levels their sum.
        dropped: Share of what tokens asked for that found no place; for two levels, at the last.
    """

    output: Tensor
    loss: Tensor
    balance_loss: Tensor
    z_loss: Tensor
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

    For activation, biases, dropout, types and initializers see `dense_relu_dense`.

    Args:
        x: [token dims, io]; by default each row along the last token dim is a group, whose tokens
            share the capacities of experts (see `Gating`).
        experts: Their dim; or (outer, inner) for two levels: a token first chooses one or more of
            the outer experts, then within each, inner ones.
        hidden: Dim of the hidden layer of every expert.
        gating: How tokens choose; for two levels one for each or a common one.
        is_training: Whether training capacities, jitter, sampling and dropout act.
        mask: bool over token dims: those that are not padding.  Padding takes no place and gets 0.
        name: Variables are ``name/router`` [io, all_experts], ``name/wi/kernel`` [experts, io,
            hidden], ``name/wo/kernel`` [experts, hidden, io]; the inner router of two levels is
            ``name/inner/router`` [outer, io, all_inner].

    Lowers: with ``batch`` and ``experts`` split over one axis, one all_to_all of the chosen tokens
    to the experts and one back, each twice more for gradients.  Inside, dims of groups have the
    prefix ``expert_`` (at the first of two levels ``outer_``).  Where a layout does not mention
    them they stay split as outside, but for axes that other dims use there: with ``"batch:rows;experts:cols"`` each
    row of ranks keeps its tokens, with ``"batch:rows+cols;experts:cols"`` they move over cols only.

    Source: Shazeer et al. 2017; Mesh-TensorFlow's moe.py.

    Example:
        >>> with mm.Graph():
        ...     x = mm.placeholder("x", "batch:8;length:16;d_model:32")
        ...     experts, d_ff = mm.Dimension("experts", 4), mm.Dimension("d_ff", 64)
        ...     mm.mixture_of_experts(x, experts, d_ff, mm.Gating(choices=2)).output.shape
        [batch=8, length=16, d_model=32]
    """
    if x.shape.ndims < 2:
        raise ShapeError(f"mixture_of_experts: the input is {x.shape}.", "Give [token dims, io].", str(x.source))
    dropout = (is_training, dropout_rate, dropout_broadcast_dims)
    variables = (use_bias, activation, variable_type(variable_dtype, x), initializers, router_initializer)
    with scope(layer_name(name, "experts")):
        y, levels = _Mixture(_levels(experts, gating), hidden, *dropout, *variables).send(x, 0, mask)
    loss, balance, z = (ew.add_n([one[i] for one in levels]) for i in (1, 2, 3))
    return ExpertsOutput(y, loss, balance, z, levels[-1].dropped)


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


class _Mixture(NamedTuple):
    """The levels of a mixture, and its feed-forward layers."""

    levels: Sequence[_Level]
    hidden: Dimension
    is_training: bool
    dropout_rate: float
    dropout_broadcast_dims: Sequence[DimLike]
    use_bias: bool
    activation: Activations
    dtype: VariableDType
    initializers: tuple[Any, Any]
    router_initializer: Any

    def send(self, x: Tensor, number: int, mask: Tensor | None) -> tuple[Tensor, list[ExpertsOutput]]:
        """(What experts make of tokens; the results of level ``number`` and those inside it)."""
        level = self.levels[number]
        groups, gating = _Groups(x, level), level.gating
        grouped, tokens = groups.cut(x), groups.tokens
        everyone = Dimension(f"all_{level.experts.name}", level.experts.size)
        size = gating.capacity(tokens.size, everyone.size, self.is_training)
        dims = (tokens, everyone, Dimension(f"{level.new_prefix}capacity", size))
        with scope(level.name) if level.name else nullcontext():
            real, variables = groups.real(mask), (level.outer, self.dtype, self.router_initializer)
            routing = route(grouped, *dims, gating, self.is_training, real, *variables)
        there = {d.name: level.inside(d.name) for d in groups.kept}
        for old, new in there.items():
            x.graph.align(new, old)
        there[everyone.name] = level.experts.name
        first = Shape([*level.outer, level.experts])

        def sent(t: Tensor) -> Tensor:
            t = rename(t, there)
            return transpose(t, first + t.shape.without(first.names))

        chosen = gather(grouped, routing.token, tokens, may_miss=True)
        h, inner = sent(chosen), list[ExpertsOutput]()
        if number + 1 < len(self.levels):
            y, inner = self.send(h, number + 1, sent(ew.greater_equal(routing.token, 0)))
        else:
            y = self._feed_forward(h)
        y = rename(y, {new: old for old, new in there.items()})
        y = ew.multiply(y, ew.cast(routing.weight, y.dtype), output_shape=chosen.shape)
        y = groups.join(scatter_add(y, routing.token, tokens, grouped.shape, may_miss=True))
        balance, z = routing.balance_loss, routing.z_loss
        loss = ew.add(ew.multiply(balance, gating.balance_loss), ew.multiply(z, gating.z_loss))
        return y, [ExpertsOutput(y, loss, balance, z, routing.dropped), *inner]

    def _feed_forward(self, h: Tensor) -> Tensor:
        io, experts = h.shape[-1], [level.experts for level in self.levels]
        into, out_of = self.initializers
        h = dense(h, self.hidden, io, experts, self.use_bias, self.activation, self.dtype, into, "wi")
        h = dropout_over(h, self.is_training, self.dropout_rate, self.dropout_broadcast_dims)
        return dense(h, io, self.hidden, experts, self.use_bias, None, self.dtype, out_of, "wo")


class _Groups:
    """Cuts the last token dim into groups of equal size, the last one padded, or joins whole rows of it to groups."""

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
        # The other dims of tokens after the cut.
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
