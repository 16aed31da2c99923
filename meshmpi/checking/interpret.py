"""Reference mode: computes a graph op by op in one process, with prints and breakpoints.

The program is lowered for one rank without any pass: one or two instructions per operation, run by the NumPy kernels.
There is no second interpreter whose meaning could differ.
"""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Union

import numpy as np

from meshmpi.checking.evaluate import evaluate
from meshmpi.compiler.lowering import lower
from meshmpi.dims import Layout, MeshShape
from meshmpi.errors import FeedError, RangeError, ShapeError, suggest
from meshmpi.graph import Graph, Tensor, Update
from meshmpi.graph.arguments import checked
from meshmpi.graph.fetches import named_fetches, needed_operations
from meshmpi.graph.ops.placement import Constrain
from meshmpi.ir import scalar
from meshmpi.ir.kinds import Feed, Map, Random, Read, Region, Write
from meshmpi.ir.program import Instruction, LocalType, Program
from meshmpi.ir.scalar import FLOATS
from meshmpi.kernels import numpy_dtype
from meshmpi.runtime.simulated_mesh import SimulatedMesh
from meshmpi.runtime.variables import VariableStore

Place = Union[str, Tensor]
"""A tensor, its name, or ``"model.py:12"``: every tensor made at that line."""


class Computed(NamedTuple):
    """A tensor at the moment it has been computed."""

    tensor: Tensor  # the tensor; ``.source`` is the user's file and line
    value: np.ndarray  # its whole array
    inputs: Mapping[Tensor, np.ndarray]  # those of its operation: tensor -> whole array

    def __str__(self) -> str:
        t, x = self.tensor, self.value
        head = f"{t.name} {t.dtype}{t.shape}, {t.source.short}:"
        if x.size <= 8:
            return f"{head} {np.array2string(x, separator=', ', max_line_width=10**6)}"
        finite = x[np.isfinite(x)] if x.dtype.kind == "f" else x
        if not finite.size:
            return f"{head} no finite element"
        lost = x.size - finite.size
        return f"{head} min {finite.min():.6g}, mean {finite.mean():.6g}, max {finite.max():.6g}" + (
            f", {lost} not finite" if lost else ""
        )


