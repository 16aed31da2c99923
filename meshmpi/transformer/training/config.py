"""Settings from a TOML file and ``--set section.key=value``, for any class made by `validated.settings`.

The classes check the values; this module adds file and line to the messages.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import textwrap
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError

from meshmpi.errors import ConfigError, MeshmpiError, suggest
from meshmpi.files import plain
from meshmpi.validated import explained

T = TypeVar("T")
SAVED = "settings.toml"
"""The file in the folder of a run from which it can go on."""
BUILT_IN = Path(__file__).parent / "configs"
"""The configurations of the package; they can be loaded by name."""


def load(settings_class: type[T], path: str | Path | None = None, overrides: Iterable[str] = ()) -> T:
    """Reads settings: defaults, then the file, then the overrides.

    Args:
        settings_class: A settings class, possibly with sections.
        path: A TOML file, or the folder of a run; None for defaults only.
        overrides: Items such as ``train.steps=100``; a string may go without TOML's quotes.

    Raises:
        ConfigError: The file is missing or is not TOML; a key does not exist; a value has the
            wrong type, is out of range or contradicts another one.
    """
    values: dict[str, Any] = {}
    places = _Places()
    if path is not None:
        path = of_run(path) or Path(path)
        text = _read(path)
        try:
            values = plain.parse_toml(text)
        except ValueError as error:
            remedy = "Correct the line named; lines are: [section], or key = value."
            if Path(path).suffix != ".toml":
                remedy += f" To train on a text: meshmpi train quickstart --set data.corpus={path}."
            raise ConfigError(f"{path} is not valid TOML: {error}.", remedy) from error
        places = _Places(str(path), text)
    for item in overrides:
        _override(settings_class, values, item, places)
    return _build(settings_class, values, (), places)


def of_run(path: str | Path) -> Path | None:
    """The settings in the folder of a run; None where it is not one."""
    file = Path(path, SAVED)
    return file if file.is_file() else None


def written(settings: Any) -> str:
    """All settings as `load` reads them from a file."""
    lines: list[str] = []
    for path, fields in _sections(type(settings), ()):
        place = functools.reduce(getattr, path, settings)
        lines += ["", f"[{'.'.join(path)}]"] if path else []
        lines += [f"{f.name} = {_toml(getattr(place, f.name))}" for f, _ in fields]
    return "\n".join(lines).strip("\n") + "\n"


def from_dict(settings_class: type[T], values: Mapping[str, Any]) -> T:
    """Settings from nested mappings, such as `dataclasses.asdict` returns.  Errors: see `load`."""
    return _build(settings_class, values, (), _Places())


def describe(settings_class: type[Any], width: int = 80) -> str:
    """All settings with default, unit, type and meaning, by section, as a file would spell them."""
    lines: list[str] = []
    for path, fields in _sections(settings_class, ()):
        lines += ["", f"[{'.'.join(path)}]"] if path else []
        rows = [(_assignment(f), _meaning(f, t)) for f, t in fields]
        room = min(max((len(r[0]) for r in rows), default=0), width // 3)
        more = " " * (room + 4)
        for assignment, meaning in rows:
            head = f"  {assignment.ljust(room)}  "
            if len(assignment) > room:  # its meaning begins on the next line
                lines.append(f"  {assignment}")
                head = more
            wrapper = textwrap.TextWrapper(width, head, more, break_on_hyphens=False, break_long_words=False)
            lines += wrapper.wrap(meaning)
    return "\n".join(lines).strip("\n")


KeyPath = tuple[str, ...]


def _sections(settings_class: Any, path: KeyPath) -> Iterator[tuple[KeyPath, list[tuple[dataclasses.Field[Any], Any]]]]:
    """Every section, outer ones first, with its own fields and their types."""
    hints = typing.get_type_hints(settings_class)
    fields = [(f, hints[f.name]) for f in dataclasses.fields(settings_class)]
    yield path, [(f, t) for f, t in fields if not dataclasses.is_dataclass(t)]
    for field, wanted in fields:
        if dataclasses.is_dataclass(wanted):
            yield from _sections(wanted, (*path, field.name))


def _assignment(field: dataclasses.Field[Any]) -> str:
    factory = field.default_factory
    value = field.default if factory is dataclasses.MISSING else factory()
    return f"{field.name} = {_toml(value)} {field.metadata['json_schema_extra']['unit']}".rstrip()


def _toml(value: Any) -> str:
    """A value as a file spells it; None is the word "none" there."""
    if value is None:
        return '"none"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (bool, str)) else str(value)


def _meaning(field: dataclasses.Field[Any], wanted: Any) -> str:
    about, choices = field.metadata, get_args(wanted)
    parts = [about["description"]]
    if get_origin(wanted) is Literal:
        parts.append(f"one of {', '.join(map(_toml, choices))}")
    elif choices:
        names = ["none" if t is type(None) else t.__name__ for t in choices]
        parts.append(f"dict[{', '.join(names)}]" if get_origin(wanted) is dict else " or ".join(names))
    least, limit = about.get("ge"), about.get("lt")
    parts += [f"at least {least:g}"] if least else []  # nobody gives a length below 0
    parts += [f"less than {limit:g}"] if limit is not None else []
    return "; ".join(parts)


# Reading


class _Places:
    """Where in a file each key stands."""

    def __init__(self, file: str = "", text: str = "") -> None:
        self.file = file
        self.lines: dict[KeyPath, str] = {}
        header: KeyPath = ()
        for number, line in enumerate(text.splitlines(), start=1):
            if found := re.match(r"\s*\[\s*([\w.\"' -]+?)\s*\]", line):
                header = _split_key(found[1])
                self.lines[header] = f"{file}:{number}"
            elif found := re.match(r"\s*([\w.\"' -]+?)\s*=", line):
                self.lines[(*header, *_split_key(found[1]))] = f"{file}:{number}"

    def of(self, key: KeyPath) -> str:
        while key and key not in self.lines:  # a key inside of a value stands where the value stands
            key = key[:-1]
        place = self.lines.get(key, self.file)
        return f" ({place})" if place else ""


def _split_key(key: str) -> KeyPath:
    return tuple(part.strip().strip("\"'") for part in key.split("."))


def _read(path: Path) -> str:
    built_in = {p.stem: p for p in sorted(BUILT_IN.glob("*.toml"))}
    if str(path) in built_in and not path.is_file():
        path = built_in[str(path)]
    try:
        return plain.text(path)
    except FileNotFoundError as error:
        near = suggest(path.name, sorted(p.name for p in path.parent.glob("*.toml")))
        hint = f"{near} " if near.startswith("Did") else ""
        raise ConfigError(
            f"the configuration file {path} does not exist.",
            f"{hint}Give the path of a TOML file, or {', '.join(built_in)}, which comes with meshmpi.",
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the configuration file {path} cannot be read: {error}.", "Give a TOML file in UTF-8."
        ) from error


def _override(settings_class: type[Any], values: dict[str, Any], item: str, places: _Places) -> None:
    """Puts one ``section.key=value`` into ``values``."""
    key, equals, text = item.partition("=")
    path = _split_key(key)
    if not equals or not all(path):
        raise ConfigError(f"--set {item} has no key and value.", "Write --set section.key=value.")
    places.lines[path] = f"--set {item}"
    here = values
    for part in path[:-1]:
        inner = here.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(
                f"--set {item}: '{part}' is a value, {inner!r}, not a section.", f"Write --set {part}=value."
            )
        here = typing.cast("dict[str, Any]", inner)
    here[path[-1]] = _parse(text.strip(), _wanted(settings_class, path))


def _parse(text: str, wanted: Any) -> Any:
    """A value in TOML's syntax; any other text is a string, and so is a number where a string is wanted."""
    try:
        value = plain.parse_toml(f"v = {text}")["v"]
    except ValueError:
        return text
    return text if wanted is str and not isinstance(value, str) else value


