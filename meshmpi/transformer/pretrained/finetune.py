"""Prepares fine-tuning: takes settings, vocabulary and initial values from a trained model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from meshmpi.dims import Dimension
from meshmpi.errors import ConfigError
from meshmpi.transformer.pretrained.architectures import Entry, FileDim
from meshmpi.transformer.pretrained.model import Model, open_model
from meshmpi.transformer.text.vocabulary import TOKENIZER
from meshmpi.transformer.training.settings import DataSettings, Settings
from meshmpi.transformer.training.trainer import Trainer

OF_TRAINING = (
    "attention_dropout",
    "ff_dropout",
    "residual_dropout",
    "embedding_dropout",
    "final_dropout",
    "dropout_over_length",
    "label_smoothing",
    "z_loss",
    "logit_jitter",
    "padding_id",
    "dtype",
    "activation_dtype",
    "residual_constraint",
    "expert_capacity",
    "expert_balance",
    "expert_z_loss",
    "expert_jitter",
    "recompute",
)
"""Options of a model that do not change what it is: those of the configuration hold."""


def fine_tuning(settings: Settings, path: str | os.PathLike[str]) -> tuple[Settings, Callable[[Trainer], None]]:
    """Settings of a run that goes on from a trained model, and what gives it first values.

    Args:
        settings: Settings of the run.  Of ``model``, only `OF_TRAINING` and a shorter ``length`` hold;
            ``data.vocabulary``, unless it is left at its default, replaces the model's own.
        path: A Hugging Face checkpoint, or a run of the trainer.

    Returns:
        The settings, and a function for ``train(..., initialize=)``.

    Raises:
        ConfigError: The model is of another kind than the task.
        CheckpointError: There is no model.
    """
    model = open_model(path)
    if settings.task != "lm" or model.kind != "lm":
        raise ConfigError(
            f"{path} is of kind {model.kind}, the task is '{settings.task}'.",
            "Language models (kind lm) are fine-tuned by the task lm.",
        )
    config, own = model.config, settings.model
    length = config.length
    if model.manifest is None or not config.learned_positions:
        length = min(own.length, length)
    options = {name: getattr(own, name) for name in OF_TRAINING}
    changed = dataclasses.replace(settings, model=config.with_options(length=length, **options))
    if settings.data.vocabulary == DataSettings().vocabulary:
        name = f"{TOKENIZER}{os.path.abspath(path)}"
        data = dataclasses.replace(settings.data, vocabulary=name)
        changed = dataclasses.replace(changed, data=data)
    short = shortened(model, length)

    def initialize(trainer: Trainer) -> None:
        short.load(trainer.step)
        trainer.say(f"first values are those of {path}")

    return changed, initialize


def shortened(model: Model, length: int) -> Model:
    """The same model for texts of ``length`` tokens: only the first of its learned positions are read."""
    found = model.architecture
    if length == found.config.length:
        return model
    config = found.config.with_options(length=length)
    entries = tuple(_shortened(entry, config.positions_dim) for entry in found.entries)
    return dataclasses.replace(model, architecture=dataclasses.replace(found, config=config, entries=entries))


def _shortened(entry: Entry, rows: Dimension) -> Entry:
    dims = tuple(
        FileDim((rows,), d.start, d.size) if [x.name for x in d.dims] == [rows.name] else d for d in entry.file_dims
    )
    return dataclasses.replace(entry, file_dims=dims)
