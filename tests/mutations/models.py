"""Layers made of many operations: experts, microbatches, attention, losses, optimizers."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import meshmpi as mm
from meshmpi import nn
from meshmpi.graph.ops import elementwise
from meshmpi.nn import experts, local_attention, routing
from meshmpi.nn.optimize import first_order
from tests.mutations.registry import Patch, mutation

# The module; `meshmpi.nn.optimize.microbatches` is the function of the same name.
microbatches = sys.modules["meshmpi.nn.optimize.microbatches"]
PARTS = "tests/nn/test_microbatches.py"
EXPERTS = "tests/nn/test_experts.py::test_against_loops"


@mutation(f"{EXPERTS}('top_2', False)")
def second_choices_take_places_that_are_taken(m: Patch) -> None:
    """Each choice counts places from 0."""
    right = routing._placed

    def wrong(gates: Any, picks: Any, asking: Any) -> tuple:
        found = [right(gates, [p], [a]) for p, a in zip(picks, asking, strict=True)]
        token = found[0][0]
        for other, _ in found[1:]:
            token = elementwise.maximum(token, other)
        return token, found[0][1]

    m.setattr(routing, "_placed", wrong)


@mutation(f"{EXPERTS}('switch_dropping', False)")
def the_first_place_of_an_expert_stays_empty(m: Patch) -> None:
    right = routing.cumsum
    m.setattr(routing, "cumsum", lambda x, dim, exclusive=False: right(x, dim))


@mutation(f"{EXPERTS}('switch', False)")
def what_experts_return_is_not_weighted(m: Patch) -> None:
    right = experts.route

    def wrong(*args: Any, **options: Any) -> Any:
        r = right(*args, **options)
        return r._replace(weight=mm.ones_like(r.weight))

    m.setattr(experts, "route", wrong)


@mutation(f"{EXPERTS}('switch_dropping', True)")
def padding_takes_places(m: Patch) -> None:
    m.setattr(experts._Groups, "real", lambda self, mask: None)


@mutation("tests/nn/test_experts.py::test_capacity()")
def capacities_do_not_count_further_choices(m: Patch) -> None:
    """As in the reference."""
    right = routing.Gating.capacity

    def wrong(self: Any, tokens: int, count: int, training: bool) -> int:
        return right(dataclasses.replace(self, choices=1), tokens, count, training)

    m.setattr(routing.Gating, "capacity", wrong)


@mutation(f"{EXPERTS}('top_2', False)")
def the_balance_loss_forgets_the_number_of_experts(m: Patch) -> None:
    right = routing._balance_loss
    m.setattr(
        routing, "_balance_loss", lambda gates, hits: elementwise.divide(right(gates, hits), float(gates.experts.size))
    )


@mutation("tests/nn/test_experts.py::test_tokens_travel_by_all_to_all()")
def experts_are_sent_every_token(m: Patch) -> None:
    """They keep the name of the router's dim of experts, and with it its layout."""
    m.setattr(experts._Level, "inside", lambda self, name: name)


@mutation(f"{PARTS}::test_parts_are_every_kth_row()")
def microbatches_are_runs_of_rows(m: Patch) -> None:
    """Right in value, but the rows of a part lie on one rank."""

    def wrong(x: Any, batch_dim: Any, num_splits: int) -> list:
        return mm.split(x, batch_dim, num_splits)

    m.setattr(microbatches, "microbatches", wrong)
    m.setattr(nn.optimize, "microbatches", wrong)


@mutation("tests/nn/test_microbatches.py::test_training_is_that_of_the_whole_batch('batch:rows', 12)")
def gradients_of_microbatches_are_those_of_the_last(m: Patch) -> None:
    m.setattr(microbatches, "_sum", lambda total, g, fence: g)


@mutation("tests/nn/test_local_attention.py::test_equals_dense_attention(*CASES[0], True)")
def a_window_is_one_position_too_wide(m: Patch) -> None:
    right = mm.Band.local
    m.setattr(local_attention.Band, "local", lambda a, b, n, causal: right(a, b, n + 1, causal))


@mutation("tests/nn/test_local_attention.py::test_halos(2, False)")
def halos_of_the_first_block_are_those_of_the_last(m: Patch) -> None:
    right = local_attention.shift
    m.setattr(local_attention, "shift", lambda x, offset, dim, wrap: right(x, offset, dim, True))


@mutation("tests/nn/test_losses.py::test_weighted_mean()")
def a_weighted_mean_counts_everything(m: Patch) -> None:
    """As in the reference: padding counts, with 0."""

    def wrong(values: Any, weights: Any = None) -> Any:
        return mm.reduce_mean(values if weights is None else values * weights)

    m.setattr(nn, "weighted_mean", wrong)


@mutation("tests/nn/test_losses.py::test_integer_targets(0.01, 0)")
def the_z_loss_is_forgotten(m: Patch) -> None:
    right = nn.softmax_cross_entropy_with_logits

    def wrong(logits: Any, targets: Any, dim: Any, z_loss: float, label_smoothing: float) -> Any:
        return right(logits, targets, dim, 0.0, label_smoothing)

    m.setattr(nn, "softmax_cross_entropy_with_logits", wrong)


@mutation("tests/nn/test_optimizers.py::test_adam()")
def adam_lacks_its_bias_correction(m: Patch) -> None:
    """As in Mesh-TensorFlow."""
    m.setattr(first_order, "_bias_correction", lambda beta, t: elementwise.add(0.0 * t, 1.0))


@mutation("tests/nn/test_optimizers.py::test_adam()")
def moving_averages_forget_too_much(m: Patch) -> None:
    """beta and 1 - beta change places."""
    right = first_order._moving_average
    m.setattr(first_order, "_moving_average", lambda beta, old, new: right(1 - beta, old, new))
