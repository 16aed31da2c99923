"""Loops over a graph function, and user-defined elementwise functions.

Programs have no branches: loops are unrolled, and a loop with a computed end is masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshmpi.errors import ShapeError
from meshmpi.graph import Tensor, layer_name, scope, shared_turns
from meshmpi.graph.arguments import asked
from meshmpi.graph.ops import elementwise as ew
from meshmpi.graph.ops.regions import custom_gradient, region_of
from meshmpi.graph.ops.sources import Constant, constant
from meshmpi.graph.ops.structure import sum_to, transpose

Body = Callable[..., Any]


def repeat(
    body: Body, n: int, inputs: Sequence[Tensor], *, shared_variables: bool, name: str | None = None
) -> list[Tensor]:
    """``n`` times inputs = body(*inputs), with a gradient: the graph is unrolled.

    Args:
        body: Takes the state, returns the new one: a tensor or as many as it took.  Dims may change from turn to turn.
        n: How many times; 0 returns the inputs.
        inputs: The state at the beginning.
        shared_variables: True: variables that body makes by name are the same in each turn (a
            recurrence).  False: turn i makes its own in the scope ``name_i`` (a stack of layers).
        name: Name of these scopes.

    Returns:
        The state at the end.

    Lowers: what body lowers to, n times.  With `mm.recompute_grad` inside body the memory is that of one turn.
    """
    name = layer_name(name, "repeat")
    if n < 0:
        raise ShapeError(f"repeat: n is {n}.", "Give a number of turns from 0 on.")
    state = list(inputs)
    for i, shared in enumerate(shared_turns(n)):
        with shared if shared_variables else scope(f"{name}_{i}"):
            state = _turn(body, state, "repeat")
    return state


def while_loop(
    cond_fn: Callable[..., Tensor],
    body_fn: Body,
    inputs: Sequence[Tensor],
    *,
    max_steps: int,
    shared_variables: bool = True,
    name: str | None = None,
) -> list[Tensor]:
    """While cond_fn(*state) holds, state = body_fn(*state), at most ``max_steps`` times.

    The graph is unrolled ``max_steps`` times and a turn after the end keeps the state, so that
    every rank runs the same program and the loop has a gradient (the reference's has none).  A turn
    that does not count runs body_fn on the inputs, so that no infinity or NaN leaks into gradients.

    Args:
        cond_fn: Takes the state, returns a bool tensor without dims, or over dims that every
            tensor of the state has: then each row ends on its own.
        body_fn: Takes the state, returns one of the same dims and data types.
        inputs: The state at the beginning.
        max_steps: Turns at most; the loop ends there even if the condition still holds, which
            ``cond_fn(*result)`` tells.
        shared_variables, name: As for `repeat`.

    Returns:
        The state at the end.

    Lowers: what cond_fn and body_fn lower to, ``max_steps`` times.
    """
    name = layer_name(name, "while")
    state = first = list(inputs)
    going: Tensor | None = None
    for i, shared in enumerate(shared_turns(max_steps)):
        with shared if shared_variables else scope(f"{name}_{i}"):
            holds = _condition(asked(cond_fn, "while_loop", *state), state)
            going = holds if going is None else ew.logical_and(going, holds)
            safe = [ew.where(going, x, x0, output_shape=x.shape) for x, x0 in zip(state, first, strict=True)]
            new = _turn(body_fn, safe, "while_loop")
        for x, y in zip(state, new, strict=True):
            if (sorted(x.shape), x.dtype) != (sorted(y.shape), y.dtype):
                raise ShapeError(
                    f"while_loop: {x.dtype}{x.shape} becomes {y.dtype}{y.shape} in a turn.",
                    "Keep dims and data types, or use mm.repeat().",
                    str(y.source),
                )
        state = [
            ew.where(going, transpose(y, x.shape), x, output_shape=x.shape) for x, y in zip(state, new, strict=True)
        ]
    return state


def _turn(body: Body, state: Sequence[Tensor], what: str) -> list[Tensor]:
    returned = asked(body, what, *state)
    new = [returned] if isinstance(returned, Tensor) else list(returned)
    if len(new) != len(state):
        raise ShapeError(
            f"{what}: the body takes {len(state)} tensors and returns {len(new)}.", "Return the whole state."
        )
    return new


def _condition(holds: Tensor, state: Sequence[Tensor]) -> Tensor:
    for x in state:
        if holds.dtype != "bool" or any(d not in x.shape for d in holds.shape):
            raise ShapeError(
                f"while_loop: the condition {holds!r} is not a bool over dims that {x!r} has too.",
                "Compare, and reduce it with mm.reduce_any() or mm.reduce_all().",
                str(holds.source),
            )
    return holds


def cwise(
    function: Callable[..., Tensor],
    xs: Sequence[Tensor],
    grad_function: Callable[..., Sequence[Tensor | None]] | None = None,
) -> Tensor:
    """An elementwise function of one's own: ``function(*xs)``, made of elementwise ones.

    Args:
        function: Composed of `mm.add`, `mm.exp`, `mm.where` ...; fused into one loop as they are.
        xs: Tensors; their dims are united by name.
        grad_function: (xs, y, dy) -> gradient for each x at every point, or None; they are summed
            over dims that an x lacks.  Default: the derivatives of what function is made of.

    Raises:
        ShapeError: The function reduces, moves or contracts.

    Source: Mesh-TensorFlow's cwise, which takes a TensorFlow function.

    Example:
        >>> with mm.Graph():
        ...     x = mm.placeholder("x", "n:4")  # relu whose gradient is 1 everywhere
        ...     mm.cwise(lambda v: mm.where(v > 0, v, 0.0), [x], lambda xs, y, dy: [dy]).shape
        [n=4]
    """
    xs = list(xs)

    def checked(*inputs: Tensor) -> Tensor:
        region = region_of(function, inputs, "cwise")
        for o in region.operations:
            if not isinstance(o, (ew.Elementwise, Constant)):
                raise ShapeError(
                    f"cwise: the function uses {type(o).__name__}, which is not elementwise.",
                    "Call it outside.",
                    str(o.source),
                )
        if not region.single:
            raise ShapeError("cwise: the function returns several tensors.", "Return one.")
        return region.results[0]

    if grad_function is None:
        return checked(*xs)

    def rule(given: Sequence[Tensor], outputs: Sequence[Tensor], dys: Sequence[Tensor]) -> list[Tensor | None]:
        dxs = asked(grad_function, "cwise", given, outputs[0], dys[0])
        return [None if d is None else _summed(d, x) for x, d in zip(given, dxs, strict=True)]

    return custom_gradient(checked, rule, xs)


def _summed(dx: Tensor, x: Tensor) -> Tensor:
    """The gradient at every point, summed over the dims that x lacks."""
    if any(d not in dx.shape for d in x.shape):
        zeros = constant(0, x.shape, dx.dtype)
        dx = ew.add(dx, zeros)
    return sum_to(dx, x.shape)
