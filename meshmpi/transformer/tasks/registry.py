"""Finds a task by the value of the setting ``task``."""

from __future__ import annotations

from importlib import import_module

from meshmpi.errors import ConfigError, suggest
from meshmpi.transformer.models import TransformerConfig
from meshmpi.transformer.tasks.base import Task
from meshmpi.transformer.training.model import TrainingGraph
from meshmpi.transformer.training.settings import Settings

TASKS = {
    "lm": "meshmpi.transformer.tasks.language_model:LanguageModelTask",
    "translation": "meshmpi.transformer.tasks.translation:TranslationTask",
}
"""Setting -> where its class is; it is imported when it is asked for."""


def task_class(name: str) -> type[Task]:
    """The class of a task; ConfigError where there is none of that name."""
    place = TASKS.get(name)
    if place is None:
        raise ConfigError(f"there is no task '{name}'.", suggest(name, TASKS))
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)


def chosen(settings: Settings) -> tuple[type[Task], TransformerConfig]:
    """The task and the Transformer that settings describe; may read data to know the size of the vocabulary."""
    task = task_class(settings.task)
    return task, task.transformer(settings, task.vocabulary_size(settings))


def build_training_graph(settings: Settings, config: TransformerConfig) -> TrainingGraph:
    """The graph of the training step and of the held-out loss, by the task of the settings."""
    return task_class(settings.task).build(settings, config)
