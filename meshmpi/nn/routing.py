"""Routing of tokens to experts: gates, capacities, load-balancing losses.

A routing is data: for each place of each expert the number of its token. `meshmpi.nn.experts` moves tokens
accordingly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from meshmpi.dims import Dimension, Shape
from meshmpi.errors import ConfigError, suggest
from meshmpi.graph import Tensor
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.contraction import einsum
from meshmpi.graph.ops.indexing import gather, scatter_add, top_k
from meshmpi.graph.ops.placement import stop_gradient
from meshmpi.graph.ops.positions import range as index_range
from meshmpi.graph.ops.reductions import cumsum, reduce_sum
from meshmpi.graph.ops.sources import VariableDType, get_variable, ones, random_uniform
from meshmpi.graph.ops.structure import reshape, unstack
from meshmpi.nn.functions import one_hot, reduce_logsumexp, softmax, widened
from meshmpi.nn.normalization import wide_type
from meshmpi.nn.randomness import multiplicative_jitter

_CHOICES = {
    "chooser": ("tokens", "experts"),
    "selection": ("best", "sample"),
    "second_policy": ("all", "none", "threshold", "random"),
}
NEVER = -1e9
"""A score that is chosen last."""


@dataclass(frozen=True)
class Gating:
    """How tokens are sent to experts.

    Attributes:
        choices: Experts of a token: 1 (Switch), 2 (GShard), or more.  Gates of several are divided by their sum.
        capacity_factor: In training an expert takes ceil(this * choices * tokens / experts) tokens of a group: 1 is
            just enough when all are evenly used.  (In the reference the number of choices does not count.)
        eval_capacity_factor: The same outside of training.
        min_capacity: The least number of tokens an expert takes, if the group has as many.
        places: The number of tokens an expert takes, whatever the group's size; None: by factors.
        group_size: Tokens that share capacities; None: those along the last token dim.  Smaller
            ones cut that dim into equal parts, larger ones join whole rows of it.
        second_policy: Which of a token's choices after the first are kept: "all", "none", "threshold" (gate above
            ``second_threshold``), or "random" (with probability gate / ``second_threshold``).
        second_threshold: See ``second_policy``.
        chooser: "tokens" choose experts; "experts" choose the tokens with the largest gates, so
            that all are full (no causal order: later tokens compete with earlier ones).
        selection: "best" takes the largest gates; "sample" draws by them in training.
        jitter: In training the router sees its input times numbers in 1 +- this.
        balance_loss: Factor of the load-balancing loss: experts * sum over experts of (share of
            tokens whose first choice it is) * (mean gate); 1 times the factor when even.
        z_loss: Factor of the mean of log(sum of e**logits)**2 of the router.

    Source: Shazeer et al. 2017; GShard (Lepikhin et al. 2021); Switch (Fedus et al. 2022); expert
    choice (Zhou et al. 2022); router z-loss (Zoph et al. 2022).
    """

    choices: int = 1
    capacity_factor: float = 1.25
    eval_capacity_factor: float = 2.0
    min_capacity: int = 4
    group_size: int | None = None
    second_policy: str = "all"
    second_threshold: float = 0.2
    chooser: str = "tokens"
    selection: str = "best"
    jitter: float = 0.0
    balance_loss: float = 1e-2
    z_loss: float = 0.0
    places: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"Gating: {name} is '{value}'.", suggest(value, allowed))
        for name in ("choices", "capacity_factor", "eval_capacity_factor", "second_threshold"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"Gating: {name} is {getattr(self, name)}.", "Give a positive number.")
        if self.group_size is not None and self.group_size < 1:
            raise ConfigError(f"Gating: group_size is {self.group_size}.", "Give at least 1 token, or None.")
        if self.places is not None and self.places < 1:
            raise ConfigError(f"Gating: places is {self.places}.", "Give at least 1, or None.")

    def capacity(self, tokens: int, experts: int, is_training: bool) -> int:
        """Tokens that one expert takes of a group of ``tokens``."""
        if self.places is not None:
            return min(tokens, self.places)
        factor = self.capacity_factor if is_training else self.eval_capacity_factor
        wanted = math.ceil(factor * self.choices * tokens / experts)
        return min(tokens, max(wanted, self.min_capacity))


class Routing(NamedTuple):
    """Where tokens go.

    Attributes:
        token: int32 [groups, experts, capacity], the token in each place; -1: none.
        weight: The gate by which the result in each place counts; 0 where there is no token.
        balance_loss: Without its factor.
        z_loss: Without its factor.
        dropped: Share of what tokens asked for that found no place.
    """

    token: Tensor
    weight: Tensor
    balance_loss: Tensor
    z_loss: Tensor
    dropped: Tensor


class _Gates(NamedTuple):
    probabilities: Tensor  # [groups, tokens, experts]
    scores: Tensor  # what experts are chosen by
    real: Tensor  # int32 [groups, tokens]
    tokens: Dimension
    experts: Dimension
    capacity: Dimension

    @property
    def groups(self) -> Shape:
        return self.real.shape.without([self.tokens.name])


def route(
    x: Tensor,
    tokens: Dimension,
    experts: Dimension,
    capacity: Dimension,
    gating: Gating,
    is_training: bool,
    real: Tensor | None,
    outer: Sequence[Dimension],
    dtype: VariableDType,
    initializer: Any = None,
) -> Routing:
    """Chooses experts with the variable ``router`` [outer, io, experts] of the current scope.

    Args:
        x: [groups, tokens, io].
        tokens, experts, capacity: Dims of tokens, which is whole, of experts under another name than the
            one by which they are split, and of the places of an expert.
        gating: Options.
        is_training: Whether jitter and sampling act.
        real: bool [groups, tokens]: tokens that may take a place; None: all.
        outer: Dims of x that each have a router of their own.
        dtype, initializer: Of the router; it is computed in at least float32.
    """
    if gating.choices > experts.size:
        raise ConfigError(
            f"a token chooses {gating.choices} of the {experts.size} experts '{experts.name}'.",
            "Give fewer choices or more experts.",
        )
    io = x.at(-1, "mixture_of_experts")
    places = x.shape.without([io.name])
    seen = multiplicative_jitter(widened(x), is_training, gating.jitter, "router_jitter")
    kernel = get_variable("router", Shape([*outer, io, experts]), wide_type(dtype), initializer)
    logits = einsum([seen, kernel], places + [experts])
    scores = logits
    if is_training and gating.selection == "sample":
        uniform = ew.cast(random_uniform(logits.shape, name="expert_choice"), logits.dtype)
        scores = ew.add(scores, ew.negative(ew.log(ew.negative(ew.log(uniform)))))
    counts = ones(places, "int32") if real is None else ew.cast(real, "int32")
    gates = _Gates(softmax(logits, experts), scores, counts, tokens, experts, capacity)
    choose = _by_experts if gating.chooser == "experts" else _by_tokens
    token, weight, balance_loss, dropped = choose(gates, gating, is_training)
    weights = ew.cast(counts, logits.dtype)
    z = ew.multiply(ew.square(reduce_logsumexp(logits, experts)), weights)
    z_loss = ew.divide(reduce_sum(z), _at_least_one(reduce_sum(weights)))
    return Routing(token, weight, balance_loss, z_loss, stop_gradient(dropped))


def _by_tokens(gates: _Gates, gating: Gating, is_training: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """First choices of all tokens are placed first, in the order of tokens; then second ones."""
    choices = Dimension("_choices", gating.choices)
    _, index = top_k(stop_gradient(gates.scores), gates.experts, choices)
    picks = unstack(index, choices)
    probabilities = gates.probabilities
    if gating.choices > 1:
        total = ew.add_n([gather(probabilities, pick, gates.experts) for pick in picks])
        probabilities = ew.divide(probabilities, total, output_shape=probabilities.shape)
    asking = [gates.real]
    for pick in picks[1:]:
        share = gather(probabilities, pick, gates.experts)
        asking.append(ew.multiply(gates.real, _later_choices(share, gating)))
    token, hits = _placed(gates, picks, asking)
    asked = ew.add_n([reduce_sum(a) for a in asking])
    weight = gather(probabilities, token, gates.tokens, may_miss=True)
    placed = reduce_sum(ew.cast(ew.greater_equal(token, 0), "float32"))
    dropped = ew.subtract(1.0, ew.divide(placed, _at_least_one(ew.cast(asked, "float32"))))
    return token, weight, _balance_loss(gates, hits), dropped


def _later_choices(gate: Tensor, gating: Gating) -> Tensor:
    """int32: whether a choice after the first is asked for."""
    if gating.second_policy == "threshold":
        return ew.cast(ew.greater(gate, gating.second_threshold), "int32")
    if gating.second_policy == "random":
        drawn = random_uniform(gate.shape, name="second_expert")
        likely = ew.divide(ew.cast(stop_gradient(gate), "float32"), gating.second_threshold)
        return ew.cast(ew.less(drawn, likely), "int32")
    every = ones(gate.shape, "int32")
    return every if gating.second_policy == "all" else ew.multiply(every, 0)


def _placed(gates: _Gates, picks: Sequence[Tensor], asking: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(The token in each place, first choices [groups, tokens, experts])."""
    experts, capacity, shape = gates.experts, gates.capacity.size, gates.real.shape
    slots = Dimension(f"{experts.name}_slots", experts.size * capacity)
    numbers = ew.broadcast(ew.add(index_range(gates.tokens), 1), shape)
    taken, filled, hits = None, [], []
    for pick, asks in zip(picks, asking, strict=True):
        hit = ew.multiply(one_hot(pick, experts, dtype="int32"), asks, output_shape=shape + [experts])
        place = cumsum(hit, gates.tokens, exclusive=True)
        if taken is not None:
            place = ew.add(place, taken, output_shape=place.shape)
        mine = gather(place, pick, experts)
        fits = ew.logical_and(ew.less(mine, capacity), ew.greater(asks, 0))
        slot = ew.where(fits, ew.add(ew.multiply(pick, capacity), mine), -1)
        filled.append(scatter_add(numbers, slot, slots, gates.groups + [slots], may_miss=True))
        count = reduce_sum(hit, reduced_dim=gates.tokens)
        taken = count if taken is None else ew.add(taken, count)
        hits.append(hit)
    token = ew.subtract(ew.add_n(filled), 1)
    return reshape(token, gates.groups + [experts, gates.capacity]), hits[0]


