"""The named-tensor graph: tensors, operations, variables.

A graph says *what* is computed.  It knows no mesh, no layout, no MPI and holds no arrays (an
initializer given as an array is carried along unread).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from meshmpi.dims import Dimension, Layout, Shape
from meshmpi.errors import ShapeError, VariableError, suggest
from meshmpi.program import NOWHERE, Source
from meshmpi.scalar import DTYPES

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
MOST_NAMED = 4
"""Inputs of an operation that a message lists."""
_LIBRARY = tuple(
    _PACKAGE + part for part in ("graph.py", "autodiff.py", "ops" + os.sep, "nn" + os.sep)
)


def user_source(name: str) -> Source:
    """The innermost stack frame outside the graph-building parts of meshmpi."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARY):
        frame = frame.f_back
    return Source(name, frame.f_code.co_filename, frame.f_lineno)


_COMPUTE = "Fetch it: step = mm.compile(graph, mesh, fetches=[x]), then step(...)[x]"


def call_of(what: str, *inputs: Tensor) -> str:
    """``"<what> of <tensors> made at <file>:<line>"``: the user's line that is running, for errors.

    Args:
        what: Name of an operation.
        inputs: Its tensors.
    """
    return str(user_source(what + _listed(inputs)))


def _listed(inputs: Sequence[Tensor]) -> str:
    """`` of x float32[batch=8] and w ...``: tensors by the user's names."""
    named = [f"{x.users_name} {x.dtype}{x.shape}" for x in inputs[:MOST_NAMED]]
    more = len(inputs) - len(named)
    return f" of {' and '.join(named)}{f' and {more} more' if more else ''}" if named else ""


class Tensor:
    """A value of the graph with named dimensions.  Made by operations, never directly.

    Supports ``+ - * / // % **``, unary minus, comparisons ``< <= > >=`` with tensors and numbers,
    and ``@`` (sum over the dimensions that both sides share); dimensions are matched by name.
    """

    __slots__ = ("operation", "index", "shape", "dtype")

    def __init__(self, operation: Operation, index: int, shape: Shape, dtype: str):
        self.operation, self.index, self.shape, self.dtype = operation, index, shape, dtype

    @property
    def name(self) -> str:
        n = self.operation.name
        return n if len(self.operation.outputs) == 1 else f"{n}:{self.index}"

    @property
    def graph(self) -> Graph:
        return self.operation.graph

    @property
    def source(self) -> Source:
        return self.operation.source

    @property
    def variable(self) -> Variable | None:
        """The variable that this tensor is the value of, if it is one."""
        return getattr(self.operation, "variable", None)

    @property
    def users_name(self) -> str:
        """The name of the variable that it is the value of, else its own."""
        return self.name if self.variable is None else self.variable.name

    def __repr__(self) -> str:
        return f"<Tensor {self.users_name} {self.dtype}{self.shape}>"

    def dim(self, name: str, what: str) -> Dimension:
        """The dimension called ``name``.

        Args:
            name: Of a dimension.
            what: The operation that asks, for the message.

        Raises:
            ShapeError: There is none.
        """
        if self.shape.find(name) < 0:
            raise ShapeError(
                f"{what}: {self.users_name} {self.dtype}{self.shape} has no dimension '{name}'.",
                suggest(name, self.shape.names), call_of(what, self),
            )  # fmt: skip
        return self.shape.dim(name)

    def __bool__(self) -> bool:
        self._has_no_value("it cannot steer an if or while", "Use mm.where(condition, a, b)")

    def __float__(self) -> float:
        self._has_no_value("float() and int() have nothing to give", _COMPUTE)

    __int__ = __index__ = __float__  # type: ignore[assignment]

    def __array__(self, dtype: object = None, copy: object = None) -> NoReturn:
        self._has_no_value("it cannot become an array", _COMPUTE)

    def __len__(self) -> int:
        self._has_no_value(
            "len() would ask for one of its dimensions",
            "Use x.shape.size, or x.shape.dim(name).size of one dimension",
        )

    def __iter__(self) -> NoReturn:
        self._has_no_value("one cannot iterate over it", "Use mm.unstack(x, dim)")

    def __getitem__(self, index: object) -> NoReturn:
        self._has_no_value(
            "and its dimensions have no order, one cannot index it by position",
            "Use mm.slice(x, begin, size, dim), or mm.gather(x, indices, dim)",
        )

    def __setitem__(self, index: object, value: object) -> NoReturn:
        self._has_no_value(
            "it cannot be written into",
            "Use mm.where(condition, new, x), or mm.put(x, updates, indices, dim)",
        )

    def _has_no_value(self, therefore: str, remedy: str) -> NoReturn:
        raise TypeError(
            f"{self!r} has no value while the graph is built, so {therefore}. {remedy}."
            f"\nin {call_of('use', self)}"
        )

    if TYPE_CHECKING:  # installed by meshmpi.ops.operators

        def __add__(self, other: Tensor | float) -> Tensor: ...
        def __radd__(self, other: float) -> Tensor: ...
        def __sub__(self, other: Tensor | float) -> Tensor: ...
        def __rsub__(self, other: float) -> Tensor: ...
        def __mul__(self, other: Tensor | float) -> Tensor: ...
        def __rmul__(self, other: float) -> Tensor: ...
        def __truediv__(self, other: Tensor | float) -> Tensor: ...
        def __rtruediv__(self, other: float) -> Tensor: ...
        def __floordiv__(self, other: Tensor | float) -> Tensor: ...
        def __rfloordiv__(self, other: float) -> Tensor: ...
        def __mod__(self, other: Tensor | float) -> Tensor: ...
        def __rmod__(self, other: float) -> Tensor: ...
        def __pow__(self, other: Tensor | float) -> Tensor: ...
        def __rpow__(self, other: float) -> Tensor: ...
        def __lt__(self, other: Tensor | float) -> Tensor: ...
        def __le__(self, other: Tensor | float) -> Tensor: ...
        def __gt__(self, other: Tensor | float) -> Tensor: ...
        def __ge__(self, other: Tensor | float) -> Tensor: ...
        def __neg__(self) -> Tensor: ...
        def __abs__(self) -> Tensor: ...
        def __matmul__(self, other: Tensor) -> Tensor: ...

    # numpy_scalar * tensor must reach Tensor.__rmul__ instead of being broadcast by NumPy.
    __array_ufunc__ = None


