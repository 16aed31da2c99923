"""local_function: a NumPy function of the user's on the blocks of every rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Union

from meshmpi.dims import DimsLike, Shape, ShapeLike, dim_names
from meshmpi.graph import Operation, Tensor, current_graph
from meshmpi.graph.arguments import check_takes
from meshmpi.graph.ops.sources import zeros_like
from meshmpi.ir.kinds.functions import ArrayType, Function
from meshmpi.ir.kinds.functions import LocalFunction as Kind
from meshmpi.ir.program import LocalType
from meshmpi.ir.scalar import FLOATS, DType

ResultLike = Union[Tensor, tuple[ShapeLike, DType]]
"""Shape and data type of a result: those of a tensor, or a pair of them."""
Gradient = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Sequence[Any]]


class LocalFunction(Operation):
    """y_1, y_2, ... = function(x_1, x_2, ...), called by each rank on its blocks.

    Gradient: another such function, of the inputs, the results and their gradients.
    Lowers: local `local_function`; dims that are no batch dims are gathered first; where a result lacks a batch dim
    that is split, an all_reduce of it over its axes.
    """

    def __init__(
        self,
        function: Function,
        inputs: Sequence[Tensor],
        results: Sequence[tuple[Shape, str]],
        batch_dims: tuple[str, ...],
        gradient: Gradient | None,
    ):
        self.function, self.results, self.batch_dims, self.gradient = function, tuple(results), batch_dims, gradient
        super().__init__(inputs, function.name.rpartition(".")[2])

    def infer(self) -> Sequence[tuple[Shape, str]]:
        if not self.results:
            raise self.fail("the function has no result.", "Name the shape and data type of what it returns.")
        sizes = self.sizes([*(x.shape for x in self.inputs), *(shape for shape, _ in self.results)])
        for name in self.batch_dims:
            if name not in sizes:
                raise self.fail(
                    f"no input and no result has the batch dimension '{name}'.", f"Give some of {', '.join(sizes)}."
                )
            if not any(x.shape.find(name) >= 0 for x in self.inputs):
                raise self.fail(
                    f"no input has the batch dimension '{name}', so that the function cannot know which part of it"
                    " a rank holds.",
                    f"Give mm.range(dim) of '{name}' as an input, which is the indices of the part.",
                )
        for shape, dtype in self.results:
            if dtype == "bool" and any(shape.find(n) < 0 for n in self.batch_dims):
                raise self.fail(
                    f"the result bool{shape} lacks a batch dimension, so that it would be summed.",
                    "Return whole numbers, and compare the sum with mm.greater().",
                )
        return self.results

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        floats = [k for k, x in enumerate(self.inputs) if x.dtype in FLOATS]
        if self.gradient is None:
            raise self.fail(
                "it has no gradient.",
                "Give gradient=, a function of (inputs, outputs, output_grads), or mm.stop_gradient() of its inputs.",
            )
        given = [zeros_like(y) if dy is None else dy for y, dy in zip(self.outputs, dys, strict=True)]
        xs, ys = len(self.inputs), len(self.outputs)
        called, name = self.gradient, f"{self.function.name}_gradient"

        def derivative(*blocks: Any) -> Any:
            found = list(called(blocks[:xs], blocks[xs : xs + ys], blocks[xs + ys :]))
            if len(found) != xs:
                raise TypeError(f"it returned {len(found)} gradients for {xs} inputs")
            return [found[k] for k in floats]

        inputs = [*self.inputs, *self.outputs, *given]
        results = [(self.inputs[k].shape, self.inputs[k].dtype) for k in floats]
        function = _declared(derivative, name, inputs, results, self.function.flops, self.function)
        found = iter(LocalFunction(function, inputs, results, self.batch_dims, None).outputs)
        return [next(found) if x.dtype in FLOATS else None for x in self.inputs]

    def lower(self, lowering: Any) -> None:
        splits: dict[str, tuple[str, ...]] = {}
        for name in self.batch_dims:
            (axes,) = lowering.placement.base(Shape([(name, 1)]))
            used = [a for other in splits.values() for a in other]
            splits[name] = () if set(axes) & set(used) else axes
        wanted = {n: splits.get(n, ()) for t in (*self.inputs, *self.outputs) for n in t.shape.names}
        values = [lowering.fit(x, wanted) for x in self.inputs]
        types = [
            lowering.pending(
                LocalType(y.shape, y.dtype, tuple(wanted[n] for n in y.shape.names)),
                [a for n, axes in splits.items() if y.shape.find(n) < 0 for a in axes],
            )
            for y in self.outputs
        ]
        made = lowering.emit_many(Kind(self.function, self.batch_dims), values, types)
        for y, value in zip(self.outputs, made, strict=True):
            lowering.define(y, value)


def _declared(
    call: Callable[..., Any],
    name: str,
    inputs: Sequence[Tensor],
    results: Sequence[tuple[Shape, str]],
    flops: int,
    derivative_of: Function | None = None,
) -> Function:
    """The function as programs name it: another one of the same name in the graph gets a number."""
    takes = tuple(ArrayType(x.shape.names, x.dtype) for x in inputs)
    makes = tuple(ArrayType(shape.names, dtype) for shape, dtype in results)
    graph = inputs[0].graph if inputs else current_graph()
    known = {o.function.name: o.function for o in graph.operations if isinstance(o, LocalFunction)}
    for number in itertools.count(1):
        new = Function(name if number == 1 else f"{name}_{number}", call, takes, makes, flops, derivative_of)
        old = known.get(new.name)
        if old is None or vars(old) == vars(new):
            return old or new
    raise AssertionError("the numbers do not end")


def local_function(
    fn: Callable[..., Any],
    inputs: Sequence[Tensor],
    outputs: Sequence[ResultLike],
    batch_dims: DimsLike = (),
    *,
    gradient: Callable[..., Any] | None = None,
    flops: int = 0,
    name: str | None = None,
) -> Any:
    """What ``fn`` makes of NumPy arrays, where meshmpi has no operation for it: SciPy, a C library, a table.

    Each rank calls it on its own blocks.  It must depend on its arguments alone, and must not change them.

    Args:
        fn: Takes one C-contiguous array for each input, its dims in the order of the tensor's shape; returns an array,
            or several, with the dims and data types of ``outputs``.
        inputs: Tensors.
        outputs: For each result a tensor of the same shape and data type, or ``(shape, dtype)``.
        batch_dims: Dims along which fn treats every index alone, as NumPy's functions treat all but ``axis``: a rank
            then calls it on its part of them.  All other dims it gets whole.  A result that lacks a batch dim is the
            sum of what fn returns for the parts: a gradient by weights, a count.
        gradient: Takes (inputs, outputs, output_grads), three sequences of arrays; returns for each input an array
            of its shape, or None for zeros.  Without it the operation has no gradient.
        flops: Floating-point operations for each element of the first result, for `mm.plan` and searches: nobody can
            see them.
        name: Of the operation; default: that of fn.

    Returns:
        A tensor, or a list of them where there are several outputs.

    With ``mm.compile(..., debug=True)`` every call is compared with the declaration: parts of each batch dim
    with the whole, and the gradient with central differences.  Memory that fn allocates is not counted.

    Raises:
        ShapeError: The dims do not fit, or the gradient is wanted and there is none.
        ProgramError: In a step, where fn raises, returns other shapes or types, or (debug) breaks its declaration.

    Source: JAX's pure_callback and custom_vjp; the batch dims are the loop dims of NumPy's gufuncs.

    Example:
        >>> def middle(x):
        ...     return np.median(x, axis=1).astype(x.dtype)
        >>> with mm.Graph() as graph:
        ...     x = mm.placeholder("x", "batch:4;length:3")
        ...     y = mm.local_function(middle, [x], [("batch:4", "float32")], batch_dims=["batch"])
    """
    results = [(t.shape, t.dtype) if isinstance(t, Tensor) else (Shape(t[0]), t[1]) for t in outputs]
    check_takes(fn, "local_function", inputs, "array")
    called = name or getattr(fn, "__qualname__", type(fn).__name__).replace("<", "").replace(">", "")
    function = _declared(fn, called, inputs, results, flops)
    dims = tuple(dict.fromkeys(dim_names(batch_dims)))
    made = LocalFunction(function, inputs, results, dims, gradient).outputs
    return made[0] if len(made) == 1 else list(made)
