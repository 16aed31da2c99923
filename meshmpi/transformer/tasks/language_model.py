"""The task ``lm``: predict every next token of a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from meshmpi.graph import Tensor
from meshmpi.nn.experts import ExpertsOutput
from meshmpi.nn.losses import softmax_cross_entropy_with_logits
from meshmpi.runtime.variables import VariableStore
from meshmpi.training.callback import Evaluation, Sample
from meshmpi.transformer.decoding.decoding import Sampling
from meshmpi.transformer.decoding.sampling import Sampler
from meshmpi.transformer.models import TransformerConfig, lm, lm_loss
from meshmpi.transformer.tasks.base import Batches, Task
from meshmpi.transformer.text.base import bits_per_byte
from meshmpi.transformer.text.vocabulary import learnt_size
from meshmpi.transformer.training.data import TokenStream
from meshmpi.transformer.training.evaluation import HeldOut, HeldOutLoss, HeldOutText
from meshmpi.transformer.training.model import TrainingGraph, assemble, outputs_with_experts, weighted_sum, window_feeds
from meshmpi.transformer.training.settings import Settings
from meshmpi.transformer.training.setup import available_data, prepare_data

_FEEDS = {"tokens": "int32", "targets": "int32"}
_HELD_OUT_FEEDS = {"held_out_tokens": "int32", "held_out_targets": "int32", "held_out_weights": "float32"}


class LanguageModelTask(Task):
    """Windows at random places of a text; the continuation of a prompt as sample."""

    name = "lm"

    @classmethod
    def vocabulary_size(cls, settings: Settings) -> int:
        name, data = settings.data.vocabulary, settings.data
        if name == "bytes":
            return 256
        if size := learnt_size(name):
            return size
        if settings.model.vocab:
            return 1  # given by hand; whether the text fits is seen when it is read
        return available_data(data)[0].vocabulary.size

    @classmethod
    def build(cls, settings: Settings, config: TransformerConfig) -> TrainingGraph:
        return assemble(
            settings,
            config,
            feeds=lambda batch: window_feeds(config, batch, _FEEDS),
            outputs=lambda feeds: _outputs(config, feeds),
            held_out_feeds=lambda batch: window_feeds(config, batch, _HELD_OUT_FEEDS),
            held_out_loss=lambda feeds: _held_out_loss(config, feeds),
        )

    def prepare(self, say: Callable[[str], None]) -> None:
        self.data = prepare_data(self.settings.data, self.mesh, say)
        self.vocabulary, self.digest = self.data.vocabulary, self.data.digest

    @property
    def tokens_per_step(self) -> float:
        return self.settings.train.batch * self.config.length

    def describe(self) -> str:
        return f"{len(self.data.train):,} training tokens"

    def batches(self) -> Batches:
        train = self.settings.train
        return TokenStream(self.data.train, train.batch, self.config.length, train.seed)

    def held_out(self, batch: int, limit: int) -> HeldOut:
        return HeldOutText(self.data.held_out, batch, self.config.length, limit)

    def evaluation(self, held_out: HeldOut, total: float, seconds: float) -> Evaluation:
        text = cast(HeldOutText, held_out)
        mean = total / text.predicted
        bits = bits_per_byte(mean, text.predicted, text.text_bytes(self.vocabulary))
        share = text.predicted / (len(self.data.held_out) - 1)
        return HeldOutLoss(mean, seconds, {}, bits, text.predicted, share)

    def sample(self, variables: VariableStore, layout: str) -> Sample:
        s = self.settings.sample
        if not s.tokens:
            return Sample()
        sampler = Sampler(
            self.config,
            self.vocabulary,
            self.mesh,
            layout,
            self.settings.mesh.storage or None,
            variables,
            Sampling(s.temperature),
            s.seed,
            between=self.between,
        )
        text = sampler.text(s.prompt, s.tokens)
        return Sample(text, heading=f"a continuation of {s.prompt!r}")


def _outputs(config: TransformerConfig, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The loss of some windows and, where there are experts, how evenly these are used."""
    mixtures: list[ExpertsOutput] = []
    loss, _ = lm_loss(config, feeds["tokens"], feeds["targets"], True, mixtures)
    return outputs_with_experts(loss, mixtures)


def _held_out_loss(config: TransformerConfig, feeds: Mapping[str, Tensor]) -> Tensor:
    logits = lm(config, feeds["held_out_tokens"], training=False)
    losses = softmax_cross_entropy_with_logits(logits, feeds["held_out_targets"], config.vocab_dim)
    return weighted_sum(losses, feeds["held_out_weights"])