class Operation:
    """A node of the graph.  One subclass is one primitive: its shape rule, gradient and lowering.

    Args:
        inputs: Tensors of one graph.
        name: Base of the node's name; default: the class name in lower case.
    """

    follows = False
    """Whether the result inherits the constrained layouts of the inputs (`mm.constrain`)."""

    def __init__(self, inputs: Sequence[Tensor], name: str | None = None):
        self.inputs: tuple[Tensor, ...] = tuple(inputs)
        self.graph: Graph = self.inputs[0].graph if self.inputs else current_graph()
        for x in self.inputs:
            if x.graph is not self.graph:
                raise ShapeError(
                    f"{x!r} belongs to another graph than {self.inputs[0]!r}.",
                    "Build a model inside one `with mm.Graph():`.",
                )
        self.base_name = name or type(self).__name__.lower()
        self.name = ""
        self.source = NOWHERE
        self.outputs: tuple[Tensor, ...] = ()
        self.graph.add(self)

    @property
    def output(self) -> Tensor:
        return self.outputs[0]

    def fail(self, problem: str, remedy: str = "") -> ShapeError:
        """A ShapeError about this node."""
        source = self.source._replace(name=self.source.name + _listed(self.inputs))
        return ShapeError(f"{self.base_name}: {problem}", remedy, str(source))

    def infer(self) -> Sequence[tuple[Shape, str]]:
        """Shape and data type of every output; raises ShapeError where the inputs do not fit."""
        raise NotImplementedError

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Gradient with respect to every input, given those of the outputs, as new graph nodes.

        Args:
            dys: For each output the gradient, or None where nothing depends on it; at least one is
                a tensor.
        """
        raise ShapeError(
            f"{self.name} ({type(self).__name__}) has no gradient.",
            "Put mm.stop_gradient() around its inputs if none is wanted.",
            str(self.source),
        )

    def followed(self, index: int) -> Sequence[Tensor]:
        """The inputs whose constrained layouts output number ``index`` inherits."""
        return self.inputs if self.follows else ()

    def lower(self, lowering: Any) -> None:
        """Emits local instructions and collectives; see `meshmpi.lowering.Lowering`."""
        raise NotImplementedError


def only(dys: Sequence[Tensor | None]) -> Tensor:
    """The gradient of an operation's one output, which `Operation.grad` gets as a tensor."""
    (dy,) = dys
    assert dy is not None
    return dy


@dataclass(eq=False)
class Variable:
    """A named array that lives between steps.

    Attributes:
        name: Unique in its graph; ``/`` separates scopes.
        shape: Global shape.
        dtype: Type in which it is stored and updated.
        initializer: An ``mm.*_initializer`` or an array of the global shape.
        trainable: Whether optimizers update it by default.
        storage: Layout rules for how it is kept, over the computation layout; None: the default.
        like: Stored the way this other variable is (optimizer slots); None: by its own rules.
    """

    name: str
    shape: Shape
    dtype: str
    initializer: Any
    trainable: bool = True
    storage: Layout | None = None
    like: Variable | None = None
    source: Source = NOWHERE
    _reads: dict[str, Tensor] = field(default_factory=dict[str, Tensor], repr=False)

    def __repr__(self) -> str:
        return f"<Variable {self.name} {self.dtype}{self.shape}>"


