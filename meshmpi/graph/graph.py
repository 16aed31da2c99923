"""The named-tensor graph: tensors, operations, variables.

A graph says *what* is computed.  It knows no mesh, no layout, no MPI and no arrays but those of initializers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, cast

from meshmpi.dims import Dimension, Layout, Shape
from meshmpi.errors import ArgumentError, ShapeError, VariableError, calls_back, suggest, users_line
from meshmpi.graph.scopes import Reuse, Scopes
from meshmpi.ir.program import NOWHERE, Source
from meshmpi.ir.scalar import DTYPES, DType, dtype_name
from meshmpi.values import first_value

MOST_NAMED = 4
"""Inputs of an operation that a message lists."""
_HERE = os.path.dirname(os.path.abspath(__file__))
_LIBRARY = [_HERE + os.sep, os.path.join(os.path.dirname(_HERE), "nn") + os.sep]
"""Folders whose files build graphs for the user: their lines are not the user's."""


def builds_graphs(file: str) -> None:
    """Counts the folder of a file as library where the user's line is looked for."""
    _LIBRARY.append(os.path.dirname(os.path.abspath(file)) + os.sep)


def user_source(name: str) -> Source:
    """The innermost stack frame outside the graph-building parts of meshmpi."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(tuple(_LIBRARY)) or calls_back(frame.f_code.co_filename)
    ):
        frame = frame.f_back
    return Source(name, frame.f_code.co_filename, frame.f_lineno)


_COMPUTE = "Fetch it: step = mm.compile(graph, mesh, fetches=[x]), then step(...)[x]"


def call_of(what: str, *inputs: Tensor) -> str:
    """``"<operation> of <tensors> made at <file>:<line>"``: the user's line that is running, for errors."""
    line, made = users_line(), what + _listed(inputs)
    return f"{made} made at {line}" if line else str(user_source(made))


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
        """The dimension called ``name``; else a ShapeError of the operation ``what``."""
        if self.shape.find(name) < 0:
            raise ShapeError(
                f"{what}: {self.users_name} {self.dtype}{self.shape} has no dimension '{name}'.",
                suggest(name, self.shape.names),
                call_of(what, self),
            )
        return self.shape.dim(name)

    def at(self, position: int, what: str) -> Dimension:
        """The dimension at a position, from the end where it is negative; else a ShapeError of ``what``."""
        needed = -position if position < 0 else position + 1
        if len(self.shape) < needed:
            raise ShapeError(
                f"{what}: {self.users_name} {self.dtype}{self.shape} has {len(self.shape)}"
                f" dimensions, and at least {needed} are needed.",
                "Give a tensor with more, or add one with mm.reshape().",
                call_of(what, self),
            )
        return self.shape[position]

    def __bool__(self) -> bool:
        self._has_no_value("it cannot steer an if or while", "Use mm.where(condition, a, b)")

    def __float__(self) -> float:
        self._has_no_value("float() and int() have nothing to give", _COMPUTE)

    __int__ = __index__ = __float__  # type: ignore[assignment]

    def __array__(self, dtype: object = None, copy: object = None) -> NoReturn:
        self._has_no_value("it cannot become an array", _COMPUTE)

    def __len__(self) -> int:
        self._has_no_value(
            "len() would ask for one of its dimensions", "Use x.shape.size, or x.shape.dim(name).size of one dimension"
        )

    def __iter__(self) -> NoReturn:
        self._has_no_value("one cannot iterate over it", "Use mm.unstack(x, dim)")

    def __getitem__(self, index: object) -> NoReturn:
        self._has_no_value(
            "one cannot index it by position, as its dimensions have names and no order",
            f"Use mm.slice(x, begin, size, dim){self._by_name(index)}, or mm.gather(x, indices, dim)",
        )

    def _by_name(self, index: object) -> str:
        """``, here mm.slice(x, 0, 1, 'length')`` where an index by position means just that."""
        parts = cast("tuple[object, ...]", index if isinstance(index, tuple) else (index,))
        cuts: list[str] = []
        for d, part in zip(self.shape, parts, strict=False):
            if isinstance(part, slice):
                start, stop, stride = part.indices(d.size)
                if (start, stop, stride) != (0, d.size, 1) and start < stop and stride == 1:
                    cuts.append(f"{start}, {stop - start}, '{d.name}'")
            elif isinstance(part, int) and -d.size <= part < d.size:
                cuts.append(f"{part % d.size}, 1, '{d.name}'")
        return f", here mm.slice({self.users_name}, {cuts[0]})" if len(cuts) == 1 else ""

    def __setitem__(self, index: object, value: object) -> NoReturn:
        self._has_no_value(
            "it cannot be written into", "Use mm.where(condition, new, x), or mm.put(x, updates, indices, dim)"
        )

    def _has_no_value(self, therefore: str, remedy: str) -> NoReturn:
        raise ArgumentError(
            f"{self!r} has no value while the graph is built, so {therefore}.", f"{remedy}.", call_of("use", self)
        )

    if TYPE_CHECKING:  # installed by meshmpi.graph.ops.operators

        def _with(self, other: Tensor | float) -> Tensor: ...
        def _alone(self) -> Tensor: ...

        __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = _with
        __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = _with
        __lt__ = __le__ = __gt__ = __ge__ = __matmul__ = _with
        __neg__ = __abs__ = _alone

        # array * tensor must reach the graph instead of being broadcast by NumPy.
        def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any: ...


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

    def sizes(self, shapes: Sequence[Shape]) -> dict[str, int]:
        """Dimension -> its size, which must be one in all ``shapes``."""
        known: dict[str, int] = {}
        for d in (d for shape in shapes for d in shape):
            if known.setdefault(d.name, d.size) != d.size:
                raise self.fail(
                    f"dimension '{d.name}' has sizes {known[d.name]} and {d.size} in {' and '.join(map(str, shapes))}.",
                    "Rename one with mm.rename_dimension(), or make the sizes equal, here to"
                    f" {d.name}={known[d.name]}.",
                )
        return known

    def one_dtype(self, inputs: Sequence[Tensor]) -> str:
        """The data type of the inputs, which must be one; float32 where there are none."""
        dtypes = list(dict.fromkeys(x.dtype for x in inputs)) or ["float32"]
        if len(dtypes) > 1:
            raise self.fail(
                f"inputs have data types {' and '.join(dtypes)}.", f"Convert one, as in mm.cast(x, '{dtypes[0]}')."
            )
        return dtypes[0]

    def infer(self) -> Sequence[tuple[Shape, str]]:
        """Shape and data type of every output, here those of x; raises ShapeError where the inputs do not fit."""
        return [(self.inputs[0].shape, self.inputs[0].dtype)]

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Gradient with respect to every input, given those of the outputs, as new graph nodes.

        None stands for no gradient; at least one of ``dys`` is a tensor.  `gradients` sums one with more
        dims than the input over them: where an input is repeated, the rule need not say so.
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
        """Emits local instructions and collectives; see `meshmpi.compiler.lowering.Lowering`."""
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
        decays: Whether weight decay applies to it by default: not for biases and scales of norms.
    """

    name: str
    shape: Shape
    dtype: str
    initializer: Any
    trainable: bool = True
    storage: Layout | None = None
    like: Variable | None = None
    source: Source = NOWHERE
    decays: bool = True
    _reads: dict[str, Tensor] = field(default_factory=dict[str, Tensor], repr=False)

    def __repr__(self) -> str:
        return f"<Variable {self.name} {self.dtype}{self.shape}>"

    @property
    def reads(self) -> list[Tensor]:
        """The tensors that it is read as: one for each type it is computed with."""
        return [t for key, t in self._reads.items() if key != "stored"]

    if TYPE_CHECKING:  # installed by meshmpi.graph.ops.operators

        @property
        def value(self) -> Tensor:
            """The tensor that `mm.get_variable` returned, or one of the stored type."""
            ...


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
        self.aligned: dict[str, str] = {}
        self._names: dict[str, int] = {}
        self.scopes = Scopes()
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
        if self._source is None:
            operation.source = user_source(operation.name)
        else:
            operation.source = self._source._replace(name=f"{operation.name} (gradient of {self._source.name})")
        operation.outputs = tuple(
            Tensor(operation, i, shape, dtype) for i, (shape, dtype) in enumerate(operation.infer())
        )
        self.operations.append(operation)

    def align(self, dim: str, other: str) -> None:
        """Splits a dim of the library like a user's, as far as possible, in layouts that do not mention it."""
        self.aligned[dim] = other

    def unique_name(self, base: str) -> str:
        """``base`` inside the current scopes, with a number appended when it is taken."""
        n = self._names.get(full := self.scopes.operation(base), 0)
        self._names[full] = n + 1
        return full if n == 0 else f"{full}_{n}"

    def scoped(self, name: str) -> str:
        """``name`` with the prefix of the open scopes."""
        return self.scopes.full(name)

    def scope(self, name: str = "", reuse: Reuse | None = None) -> AbstractContextManager[None]:
        """As `mm.scope`, in this graph."""
        return self.scopes.opened(name, reuse)

    @contextmanager
    def gradient_of(self, operation: Operation) -> Generator[None, None, None]:
        """Nodes made inside are reported at the place where ``operation`` was made."""
        old, self._source = self._source, operation.source
        try:
            yield
        finally:
            self._source = old

    def variable(self, new: Variable) -> Variable:
        """Adds a variable; where the scope says so, the one of that name that exists takes its place."""
        old, reuse = self.variables.get(new.name), self.scopes.reuse
        if old is None:
            check_dtype(new.dtype, f"variable '{new.name}'")
            if reuse is True:
                raise VariableError(
                    f"there is no variable '{new.name}' to share, but `mm.scope(reuse=True)` requests it.",
                    suggest(new.name, self.variables),
                )
            new.source = user_source(f"variable '{new.name}'")
            if new.initializer is not None:
                first_value(new.name, new.shape, new.dtype, new.initializer, str(new.source))
            self.scopes.take(new.name)
            self.variables[new.name] = new
            return new
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise VariableError(
                f"variable '{old.name}' exists as {old.dtype}{old.shape} and is requested as {new.dtype}{new.shape}.",
                "Use another name, or put one of them inside `with mm.scope(...)`.",
                str(old.source),
            )
        if not reuse:
            raise VariableError(
                f"variable '{old.name}' exists already, as {old.dtype}{old.shape}: two layers or"
                " variables with the same name would silently share their values.",
                "Use another name, or put one of them inside `with mm.scope(...)`; to share it, put"
                " the second call inside `with mm.scope(reuse=True):`.",
                str(old.source),
            )
        return old

    @property
    def trainable_variables(self) -> list[Variable]:
        return [v for v in self.variables.values() if v.trainable]

    @property
    def dims(self) -> list[Dimension]:
        """All dimensions of all tensors, in order of appearance; a name may have several sizes."""
        tensors = (t for operation in self.operations for t in operation.outputs)
        return list(dict.fromkeys(d for x in (*tensors, *self.variables.values()) for d in x.shape))

    @property
    def dim_names(self) -> list[str]:
        """Names of all dimensions of all tensors, in order of appearance."""
        return list(dict.fromkeys(d.name for d in self.dims))


