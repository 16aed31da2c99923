"""Operations without tensor inputs: placeholders, variables, constants, ranges, random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from meshmpi.dims import Layout, LayoutLike, Shape, ShapeLike
from meshmpi.errors import ShapeError
from meshmpi.graph import Operation, Tensor, Update, Variable, call_of, check_dtype, current_graph
from meshmpi.ir import kinds as ir
from meshmpi.ir.scalar import FLOATS, DType, fill, fits


class Placeholder(Operation):
    """A value given at every step.  Lowers: `feed` of the own block; no traffic."""

    def __init__(self, name: str, shape: Shape, dtype: str):
        self.shape, self.dtype = shape, dtype
        graph = current_graph()
        if graph.scoped(name) in graph.placeholders:
            old = graph.placeholders[graph.scoped(name)]
            raise ShapeError(
                f"placeholder '{name}' exists already, as {old.dtype}{old.shape}.",
                "Take another name, or use the tensor that mm.placeholder() returned first.",
                str(old.source),
            )
        super().__init__([], name)
        graph.placeholders[self.name] = self.output

    def infer(self) -> Sequence[tuple[Shape, str]]:
        return [(self.shape, check_dtype(self.dtype, f"placeholder '{self.name}'"))]

    def lower(self, lowering: Any) -> None:
        t = lowering.type_of(self.output)
        lowering.add_feed(self.name, t)
        lowering.define(self.output, lowering.emit(ir.Feed(self.name), [], t))


def placeholder(name: str, shape: ShapeLike, dtype: DType = "float32") -> Tensor:
    """A tensor whose value is fed at each step: ``step(name=array)`` with an array of ``shape``."""
    return Placeholder(name, Shape(shape), dtype).output


class ReadVariable(Operation):
    """The value a variable had when the step began, in the computation layout.

    Lowers: `read`, then what it takes from the storage layout to the computation layout
    (all_gather of the split dims), after the cast to the activation type; with a ``barrier`` once
    more, though another does the same (`mm.recompute_grad`).
    """

    barrier = ""

    def __init__(self, variable: Variable, activation_dtype: str):
        self.variable, self.activation_dtype = variable, activation_dtype
        super().__init__([], "read")

    def infer(self) -> Sequence[tuple[Shape, str]]:
        return [(self.variable.shape, check_dtype(self.activation_dtype, "activation"))]

    def lower(self, lowering: Any) -> None:
        value = lowering.read(self.variable)
        if self.barrier:
            value = lowering.emit(ir.View(self.barrier), [value], lowering.types[value])
        lowering.define(self.output, lowering.cast(value, self.activation_dtype))


class ReadStored(Operation):
    """The value of a variable, kept in its storage layout: what it is computed with follows it.

    Optimizers use it, so that an update is computed on the stored blocks only.
    """

    follows = True

    def __init__(self, variable: Variable):
        self.variable = variable
        super().__init__([], "read_stored")

    def infer(self) -> Sequence[tuple[Shape, str]]:
        return [(self.variable.shape, self.variable.dtype)]

    def lower(self, lowering: Any) -> None:
        lowering.define(self.output, lowering.read(self.variable))


class VariableDType(NamedTuple):
    """Types of a variable: ``master`` is stored and updated, ``activation`` is computed with."""

    master: DType = "float32"
    activation: DType = "float32"


def get_variable(
    name: str,
    shape: ShapeLike,
    dtype: DType | VariableDType = "float32",
    initializer: Any = None,
    trainable: bool = True,
    *,
    storage: LayoutLike = None,
    like: Variable | None = None,
    decays: bool = True,
) -> Tensor:
    """The value of the variable ``name``; asking again with the same name gives the same variable.

    Args:
        name: Prefixed by the scopes around (`mm.scope`).
        shape: Global shape.
        dtype: Stored type, or a `VariableDType` to compute in another one.
        initializer: An ``mm.*_initializer`` or an array of the global shape; default: variance
            scaling for floats, zeros for others.
        trainable: Whether optimizers update it by default.
        storage: Layout rules for how it is kept when that differs from how it is computed with,
            such as ``"d_model:rows"`` (ZeRO-3 / FSDP).
        like: Keep it as this variable is kept (optimizer slots).
        decays: Whether weight decay applies to it, unless an optimizer's own ``decays`` says
            otherwise.  The layers of meshmpi make biases and scales of norms with False.

    Raises:
        VariableError: The name is taken by a variable of another shape or type, or the initializer
            gives another shape or values that the type cannot keep.
    """
    types = dtype if isinstance(dtype, VariableDType) else VariableDType(dtype, dtype)
    rules = None if storage is None else Layout(storage)
    graph = current_graph()
    new = Variable(graph.scoped(name), Shape(shape), types.master, initializer, trainable, rules, like, decays=decays)
    return _read(graph.variable(new), types.activation)


def value_of(variable: Variable) -> Tensor:
    """What `get_variable` returned; of several types the stored one."""
    reads = variable.reads
    if len(reads) == 1:
        return reads[0]
    with reads[0].graph if reads else nullcontext():
        return _read(variable, variable.dtype)


def _read(variable: Variable, dtype: str) -> Tensor:
    read = variable._reads.get(dtype)
    if read is None:
        read = variable._reads[dtype] = ReadVariable(variable, dtype).output
    return read


def read_stored(variable: Variable) -> Tensor:
    """The variable's value in its storage layout and stored type."""
    read = variable._reads.get("stored")
    if read is None:
        read = variable._reads["stored"] = ReadStored(variable).output
    return read


