"""Turns an annotation into the rule of an argument: kinds, and lists, dicts and choices of them."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast, get_origin

from meshmpi.errors import MeshmpiError
from meshmpi.graph import Tensor
from meshmpi.graph.arguments import rules
from meshmpi.graph.arguments.rules import ANYTHING, FUNCTION, NO, NONE, Call, Rule, fixed


def _first(takes: Sequence[Callable[[Any, Call], Any]], value: Any, call: Call) -> Any:
    """What the first of ``takes`` makes of a value that takes it; if none does, the first error is raised."""
    error: MeshmpiError | None = None
    for one in takes:
        try:
            taken = one(value, call)
        except MeshmpiError as e:
            error = error or e
            continue
        if taken is not NO:
            return taken
    if error is not None:
        raise error
    return NO


def _any_of(*choices: Rule) -> Rule:
    """Whatever one of the rules takes, the first first; the first also advises."""
    if rules.NUMBER in choices:  # which whole numbers and truth values are as well
        choices = tuple(r for r in choices if r not in (rules.INTEGER, rules.TRUTH))
    mostly, takes = [r for r in choices if r is not NONE], [r.take for r in choices]
    item = next((r.item for r in mostly if r.item is not None), None)
    said = " or ".join(dict.fromkeys(r.said for r in mostly))
    return Rule(said, lambda value, call: _first(takes, value, call), _advice_of(mostly), item)


def _advice_of(choices: Sequence[Rule]) -> Callable[[Any, Call], str]:
    """The advice of the first; where all of them say "Give ...", of all."""

    def advice(value: Any, call: Call) -> str:
        said = list(dict.fromkeys(r.advice(value, call) for r in choices))
        if not all(s.startswith("Give ") and s.count(".") == 1 for s in said):
            return said[0]
        return f"Give {' or '.join(s[5:-1] for s in said)}."

    return advice


def _list_of(rule: Rule) -> Rule:
    """Several; one alone counts as a list of one."""

    def items_of(value: Any, call: Call) -> Any:
        if isinstance(value, (str, Mapping, Tensor)) or not isinstance(value, Iterable):
            return NO
        if getattr(value, "ndim", 1) == 0:  # an array that cannot be iterated over
            return NO
        given = list(cast("Iterable[Any]", value))
        items = [rule.take(v, call) for v in given]
        if any(v is NO for v in items):
            return NO
        same = isinstance(value, list) and all(map(operator.is_, given, items))
        return value if same else items  # the caller's own list may be there to be filled

    def alone(value: Any, call: Call) -> Any:
        one = rule.take(value, call)
        return NO if one is NO else [one]

    said = f"a list of {_plural(rule.said)}"
    return Rule(said, lambda value, call: _first((items_of, alone), value, call), rule.advice, rule)


def _plural(said: str) -> str:
    return " or ".join(part.removeprefix("a ").removeprefix("an ") + "s" for part in said.split(" or "))


def _tuple_of(rule: Rule) -> Rule:
    """Several, as a tuple: ``tuple[int, ...]``."""
    several = _list_of(rule)

    def take(value: Any, call: Call) -> Any:
        found: Any = several.take(value, call) if isinstance(value, (list, tuple)) else NO
        return NO if found is NO else tuple(found)

    return several._replace(take=take)


def _pair_of(parts: Sequence[Rule]) -> Rule:
    def take(value: Any, call: Call) -> Any:
        if not isinstance(value, (list, tuple)) or len(cast("Sequence[Any]", value)) != len(parts):
            return NO
        items = tuple(r.take(v, call) for r, v in zip(parts, value, strict=True))
        return NO if any(v is NO for v in items) else items

    said = f"({', '.join(r.said for r in parts)})"
    return Rule(said, take, fixed(f"Give {len(parts)} values: {said}."))


def _mapping_of(key: Rule, rule: Rule) -> Rule:
    def take(value: Any, call: Call) -> Any:
        if not isinstance(value, Mapping):
            return NO
        pairs = cast("Mapping[Any, Any]", value).items()
        items = [(key.take(k, call), rule.take(v, call)) for k, v in pairs]
        if any(k is NO or v is NO for k, v in items):
            return NO
        same = all(a is b and c is d for (a, c), (b, d) in zip(pairs, items, strict=True))
        return value if same else dict(items)  # the caller's own dict may be there to be filled

    if rule is ANYTHING:
        return Rule("a dict", take, fixed("Give a dict, by name."), rule)
    said = f"a dict from {_plural(key.said)} to {_plural(rule.said)}"
    return Rule(said, take, fixed(f"Give a dict of {_plural(rule.said)} by name."), rule)


def _instance_of(name: str, namespace: Mapping[str, Any]) -> Rule:
    """What is an object of a class, found by its name where the function stands."""
    kind = namespace.get(name)
    if not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return ANYTHING

    def take(value: Any, call: Call) -> Any:
        return value if isinstance(value, cast("type", kind)) else NO

    article = "an" if name[0] in "AEIOU" and not name.startswith("Un") else "a"
    advice = rules.MADE_BY.get(name, f"Give mm.{name}(...).")
    return Rule(f"{article} {name}", take, fixed(advice))


_RESULT = _any_of(rules.TENSOR, _pair_of([rules.SHAPE, rules.DTYPE]))._replace(
    said="a result type", advice=fixed("Give a pair, as ('batch:8;io:16', 'float32'), or a tensor that has both.")
)
_KINDS: dict[str, Rule] = {
    "Any": ANYTHING,
    "NoneType": NONE,
    "Tensor": rules.TENSOR,
    "int": rules.INTEGER,
    "float": rules.NUMBER,
    "bool": rules.TRUTH,
    "str": rules.TEXT,
    "Dimension": rules.DIMENSION,
    "DimLike": rules.DIM_NAME,
    "Dims": _list_of(rules.DIMENSION),
    "DimsLike": _list_of(rules.DIM_NAME)._replace(said="a dimension, its name or a list of them"),
    "Shape": rules.SHAPE,
    "ShapeLike": rules.SHAPE,
    "DType": rules.DTYPE,
    "VariableDType": rules.DTYPES_OF_VARIABLE,
    "DTypeLike": _any_of(rules.DTYPES_OF_VARIABLE, NONE),
    "ResultLike": _RESULT,
    "Layout": rules.LAYOUT,
    "LayoutLike": rules.LAYOUT,
    "MeshShape": rules.MESH_SHAPE,
    "MeshShapeLike": rules.MESH_SHAPE,
    "Callable": FUNCTION,
    "VariableLike": rules.VARIABLE,
    "VariableStore": rules.STORE,
    "Fetch": _any_of(rules.TENSOR, rules.TEXT)._replace(
        advice=fixed("Give a tensor that the step fetches, or its name.")
    ),
    "Meshes": _list_of(rules.MESH_SHAPE)._replace(said="the shape of a mesh or a list of them"),
}
"""Name in an annotation -> what it takes.  Other names are those of classes, or of types made of others."""
_BY_PARAMETER = (("initializer", rules.INITIALIZER), ("dtype", _any_of(rules.DTYPES_OF_VARIABLE, NONE)))
"""End of a parameter's name -> what it takes, where the annotation says no more than Any."""


