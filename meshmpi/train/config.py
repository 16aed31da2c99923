"""Typed settings from a TOML file and ``--set section.key=value``, for any dataclass.

A settings class is a dataclass whose fields are made with `setting` or `section`.  This module
knows no setting by name: the classes stand beside the code that uses them.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from meshmpi.errors import ConfigError, suggest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

T = TypeVar("T")
BUILT_IN = Path(__file__).parent / "configs"
"""Configurations that come with the package: their names may stand for paths."""
_REQUIRED = dataclasses.MISSING


def setting(
    default: Any = _REQUIRED,
    help: str = "",
    unit: str = "",
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[Any] = (),
) -> Any:
    """A field of a settings class.

    Args:
        default: Its value when nothing is given; without one it must be given.
        help: What it does.
        unit: What it is counted in, such as "steps" or "s".
        minimum: The smallest value allowed.
        maximum: The largest value allowed.
        choices: The only values allowed; none means any.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Train:
        ...     steps: int = setting(2000, "length of the training", "steps", minimum=0)
        >>> load(Train, overrides=["steps=10"])
        Train(steps=10)
    """
    about = {
        "help": help, "unit": unit, "minimum": minimum, "maximum": maximum,
        "choices": tuple(choices),
    }  # fmt: skip
    if isinstance(default, (list, dict)):
        made = default
        return dataclasses.field(default_factory=lambda: type(made)(made), metadata=about)
    return dataclasses.field(default=default, metadata=about)


def section(settings_class: type[Any], help: str = "") -> Any:
    """A field that is a settings class of its own: a ``[section]`` of the file."""
    return dataclasses.field(default_factory=settings_class, metadata={"help": help})


def load(
    settings_class: type[T],
    path: str | Path | None = None,
    overrides: Iterable[str] = (),
) -> T:
    """Reads settings: defaults, then the file, then the overrides.

    Args:
        settings_class: A dataclass, possibly with sections.
        path: A TOML file; None for defaults only.
        overrides: Items such as ``train.steps=100``; the value is written as in TOML, where a
            string may go without quotes.

    Raises:
        ConfigError: The file is missing or is not TOML; a key does not exist; a value has the
            wrong type or is out of range.
    """
    values: dict[str, Any] = {}
    places = _Places()
    if path is not None:
        text = _read(Path(path))
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(
                f"{path} is not valid TOML: {error}.",
                "Correct the line named; lines are: [section], or key = value.",
            ) from error
        places = _Places(str(path), text)
    for item in overrides:
        _override(settings_class, values, item, places)
    return from_dict(settings_class, values, places)


def from_dict(
    settings_class: type[T], values: Mapping[str, Any], places: _Places | None = None
) -> T:
    """Settings from nested mappings, such as `as_dict` returns.

    Raises:
        ConfigError: As `load`.
    """
    return _build(settings_class, values, (), places or _Places())


def as_dict(settings: Any) -> dict[str, Any]:
    """Settings as nested dictionaries of plain values, for JSON or a checkpoint."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, (list, tuple)):
            return [plain(v) for v in value]
        if isinstance(value, Mapping):
            return {k: plain(v) for k, v in value.items()}
        return str(value) if isinstance(value, Path) else value

    return plain(settings)


def describe(settings_class: type[Any], width: int = 80) -> str:
    """All settings with default, unit, type and meaning, by section, as a file would spell them.

    Args:
        settings_class: A dataclass, possibly with sections.
        width: Columns of a line.
    """
    lines: list[str] = []
    for path, fields in _sections(settings_class, ()):
        lines += ["", f"[{'.'.join(path)}]"] if path else []
        rows = [(_assignment(f, t), _meaning(f, t)) for f, t in fields]
        room = min(max((len(r[0]) for r in rows), default=0), width // 3)
        for assignment, meaning in rows:
            head = f"  {assignment.ljust(room)}  "
            if len(assignment) > room:  # its meaning begins on the next line
                lines.append(f"  {assignment}")
                head = " " * len(f"  {''.ljust(room)}  ")
            more = " " * (room + 4)
            lines += textwrap.wrap(
                meaning, width, initial_indent=head, subsequent_indent=more,
                break_on_hyphens=False, break_long_words=False,
            ) or [head.rstrip()]  # fmt: skip
    return "\n".join(lines).strip("\n")


def _sections(
    settings_class: type[Any], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], list[tuple[dataclasses.Field[Any], Any]]]]:
    """Every section, outer ones first, with its own fields and their types."""
    hints = typing.get_type_hints(settings_class)
    fields = [(f, hints[f.name]) for f in dataclasses.fields(settings_class)]
    yield path, [(f, t) for f, t in fields if not dataclasses.is_dataclass(t)]
    for field, wanted in fields:
        if dataclasses.is_dataclass(wanted):
            yield from _sections(typing.cast("type[Any]", wanted), (*path, field.name))