_stack: list[Graph] = []


def current_graph() -> Graph:
    """The graph of the innermost ``with mm.Graph():``; ShapeError outside of one."""
    if not _stack:
        raise ShapeError("no graph is under construction.", "Write `with mm.Graph() as graph:` around it.")
    return _stack[-1]


def building() -> bool:
    """Whether a graph is under construction."""
    return bool(_stack)


def part(name: str) -> AbstractContextManager[None]:
    """Operations made inside are called ``name/...``, an intermediate of a layer, in pictures and lists."""
    return current_graph().scopes.part(name)


def scope(name: str = "", *, reuse: Reuse | None = None) -> AbstractContextManager[None]:
    """``with mm.scope("layer_0"):`` prefixes names made inside with ``layer_0/``.

    Every variable has a name of its own, and an unnamed layer gets one: the second `mm.dense` of a
    scope is ``dense_1``.  Two layers share their variables only inside a scope with ``reuse``.

    Args:
        name: The prefix; empty: none.
        reuse: True: variables made inside are those of the same names that exist, and unnamed
            layers those made first in the same order.  "auto": the same, and what does not exist is
            made.  False: every variable is new.  None: as in the scope around, at first False.

    Example:
        >>> def model(x):
        ...     return mm.dense(mm.dense(x, mm.Dimension("hidden", 8)), mm.Dimension("out", 2))
        >>> with mm.Graph() as graph:
        ...     y = model(mm.placeholder("x", "batch:4;io:3"))
        ...     with mm.scope(reuse=True):
        ...         held_out = model(mm.placeholder("x_held_out", "batch:6;io:3"))
        >>> list(graph.variables)
        ['dense/kernel', 'dense/bias', 'dense_1/kernel', 'dense_1/bias']
    """
    return current_graph().scope(name, reuse)


def shared_turns(n: int) -> Iterator[AbstractContextManager[None]]:
    """A scope for each of ``n`` turns: the first makes variables, the others share them."""
    scopes = current_graph().scopes
    mark = scopes.mark()
    for turn in range(n):
        yield scopes.opened("", "auto" if turn else None, mark)


def layer_name(name: str | None, default: str) -> str:
    """The name of a layer that makes variables, see `Scopes.layer_name`."""
    return current_graph().scopes.layer_name(name, default)


def check_dtype(dtype: DType, what: str) -> str:
    """The name of ``dtype`` in scalar.DTYPES; ShapeError where it has none."""
    name = dtype_name(dtype)
    if not isinstance(name, str) or name not in DTYPES:
        raise ShapeError(f"{what} has data type {dtype!r}.", f"Use one of {', '.join(DTYPES)}.")
    return name