def needed_tensors(graph: Graph, wanted: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that ``wanted`` depend on and they themselves, in graph order."""
    return [t for operation in needed_operations(graph, wanted) for t in operation.outputs]


def lowered_with_values(
    graph: Graph,
    mesh: MeshShape,
    layout: Layout,
    fetches: Mapping[str, Tensor],
    updates: Sequence[Update],
    storage: Layout | None,
    seed: int,
) -> tuple[Program, dict[Tensor, int]]:
    """The unoptimised program, and for each tensor that is computed the value that it is.

    Lowering is deterministic: with everything fetched, operations get the same numbers.
    """
    tensors = needed_tensors(graph, [*fetches.values(), *(u.value for u in updates)])
    everything = lower(graph, mesh, layout, {t.name: t for t in tensors}, (), storage, seed)
    values = {t: everything.fetches[t.name] for t in tensors}
    return lower(graph, mesh, layout, fetches, updates, storage, seed), values


def of_one_rank(
    graph: Graph, fetches: Mapping[str, Tensor], updates: Sequence[Update], seed: int
) -> tuple[Program, dict[Tensor, int]]:
    """The program that `interpret` runs, and for each tensor the value that it is.

    Its mesh of one rank has all the axes that constraints and storage layouts name.
    """
    layouts = [o.layout for o in graph.operations if isinstance(o, Constrain)]
    layouts += [v.storage for v in graph.variables.values() if v.storage is not None]
    axes = dict.fromkeys(a for layout in layouts for rule in layout for a in rule.axes)
    mesh = MeshShape(dict.fromkeys(axes, 1) or {"all": 1})
    return lowered_with_values(graph, mesh, Layout(), fetches, updates, None, seed)


@checked
def interpret(
    graph: Graph,
    feeds: Mapping[str, Any] | None = None,
    fetches: Sequence[Tensor] | Mapping[str, Tensor] | None = None,
    *,
    updates: Sequence[Update] = (),
    variables: Mapping[str, Any] | None = None,
    float64: bool = False,
    seed: int = 0,
    step: int = 0,
    prints: Sequence[Place] = (),
    breakpoints: Sequence[Place] | Mapping[Place, Callable[[Computed], Any]] = (),
    check_finite: bool = False,
) -> dict[Any, np.ndarray]:
    """Computes a graph op by op in this process; you may look at any tensor on the way.

    Args:
        graph: What to compute.
        feeds: Placeholder name -> array of the global shape.
        fetches: Tensors wanted; default: those of `mm.plan`.
        updates: Updates whose new values are wanted too, under the variables' names.
        variables: Name -> value at the start; default: by initializers and ``seed``.
        float64, seed, step: Whether to compute all floats in float64; of random numbers.
        prints: Places whose tensors are printed: a tensor, its name, or ``"model.py:12"``, its line.
        breakpoints: Places at which `breakpoint()` is called; or place -> function of a `Computed`.
        check_finite: Raise if a tensor is not finite though its inputs are.

    Returns:
        Tensor (and fetch or variable name) -> whole array.

    Raises:
        RangeError: ``check_finite`` found something.
        ShapeError, FeedError: No tensor was made at a place; a feed is missing or has another shape.

    Example:
        >>> import meshmpi as mm
        >>> with mm.Graph() as graph:
        ...     x = mm.placeholder("x", "a:2")
        ...     y = mm.square(x)
        >>> interpret(graph, {"x": [1, 3]}, [y])[y].tolist()
        [1.0, 9.0]
    """
    named = named_fetches(graph, fetches)
    program, values = of_one_rank(graph, named, updates, seed)
    watchers = _watchers(list(values), prints, breakpoints)
    out: dict[Any, np.ndarray] = {}
    wanted = list(named.values())
    for computed in run(widened(program) if float64 else program, values, feeds or {}, variables, step):
        t = computed.tensor
        if check_finite:
            _check_finite(computed)
        for watch in watchers.get(t, ()):
            watch(computed)
        if t in wanted:
            out[t] = computed.value
        for u in updates:
            if u.value is t:
                out[u.variable.name] = computed.value.transpose([t.shape.position(n) for n in u.variable.shape.names])
    out.update({name: out[t] for name, t in named.items()})
    return out


def run(
    program: Program,
    values: dict[Tensor, int],
    feeds: Mapping[str, Any],
    variables: Mapping[str, Any] | None,
    step: int,
    observe: Callable[[Any, list, list], None] | None = None,
    instead: Mapping[Tensor, np.ndarray] | None = None,
) -> Iterator[Computed]:
    """Runs what `of_one_rank` returns; yields every tensor in the order of the graph.

    ``observe`` is called with each instruction, its inputs and results; values ``instead`` take the place of
    computed ones, once these have been yielded.
    """
    waiting, arrays = [*reversed(values)], dict[int, np.ndarray]()
    left = Counter(v for i in program.instructions for v in i.inputs)
    left.update(values[x] for t in values for x in (t, *t.operation.inputs))
    start = initial_variables(program, variables)

    def used(v: int) -> None:
        left[v] -= 1
        if not left[v]:
            del arrays[v]

    for i in program.instructions:
        ins = [arrays[v] for v in i.inputs]
        if isinstance(i.attrs, Write):
            results = []
        elif isinstance(i.attrs, Feed):
            results = [fed(program, i.attrs.name, feeds)]
        elif isinstance(i.attrs, Read):
            results = [start[i.attrs.variable]]
        else:
            results = evaluate(i, program, ins, step)
        if observe is not None:
            observe(i, ins, results)
        arrays.update(zip(i.outputs, results, strict=True))
        while waiting and values[waiting[-1]] in arrays:
            t = waiting.pop()
            yield Computed(t, arrays[values[t]], {x: arrays[values[x]] for x in t.operation.inputs})
            if instead is not None and t in instead:
                arrays[values[t]] = instead[t]
            for x in (t, *t.operation.inputs):
                used(values[x])
        for v in i.inputs:
            used(v)
    assert not waiting, f"{waiting[-1]} was not computed"


def fed(program: Program, name: str, feeds: Mapping[str, Any]) -> np.ndarray:
    """The array of a feed, checked, in the type of the program."""
    t = program.feeds[name]
    if name not in feeds:
        raise FeedError(f"placeholder '{name}' {t.dtype}{t.shape} is not fed.", "Give its array.")
    array = np.asarray(feeds[name])
    if array.shape != t.shape.sizes:
        raise FeedError(
            f"feed '{name}' has shape {array.shape}, the placeholder {t.shape}.", "Give the array of the global shape."
        )
    return array.astype(numpy_dtype(t.dtype), order="C")


def initial_variables(program: Program, given: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
    """Name -> whole first value, in the type of the program; ``given`` ones instead of others."""
    store = VariableStore(SimulatedMesh(program.mesh), [0])
    for variable in program.variables.values():
        store.add(variable, program.seed)
    if given:
        store.assign({n: a for n, a in given.items() if n in program.variables})
    return {name: store[name] for name in program.variables}


# -- places ----------------------------------------------------------------------------------------


def at_place(tensors: Sequence[Tensor], place: Place) -> list[Tensor]:
    """The tensors that a place means; ShapeError with the nearest place where there is none."""
    if isinstance(place, Tensor):
        found = [t for t in tensors if t is place]
    else:
        found = [t for t in tensors if place in (t.name, t.source.short, f"{t.source.file}:{t.source.line}")]
    if found:
        return found
    known = [*(t.name for t in tensors), *(t.source.short for t in tensors)]
    name = place.name if isinstance(place, Tensor) else place
    raise ShapeError(
        f"no tensor that is computed is called '{name}' or was made there.", suggest(name, list(dict.fromkeys(known)))
    )


def _watchers(
    tensors: Sequence[Tensor],
    prints: Sequence[Place],
    breakpoints: Sequence[Place] | Mapping[Place, Callable[[Computed], Any]],
) -> dict[Tensor, list[Callable[[Computed], Any]]]:
    if isinstance(prints, (str, Tensor)):
        prints = [prints]
    if isinstance(breakpoints, (str, Tensor)):
        breakpoints = [breakpoints]
    calls: list[tuple[Place, Callable[[Computed], Any]]] = [(p, print) for p in prints]
    for p in breakpoints:
        calls.append((p, breakpoints[p] if isinstance(breakpoints, Mapping) else _stop))
    out: dict[Tensor, list[Callable[[Computed], Any]]] = {}
    for place, call in calls:
        for t in at_place(tensors, place):
            out.setdefault(t, []).append(call)
    return out


def _stop(computed: Computed) -> None:
    print(computed)
    builtins.breakpoint()  # noqa: T100 - what the user asked for


def _is_finite(x: np.ndarray) -> np.ndarray:
    return np.isfinite(x.astype(np.float64))


def _check_finite(computed: Computed) -> None:
    t, x = computed.tensor, computed.value
    bad = np.argwhere(~_is_finite(x))
    if not len(bad) or not all(_is_finite(a).all() for a in computed.inputs.values()):
        return
    first = ", ".join(f"{n}={k}" for n, k in zip(t.shape.names, map(int, bad[0]), strict=True))
    before = "; ".join(f"{u.name} in [{a.min():.6g}, {a.max():.6g}]" for u, a in computed.inputs.items() if a.size)
    how_many = "1 element that is" if len(bad) == 1 else f"{len(bad)} elements that are"
    raise RangeError(
        f"tensor {t.name} {t.shape} has {how_many} not finite, the first {x[tuple(bad[0])]} at [{first}].",
        f"Its inputs are finite: {before}." if before else "It has no inputs.",
        str(t.source),
    )


# ---- in float64 ----------------------------------------------------------------------------------


def widened(program: Program) -> Program:
    """``program`` with every floating-point value, feed and variable in float64.

    Layouts, collectives and the decisions of passes stay, so a difference beyond float64 rounding is a
    mistake.  Random numbers are drawn in their own type first: those of another type are others.
    """
    numbers = [*program.types, *(v for i in program.instructions for v in i.inner_types())]
    fresh = iter(range(max(numbers, default=-1) + 1, 1 << 62))
    types = {v: _wide(t) for v, t in program.types.items()}
    instructions = _all(program.instructions, program.types, types, fresh)
    return replace(
        program,
        types=types,
        instructions=tuple(instructions),
        variables={n: replace(v, type=_wide(v.type)) for n, v in program.variables.items()},
        feeds={n: _wide(t) for n, t in program.feeds.items()},
    )


def _wide(t: LocalType) -> LocalType:
    return replace(t, dtype="float64") if t.dtype in FLOATS else t


def _all(
    instructions: Iterable[Instruction], old: Mapping[int, LocalType], types: dict[int, LocalType], fresh: Iterator[int]
) -> list[Instruction]:
    """The instructions in float64; types of values made on the way are added to ``types``."""
    out: list[Instruction] = []
    for i in instructions:
        if isinstance(i.attrs, Map):
            # Numbers stay exact: a float literal is what the user wrote.
            steps = [s._replace(dtype="float64") if s.dtype in FLOATS else s for s in i.attrs.expr.steps]
            i = i.replaced(expr=i.attrs.expr._replace(steps=tuple(steps)))
        elif isinstance(i.attrs, Region):
            inner = {v: _wide(t) for v, t in i.attrs.inner.items()}
            body = _all(i.attrs.body, {**old, **i.attrs.inner}, inner, fresh)
            i = i.replaced(body=tuple(body), inner=inner)
        elif isinstance(i.attrs, Random) and old[i.outputs[0]].dtype != "float64":
            drawn = next(fresh)
            types[drawn] = old[i.outputs[0]]
            out.append(i.replaced(outputs=(drawn,)))
            i = Instruction(Map(scalar.call("cast", 1, "float64")), (drawn,), i.outputs, i.source)
        out.append(i)
    return out
