"""Kinds of arguments: what each accepts, how it converts it, and what its error advises."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from meshmpi.dims import Dimension, Layout, MeshShape, Shape
from meshmpi.errors import ArgumentError, suggest
from meshmpi.graph import Graph, Operation, Tensor, Variable, building, call_of, current_graph
from meshmpi.ir.scalar import DTYPES, dtype_name

NO = object()
"""What a rule gives for a value that it does not take."""


class Call(NamedTuple):
    """A call whose arguments are being read: the function's public name, and the arguments in any order."""

    function: str
    arguments: Sequence[Any]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, those in lists too."""
        flat: list[Any] = []
        for a in self.arguments:
            flat += list(cast("Sequence[Any]", a)) if isinstance(a, (list, tuple)) else [a]
        return [t for t in flat if isinstance(t, Tensor)]

    def dimension(self, name: str) -> Dimension | None:
        """The one dimension of that name among the tensors given, else in their graph."""
        tensors = self.tensors
        found = dict.fromkeys(d for t in tensors for d in t.shape if d.name == name)
        if not found and self.graph is not None:
            found = dict.fromkeys(d for d in self.graph.dims if d.name == name)
        return next(iter(found)) if len(found) == 1 else None

    @property
    def graph(self) -> Graph | None:
        """The graph of the tensors given, or the one under construction."""
        tensors = self.tensors
        return tensors[0].graph if tensors else current_graph() if building() else None

    def error(self, problem: str, remedy: str) -> ArgumentError:
        """An error of this call."""
        return ArgumentError(f"{self.function}: {problem}", remedy, call_of(self.function, *self.tensors))


class Rule(NamedTuple):
    """A kind of argument.

    Attributes:
        said: As it is called in messages: "a tensor".
        take: The value as the function gets it, or `NO`.
        advice: What to give in place of a value that is not taken; a sentence.
        item: Where it is a list, the rule of its items.
    """

    said: str
    take: Callable[[Any, Call], Any]
    advice: Callable[[Any, Call], str]
    item: Any = None


def shown(value: Any) -> str:
    """A value as messages name it: short, whatever it is."""
    kind = type(value).__name__
    if isinstance(value, (Tensor, Variable, Dimension, type(None), bool, int, float, str)):
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:77]}..."
    if hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type):
        return f"{kind} of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        items = cast("Sequence[Any]", value)
        inside = ", ".join(shown(v) for v in items[:3]) + (", ..." if len(items) > 3 else "")
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if hasattr(value, "__name__"):
        return f"the {kind} {value.__name__}"
    return f"a {kind}"


# -- tensors -----------------------------------------------------------------------------------


def _tensor(value: Any, call: Call) -> Any:
    if type(value) is Tensor:
        return value
    return value.value if isinstance(value, Variable) else NO


def _tensor_advice(value: Any, call: Call) -> str:
    if isinstance(value, str):
        if "->" in value:
            return _by_names(value, call.tensors)
        return "Give the tensor itself, as mm.placeholder() or mm.get_variable() returned it."
    if isinstance(value, (bool, int, float)):
        return f"Make it a tensor with mm.constant({value!r})."
    if hasattr(value, "shape"):
        return "Feed arrays through mm.placeholder(), or keep them in mm.get_variable(initializer=array)."
    if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
        return "Give one tensor, without the list around it."
    return "Give a tensor, such as mm.placeholder() and mm.get_variable() return."


def _by_names(letters: str, tensors: Sequence[Tensor]) -> str:
    """The einsum that the letters of NumPy's stand for, in names."""
    left, _, right = letters.replace(" ", "").partition("->")
    parts = left.split(",")
    operands = zip(parts, tensors, strict=False)
    named = {c: d.name for p, t in operands for c, d in zip(p, t.shape, strict=False)}
    names = [named.get(c, c) for c in right]
    listed = ", ".join(t.users_name for t in tensors)
    return f"Dimensions are matched by their names: write mm.einsum([{listed}], {names})."


def _number(value: Any, call: Call) -> Any:
    if isinstance(value, (bool, int, float)):
        return value
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:  # NumPy scalars
        return _number(value.item(), call)
    return NO


def _integer(value: Any, call: Call) -> Any:
    if type(value) is int:
        return value
    if isinstance(value, (bool, Tensor)) or not hasattr(value, "__index__"):
        return NO
    try:
        return operator.index(value)
    except TypeError:  # arrays of several numbers
        return NO


