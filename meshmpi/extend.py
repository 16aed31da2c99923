"""Operations and kinds of instructions from outside the package: what their authors import, and what checks them.

`docs/writing_an_op.md` builds one with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from meshmpi.checking import Report, bounds, interpret, verify
from meshmpi.dims import Shape, ShapeLike
from meshmpi.errors import ArgumentError, ProgramError
from meshmpi.graph import Graph, Operation, Tensor, builds_graphs, only
from meshmpi.graph.arguments import asked, checked
from meshmpi.graph.autodiff import gradients
from meshmpi.graph.ops import placeholder
from meshmpi.ir.kinds.checks import check_pending, require, result_type, same_splits
from meshmpi.ir.kinds.shaping import AlongDim
from meshmpi.ir.program import KINDS, Extents, Instruction, Kind, LocalType, Program, Traits, Violation, Work
from meshmpi.ir.scalar import FLOATS, dtype_name
from meshmpi.kernels import numpy_dtype, numpy_kernels
from meshmpi.kernels.binding import Call, Plan, Runtime, Scratch

__all__ = [
    "AlongDim",
    "Call",
    "Extents",
    "Instruction",
    "Kind",
    "LocalType",
    "Operation",
    "Plan",
    "Program",
    "Runtime",
    "Scratch",
    "Traits",
    "Violation",
    "Work",
    "builds_graphs",
    "check_operation",
    "check_pending",
    "only",
    "register",
    "require",
    "result_type",
    "same_splits",
]
PACKAGE = "meshmpi."
ROUNDINGS = {"float64": 1e-9, "float32": 2e-4, "bfloat16": 6e-2}
"""Largest difference from the definition, relative to the largest element: that of a hundred or so roundings."""
SLOPE_STEP, SLOPE_ERROR = 1e-5, 1e-4
"""Central differences in float64: their step, and the error that is put down to them."""


def register(kind: type[Kind], plan: Callable[[Call], Plan], linear: bool = False) -> type[Kind]:
    """Makes a kind of instruction known: programs that have it can be run, checked and priced.

    Call it on import of the module that defines the kind, on all ranks; calling it again replaces the plan.

    Args:
        kind: A frozen dataclass ``class PairSum(Kind, kind="pair_sum", traits=Traits(...))`` with a type rule
            ``check``.  Its cost is 0 FLOP unless ``flops`` and ``work`` say more.
        plan: Its meaning in NumPy: from a `Call` (the types and blocks of its operands) to a `Plan`, whose function
            makes, from arrays at fixed addresses, the function that every step calls.
        linear: Whether the results are sums of elements of the inputs, each times a constant.  `mm.verify` then
            bounds its rounding more closely.

    Returns:
        The kind.

    Raises:
        ArgumentError: It is not a kind, has no name, or has that of one of the package's own.
    """
    if not (isinstance(kind, type) and issubclass(kind, Kind) and kind.kind):
        raise ArgumentError(
            f"register: {kind!r} is no kind of instruction.",
            'Give a class as class PairSum(extend.Kind, kind="pair_sum", traits=extend.Traits()).',
        )
    if kind.__module__.startswith(PACKAGE) or not callable(plan):
        raise ArgumentError(
            f"register: '{kind.kind}' is a kind of the package, or its plan {plan!r} is no function.",
            "Register a kind of your own, with a function of a Call that returns a Plan.",
        )
    KINDS[kind.kind] = kind
    numpy_kernels.PLANS[kind.kind] = plan
    if not linear:
        bounds.RULES[kind] = bounds.unknown
    return kind


@checked
def check_operation(
    operation: Callable[..., Any],
    inputs: Sequence[tuple[ShapeLike, Any]],
    expected: Callable[..., Any],
    meshes: Sequence[str] = ("rows:2;cols:2", "rows:3"),
    gradient: bool = True,
) -> Report:
    """Compares an operation with its definition, in every legal layout, and its gradient with central differences.

    One row of a test: the same checks that the package's own operations pass, simulated in this process.

    Args:
        operation: Takes the inputs as tensors; returns a tensor or several.
        inputs: For each input ``(shape, array)``; arrays of float64 make the comparison sharp.  Sizes that the mesh
            axes do not divide, and some that are smaller than them, find the most mistakes.
        expected: The definition: takes the arrays, returns an array for each result.
        meshes: Each layout of each mesh is tried: as lowered and after the passes, NumPy's kernels and generated C.
        gradient: Whether to check it by every float input; False where there is none, or at kinks.

    Returns:
        What `mm.verify` found.

    Raises:
        ProgramError: The first thing that is wrong.
    """
    with Graph() as graph:
        xs, feeds = list[Tensor](), dict[str, np.ndarray]()
        for k, (shape, array) in enumerate(inputs):
            feeds[f"x{k}"] = np.asarray(array)
            xs.append(placeholder(f"x{k}", Shape(shape), cast("Any", dtype_name(feeds[f"x{k}"].dtype))))
        returned = asked(operation, "check_operation", *xs)
        ys: list[Tensor] = [returned] if isinstance(returned, Tensor) else list(returned)
        given, by = [y for y in ys if y.dtype in FLOATS], [x for x in xs if x.dtype in FLOATS]
        dys = [placeholder(f"dy{k}", y.shape, cast("Any", y.dtype)) for k, y in enumerate(given)]
        dxs = gradients(given, by, dys) if gradient and given and by else []
    for dy in dys:
        weights = np.random.default_rng(len(feeds)).uniform(-1, 1, dy.shape.sizes)
        feeds[dy.name] = weights.astype(numpy_dtype(dy.dtype))
    slopes = {x: dx for x, dx in zip(by, dxs, strict=False) if dx is not None}
    _check_values(graph, feeds, xs, ys, expected)
    _check_slopes(graph, feeds, xs, slopes, [ys.index(y) for y in given], expected)
    fetches = {f"result {k}": y for k, y in enumerate(ys)} | {f"gradient by {x.name}": dx for x, dx in slopes.items()}
    report = verify(graph, "all", list(meshes), fetches, [], feeds)
    if not report.ok:
        raise ProgramError(f"check_operation: {report.text()}", "Correct lower(), or check() of the kind.")
    return report


def _defined(expected: Callable[..., Any], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The results of the definition as a list."""
    found: Any = asked(expected, "check_operation", *arrays)
    return [np.asarray(a) for a in (found if isinstance(found, (list, tuple)) else [found])]


