"""The task ``translation``: translates sentences with an encoder-decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from meshmpi.dims import Dimension, Shape
from meshmpi.errors import ConfigError, DataError
from meshmpi.graph import Tensor
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.reductions import reduce_mean
from meshmpi.graph.ops.sources import placeholder
from meshmpi.nn.experts import ExpertsOutput
from meshmpi.nn.losses import softmax_cross_entropy_with_logits
from meshmpi.runtime.feeding import Held
from meshmpi.runtime.variables import VariableStore
from meshmpi.training.callback import Evaluation, Sample
from meshmpi.transformer.models import PackedPairs, TransformerConfig, encoder_decoder, encoder_decoder_parameter_count
from meshmpi.transformer.models.transformers import SOURCE_LENGTH
from meshmpi.transformer.tasks.base import Batches, Task
from meshmpi.transformer.text.base import bits_per_byte
from meshmpi.transformer.text.characters import PADDING
from meshmpi.transformer.text.vocabulary import learnt_size
from meshmpi.transformer.training.evaluation import HeldOut, HeldOutLoss
from meshmpi.transformer.training.model import TrainingGraph, assemble, outputs_with_experts, weighted_sum
from meshmpi.transformer.training.settings import Settings, transformer_config
from meshmpi.transformer.training.setup import check_equal
from meshmpi.transformer.translation.data import prepare
from meshmpi.transformer.translation.packing import PackedRows, RowStream, TokenPairs, pack, permutation
from meshmpi.transformer.translation.translator import Translator, bleu

_SHOWN = 5  # translations in the sample at the end
_HELD_OUT = "held_out_"


class TranslationTask(Task):
    """Pairs packed into rows; BLEU of held-out sentences by beam search as sample.

    The loss of a batch is the mean over its target tokens, also where it is computed in
    microbatches: weights are divided by the number of tokens of the whole batch when it is fed.
    """

    name = "translation"

    @classmethod
    def transformer(cls, settings: Settings, vocabulary_size: int) -> TransformerConfig:
        if settings.model.padding_id not in (-1, PADDING):
            raise ConfigError(
                f"'model.padding_id' is {settings.model.padding_id}; translation pads with {PADDING}.",
                f"Leave it out, or give {PADDING}.",
            )
        return transformer_config(replace(settings.model, padding_id=PADDING), vocabulary_size)

    @classmethod
    def vocabulary_size(cls, settings: Settings) -> int:
        if size := learnt_size(settings.data.vocabulary):
            return size
        return 1 if settings.model.vocab else prepare(settings).vocabulary.size

    @classmethod
    def build(cls, settings: Settings, config: TransformerConfig) -> TrainingGraph:
        return assemble(
            settings,
            config,
            feeds=lambda batch: _placeholders(settings, config, batch, ""),
            outputs=lambda feeds: _outputs(config, feeds),
            held_out_feeds=lambda batch: _placeholders(settings, config, batch, _HELD_OUT),
            held_out_loss=lambda feeds: _held_out_loss(config, feeds),
        )

    @classmethod
    def source(cls, settings: Settings) -> str:
        s = settings.translation
        return f"{s.source} and {s.target}" if s.source else s.pairs

    @classmethod
    def parameter_count(cls, config: TransformerConfig) -> int:
        return encoder_decoder_parameter_count(config)

    def prepare(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.data = prepare(self.settings)
        check_equal(self.mesh, self.data.digest, "pairs")
        self.vocabulary, self.digest = self.data.vocabulary, self.data.digest
        order = permutation(len(self.data.train), self.settings.train.seed, -1)
        self._train = self._packed(self.data.train, order, "training")

    def _packed(self, pairs: TokenPairs, order: np.ndarray, what: str) -> PackedRows:
        length = self.settings.model.length
        source_length = self.settings.translation.source_length or length
        rows = pack(pairs, source_length, length, order, self.settings.translation.packing)
        if not len(rows):
            raise DataError(
                f"none of the {len(pairs):,} {what} pairs fits into a row of"
                f" {source_length} source and {length} target tokens.",
                "Give a greater model.length.",
            )
        return PackedRows(pairs, rows, source_length, length)

    @property
    def tokens_per_step(self) -> float:
        used = int(self._train.rows.targets.sum() + self._train.rows.sources.sum())
        return used / len(self._train.rows) * self.settings.train.batch

    def describe(self) -> str:
        rows = self._train.rows
        dropped = f" ({rows.left_out:,} too long for a row)" if rows.left_out else ""
        return (
            f"{len(self.data.train):,} training pairs{dropped} with"
            f" {int(rows.sources.sum()):,} + {int(rows.targets.sum()):,} tokens in {len(rows):,}"
            f" rows, {self._train.padding_share:.1%} of them padding;"
            f" {len(rows) / self.settings.train.batch:.0f} steps see all"
        )

    def batches(self) -> Batches:
        s = self.settings.train
        return _Batches(self._train, RowStream(len(self._train.rows), s.batch, s.seed))

    def held_out(self, batch: int, limit: int) -> HeldOut:
        pairs = self.data.held_out
        return _HeldOut(self._packed(pairs, np.arange(len(pairs)), "held-out"), batch, limit)

    def evaluation(self, held_out: HeldOut, total: float, seconds: float) -> Evaluation:
        held = cast(_HeldOut, held_out)
        text_bytes = sum(len(self.data.sentences[k][1].encode()) for k in held.pairs)
        mean = total / held.predicted
        bits = bits_per_byte(mean, held.predicted, text_bytes)
        share = held.predicted / int(self.data.held_out.lengths[:, 1].sum())
        return HeldOutLoss(mean, seconds, {}, bits, held.predicted, share)

    def sample(self, variables: VariableStore, layout: str) -> Sample:
        count = min(self.settings.translation.sentences, len(self.data.sentences))
        if not count:
            return Sample()
        translator = Translator(
            self.settings, self.config, self.data.vocabulary, self.mesh, layout, variables, between=self.between
        )
        # Sources that the model can take.
        fitting = np.flatnonzero(self.data.held_out.lengths[:, 0] <= translator.source_length).tolist()
        sentences = [self.data.sentences[k] for k in fitting[:count]]
        found = translator.translate([source for source, _ in sentences])
        lines = [
            f"{source}\n  -> {text}\n  == {target}"
            for (source, target), text in zip(sentences[:_SHOWN], found, strict=False)
        ]
        heading = "held-out sentences, translations (->) and references (==)"
        return Sample("\n".join(lines), self._scores(found, [t for _, t in sentences]), heading)

    def _scores(self, found: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        try:
            score = bleu(found, references)
        except DataError as error:  # sacrebleu is an extra; a run is not lost without it
            self._say(f"no BLEU: {error}")
            return {}
        self._say(f"BLEU of {len(found):,} held-out sentences: {score.score:.2f} {score.signature}")
        return {"bleu": score.score, "chrf": score.chrf, "sentences": len(found)}


class _Batches:
    def __init__(self, packed: PackedRows, stream: RowStream) -> None:
        self._packed, self._stream = packed, stream

    def feeds(self, step: int, held: Held) -> dict[str, np.ndarray]:
        numbers = self._stream.numbers(step)
        # The mean over all places of (loss * weight) is then the mean over the target tokens.
        counted = int(self._packed.rows.targets[numbers].sum())
        weight = len(numbers) * self._packed.length / counted
        return self._packed.block(numbers, held, "", weight)


class _HeldOut:
    """Held-out rows in order; places left over in the last batch stay empty."""

    def __init__(self, packed: PackedRows, batch: int, limit: int) -> None:
        self._packed, self._batch = packed, batch
        self._count = min(limit, len(packed.rows)) if limit else len(packed.rows)
        self.batches = -(-self._count // batch)
        self.predicted = int(packed.rows.targets[: self._count].sum())
        self.pairs: list[int] = packed.rows.order[: packed.rows.starts[self._count]].tolist()

    def feeds(self, index: int, held: Held) -> dict[str, np.ndarray]:
        numbers = np.arange(index * self._batch, (index + 1) * self._batch)
        numbers[numbers >= self._count] = -1
        return self._packed.block(numbers, held, _HELD_OUT, 1.0)


def _placeholders(settings: Settings, config: TransformerConfig, batch: int, prefix: str) -> dict[str, Tensor]:
    """All feeds of a batch of packed rows."""
    rows = Dimension("batch", batch)
    source_length = settings.translation.source_length or config.length
    source = Shape([rows, Dimension(SOURCE_LENGTH, source_length)])
    target = Shape([rows, config.length_dim])
    shapes = dict.fromkeys(("source", "source_segments", "source_places"), source)
    shapes |= dict.fromkeys(("tokens", "targets", "segments", "places", "weights"), target)
    return {
        f"{prefix}{name}": placeholder(f"{prefix}{name}", shape, "float32" if name == "weights" else "int32")
        for name, shape in shapes.items()
    }


def _logits(
    config: TransformerConfig,
    feeds: Mapping[str, Tensor],
    prefix: str,
    training: bool,
    mixtures: list[ExpertsOutput] | None = None,
) -> Tensor:
    names = ("source_segments", "segments", "source_places", "places")
    packing = PackedPairs(*(feeds[f"{prefix}{n}"] for n in names))
    source, tokens = feeds[f"{prefix}source"], feeds[f"{prefix}tokens"]
    return encoder_decoder(config, source, tokens, training, mixtures, packing)


def _outputs(config: TransformerConfig, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    mixtures: list[ExpertsOutput] = []
    logits = _logits(config, feeds, "", True, mixtures)
    losses = softmax_cross_entropy_with_logits(
        logits, feeds["targets"], config.vocab_dim, config.z_loss, config.label_smoothing
    )
    loss = reduce_mean(ew.multiply(losses, ew.cast(feeds["weights"], losses.dtype)))
    for found in mixtures:
        loss = ew.add(loss, ew.cast(found.loss, loss.dtype))
    return outputs_with_experts(loss, mixtures)


def _held_out_loss(config: TransformerConfig, feeds: Mapping[str, Tensor]) -> Tensor:
    logits = _logits(config, feeds, _HELD_OUT, False)
    targets = feeds[f"{_HELD_OUT}targets"]
    losses = softmax_cross_entropy_with_logits(logits, targets, config.vocab_dim)
    return weighted_sum(losses, feeds[f"{_HELD_OUT}weights"])