def _assignment(field: dataclasses.Field[Any], wanted: Any) -> str:
    if field.default is not _REQUIRED:
        value = field.default
    elif field.default_factory is not _REQUIRED:
        value = field.default_factory()
    else:
        return f"{field.name} ({_spell(wanted)}, must be given)"
    unit = field.metadata.get("unit")
    return f"{field.name} = {_toml(value)}" + (f" {unit}" if unit else "")


def _toml(value: Any) -> str:
    """A value as it stands in a file; none is a word there."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or isinstance(value, (str, Path)):
        text = "none" if value is None else str(value)
        return json.dumps(text, ensure_ascii=False)
    if isinstance(value, Mapping):
        pairs = typing.cast("Mapping[str, Any]", value)
        return "{" + ", ".join(f"{k} = {_toml(v)}" for k, v in pairs.items()) + "}"
    if isinstance(value, (list, tuple)):
        items = typing.cast("Sequence[Any]", value)
        return "[" + ", ".join(map(_toml, items)) + "]"
    return str(value)


def _meaning(field: dataclasses.Field[Any], wanted: Any) -> str:
    about = field.metadata
    parts = [about["help"]] if about.get("help") else []
    if get_origin(wanted) not in (None, Literal) and type(None) not in get_args(wanted):
        parts.append(_spell(wanted))
    elif type(None) in get_args(wanted):
        parts.append(_spell(wanted).replace(" | ", " or "))
    if about.get("choices"):
        parts.append(f"one of {', '.join(_toml(c) for c in about['choices'])}")
    least, most = about.get("minimum"), about.get("maximum")
    parts += [f"at least {least:g}"] if least else []  # that no length is below 0 is clear
    parts += [f"at most {most:g}"] if most is not None else []
    return "; ".join(parts)


# Reading


class _Places:
    """Where in a file a key stands, for messages."""

    def __init__(self, file: str = "", text: str = "") -> None:
        self.file = file
        self.lines: dict[tuple[str, ...], str] = {}
        header: tuple[str, ...] = ()
        for number, line in enumerate(text.splitlines(), start=1):
            if found := re.match(r"\s*\[\s*([\w.\"' -]+?)\s*\]", line):
                header = _split_key(found[1])
                self.lines[header] = f"{file}:{number}"
            elif found := re.match(r"\s*([\w.\"' -]+?)\s*=", line):
                self.lines[(*header, *_split_key(found[1]))] = f"{file}:{number}"

    def of(self, key: tuple[str, ...]) -> str:
        place = self.lines.get(key, self.file)
        return f" ({place})" if place else ""


def _split_key(key: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in key.split("."))


def _near(path: Path) -> str:
    """The TOML file beside ``path`` that may have been meant, as a hint."""
    files = {p.name: p for p in sorted(path.parent.glob("*.toml"))}
    hint = suggest(path.name, files)
    return "" if not hint or hint.startswith("Known") else f"{hint} "


def _read(path: Path) -> str:
    built_in = {p.stem: p for p in sorted(BUILT_IN.glob("*.toml"))}
    if str(path) in built_in and not path.is_file():
        path = built_in[str(path)]
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"the configuration file {path} does not exist.",
            f"{_near(path)}Give the path of a TOML file, or {', '.join(built_in)}, which comes with"
            " meshmpi.",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the configuration file {path} cannot be read: {error}.", "Give a TOML file in UTF-8."
        ) from error


def _override(
    settings_class: type[Any], values: dict[str, Any], item: str, places: _Places
) -> None:
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
                f"--set {item}: '{part}' is a value, {inner!r}, not a section.",
                f"Write --set {part}=value.",
            )
        here = typing.cast("dict[str, Any]", inner)
    here[path[-1]] = _parse(text.strip(), _wanted(settings_class, path))


def _parse(text: str, wanted: Any) -> Any:
    """A value in TOML's syntax; what is not in it is a string, as is all that a string wants."""
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        # A bare none, or a list of bare words such as [a, b]
        value = text
        if get_origin(wanted) in (list, tuple):
            inner = text[1:-1] if text[:1] + text[-1:] == "[]" else text
            value = [_parse(p.strip(), str) for p in inner.split(",") if p.strip()]
    if wanted is str and not isinstance(value, str):
        return text
    return value


def _wanted(settings_class: Any, path: Sequence[str]) -> Any:
    """The type of the setting at ``path``; None where there is none."""
    for part in path:
        if not dataclasses.is_dataclass(settings_class):
            return None
        settings_class = typing.get_type_hints(settings_class).get(part)
    return settings_class


