"""`checked`: converts and checks the arguments of a function by their annotations before it runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from meshmpi.errors import ArgumentError, suggest
from meshmpi.graph import Tensor, call_of
from meshmpi.graph.arguments.annotations import rule_of
from meshmpi.graph.arguments.rules import ANYTHING, NO, Call, Rule, shown

F = TypeVar("F", bound=Callable[..., Any])
_EITHER, _NAMES = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_KEYWORD


class _Signature:
    """The parameters of a function that users call ``name``, and the rules of their arguments."""

    def __init__(self, function: Callable[..., Any], name: str):
        inner = inspect.unwrap(function)
        self.name, parameters = name, list(inspect.signature(inner).parameters.values())
        kinds = [p.kind for p in parameters]
        self.takes_more, self.takes_names = inspect.Parameter.VAR_POSITIONAL in kinds, _NAMES in kinds
        named = [p for p in parameters if p.kind in (_EITHER, inspect.Parameter.KEYWORD_ONLY)]
        self.positional = [p.name for p in named if p.kind is _EITHER]
        self.required = [p.name for p in named if p.default is p.empty]
        self.public = [p.name for p in named if p.name not in ("self", "cls", "_cls")]
        self.rules = {p.name: _rule(p, inner.__globals__) for p in named}

    def fit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments as the function gets them; ArgumentError if one is missing, unknown or of another kind."""
        call = Call(self.name, (*args, *kwargs.values()))
        if wrong := self._misnamed(args, kwargs):
            problem, remedy = wrong
            raise call.error(problem, f"{remedy}Call it as {self}.")
        given = [self._taken(n, a, call) for n, a in zip(self.positional, args, strict=False)]
        given += args[len(self.positional) :]
        return given, {n: self._taken(n, a, call) for n, a in kwargs.items()}

    def _taken(self, parameter: str, value: Any, call: Call) -> Any:
        rule = self.rules.get(parameter, ANYTHING)
        taken = rule.take(value, call)
        if taken is not NO:
            return taken
        if rule.item is not None and isinstance(value, (list, tuple, Mapping)):
            items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else enumerate(value)
            for at, one in items:
                if rule.item.take(one, call) is NO:
                    parameter, value, rule = f"{parameter}[{at!r}]", one, rule.item
                    break
        raise call.error(f"{parameter} is {shown(value)}, which is not {rule.said}.", rule.advice(value, call))

    def _misnamed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, str] | None:
        """What is wrong with the number and the names of the arguments, and the cure."""
        given = self.positional[: len(args)]
        if len(args) > len(given) and not self.takes_more:
            first = shown(args[len(given)])
            return f"there are {len(args) - len(given)} arguments too many, from {first} on.", ""
        for n in kwargs:
            if n not in self.rules and not self.takes_names:
                return f"there is no argument '{n}'.", f"{suggest(n, self.public)} "
            if n in given:
                return f"the argument {n} is given twice.", ""
        for n in self.required:
            if n not in given and n not in kwargs:
                what = "" if self.rules[n] is ANYTHING else f" ({self.rules[n].said})"
                return f"the argument {n} is missing{what}.", ""
        return None

    def __str__(self) -> str:
        needed = [n for n in self.public if n in self.required]
        parts = [n if n in self.positional else f"{n}=..." for n in needed]
        parts += ["..."] * (len(needed) < len(self.public))
        return f"mm.{self.name}({', '.join(parts)})"


def _rule(parameter: inspect.Parameter, namespace: Mapping[str, Any]) -> Rule:
    annotation = getattr(parameter.annotation, "__forward_arg__", parameter.annotation)  # of a NamedTuple
    return rule_of(annotation, parameter.name, namespace) if isinstance(annotation, str) else ANYTHING


def checked(function: F, name: str = "") -> F:
    """The function (or method), whose arguments are read by their annotations first.

    ``name`` is what users call it; default: its own.
    """
    signature: list[_Signature] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not signature:  # late: `import meshmpi` reads no annotations
            signature.append(_Signature(function, name or function.__name__))
        fitting, named = signature[0].fit(args, kwargs)
        return function(*fitting, **named)

    call.__dict__["__checked__"] = True
    return cast("F", call)


def named(function: F, name: str, doc: str) -> F:
    """A function that a factory made, under the name and docstring that users see."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def asked(function: Callable[..., Any], what: str, *arguments: Any) -> Any:
    """What a user's function returns; ArgumentError of ``what`` where it takes another number of arguments."""
    check_takes(function, what, arguments, _kind(arguments))
    return function(*arguments)


def check_takes(function: Callable[..., Any], what: str, arguments: Sequence[Any], kind: str) -> None:
    """ArgumentError of ``what`` where a user's function takes another number of arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have none
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        n = len(arguments)
        raise ArgumentError(
            f"{what}: the function {name}{signature} is called with {n} argument{'s' * (n != 1)}: {error}.",
            f"Give a function that takes {n} {kind}{'s' * (n != 1)}.",
            call_of(what),
        ) from None


def _kind(arguments: Sequence[Any]) -> str:
    return "tensor" if arguments and all(isinstance(a, Tensor) for a in arguments) else "argument"


def check_all(namespace: dict[str, Any], names: Iterable[str], prefix: str = "") -> None:
    """Puts `checked` functions and classes in place of the public ones among a module's globals.

    ``prefix`` is that of their names as users write them, such as "optimize.".
    """
    for name in names:
        value = namespace[name]
        if isinstance(value, type):
            if not getattr(value, "_is_protocol", False):
                _check_class(value, prefix + name)
        elif inspect.isfunction(value):
            namespace[name] = checked(value, prefix + name)


def _check_class(kind: type, name: str) -> None:
    """The constructor and the public methods of a class, where it defines them itself."""
    for method, value in list(vars(kind).items()):
        made_static = isinstance(value, staticmethod)  # __new__
        function = value.__func__ if made_static else value
        makes = method in ("__init__", "__new__")
        if not inspect.isfunction(function) or hasattr(function, "__checked__"):
            continue
        if makes or not method.startswith("_"):
            new = checked(function, name if makes else f"{name}.{method}")
            setattr(kind, method, staticmethod(new) if made_static else new)