def _check_values(
    graph: Graph, feeds: dict[str, np.ndarray], xs: Sequence[Tensor], ys: Sequence[Tensor], expected: Callable[..., Any]
) -> None:
    found, wanted = interpret(graph, feeds, list(ys)), _defined(expected, [feeds[x.name] for x in xs])
    if len(wanted) != len(ys):
        raise ProgramError(
            f"check_operation: the operation has {len(ys)} results, its definition returns {len(wanted)}.",
            "Return an array for each result.",
        )
    for k, (y, want) in enumerate(zip(ys, wanted, strict=True)):
        have = found[y]
        if have.shape != want.shape:
            raise ProgramError(
                f"check_operation: result {k} is {y.shape}, its definition returns the shape {want.shape}.",
                "Correct infer(), or return the dims in the order of the result.",
            )
        apart, largest = _difference(have, want), float(np.abs(_wide(want)).max(initial=0.0))
        if apart > ROUNDINGS.get(y.dtype, 0.0) * max(largest, 1.0):
            raise ProgramError(
                f"check_operation: result {k} differs from its definition by up to {apart:.3g} on one rank;"
                f" its largest element is {largest:.3g}.",
                "Correct the plan of the kind, or lower().",
            )


def _check_slopes(
    graph: Graph,
    feeds: dict[str, np.ndarray],
    xs: Sequence[Tensor],
    slopes: dict[Tensor, Tensor],
    floats: Sequence[int],
    expected: Callable[..., Any],
) -> None:
    """Each gradient along a random direction beside the slope of sum(dy * y), from the definition in float64."""
    found = interpret(graph, feeds, list(slopes.values())) if slopes else {}
    for x, dx in slopes.items():
        direction = np.random.default_rng(0).choice([-1.0, 1.0], feeds[x.name].shape)

        there = [{**feeds, x.name: _wide(feeds[x.name]) + sign * SLOPE_STEP * direction} for sign in (1, -1)]
        totals = [
            sum(float(np.sum(feeds[f"dy{k}"] * made[n])) for k, n in enumerate(floats))
            for made in (_defined(expected, [_in_float64(arrays[t.name]) for t in xs]) for arrays in there)
        ]
        slope = (totals[0] - totals[1]) / (2 * SLOPE_STEP)
        claimed = float(np.sum(_wide(found[dx]) * direction))
        size = float(np.abs(_wide(found[dx])).sum())
        if not abs(claimed - slope) <= (SLOPE_ERROR + 10 * ROUNDINGS[x.dtype]) * max(size, abs(slope), 1.0):
            raise ProgramError(
                f"check_operation: the gradient by input {xs.index(x)} along a random direction is {claimed:.6g},"
                f" central differences of the definition give {slope:.6g}.",
                "Correct grad(), or give gradient=False where there is none.",
            )


def _in_float64(x: np.ndarray) -> np.ndarray:
    """An array of floats; indices and bools stay what they are."""
    return x if x.dtype.kind in "iub" else _wide(x)


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(bounds.distance(a, b).max(initial=0.0))