def _build(
    settings_class: type[T], values: Mapping[str, Any], path: tuple[str, ...], places: _Places
) -> T:
    """One section with all its keys."""
    hints = typing.get_type_hints(settings_class)
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, settings_class))}
    named = f"section [{'.'.join(path)}]" if path else "the top level"
    for key in values:
        if key not in fields:
            near = suggest(key, fields)
            near = _in_a_section(hints, key) if near.startswith("Known") else f"{near} "
            raise ConfigError(
                f"there is no key '{key}' in {named}{places.of((*path, key))}.",
                f"{near}Its keys are: {', '.join(fields)}.",
            )
    made: dict[str, Any] = {}
    for name, field in fields.items():
        wanted, key = hints[name], (*path, name)
        if dataclasses.is_dataclass(wanted):
            inner = values.get(name, {})
            if not isinstance(inner, Mapping):
                raise ConfigError(
                    f"'{'.'.join(key)}' is {inner!r}{places.of(key)}, but it is a section.",
                    f"Write [{'.'.join(key)}] and its keys below, or {'.'.join(key)}.key = value.",
                )
            made[name] = _build(typing.cast("type[Any]", wanted), inner, key, places)
        elif name in values:
            made[name] = _value(values[name], wanted, field, key, places)
        elif field.default is _REQUIRED and field.default_factory is _REQUIRED:
            raise ConfigError(
                f"'{'.'.join(key)}' is not given{places.of(path)}.",
                f"Add it to {named} ({_spell(wanted)}).",
            )
    return settings_class(**made)


def _in_a_section(hints: Mapping[str, Any], key: str) -> str:
    """The section that does have a key, as a hint."""
    sections = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    for name, section_class in sections.items():
        if key in {f.name for f in dataclasses.fields(section_class)}:
            return f"Did you mean '{name}.{key}'? "
    return ""


def _value(
    given: Any, wanted: Any, field: dataclasses.Field[Any], key: tuple[str, ...], places: _Places
) -> Any:
    """A value of the wanted type and in range, or the error that says why not."""
    name, about = ".".join(key), field.metadata
    try:
        value = _convert(given, wanted)
    except TypeError as error:
        raise ConfigError(
            f"'{name}' is {given!r}{places.of(key)}, which is not {_article(wanted)}.",
            f"Give {_article(wanted)}.",
        ) from error
    choices = about.get("choices")
    if choices and value is not None and value not in choices:
        raise ConfigError(
            f"'{name}' is {value!r}{places.of(key)}.",
            f"Choose one of: {', '.join(map(str, choices))}.",
        )
    for word, bound, sign in (
        ("least", about.get("minimum"), 1),
        ("most", about.get("maximum"), -1),
    ):
        # not (>=) instead of (<): NaN is out of every range
        if bound is not None and value is not None and not (value - bound) * sign >= 0:
            raise ConfigError(
                f"'{name}' is {value!r}{places.of(key)}.", f"It must be at {word} {bound}."
            )
    return value


def _convert(given: Any, wanted: Any) -> Any:
    """``given`` as ``wanted``, or TypeError; an int may stand for a float, nothing else differs."""
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return _convert_any(given, inner)
    if origin is Literal:
        if given in inner:
            return given
    elif origin in (list, tuple) and isinstance(given, (list, tuple)):
        items = typing.cast("Sequence[Any]", given)
        return origin(_convert_items(items, origin, inner))
    elif origin is dict and isinstance(given, Mapping):
        return {str(k): _convert(v, inner[1]) for k, v in given.items()}
    elif wanted is Any:
        return given
    elif wanted is Path and isinstance(given, (str, Path)):
        return Path(given)
    elif wanted is float and isinstance(given, (int, float)) and not isinstance(given, bool):
        return float(given)
    elif isinstance(wanted, type) and type(given) is wanted:
        return given
    raise TypeError(wanted)


def _convert_any(given: Any, alternatives: Sequence[Any]) -> Any:
    # TOML has no null: the word none stands for it where None is allowed.
    if type(None) in alternatives and (given is None or given == "none"):
        return None
    for wanted in alternatives:
        try:
            return _convert(given, wanted)
        except TypeError:
            continue
    raise TypeError(alternatives)


def _convert_items(given: Sequence[Any], origin: type, inner: Sequence[Any]) -> list[Any]:
    if origin is tuple and inner[-1] is not Ellipsis:
        if len(given) != len(inner):
            raise TypeError(inner)
        return [_convert(v, t) for v, t in zip(given, inner, strict=True)]
    return [_convert(v, inner[0]) for v in given]


def _spell(wanted: Any) -> str:
    """A type as a user would write it."""
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return " | ".join(_spell(t) for t in inner)
    if origin is Literal:
        return " | ".join(repr(v) for v in inner)
    if inner:
        return f"{origin.__name__}[{', '.join(_spell(t) for t in inner)}]"
    if wanted is Ellipsis:
        return "..."
    return {type(None): "none", Path: "path"}.get(wanted) or getattr(
        wanted, "__name__", str(wanted)
    )


def _article(wanted: Any) -> str:
    spelled = _spell(wanted)
    return f"{'an' if spelled[0] in 'aeio' else 'a'} {spelled}"