def rule_of(annotation: str, parameter: str, namespace: Mapping[str, Any]) -> Rule:
    """The rule that an annotation of a parameter stands for, in the namespace of its module."""
    if annotation in ("Any", "str"):
        for name, rule in _BY_PARAMETER:
            if parameter == name or (rule is rules.INITIALIZER and parameter.endswith(name)):
                return rule
    return _rule(ast.parse(annotation, mode="eval").body, namespace)


def _rule(node: ast.expr, namespace: Mapping[str, Any]) -> Rule:
    if isinstance(node, ast.Constant):
        return _rule(ast.parse(node.value, mode="eval").body, namespace) if isinstance(node.value, str) else NONE
    if isinstance(node, ast.BinOp):
        return _any_of(*(_rule(part, namespace) for part in _alternatives(node)))
    if isinstance(node, ast.Name | ast.Attribute):
        name = node.id if isinstance(node, ast.Name) else node.attr
        if name not in _KINDS and get_origin(namespace.get(name)) is not None:  # such as Sizes = int | Sequence[int]
            return _rule(ast.parse(str(namespace[name]), mode="eval").body, namespace)
        return _KINDS.get(name) or _instance_of(name, namespace)
    if not isinstance(node, ast.Subscript):
        return ANYTHING
    name = ast.unparse(node.value).rpartition(".")[2]
    if name in ("Callable", "PathLike"):
        return FUNCTION if name == "Callable" else rules.PATH
    parts = [_rule(n, namespace) for n in (node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice])]
    if name in ("Sequence", "Iterable", "list"):
        return _list_of(parts[0])
    if name in ("Mapping", "dict"):
        return _mapping_of(parts[0], parts[1])
    if name == "tuple":
        return _tuple_of(parts[0]) if ast.unparse(node.slice).endswith(("...", "...)")) else _pair_of(parts)
    if name == "Optional":
        parts.append(NONE)
    return _any_of(*parts) if name in ("Union", "Optional") else ANYTHING


def _alternatives(node: ast.expr) -> list[ast.expr]:
    """The parts of ``X | Y | Z``."""
    return [*_alternatives(node.left), *_alternatives(node.right)] if isinstance(node, ast.BinOp) else [node]