def _truth(value: Any, call: Call) -> Any:
    value = _number(value, call)
    return value if value is not NO and value in (0, 1) else NO


def _float_advice(value: Any, call: Call) -> str:
    if isinstance(value, (Tensor, Variable)):
        return "It is fixed when the graph is built: give a Python number, not a tensor."
    if hasattr(value, "shape"):
        return (
            "Keep arrays in mm.get_variable(name, shape, initializer=array, trainable=False), or"
            " feed them through mm.placeholder()."
        )
    return "Give a number."


# -- names and dimensions ----------------------------------------------------------------------


def _alone(value: Any) -> Any:
    """The one item of a list."""
    if isinstance(value, (list, Shape)) and len(cast("Sequence[Any]", value)) == 1:
        return value[0]
    return value


def _name_of_dim(value: Any, call: Call) -> Any:
    value = _alone(value)
    if isinstance(value, Dimension) or (isinstance(value, str) and value):
        return value
    return Dimension(*cast("tuple[str, int]", value)) if _is_pair(value) else NO


def _is_pair(value: Any) -> bool:
    pair = isinstance(value, tuple) and len(cast("Sequence[Any]", value)) == 2
    return pair and isinstance(value[0], str) and isinstance(_integer(value[1], Call("", ())), int)


def _dimension(value: Any, call: Call) -> Any:
    value = _alone(value)
    if isinstance(value, Dimension):
        return value
    if _is_pair(value):
        return Dimension(*cast("tuple[str, int]", value))
    if isinstance(value, str) and (":" in value or "=" in value):
        dims = Shape(value)
        return dims[0] if len(dims) == 1 else NO
    found = call.dimension(value) if isinstance(value, str) else None
    return NO if found is None else found


def _dim_advice(value: Any, call: Call) -> str:
    tensors = call.tensors
    shape = tensors[0].shape if tensors else ()
    if isinstance(value, int) and -len(shape) <= value < len(shape):
        x = tensors[0]
        return (
            f"Dimensions have names and no order: write '{x.shape[value].name}' for that of {x.users_name} {x.shape}."
        )
    if tensors:
        return f"Give one of {', '.join(repr(n) for n in tensors[0].shape.names)}."
    return "Give its name, or mm.Dimension(name, size)."


def _dimension_advice(value: Any, call: Call) -> str:
    if isinstance(value, str):
        return f"Write mm.Dimension({value!r}, size)."
    if isinstance(value, int) and value > 0:
        return f"Sizes have names here: write mm.Dimension('name', {value})."
    return "Give mm.Dimension(name, size)."


def _shape(value: Any, call: Call) -> Any:
    if isinstance(value, (Tensor, Variable)):
        return NO
    if isinstance(value, str) and not any(sign in value for sign in ":=") and value.strip(" []"):
        names = value.strip(" []").replace(",", " ").replace(";", " ").split()
        found = [call.dimension(n) for n in names]
        return NO if None in found else Shape(cast("list[Dimension]", found))
    if isinstance(value, (list, tuple)) and not isinstance(value, (Dimension, Shape)):
        if _is_pair(value):
            value = [value]
        items = [call.dimension(v) or v if isinstance(v, str) else v for v in value]
        text = next((v for v in items if isinstance(v, str)), None)
        if text is not None:
            dims = [Shape(v) if isinstance(v, str) and ":" in v else (v,) for v in items]
            items = [d for group in dims for d in group]
        if any(isinstance(v, (str, Tensor)) for v in items):
            return NO
        value = items
    return Shape(value)


def _shape_advice(value: Any, call: Call) -> str:
    if isinstance(value, (Tensor, Variable)):
        return "Give its dims: x.shape."
    unknown = value.split() if isinstance(value, str) else value
    for name in unknown if isinstance(unknown, (list, tuple)) else ():
        if isinstance(name, str) and ":" not in name and call.dimension(name) is None:
            known = dict.fromkeys(n for t in call.tensors for n in t.shape.names)
            near = suggest(name, known) if known else ""
            return f"Give '{name}' a size, as in '{name}:8'. {near}".strip()
    return "Give dims with their sizes, as 'batch:8;io:16' or [mm.Dimension(name, size)]."


# -- the rest ----------------------------------------------------------------------------------


def _dtype(value: Any, call: Call) -> Any:
    if isinstance(value, (Tensor, bool, int, float, list, tuple, type(None))):
        return NO
    if isinstance(value, str):
        return value  # the function says of what it is, where it is none
    name = dtype_name(value)
    return name if isinstance(name, str) and name in DTYPES else NO