class Update(NamedTuple):
    """At the end of a step ``variable`` takes the value of ``value``."""

    variable: Variable
    value: Tensor

    def __repr__(self) -> str:
        return f"<Update of {self.variable.name} to {self.value!r}>"


class Graph:
    """A graph under construction.  ``with mm.Graph() as graph: ...`` makes it the current one."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.variables: dict[str, Variable] = {}
        self.placeholders: dict[str, Tensor] = {}
        self.updates: list[Update] = []
        self.followers: dict[str, str] = {}
        self._names: dict[str, int] = {}
        self._scopes: list[str] = []
        self._source: Source | None = None

    def __repr__(self) -> str:
        n, dims = len(self.operations), ", ".join(self.dim_names)
        feeds, variables = ", ".join(self.placeholders), ", ".join(self.variables)
        return (
            f"<Graph of {n} operations; placeholders: {feeds or 'none'}; variables:"
            f" {variables or 'none'}; dimensions: {dims or 'none'}>"
        )

    def __enter__(self) -> Graph:
        _stack.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _stack.remove(self)

    def add(self, operation: Operation) -> None:
        """Names the node, records who made it, infers its outputs and appends it."""
        operation.name = self.unique_name(operation.base_name)
        operation.source = self._new_source(operation.name)
        operation.outputs = tuple(
            Tensor(operation, i, shape, dtype) for i, (shape, dtype) in enumerate(operation.infer())
        )
        self.operations.append(operation)

    def follow(self, dim: str, leader: str) -> None:
        """Lets a layout that does not mention ``dim`` split it as ``leader``, as far as it can be.

        Args:
            dim: A name that the library gave, and a user need not know.
            leader: The user's name for the same elements elsewhere.
        """
        self.followers[dim] = leader

    def _new_source(self, name: str) -> Source:
        if self._source is not None:
            return Source(f"{name} (gradient of {self._source.name})", *self._source[1:])
        return user_source(name)

    def unique_name(self, base: str) -> str:
        """``base`` inside the current scopes, with a number appended when it is taken."""
        full = self.scoped(base)
        n = self._names.get(full, 0)
        self._names[full] = n + 1
        return full if n == 0 else f"{full}_{n}"

    def scoped(self, name: str) -> str:
        return "/".join([*self._scopes, name])

    @contextmanager
    def scope(self, name: str) -> Generator[None, None, None]:
        """Prefixes the names of variables and operations made inside with ``name/``."""
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()

    @contextmanager
    def gradient_of(self, operation: Operation) -> Generator[None, None, None]:
        """Nodes made inside are reported at the place where ``operation`` was made."""
        old, self._source = self._source, operation.source
        try:
            yield
        finally:
            self._source = old

    def variable(
        self, name: str, shape: Shape, dtype: str, initializer: Any, trainable: bool,
        storage: Layout | None, like: Variable | None = None,
    ) -> Variable:  # fmt: skip
        """The variable of that (scoped) name: the existing one, or a new one.

        Raises:
            VariableError: It exists with another shape or data type.
        """
        full = self.scoped(name)
        old = self.variables.get(full)
        if old is None:
            check_dtype(dtype, f"variable '{full}'")
            source = user_source(f"variable '{full}'")
            new = Variable(full, shape, dtype, initializer, trainable, storage, like, source)
            self.variables[full] = new
            return new
        if (old.shape, old.dtype) != (shape, dtype):
            raise VariableError(
                f"variable '{full}' exists as {old.dtype}{old.shape} and is asked for as"
                f" {dtype}{shape}.",
                "Use another name, or put one of them inside `with mm.scope(...)`.",
                str(old.source),
            )
        return old

    @property
    def trainable_variables(self) -> list[Variable]:
        return [v for v in self.variables.values() if v.trainable]

    @property
    def dim_names(self) -> list[str]:
        """Names of all dimensions of all tensors, in order of appearance."""
        names: dict[str, None] = {}
        for operation in self.operations:
            for t in operation.outputs:
                names.update(dict.fromkeys(t.shape.names))
        for v in self.variables.values():
            names.update(dict.fromkeys(v.shape.names))
        return list(names)


_stack: list[Graph] = []


def current_graph() -> Graph:
    """The graph of the innermost ``with mm.Graph():``; ShapeError outside of one."""
    if not _stack:
        raise ShapeError(
            "no graph is under construction.", "Write `with mm.Graph() as graph:` around it."
        )
    return _stack[-1]


@contextmanager
def scope(name: str) -> Generator[None, None, None]:
    """``with mm.scope("layer_0"):`` prefixes names made inside with ``layer_0/``."""
    with current_graph().scope(name):
        yield


def check_dtype(dtype: object, what: str) -> str:
    """``dtype`` if it is one of scalar.DTYPES, else ShapeError."""
    if dtype not in DTYPES:
        raise ShapeError(f"{what} has data type {dtype!r}.", f"Use one of {', '.join(DTYPES)}.")
    return str(dtype)
