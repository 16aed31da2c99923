"""Settings classes: frozen dataclasses that pydantic validates, with this package's errors.

The fields are made with `setting` and `section`.  A wrong value raises ConfigError, whether it comes from a file
(`meshmpi.transformer.training.config`) or from a call of the constructor.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, Union, get_args

from pydantic import BeforeValidator, ConfigDict, ValidationError
from pydantic.dataclasses import dataclass
from typing_extensions import dataclass_transform

from meshmpi.errors import ConfigError, suggest

T = TypeVar("T")
OrNone = Annotated[Union[T, None], BeforeValidator(lambda given: None if given == "none" else given)]
"""A value or None.  TOML has no null, so the word "none" stands for it."""


def setting(
    default: Any, help: str, unit: str = "", *, minimum: float | None = None, below: float | None = None
) -> Any:
    """A field of a settings class.

    Args:
        default: Its value when nothing is given.
        help: What it does.
        unit: What it is counted in, such as "steps" or "s".
        minimum: The smallest value allowed.
        below: All values allowed are less than this.

    Example:
        >>> @settings
        ... class Train:
        ...     steps: int = setting(2000, "length of the training", "steps", minimum=0)
        >>> Train(steps=10)
        Train(steps=10)
    """
    about = {"description": help, "json_schema_extra": {"unit": unit}, "ge": minimum, "lt": below}
    about = {name: value for name, value in about.items() if value is not None}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=about)
    return dataclasses.field(default=default, metadata=about)


def section(settings_class: type[Any]) -> Any:
    """A field that is a settings class of its own: a ``[section]`` of the file."""
    return dataclasses.field(default_factory=settings_class)


@dataclass_transform(frozen_default=True)
def settings(cls: type[T]) -> type[T]:
    """Makes a class a settings class and lists its settings in its docstring.

    Types are strict: an int may stand for a float, nothing else is converted.  A method ``check`` of the class may
    raise an error where several settings contradict each other.
    """
    if not hasattr(cls, "check"):
        cls.check = lambda self: None  # pyright: ignore[reportAttributeAccessIssue]
    made: Any = dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))(cls)
    construct: Callable[..., None] = made.__init__

    @functools.wraps(construct)
    def construct_or_explain(self: Any, *args: Any, **values: Any) -> None:
        try:
            construct(self, *args, **values)
        except ValidationError as error:
            name, wrong, remedy = explained(error, made)
            raise ConfigError(f"{made.__name__}: {name} {wrong}.", remedy) from None
        self.check()  # not in __post_init__: errors name the innermost line that is not ours, which would be pydantic's

    construct_or_explain.__dict__["__checked__"] = True  # the arguments need no second check
    made.__init__ = construct_or_explain
    lines = [f"    {f.name}: {f.metadata['description']}." for f in dataclasses.fields(made) if f.metadata]
    made.__doc__ = "\n".join([cls.__doc__ or "", "", "Attributes:", *lines])
    return made


def explained(error: ValidationError, settings_class: Any) -> tuple[str, str, str]:
    """The first setting that is wrong, what is wrong with it, and what would make it right."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    fields = settings_class.__pydantic_fields__
    if name not in fields:
        return name, "is not a setting", suggest(name, fields)
    wanted = first["msg"].replace("Input should be", "It must be").replace("greater than or equal to", "at least") + "."
    if first["type"] == "literal_error":
        near = suggest(str(first["input"]), map(str, get_args(fields[name].annotation)))
        wanted = near if near.startswith("Known") else f"{near} {wanted}"
    return ".".join(map(str, first["loc"])), f"is {first['input']!r}", wanted