def assign(variable: Tensor | Variable, value: Tensor) -> Update:
    """An update: at the end of the step ``variable`` takes ``value``.

    All updates of a step read the old values of all variables.  Pass it to
    ``mm.compile(..., updates=[...])``; the graph remembers it for `mm.plan`.
    """
    target = variable if isinstance(variable, Variable) else variable.variable
    if target is None:
        raise ShapeError(
            f"assign: {variable!r} is not the value of a variable.",
            "Give what mm.get_variable() returned.",
            call_of("assign"),
        )
    if sorted(value.shape) != sorted(target.shape) or value.dtype != target.dtype:
        raise ShapeError(
            f"assign: variable '{target.name}' is {target.dtype}{target.shape}, the value is"
            f" {value.dtype}{value.shape}.",
            f"Give a value that is {target.dtype}{target.shape}: reduce or cast it.",
            call_of("assign", value),
        )
    update = Update(target, value)
    value.graph.updates.append(update)
    return update


class Constant(Operation):
    """One number at every point.  Lowers: a local `map` without inputs."""

    follows = True

    def __init__(self, value: float | int | bool, shape: Shape, dtype: str):
        self.value, self.shape, self.dtype = value, shape, dtype
        super().__init__([], "constant")

    def infer(self) -> Sequence[tuple[Shape, str]]:
        return [(self.shape, check_dtype(self.dtype, "constant"))]

    def lower(self, lowering: Any) -> None:
        t = lowering.type_of(self.output)
        lowering.define(self.output, lowering.emit(ir.Map(fill(self.value, self.dtype)), [], t))


def constant(value: float | int | bool, shape: ShapeLike = (), dtype: DType = "float32") -> Tensor:
    """``value`` at every point of ``shape``."""
    if check_dtype(dtype, "constant") not in FLOATS and not fits(value, dtype):
        raise ShapeError(f"constant: the number {value} does not fit data type {dtype}.", "Use another data type.")
    convert = float if dtype in FLOATS else bool if dtype == "bool" else int
    return Constant(convert(value), Shape(shape), dtype).output


def zeros(shape: ShapeLike, dtype: DType = "float32") -> Tensor:
    """0 at every point of ``shape``."""
    return constant(0, shape, dtype)


def ones(shape: ShapeLike, dtype: DType = "float32") -> Tensor:
    """1 at every point of ``shape``."""
    return constant(1, shape, dtype)


def zeros_like(x: Tensor) -> Tensor:
    """0 at every point, with the shape and data type of x."""
    return constant(0, x.shape, x.dtype)


def ones_like(x: Tensor) -> Tensor:
    """1 at every point, with the shape and data type of x."""
    return constant(1, x.shape, x.dtype)


class StepNumber(Operation):
    """The number of the running step, counted by the executor.  Lowers: local `step`."""

    def infer(self) -> Sequence[tuple[Shape, str]]:
        return [(Shape(), "int32")]

    def lower(self, lowering: Any) -> None:
        lowering.define(self.output, lowering.emit(ir.StepNumber(), [], lowering.type_of(self.output)))


def step_number() -> Tensor:
    """How many steps the compiled program has run before this one: an int32 without dims."""
    return StepNumber([], "step").output


class Random(Operation):
    """Numbers that depend on (seed, name, step, global index) only, so not on the layout.

    ``key`` is the name they depend on, if not the operation's own; with a ``barrier`` the numbers
    are made once more, though others of the same key exist (`mm.recompute_grad`).
    Lowers: local `random`; no traffic.
    """

    key = barrier = ""

    def __init__(self, distribution: str, shape: Shape, dtype: str, name: str):
        self.distribution, self.shape, self.dtype = distribution, shape, dtype
        super().__init__([], name)

    def infer(self) -> Sequence[tuple[Shape, str]]:
        if self.dtype not in FLOATS:
            raise self.fail(f"the data type is {self.dtype}.", f"Use one of {', '.join(FLOATS)}.")
        return [(self.shape, self.dtype)]

    def lower(self, lowering: Any) -> None:
        t = lowering.type_of(self.output)
        drawn = ir.Random(self.distribution, self.key or self.name, self.barrier)
        lowering.define(self.output, lowering.emit(drawn, [], t))


def random_uniform(
    shape: ShapeLike, minval: float = 0.0, maxval: float = 1.0, dtype: DType = "float32", name: str = "random_uniform"
) -> Tensor:
    """Uniform in [minval, maxval), new at every step, the same in every layout."""
    u = Random("uniform", Shape(shape), dtype, name).output
    return u if (minval, maxval) == (0.0, 1.0) else u * (maxval - minval) + minval


def random_normal(
    shape: ShapeLike, mean: float = 0.0, stddev: float = 1.0, dtype: DType = "float32", name: str = "random_normal"
) -> Tensor:
    """Normal, new at every step, the same in every layout."""
    z = Random("normal", Shape(shape), dtype, name).output
    return z if (mean, stddev) == (0.0, 1.0) else z * stddev + mean
