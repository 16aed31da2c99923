"""The graph of a training run: training step and held-out loss share their variables.

Contains what the graphs of all tasks have in common; each task gives its parts (`meshmpi.transformer.tasks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

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
        graph: The graph.
        config: The Transformer.
        loss: Mean training loss, nats per token; takes ``feeds``.
        learning_rate: That of the next update.
        updates: Updates of one training step.
        held_out_loss: *Sum* of losses, nats; takes ``held_out_feeds``.
        evaluation_batch: Windows evaluated together.
        reports: Other numbers of a training step by name: ``expert_balance`` (1 when experts are
            evenly used) and ``expert_dropped`` (share of tokens without a place), means over
            layers.
        feeds, held_out_feeds: Names of the placeholders of a training step and of an evaluation.
        finite: Whether loss and gradients are finite, so that the updates take effect; None where
            ``guard.non_finite`` is off.
    """

    graph: Graph
    config: TransformerConfig
    loss: Tensor
    learning_rate: Tensor
    updates: list[Update]
    held_out_loss: Tensor
    evaluation_batch: int
    reports: Mapping[str, Tensor] = field(default_factory=dict)
    feeds: tuple[str, ...] = ()
    held_out_feeds: tuple[str, ...] = ()
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
        settings, config: Settings of the run, and the Transformer.
        feeds: Batch size -> placeholders of a training step, each with the dimension ``batch``.
        outputs: Such placeholders, of a batch or of a microbatch -> ``loss``, a mean over
            ``batch``, and other numbers to report, likewise.
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
    loss = found.pop("loss")
    return TrainingGraph(
        graph,
        config,
        loss,
        rate,
        updates,
        held_out,
        evaluation_batch,
        found,
        tuple(fed),
        tuple(evaluated),
        optimizer.finite,
    )


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


def build_optimizer(settings: OptimizerSettings, storage: str, rates: list[Tensor]) -> optimize.Optimizer:
    """The optimizer that the settings describe.

    Args:
        settings: Name and numbers.
        storage: Layout rules of the slots, or empty.
        rates: The tensor of the learning rate is appended when the optimizer is used.
    """
    schedule = schedules.parse_schedule(settings.learning_rate)

    def recorded(step: Tensor) -> Tensor:
        rates.append(schedule(step))
        return rates[-1]

    s, kept, clip = settings, storage or None, settings.clip_norm
    if s.name == "sgd":
        return optimize.SGD(recorded, clip_norm=clip)
    if s.name == "momentum":
        return optimize.Momentum(recorded, s.beta1, clip_norm=clip, storage=kept)
    if s.name == "adafactor":
        return optimize.Adafactor(
            recorded,
            decay_exponent=s.decay_exponent,
            clip_norm=clip,
            multiply_by_parameter_scale=s.relative_step,
            storage=kept,
        )
    if s.name == "adam":
        return optimize.Adam(recorded, s.beta1, s.beta2, s.epsilon, clip_norm=clip, storage=kept)
    decaying = optimize.LAMB if s.name == "lamb" else optimize.AdamW
    return decaying(recorded, s.beta1, s.beta2, s.epsilon, s.weight_decay, clip_norm=clip, storage=kept)
