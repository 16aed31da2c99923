"""The interface between the training loop and a task.

A task is used in two ways: without data (class methods) for the graph of a step in a plan; with data (an instance)
for batches, held-out data and a closing sample.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Protocol

import numpy as np

from meshmpi.api import compile as compile_step
from meshmpi.runtime.feeding import BlockFeeder, Held
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.runtime.variables import VariableStore
from meshmpi.training.callback import Evaluation, Sample
from meshmpi.transformer.models import TransformerConfig, parameter_count
from meshmpi.transformer.text.base import Vocabulary
from meshmpi.transformer.training.evaluation import HeldOut
from meshmpi.transformer.training.model import TrainingGraph
from meshmpi.transformer.training.settings import Settings, transformer_config


class Batches(Protocol):
    """Training batches by step number: what resumes needs the number only."""

    def feeds(self, step: int, held: Held) -> dict[str, np.ndarray]:
        """The blocks of the batch of a step, from 0, that this rank holds: an array for every name of ``held``."""
        ...


class Task(ABC):
    """A kind of training.  Making one is collective: its data are prepared.

    To add a task: subclass this, add a line to `registry.TASKS` and its name to the choices of the
    setting ``task``.

    Attributes:
        tokens_per_step: Tokens that a step learns from, the mean where it varies.
        between: Called between the programs of a sample or an evaluation on all ranks; what it raises ends it.
    """

    name: ClassVar[str]  # the setting ``task`` that chooses it
    vocabulary: Vocabulary  # what the tokens mean
    digest: str  # checksum of all training data: a run resumes with equal data only

    def __init__(self, settings: Settings, mesh: AnyMesh, say: Callable[[str], None]) -> None:
        self.settings, self.mesh = settings, mesh
        self.between: Callable[[], None] = lambda: None
        self.prepare(say)
        self.config = self.transformer(settings, self.vocabulary.size)

    # ---- without data --------------------------------------------------------------------

    @classmethod
    def transformer(cls, settings: Settings, vocabulary_size: int) -> TransformerConfig:
        """The Transformer that the settings describe, for a vocabulary of that size."""
        return transformer_config(settings.model, vocabulary_size)

    @classmethod
    @abstractmethod
    def vocabulary_size(cls, settings: Settings) -> int:
        """The size of the vocabulary; reads data only where its name does not tell it."""

    @classmethod
    @abstractmethod
    def build(cls, settings: Settings, config: TransformerConfig) -> TrainingGraph:
        """The graph of a training step and of the held-out loss."""

    @classmethod
    def source(cls, settings: Settings) -> str:
        """Where the data are from, for messages."""
        return settings.data.corpus

    @classmethod
    def parameter_count(cls, config: TransformerConfig) -> int:
        """Trainable numbers of the model."""
        return parameter_count(config)

    # ---- with data -----------------------------------------------------------------------

    @abstractmethod
    def prepare(self, say: Callable[[str], None]) -> None:
        """Reads the data; sets ``vocabulary`` and ``digest``.  Collective."""

    @property
    @abstractmethod
    def tokens_per_step(self) -> float: ...

    @abstractmethod
    def describe(self) -> str:
        """The amount of training data, as ``"1,234 training tokens"``."""

    @abstractmethod
    def batches(self) -> Batches:
        """The training batches."""

    @abstractmethod
    def held_out(self, batch: int, limit: int) -> HeldOut:
        """Held-out data in batches; ``limit`` is the most rows to take from the start, 0: all."""

    @abstractmethod
    def evaluation(self, held_out: HeldOut, total: float, seconds: float) -> Evaluation:
        """Explains a sum of held-out losses, in nats."""

    def sample(self, variables: VariableStore, layout: str) -> Sample:
        """The sample of the trained model.  Collective."""
        return Sample()


class Evaluator:
    """Computes the held-out losses of a task by a program of its own, which shares ``variables``."""

    def __init__(self, task: Task, built: TrainingGraph, layout: str, variables: VariableStore | None = None) -> None:
        s, self._task, self._batch = task.settings, task, built.evaluation_batch
        self._step = compile_step(
            built.graph,
            task.mesh,
            layout,
            fetches=[built.held_out_loss],
            updates=[],
            variables=variables,
            storage=s.mesh.storage or None,
            seed=s.train.seed,
        )
        self.variables, self._feeder = self._step.variables, BlockFeeder(self._step, built.held_out_feeds)

    def evaluate(self, rows: int = 0) -> Evaluation:
        """The held-out loss over the first ``rows`` rows (windows of a text); 0: all.  Collective."""
        data = self._task.held_out(self._batch, rows)
        began, total = time.perf_counter(), 0.0
        for index in range(data.batches):
            self._task.between()
            blocks = data.feeds(index, self._feeder.held)
            (loss,) = self._step(self._feeder.feeds(blocks)).values()
            total += loss
        return self._task.evaluation(data, total, time.perf_counter() - began)
