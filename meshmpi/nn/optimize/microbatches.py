"""Computes a training step in several parts, one after another: less memory, the same gradients.

The parts are rows 0, k, 2k, ..., rows 1, k + 1, ... of the batch: each rank divides its own block of a split batch,
without communication. The sum of the parts' gradients stays pending, so each gradient is reduced once, as for one
large batch. No layout or optimizer is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from meshmpi.dims import Dimension, Shape
from meshmpi.errors import ShapeError
from meshmpi.graph import Tensor, Variable, shared_turns
from meshmpi.graph.arguments import asked, shown
from meshmpi.graph.autodiff import gradients
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.placement import barrier
from meshmpi.graph.ops.structure import DimLike, dim_name, reshape, stack, transpose, unstack
from meshmpi.ir.scalar import FLOATS
from meshmpi.nn.optimize.base import VariableLike, as_variable

Tensors = Mapping[str, Tensor]
Outputs = dict[str, Tensor]
Pairs = list[tuple[Tensor | None, Variable]]


def microbatches(x: Tensor, batch_dim: DimLike, num_splits: int) -> list[Tensor]:
    """x cut into ``num_splits`` parts of every ``num_splits``-th row.

    Args:
        x: Any shape with ``batch_dim``.
        batch_dim: The dim (or its name) that is cut; it keeps its name.
        num_splits: Number of parts; must divide the size of the dim.

    Returns:
        Part j holds the rows whose index is j modulo ``num_splits``.

    Raises:
        ShapeError: The dim cannot be cut into equal parts.

    Lowers: nothing, where the ranks over which the dim is split divide the size of a part; else
    what the reshape to [rows, parts] takes.

    Example:
        >>> with mm.Graph():
        ...     parts = mm.optimize.microbatches(mm.placeholder("x", "batch:12;io:4"), "batch", 3)
        >>> [str(part.shape) for part in parts]
        ['[batch=4, io=4]', '[batch=4, io=4]', '[batch=4, io=4]']
    """
    name = dim_name(batch_dim)
    n, i = x.shape.dim(name).size, x.shape.position(name)
    if num_splits < 1 or n % num_splits:
        raise ShapeError(
            f"microbatches: dimension '{name}' ({n}) cannot be cut into {num_splits} equal parts.",
            "Give a divisor of its size.",
            str(x.source),
        )
    if num_splits == 1:
        return [x]
    rows, parts = Dimension(name, n // num_splits), _parts_dim(name, num_splits)
    return unstack(reshape(x, Shape([*x.shape[:i], rows, parts, *x.shape[i + 1 :]])), parts)


def _parts_dim(name: str, parts: int) -> Dimension:
    return Dimension(f"_{name}_part", parts)


def serialize_training_step(
    features: Tensors,
    model_fn: Callable[[Outputs], Tensors],
    batch_dim: DimLike,
    num_splits: int,
    variables: Sequence[VariableLike] | None = None,
) -> tuple[Outputs, Pairs]:
    """Loss and gradients of a batch, computed part by part; other arguments as in `microbatches`.

    Args:
        features: Name -> tensor; those without ``batch_dim`` go whole to every part.
        model_fn: Called for each part with its features; returns name -> tensor, with the loss
            under "loss".  All parts share the variables that the first one makes.
        variables: What to differentiate by; default all trainable variables of the graph.

    Returns:
        (outputs, pairs of gradients and variables for `Optimizer.apply_gradients`).  Outputs with
        ``batch_dim`` are put together again.  All others, loss and gradients are *means* over the
        parts (the reference has sums), so that they are those of the whole batch wherever the loss
        is a mean over rows.  A mean weighted by row (padding) is one over the parts' means instead.

    Lowers: as the step with the whole batch: each gradient is reduced once.
    Source: Mesh-TensorFlow's serialize_training_step.

    Example:
        >>> with mm.Graph() as graph:
        ...     x = mm.placeholder("x", "batch:8;io:4")
        ...     def model(features):
        ...         y = mm.dense(features["x"], mm.Dimension("out", 3))
        ...         return {"loss": mm.reduce_mean(mm.square(y))}
        ...     step = mm.optimize.serialize_training_step
        ...     outputs, pairs = step({"x": x}, model, "batch", num_splits=4)
        ...     updates = mm.optimize.SGD(0.1).apply_gradients(pairs)
        >>> [update.variable.name for update in updates]
        ['dense/kernel', 'dense/bias', 'sgd/step']
    """
    name = dim_name(batch_dim)
    cut = {
        key: microbatches(x, name, num_splits) if x.shape.find(name) >= 0 else [x] * num_splits
        for key, x in features.items()
    }
    collected: dict[str, list[Tensor]] = {}
    totals: dict[str, Tensor | None] = {}
    targets: list[Variable] = []
    for j, shared in enumerate(shared_turns(num_splits)):
        part = {key: parts[j] for key, parts in cut.items()}
        with shared:
            outputs = asked(model_fn, "optimize.serialize_training_step", part)
        loss = _loss(outputs)
        share = loss if num_splits == 1 else ew.multiply(loss, 1.0 / num_splits)
        for key, y in outputs.items():
            collected.setdefault(key, []).append(y)
        targets = loss.graph.trainable_variables if variables is None else [as_variable(v) for v in variables]
        # Before the next part is built: what this part keeps for its gradients is then free.
        for v, g in zip(targets, gradients([share], targets), strict=True):
            fence = f"{v.name} part {j}" if j < num_splits - 1 else ""
            totals[v.name] = _sum(totals.get(v.name), g, fence)
    return {key: _joined(ys, name) for key, ys in collected.items()}, [(totals[v.name], v) for v in targets]


def _loss(outputs: Tensors) -> Tensor:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if loss is None or loss.shape:
        found = shown(outputs) if loss is None else f"a loss {loss.dtype}{loss.shape}"
        raise ShapeError(
            f"serialize_training_step: model_fn returned {found}.",
            'Return a mapping with a number (no dimensions) under "loss".',
        )
    return loss


def _sum(total: Tensor | None, g: Tensor | None, fence: str) -> Tensor | None:
    if total is None or g is None:
        return g if total is None else total
    added = ew.add(total, g)
    # Sums fused into one at the end would keep the gradients of all parts until then.
    return barrier(added, fence) if fence else added


def _joined(ys: Sequence[Tensor], batch: str) -> Tensor:
    """Rows of all parts in their old order, or the mean of what has no rows."""
    if len(ys) == 1:
        return ys[0]
    i = ys[0].shape.find(batch)
    if i < 0:
        numbers = [y if y.dtype in FLOATS else ew.cast(y, "float32") for y in ys]
        return ew.multiply(ew.add_n(numbers), 1.0 / len(ys))
    parts, shape = _parts_dim(batch, len(ys)), ys[0].shape
    rows = stack(list(ys), parts.name)
    rows = transpose(rows, Shape([*shape[: i + 1], parts, *shape[i + 1 :]]))
    whole = Dimension(batch, shape[i].size * len(ys))
    return reshape(rows, Shape([*shape[:i], whole, *shape[i + 1 :]]))