def _dtypes(value: Any, call: Call) -> Any:
    """One data type, or the pair of a variable's (`mm.VariableDType`)."""
    if not hasattr(value, "master"):
        return _dtype(value, call)
    master, activation = _dtype(value.master, call), _dtype(value.activation, call)
    return NO if master is NO or activation is NO else type(value)(master, activation)


def _function(value: Any, call: Call) -> Any:
    return value if callable(value) and not isinstance(value, (Tensor, Operation)) else NO


def _layout(value: Any, call: Call) -> Any:
    Layout(value)
    return value


def _mesh_shape(value: Any, call: Call) -> Any:
    shape = getattr(value, "shape", None)
    if isinstance(shape, MeshShape):  # a mesh
        return shape
    if isinstance(value, (str, Mapping, list, tuple, MeshShape)):
        return MeshShape(cast("Any", value))
    return NO


def _initializer(value: Any, call: Call) -> Any:
    if value is None or (hasattr(value, "resolve") and not isinstance(value, type)):
        return value
    if isinstance(value, (list, tuple)):
        return value
    is_array = hasattr(value, "__array__") and not isinstance(value, (Tensor, Variable))
    return value if is_array else NO


def _initializer_advice(value: Any, call: Call) -> str:
    if isinstance(value, (bool, int, float)):
        return f"Write mm.constant_initializer({value!r})."
    if callable(value) and not isinstance(value, Tensor):
        return f"Call it: {getattr(value, '__name__', 'initializer')}()."
    return "Give an initializer, such as mm.zeros_initializer(), or an array of the global shape."


def fixed(text: str) -> Callable[[Any, Call], str]:
    """The same advice for every value."""
    return lambda value, call: text


TENSOR = Rule("a tensor", _tensor, _tensor_advice)
NUMBER = Rule("a number", _number, _float_advice)
INTEGER = Rule("a whole number", _integer, fixed("Give an int."))
TRUTH = Rule("True or False", _truth, fixed("Give True or False."))
TEXT = Rule("a string", lambda value, call: value if isinstance(value, str) else NO, fixed("Give a string."))
PATH = Rule("a path", lambda value, call: value if isinstance(value, os.PathLike) else NO, fixed("Give a path."))
DIM_NAME = Rule("a dimension or its name", _name_of_dim, _dim_advice)
DIMENSION = Rule("a dimension", _dimension, _dimension_advice)
SHAPE = Rule("a list of dimensions", _shape, _shape_advice)
DTYPE = Rule("a data type", _dtype, fixed(f"Use one of {', '.join(DTYPES)}."))
FUNCTION = Rule("a function", _function, fixed("Give a function."))
LAYOUT = Rule("a layout", _layout, fixed("Write 'batch:rows;heads:cols'."))
MESH_SHAPE = Rule("the shape of a mesh", _mesh_shape, fixed("Write it as 'rows:2;cols:2'."))
INITIALIZER = Rule("an initializer", _initializer, _initializer_advice)
NONE = Rule("None", lambda value, call: None if value is None else NO, fixed("Give None."))
ANYTHING = Rule("anything", lambda value, call: value, fixed(""))
DTYPES_OF_VARIABLE = Rule("a data type", _dtypes, DTYPE.advice)

MADE_BY = {
    "Update": "Make it with mm.assign() or an optimizer.",
    "Graph": "Give the graph of `with mm.Graph() as graph:`.",
    "Variable": "Give what mm.get_variable() returned, or one of graph.trainable_variables.",
    "Program": "Give step.program or plan.program.",
    "Machine": "Give mm.load_machine(name).",
    "CompiledStep": "Give what mm.compile(...) returned.",
    "Callback": "Subclass mm.Callback, and give an object of it.",
    "TransformerConfig": "Give mm.transformer.TransformerConfig(...).",
}
"""Class -> how one comes by an object of it."""


def _variable(value: Any, call: Call) -> Any:
    if isinstance(value, Variable):
        return value
    return NO if not isinstance(value, Tensor) or value.variable is None else value.variable


def _store(value: Any, call: Call) -> Any:
    return value if hasattr(value, "types") and hasattr(value, "blocks") else NO


STORE = Rule("variables of a step", _store, fixed("Give step.variables, where step is what mm.compile(...) returned."))
VARIABLE = Rule("the value of a variable", _variable, fixed(MADE_BY["Variable"]))
