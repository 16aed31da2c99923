"""Parts of a graph that a function made: finds, checks and rebuilds them on other inputs.

Graph only: no layout, and no gradient rule of any operation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from meshmpi.errors import ShapeError
from meshmpi.graph import Operation, Tensor, current_graph
from meshmpi.graph.arguments import asked
from meshmpi.graph.ops.placement import CustomGradient, Rule, barrier
from meshmpi.graph.ops.sources import Placeholder, Random, ReadStored, ReadVariable, zeros_like
from meshmpi.ir.scalar import FLOATS

_SOURCES = (Placeholder, ReadStored, ReadVariable)
"""What comes from outside even if it was first asked for inside."""


class Region(NamedTuple):
    """Operations, what they use from outside, what they return, and whether that is one tensor instead of several."""

    operations: tuple[Operation, ...]
    externals: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    single: bool

    def with_gradient(self, inputs: Sequence[Tensor], rule: Rule, name: str) -> Any:
        """What the function returned; its gradient by ``inputs`` is what the rule says."""
        outputs = CustomGradient(self.results, inputs, rule, name).outputs
        return outputs[0] if self.single else list(outputs)

    def again(self, externals: Sequence[Tensor], name: str) -> list[Tensor]:
        """The results of the same operations on other ``externals``, as new nodes.

        Random numbers are those of the first time, behind a barrier called ``name``.
        """
        instead: dict[Tensor, Tensor] = dict(zip(self.externals, externals, strict=True))
        graph = externals[0].graph if externals else current_graph()
        with graph.scope(name.replace("/", "_")):
            for operation in self.operations:
                new = _cloned(operation, instead)
                if isinstance(new, Random) and isinstance(operation, Random):
                    new.key, new.barrier = operation.key or operation.name, name
                instead.update(zip(operation.outputs, new.outputs, strict=True))
        return [instead[t] for t in self.results]


def behind_barrier(x: Tensor, name: str) -> Tensor:
    """x for a second computation: a variable is read, converted and gathered anew."""
    if not isinstance(x.operation, ReadVariable):
        return barrier(x, name)
    again = _cloned(x.operation, {})
    assert isinstance(again, ReadVariable)
    again.barrier = name
    return again.output


def _cloned(operation: Operation, instead: Mapping[Tensor, Tensor]) -> Operation:
    """The same operation on other inputs, added to the graph."""
    new = copy.copy(operation)
    for name, value in vars(operation).items():
        if name != "outputs":
            setattr(new, name, _replaced(value, instead))
    operation.graph.add(new)
    return new


def _replaced(value: Any, instead: Mapping[Tensor, Tensor]) -> Any:
    """``value`` with tensors replaced, in tuples and lists too."""
    if isinstance(value, Tensor):
        return instead.get(value, value)
    if type(value) in (tuple, list):
        return type(value)(_replaced(v, instead) for v in value)
    return value


def region_of(fn: Callable[..., Any], inputs: Sequence[Tensor], what: str) -> Region:
    """What ``fn(*inputs)`` makes.

    Raises:
        ShapeError: It returned something else than tensors.
    """
    graph = inputs[0].graph if inputs else current_graph()
    start = len(graph.operations)
    returned = asked(fn, what, *inputs)
    results = [returned] if isinstance(returned, Tensor) else returned
    if not isinstance(results, (tuple, list)) or not all(isinstance(t, Tensor) for t in results):
        raise ShapeError(f"{what}: the function returned {returned!r}.", "Return a tensor, or a tuple of them.")
    inside = [o for o in graph.operations[start:] if not isinstance(o, _SOURCES)]
    made = {t for o in inside for t in o.outputs}
    used = [*inputs, *(t for o in inside for t in o.inputs), *results]
    externals = tuple(dict.fromkeys(t for t in used if t not in made))
    return Region(tuple(inside), externals, tuple(results), isinstance(returned, Tensor))


def custom_gradient(
    fn: Callable[..., Any], grad_fn: Callable[..., Sequence[Tensor | None]], inputs: Sequence[Tensor]
) -> Any:
    """``fn(*inputs)``, whose gradient is what ``grad_fn`` says instead of what fn's operations say.

    Args:
        fn: Takes the inputs, returns a tensor or a tuple of tensors.
        grad_fn: Takes (inputs, outputs, output_grads), three lists of tensors; returns for each
            input a tensor of its dims and data type, or None.
        inputs: Everything that fn uses and that a gradient might be wanted of.

    Returns:
        What fn returns: a tensor, or a list of them.

    Raises:
        ShapeError: fn uses another tensor or variable, whose gradient would be lost, or grad_fn
            returns what does not fit.

    Source: Mesh-TensorFlow's custom_gradient.

    Example:
        >>> rounded = mm.custom_gradient(mm.floor, lambda xs, ys, dys: dys, [x])  # straight through
    """
    inputs = list(inputs)
    region = region_of(fn, inputs, "custom_gradient")
    for t in region.externals:
        _check_captured(t, inputs)

    def rule(
        given: Sequence[Tensor], outputs: Sequence[Tensor], dys: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        whole = [zeros_like(y) if dy is None else dy for y, dy in zip(outputs, dys, strict=True)]
        return asked(grad_fn, "custom_gradient", list(given), list(outputs), whole)

    return region.with_gradient(inputs, rule, "custom_gradient")


def _check_captured(t: Tensor, inputs: Sequence[Tensor]) -> None:
    """A tensor from outside must be an input, or one that no gradient reaches."""
    o = t.operation
    harmless = not o.inputs and not isinstance(o, _SOURCES)
    stopped = isinstance(o, CustomGradient) and o.rule is None
    if t in inputs or t.dtype not in FLOATS or harmless or stopped:
        return
    raise ShapeError(
        f"custom_gradient: the function uses {t!r}, which is not among its inputs, so that its gradient would be lost.",
        "Add it to inputs, or use mm.stop_gradient() of it, made outside.",
        str(t.source),
    )
