"""The graph of a training run: training step and held-out loss share their variables.

Contains the common part of all tasks' graphs; each task adds its parts (`meshmpi.transformer.tasks`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshmpi.dims import Dimension, Shape
from meshmpi.graph import Graph, Tensor, Update
from meshmpi.graph.ops.elementwise import add_n, cast, identity, multiply
from meshmpi.graph.ops.reductions import reduce_sum
from meshmpi.graph.ops.sources import placeholder
from meshmpi.nn import optimize, schedules
from meshmpi.nn.experts import ExpertsOutput
from meshmpi.transformer.models import TransformerConfig
from meshmpi.transformer.training.settings import OptimizerSettings, Settings


@dataclass(frozen=True)
class TrainingGraph:
    """Tensors of one graph.

    Attributes:
        reports: Other numbers of a training step by name: ``expert_balance`` (1 when experts are evenly used) and
            ``expert_dropped`` (share of tokens without a place), means over layers.
        finite: Whether loss and gradients are finite, so that the updates take effect; None where
            ``guard.non_finite`` is off.
    """

    graph: Graph
    loss: Tensor  # mean training loss, nats per token; takes ``feeds``
    learning_rate: Tensor  # that of the next update
    updates: list[Update]  # of one training step
    held_out_loss: Tensor  # *sum* of losses, nats; takes ``held_out_feeds``
    evaluation_batch: int  # windows evaluated together
    reports: Mapping[str, Tensor] = field(default_factory=dict)
    feeds: tuple[str, ...] = ()  # names of the placeholders of a training step
    held_out_feeds: tuple[str, ...] = ()  # and of an evaluation
    finite: Tensor | None = None

    @property
    def fetches(self) -> list[Tensor]:
        """What a training step returns."""
        flags = [] if self.finite is None else [self.finite]
        return [self.loss, self.learning_rate, *self.reports.values(), *flags]


Feeds = Mapping[str, Tensor]


def assemble(
    settings: Settings,
    config: TransformerConfig,
    *,
    feeds: Callable[[int], Feeds],
    outputs: Callable[[Feeds], dict[str, Tensor]],
    held_out_feeds: Callable[[int], Feeds],
    held_out_loss: Callable[[Feeds], Tensor],
) -> TrainingGraph:
    """The graph of a task from its parts.

    Args:
        feeds: Batch size -> placeholders of a training step, each with the dimension ``batch``.
        outputs: Such placeholders, of a batch or a microbatch -> means over ``batch``: ``loss``, and others to report.
        held_out_feeds: Batch size -> placeholders of an evaluation.
        held_out_loss: These -> the *sum* of losses, nats.
    """
    evaluation_batch = settings.evaluate.batch or settings.train.batch
    rates: list[Tensor] = []
    with Graph() as graph:
        fed = dict(feeds(settings.train.batch))
        optimizer = build_optimizer(settings.optimizer, settings.mesh.optimizer_storage, rates)
        found, pairs = optimize.serialize_training_step(fed, outputs, "batch", settings.optimizer.microbatches)
        guarded = settings.guard.non_finite != "off"
        updates = optimizer.apply_gradients(pairs, [found["loss"]] if guarded else None)
        evaluated = held_out_feeds(evaluation_batch)
        with graph.scope(reuse=True):
            held_out = held_out_loss(evaluated)
        rate = identity(rates[0])  # one more node, so that a fetched rate has its own name
    loss, names = found.pop("loss"), (tuple(fed), tuple(evaluated))
    return TrainingGraph(graph, loss, rate, updates, held_out, evaluation_batch, found, *names, optimizer.finite)


def window_feeds(config: TransformerConfig, batch: int, dtypes: Mapping[str, str]) -> Feeds:
    """Placeholders [batch, length] of these names and types."""
    shape = Shape([Dimension("batch", batch), config.length_dim])
    return {name: placeholder(name, shape, dtype) for name, dtype in dtypes.items()}


def outputs_with_experts(loss: Tensor, mixtures: Sequence[ExpertsOutput]) -> dict[str, Tensor]:
    """``loss`` and, where there are experts, how evenly these are used."""
    if not mixtures:
        return {"loss": loss}
    share = 1.0 / len(mixtures)
    return {
        "loss": loss,
        "expert_balance": multiply(add_n([m.balance_loss for m in mixtures]), share),
        "expert_dropped": multiply(add_n([m.dropped for m in mixtures]), share),
    }


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """The sum of losses times weights, in float32."""
    return reduce_sum(multiply(cast(losses, "float32"), weights))


def schedule_steps(text: str) -> int:
    """After how many steps a schedule as `schedules.parse_schedule` takes has come to its end; 0: it has none."""
    found = [0]
    for name, arguments in re.findall(r"(\w+)\(([^)]*)\)", text):
        if "total_steps" in (names := list(inspect.signature(schedules.SCHEDULES[name]).parameters)):
            given = arguments.split(",")
            at = names.index("total_steps")
            found += [int(float(given[at]))] if at < len(given) else []
    return max(found)


def build_optimizer(settings: OptimizerSettings, storage: str, rates: list[Tensor]) -> optimize.Optimizer:
    """The optimizer that the settings describe; its use appends the tensor of the learning rate to ``rates``."""
    schedule = schedules.parse_schedule(settings.learning_rate)

    def recorded(step: Tensor) -> Tensor:
        rates.append(schedule(step))
        return rates[-1]

    s, adam = settings, (settings.beta1, settings.beta2, settings.epsilon)
    shared: dict[str, Any] = {"clip_norm": s.clip_norm, "storage": storage or None}
    if s.name == "sgd":
        return optimize.SGD(recorded, clip_norm=s.clip_norm)
    if s.name == "momentum":
        return optimize.Momentum(recorded, s.beta1, **shared)
    if s.name == "adafactor":
        shared |= {"decay_exponent": s.decay_exponent, "multiply_by_parameter_scale": s.relative_step}
        return optimize.Adafactor(recorded, **shared)
    if s.name == "adam":
        return optimize.Adam(recorded, *adam, **shared)
    decaying = optimize.LAMB if s.name == "lamb" else optimize.AdamW
    return decaying(recorded, *adam, s.weight_decay, **shared)
