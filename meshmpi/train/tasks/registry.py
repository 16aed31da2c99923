"""The tasks by the value of the setting ``task``."""

from __future__ import annotations

from importlib import import_module

from meshmpi.errors import ConfigError, suggest
from meshmpi.train.tasks.base import Task

TASKS = {
    "lm": "meshmpi.train.tasks.language_model:LanguageModelTask",
    "translation": "meshmpi.train.tasks.translation:TranslationTask",
}
"""Setting -> where its class is; it is imported when it is asked for."""


def task_class(name: str) -> type[Task]:
    """The class of a task.

    Raises:
        ConfigError: There is none of that name.
    """
    place = TASKS.get(name)
    if place is None:
        raise ConfigError(f"there is no task '{name}'.", suggest(name, TASKS))
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)