def _wanted(settings_class: Any, path: Sequence[str]) -> Any:
    """The type of the setting at ``path``; None where there is none."""
    for part in path:
        if not dataclasses.is_dataclass(settings_class):
            return None
        settings_class = typing.get_type_hints(settings_class).get(part)
    return settings_class


def _build(settings_class: type[T], values: Mapping[str, Any], path: KeyPath, places: _Places) -> T:
    """One section with all its keys."""
    hints = typing.get_type_hints(settings_class)
    named = f"section [{'.'.join(path)}]" if path else "the top level"
    given: dict[str, Any] = {}
    for key, value in values.items():
        where = places.of((*path, key))
        if key not in hints:
            near = suggest(key, hints)
            near = f"{near} " if near.startswith("Did") else _in_a_section(hints, key)
            problem = f"there is no key '{key}' in {named}{where}."
            raise ConfigError(problem, f"{near}Its keys are: {', '.join(hints)}.")
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, Mapping):
                full = ".".join((*path, key))
                raise ConfigError(
                    f"'{full}' is {value!r}{where}, but it is a section.",
                    f"Write [{full}] and its keys below, or {full}.key = value.",
                )
            value = _build(hints[key], value, (*path, key), places)
        given[key] = value
    made: Any = object.__new__(settings_class)
    try:
        made.__init__.__wrapped__(made, **given)
        made.check()
    except ValidationError as error:
        name, wrong, remedy = explained(error, settings_class)
        full = ".".join((*path, name))
        raise ConfigError(f"'{full}' {wrong}{places.of(_split_key(full))}.", remedy) from None
    except MeshmpiError as error:  # several settings contradict each other
        raise ConfigError(f"{named}{places.of(path)}: {error.problem}", error.remedy) from error
    return made


def _in_a_section(hints: Mapping[str, Any], key: str) -> str:
    """The section that does have a key, as a hint."""
    for name, section in hints.items():
        if dataclasses.is_dataclass(section) and key in {f.name for f in dataclasses.fields(section)}:
            return f"Did you mean '{name}.{key}'? "
    return ""
