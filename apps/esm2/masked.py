"""The task ``masked``: predict hidden tokens from those around them, with an encoder.

Subclasses give the sequences; what is here serves proteins as well as text.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple, cast

import numpy as np

from apps.esm2.masking import Masking
from apps.esm2.sequences import Crops, Sequences, Windows
from meshmpi.errors import DataError
from meshmpi.graph import Tensor
from meshmpi.nn.losses import softmax_cross_entropy_with_logits, weights_nonzero
from meshmpi.runtime.feeding import Held
from meshmpi.training.callback import Evaluation
from meshmpi.transformer.models import TransformerConfig, masked_lm, masked_lm_loss
from meshmpi.transformer.tasks.base import Batches, Task
from meshmpi.transformer.text.base import Vocabulary
from meshmpi.transformer.training.evaluation import HeldOut, HeldOutLoss
from meshmpi.transformer.training.model import TrainingGraph, assemble, weighted_sum, window_feeds
from meshmpi.transformer.training.settings import Settings

_FEEDS = {"tokens": "int32", "targets": "int32"}
_HELD_OUT_FEEDS = {"held_out_tokens": "int32", "held_out_targets": "int32"}
_EVALUATION_SEED = 0x65766173
"""Held-out tokens are hidden alike in all runs."""


class MaskedData(NamedTuple):
    """What a masked model learns from.

    Attributes:
        train: Training sequences, marks of begin and end included.
        held_out: Sequences that are not trained on.
        vocabulary: What the tokens mean.
        note: The amount of training data, for people.
    """

    train: Sequences
    held_out: Sequences
    vocabulary: Vocabulary
    note: str


class MaskedTask(Task):
    """Crops of sequences, of whose tokens some are hidden at every step anew.

    In training the rule is `masking`; held-out tokens are all hidden by the mask, so that no
    prediction has seen its target.  A held-out loss comes with its perplexity and with that of the
    frequencies of tokens in the training sequences (the unigram baseline), on the same tokens.
    """

    name = "masked"
    masking: ClassVar[Masking]

    @abstractmethod
    def load(self, say: Callable[[str], None]) -> MaskedData:
        """The sequences, the same on every rank.  Collective."""

    @classmethod
    def build(cls, settings: Settings, config: TransformerConfig) -> TrainingGraph:
        return assemble(
            settings,
            config,
            feeds=lambda batch: window_feeds(config, batch, _FEEDS),
            outputs=lambda feeds: {"loss": _loss(cls.masking, config, feeds)},
            held_out_feeds=lambda batch: window_feeds(config, batch, _HELD_OUT_FEEDS),
            held_out_loss=lambda feeds: _held_out_loss(cls.masking, config, feeds),
        )

    def prepare(self, say: Callable[[str], None]) -> None:
        self.data = self.load(say)
        self.vocabulary, self.digest = self.data.vocabulary, self.data.train.digest()
        self.baseline = unigram_losses(self.data.train, self.vocabulary.size, self.masking.special)

    @property
    def tokens_per_step(self) -> float:
        crops = self._crops()
        return crops.batch * crops.length * (1 - crops.padding_share())

    def describe(self) -> str:
        crops = self._crops()
        return f"{self.data.note}; {crops.padding_share():.1%} of a batch is padding"

    def _crops(self) -> Crops:
        s, config = self.settings, self.config
        pad = self.masking.padding_id
        return Crops(self.data.train, s.train.batch, config.length, pad, s.train.seed)

    def batches(self) -> Batches:
        return _Batches(self._crops(), self.masking, self.settings.train.seed)

    def held_out(self, batch: int, limit: int) -> HeldOut:
        windows = Windows(self.data.held_out, batch, self.config.length, self.masking.padding_id, limit)
        return HeldOutMasks(windows, self.masking, self.baseline)

    def evaluation(self, held_out: HeldOut, total: float, seconds: float) -> Evaluation:
        held = cast(HeldOutMasks, held_out)
        loss, baseline = total / held.hidden, held.baseline_loss / held.hidden
        measures = {"perplexity": math.exp(loss), "unigram_perplexity": math.exp(baseline)}
        share = held.seen / len(self.data.held_out.tokens)
        return HeldOutLoss(loss, seconds, measures, None, held.hidden, share)


class _Batches:
    def __init__(self, crops: Crops, masking: Masking, seed: int) -> None:
        self._crops, self._masking, self._seed = crops, masking, seed

    def feeds(self, step: int, held: Held) -> dict[str, np.ndarray]:
        rows, columns = held["tokens"] or ((0, self._crops.batch), (0, self._crops.length))
        tokens = self._crops.block(step, rows)
        seen, targets = self._masking.apply(tokens, self._seed, step, rows)
        return {"tokens": seen[:, slice(*columns)], "targets": targets[:, slice(*columns)]}


class HeldOutMasks:
    """Held-out windows with the same tokens hidden in every run, all of them by the mask.

    Args:
        windows: Windows of the held-out sequences.
        masking: Which tokens are hidden.
        baseline: Loss of every token by a model that looks at nothing, nats.

    Attributes:
        batches: Number of batches.
        hidden: Number of hidden tokens.
        seen: Number of tokens that are not padding.
        baseline_loss: Sum of the baseline's losses over the hidden tokens.
    """

    def __init__(self, windows: Windows, masking: Masking, baseline: np.ndarray) -> None:
        self._windows, self._masking = windows, masking
        self.batches = windows.batches
        self.hidden, self.seen, self.baseline_loss = 0, 0, 0.0
        for k in range(windows.batches):
            tokens = windows.block(k)
            hidden = tokens[self._hidden(k, tokens, (0, windows.batch))]
            self.hidden += len(hidden)
            self.seen += int((tokens != masking.padding_id).sum())
            self.baseline_loss += float(baseline[hidden].sum())
        if not self.hidden:
            raise DataError(f"of {self.seen} held-out tokens none is hidden.", "Hold out more sequences.")

    def _hidden(self, index: int, tokens: np.ndarray, rows: tuple[int, int]) -> np.ndarray:
        targets = self._masking.apply(tokens, _EVALUATION_SEED, index, rows)[1]
        return targets != self._masking.padding_id

    def feeds(self, index: int, held: Held) -> dict[str, np.ndarray]:
        windows, pad = self._windows, self._masking.padding_id
        rows, columns = held["held_out_tokens"] or ((0, windows.batch), (0, windows.length))
        tokens = windows.block(index, rows)
        hidden = self._hidden(index, tokens, rows)
        seen = np.where(hidden, self._masking.mask_id, tokens)[:, slice(*columns)]
        targets = np.where(hidden, tokens, pad)[:, slice(*columns)]
        return {"held_out_tokens": seen, "held_out_targets": targets}


def unigram_losses(train: Sequences, size: int, special: tuple[int, ...]) -> np.ndarray:
    """-log of the frequency of each token in the training sequences, special ones left out, nats.

    One is added to every count, so that a token that is never trained on has a finite loss.
    """
    counts = np.bincount(train.tokens, minlength=size).astype(np.float64) + 1.0
    counts[list(special)] = 0.0
    with np.errstate(divide="ignore"):
        return -np.log(counts / counts.sum())


def _loss(masking: Masking, config: TransformerConfig, feeds: Mapping[str, Tensor]) -> Tensor:
    weights = weights_nonzero(feeds["targets"], masking.padding_id)
    return masked_lm_loss(config, feeds["tokens"], feeds["targets"], weights, training=True)[0]


def _held_out_loss(masking: Masking, config: TransformerConfig, feeds: Mapping[str, Tensor]) -> Tensor:
    targets = feeds["held_out_targets"]
    logits = masked_lm(config, feeds["held_out_tokens"], training=False)
    losses = softmax_cross_entropy_with_logits(logits, targets, config.vocab_dim)
    return weighted_sum(losses, weights_nonzero(targets, masking.padding_id))
