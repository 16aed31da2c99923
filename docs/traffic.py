"""What examples send, found by lowering them; for docs/ops.md."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import meshmpi as mm
from docs.traffic_examples import TENSORS, Combination
from meshmpi.ir.scalar import FLOATS

ONE_AXIS, TWO_AXES = "rows:2", "rows:2;cols:2"
NOTHING = "nothing"


class Traffic(NamedTuple):
    """What one example makes and sends.

    Attributes:
        inputs: Shapes of the tensors it uses, by name.
        results: Shapes of its results.
        forward: Dim -> what is sent when that dim is split.
        backward: The same for results and gradients of everything that has one; None where nothing
            has.
    """

    inputs: dict[str, str]
    results: list[str]
    forward: dict[str, str]
    backward: dict[str, str] | None


def _used_names(code: types.CodeType) -> set[str]:
    """Global names, those inside lambdas too."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _used_names(constant)
    return names


class _Built(NamedTuple):
    graph: mm.Graph
    inputs: dict[str, mm.Tensor]
    results: list[mm.Tensor]
    gradients: list[mm.Tensor]


def _build(code: str) -> _Built:
    """Evaluates an expression in a new graph, with gradients of all that it is made of."""
    compiled = compile(code, f"<example {code}>", "eval")
    used = _used_names(compiled)
    with mm.Graph() as graph:
        names: dict[str, Any] = {n: getattr(mm, n) for n in dir(mm) if not n.startswith("_")}
        names |= {d: mm.Dimension(d, size) for d, size in (("a", 8), ("b", 12), ("c", 16))}
        names["D"] = mm.Dimension
        inputs = {n: mm.placeholder(n, *TENSORS[n]) for n in TENSORS if n in used}
        if "v" in used:
            inputs["v"] = mm.get_variable("v", TENSORS["w"][0])
        results = list(_tensors(eval(compiled, {**names, **inputs})))
        made = [t for v in graph.trainable_variables for t in v._reads.values()]
        sources = [t for t in dict.fromkeys([*inputs.values(), *made]) if t.dtype in FLOATS]
        ys = [y for y in results if y.dtype in FLOATS and y not in sources]
        dys = [mm.placeholder(f"_dy_{k}", y.shape, y.dtype) for k, y in enumerate(ys)]
        found = mm.gradients(ys, sources, dys) if ys and sources else []
    return _Built(graph, inputs, results, [g for g in found if g is not None])


def _tensors(result: Any) -> Iterator[mm.Tensor]:
    if isinstance(result, mm.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for part in result:
            yield from _tensors(part)


@cache
def traffic(code: str) -> Traffic:
    """What an example sends for each dim split alone over an axis of two ranks."""
    built = _build(code)
    dims = [
        n
        for n in built.graph.dim_names
        if not n.startswith("_") and any(t.shape.find(n) >= 0 for t in _shown(built))
    ]
    both = [*built.results, *built.gradients]
    return Traffic(
        {name: str(t.shape) for name, t in built.inputs.items()},
        [str(t.shape) for t in built.results],
        {d: _sent(built.graph, f"{d}:rows", built.results) for d in dims},
        {d: _sent(built.graph, f"{d}:rows", both) for d in dims} if built.gradients else None,
    )


def _shown(built: _Built) -> list[mm.Tensor]:
    """Tensors whose dims a reader sees: inputs, results, variables."""
    reads = [t for v in built.graph.variables.values() for t in v._reads.values()]
    return [*built.inputs.values(), *built.results, *reads]


def _sent(
    graph: mm.Graph, layout: str, fetches: list[mm.Tensor], mesh: str = ONE_AXIS, storage: str = ""
) -> str:
    """Collectives of a program: kind, axes where there are several, elements per rank."""
    wanted = list(dict.fromkeys(fetches))
    plan = mm.plan(graph, mesh, layout, fetches=wanted, updates=[], storage=storage)
    parts = []
    for kind, table in plan.program.values().items():
        for axes, elements in table.items():
            over = "" if mesh == ONE_AXIS else f" over {axes}"
            if not elements:  # every rank has what it needs
                continue
            parts.append(f"{kind}{over} {elements:,}")
    return ", ".join(parts) or NOTHING


def combined(example: Combination) -> str:
    """What a combination of splits sends."""
    built = _build(example.code)
    return _sent(built.graph, example.layout, built.results, TWO_AXES, example.storage)


def by_dims(sent: dict[str, str]) -> str:
    """Dims with the same traffic together: ``a, c: nothing; b: all_reduce 128``."""
    groups: dict[str, list[str]] = {}
    for dim, text in sent.items():
        groups.setdefault(text, []).append(dim)
    if list(groups) == [NOTHING] or not groups:
        return NOTHING
    busy = {text: dims for text, dims in groups.items() if text != NOTHING}
    text = "; ".join(f"**{', '.join(dims)}**: {text}" for text, dims in busy.items())
    return text + (f"; {', '.join(groups[NOTHING])}: {NOTHING}" if NOTHING in groups else "")