def _by_experts(gates: _Gates, gating: Gating, is_training: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every expert takes the tokens that score highest; some take none of a token, some many."""
    real = ew.greater(gates.real, 0)
    shape = gates.scores.shape
    ranked = ew.where(real, gates.probabilities, NEVER, output_shape=shape)
    if is_training and gating.selection == "sample":
        ranked = ew.where(real, gates.scores, NEVER, output_shape=shape)
    _, index = top_k(stop_gradient(ranked), gates.tokens, gates.capacity)
    token = ew.where(ew.greater(gather(gates.real, index, gates.tokens), 0), index, -1)
    weight = gather(gates.probabilities, token, gates.tokens, may_miss=True)
    each = scatter_add(ones(token.shape, "int32"), token, gates.tokens, gates.real.shape, True)
    reached = reduce_sum(ew.cast(ew.greater(each, 0), "float32"))
    asked = ew.cast(reduce_sum(gates.real), "float32")
    dropped = ew.subtract(1.0, ew.divide(reached, _at_least_one(asked)))
    return token, weight, reduce_sum(ew.multiply(weight, 0.0)), dropped


def _balance_loss(gates: _Gates, hits: Tensor) -> Tensor:
    """Mean over real tokens of their group's experts * sum of shares * mean gates."""
    dtype = gates.probabilities.dtype
    real = ew.cast(gates.real, dtype)
    group = _at_least_one(reduce_sum(real, reduced_dim=gates.tokens))
    per_expert = gates.groups + [gates.experts]
    first = reduce_sum(ew.cast(hits, dtype), output_shape=per_expert)
    gate = einsum([gates.probabilities, real], per_expert)
    product = ew.divide(ew.multiply(first, gate), group, output_shape=per_expert)
    total = ew.multiply(reduce_sum(product), float(gates.experts.size))
    return ew.divide(total, _at_least_one(reduce_sum(real)))


def _at_least_one(count: Tensor) -> Tensor:
    return ew.maximum(count, 1.0)
