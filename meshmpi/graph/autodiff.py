"""Reverse-mode differentiation, graph to graph.

Runs before layouts are known: the graph has no collectives, so none needs a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshmpi.errors import ShapeError
from meshmpi.graph import Operation, Tensor, Variable
from meshmpi.graph.arguments import checked
from meshmpi.graph.ops.elementwise import add, add_n, cast
from meshmpi.graph.ops.reductions import reduce_sum
from meshmpi.graph.ops.regions import behind_barrier, region_of
from meshmpi.graph.ops.sources import constant
from meshmpi.graph.ops.structure import transpose
from meshmpi.ir.scalar import FLOATS


@checked
def gradients(
    ys: Sequence[Tensor], xs: Sequence[Variable | Tensor], grad_ys: Sequence[Tensor] | None = None
) -> list[Tensor | None]:
    """Gradients of the sum of ``ys`` with respect to each of ``xs``.

    Args:
        ys: Tensors to differentiate, or one; usually one scalar loss.
        xs: Tensors to differentiate by, or one: variables, placeholders, or any intermediate tensor.  A Variable (of
            ``graph.trainable_variables``) stands for all tensors that it is read as.
        grad_ys: Gradient of each of ys (same shapes); default ones.

    Returns:
        For each x a tensor of its shape, in its order of dimensions, and of its data type; None
        where no y depends on x through differentiable operations.

    Raises:
        ShapeError: A shape in grad_ys differs, an x is not a tensor, or an operation on the way has no gradient.
    """
    if not ys:
        raise ShapeError("gradients: there are no ys.", "Give at least one tensor.")
    reads = [x.reads if isinstance(x, Variable) else [x] for x in xs]
    flat = [t for ts in reads for t in ts]
    found = iter(_backward(ys, flat, _seeds(ys, grad_ys), ys[0].graph.operations))
    return [_summed([g for g in (next(found) for _ in ts) if g is not None]) for ts in reads]


def _summed(parts: Sequence[Tensor]) -> Tensor | None:
    """The sum of gradients by one variable, in float32 at least where their types differ."""
    if len({g.dtype for g in parts}) > 1:
        parts = [cast(g, "float32") if g.dtype == "bfloat16" else g for g in parts]
    return add_n(parts) if parts else None


def _backward(
    ys: Sequence[Tensor], xs: Sequence[Tensor], seeds: Sequence[Tensor], operations: Sequence[Operation]
) -> list[Tensor | None]:
    """Gradients by ``xs`` through ``operations``, given those of ``ys`` as ``seeds``."""
    graph, needed = ys[0].graph, _between(operations, ys, xs)
    total: dict[Tensor, Tensor] = {}
    for y, dy in zip(ys, seeds, strict=True):
        _accumulate(total, y, dy)
    for operation in reversed(needed):
        dys = [total.get(t) for t in operation.outputs]
        if all(dy is None for dy in dys):
            continue
        with graph.gradient_of(operation):
            # Where x was repeated along dims that it lacks, its gradient is the sum over them.
            dxs = [
                dx if dx is None or len(dx.shape) <= len(x.shape) else reduce_sum(dx, output_shape=x.shape)
                for x, dx in zip(operation.inputs, operation.grad(dys), strict=True)
            ]
            for x, dx in zip(operation.inputs, dxs, strict=True):
                if dx is not None and x.dtype in FLOATS:
                    _accumulate(total, x, dx)
    return [total.get(x) for x in xs]


@checked
def recompute_grad(fn: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
    """``fn(*inputs)``, whose intermediate values are computed again for the backward pass.

    The memory of a stack of layers is then that of the inputs of every layer and of the inside of
    one; the price is one more forward pass.  Values and gradients stay the same to the last bit,
    random numbers included; variables that fn makes or uses are those of the forward pass.

    Args:
        fn: Takes the inputs, returns a tensor or a tuple of tensors.
        inputs: Tensors.  Whatever else fn uses gets its gradient too.

    Returns:
        What fn returns: a tensor, or a list of them.  A tensor made inside is known to fn alone:
        `gradients` by it are None.

    Lowers: what fn lowers to, a second time where the gradient is computed; variables that are
    stored in blocks are gathered a second time too, and not kept whole from one pass to the other.
    Source: Chen et al. 2016; Mesh-TensorFlow's recompute_grad.

    Example:
        >>> for n in range(layers):
        ...     with mm.scope(f"layer_{n}"):
        ...         x = mm.recompute_grad(layer, [x])
    """
    region = region_of(fn, list(inputs), "recompute_grad")
    graph = (*inputs, *region.results)[0].graph

    def rule(
        given: Sequence[Tensor], outputs: Sequence[Tensor], dys: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        name, start = graph.unique_name("recompute"), len(graph.operations)
        # Masks stay what they are: behind a barrier they would be stored instead of computed again.
        fenced = [x if x.dtype == "bool" else behind_barrier(x, name) for x in given]
        again = region.again(fenced, name)
        pairs = [(y, dy) for y, dy in zip(again, dys, strict=True) if dy is not None]
        ys, grad_ys = [y for y, _ in pairs], [dy for _, dy in pairs]
        return _backward(ys, fenced, grad_ys, graph.operations[start:])

    return region.with_gradient(region.externals, rule, "recompute_grad")


def _seeds(ys: Sequence[Tensor], grad_ys: Sequence[Tensor] | None) -> list[Tensor]:
    if grad_ys is None:
        return [constant(1.0, y.shape, y.dtype) for y in ys]
    if len(grad_ys) != len(ys):
        raise ShapeError(
            f"gradients: there are {len(ys)} ys and {len(grad_ys)} grad_ys.",
            "Give one of grad_ys for each of ys.",
            str(ys[0].source),
        )
    for y, dy in zip(ys, grad_ys, strict=True):
        if sorted(y.shape) != sorted(dy.shape):
            raise ShapeError(
                f"gradients: grad_ys has {dy.shape} for {y.name} {y.shape}.",
                f"Give a tensor of shape {y.shape} for it.",
                str(y.source),
            )
    return list(grad_ys)


def _between(operations: Sequence[Operation], ys: Sequence[Tensor], xs: Sequence[Tensor]) -> list[Operation]:
    """Operations on a path from some x to some y, in graph order."""
    from_x = set(xs)
    for operation in operations:
        if any(t in from_x for t in operation.inputs):
            from_x.update(operation.outputs)
    to_y, path = set(ys), []
    for operation in reversed(operations):
        if any(t in to_y for t in operation.outputs):
            to_y.update(operation.inputs)
            if any(t in from_x for t in operation.inputs):
                path.append(operation)
    return path[::-1]


def _accumulate(total: dict[Tensor, Tensor], x: Tensor, dx: Tensor) -> None:
    if dx.shape != x.shape:
        dx = transpose(dx, x.shape)
    total[x] = add(total[x], dx) if x in total else dx
