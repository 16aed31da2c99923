"""One trial: a random graph on a random mesh in a random layout, compared with the oracle.

How far a right program may be from the oracle is taken from the graph itself: the one-rank,
unoptimised program on NumPy kernels makes the same roundings as any other, and how far it is from
float64 says how much the graph amplifies them.  A wrong block, mask or sum is off by far more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.compiler.lowering import placement
from meshmpi.compiler.passes import messages, tiled_regions
from meshmpi.compiler.passes.tiled_regions import form_tiled_regions
from meshmpi.dims import Axes, MeshShape
from meshmpi.errors import ConfigError, LayoutError
from meshmpi.graph import Tensor
from tests import oracle
from tests.fuzz.graphs import Fuzzed, Random, random_graph
from tests.layouts import as_text, legal, options, tensor_dims
from tests.ops.run import bytes_counted, check_cost, result_array

SEED = 5
TRAINING_STEPS = 2
FLOOR = {"float64": 1e-10, "float32": 2e-5, "bfloat16": 4e-2}
"""Least tolerance by type of the activations, relative to the largest magnitude and 1."""
LAYOUTS_TRIED = 5
"""Constraints of a graph may contradict a layout; then another one is tried."""
AMPLIFIED = 16
"""Tolerance over the error of the one-rank program; ranks add up in other orders."""
HOPELESS = {"float64": 1e-6, "float32": 2e-2, "bfloat16": 0.3}
"""A one-rank error beyond which the graph is not compared: it amplifies rounding too much."""


@dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    Attributes:
        verdict: "right", "refused" (a layout that contradicts constraints; a memory limit too
            small), "hopeless" (the graph amplifies rounding), or "wrong".
        what: Graph, mesh, layout, options and, when wrong, the first difference.
    """

    verdict: str
    what: str


Values = dict[str, np.ndarray]


def trial(number: int, ranks: int, mesh: Any = None, kernels: str = "") -> Outcome:
    """Runs trial ``number``.

    Args:
        number: The seed of everything that is chosen.
        ranks: Of the mesh.
        mesh: Axis sizes -> a real mesh; default a `mm.SimulatedMesh`.
        kernels: "numpy" or "native"; default: chosen by the number.
    """
    choose = Random(number)
    shape = random_mesh(choose, ranks)
    made = random_graph(choose, shape)
    wanted: dict[str, Any] = {"optimize": choose.chance(0.8), "kernels": kernels or choose.one(["numpy", "native"])}
    tile = choose.one([64, 256, 1024]) if choose.chance(0.4) else None
    storage = choose.chance(0.25)
    if wanted["optimize"] and choose.chance(0.2):
        wanted["overlap"] = True
    if wanted["optimize"] and choose.chance(0.15):
        wanted["memory_limit"] = choose.one([0.6, 0.8, 0.95])
    shared = mm.MeshShape(shape).names if number % 3 == 0 else ()  # real ranks of a host share memory anyway
    on = mm.SimulatedMesh(shape, shared) if mesh is None else mesh(shape)
    try:
        for _ in range(LAYOUTS_TRIED):
            layout = random_layout(choose, made, shape)
            if storage:
                wanted["storage"] = random_layout(choose, made, shape)
            what = f"{made.dtype} mesh {shape} layout '{layout}' {wanted}"
            what += f" tile {tile}: {', '.join(made.steps)}"
            try:
                with tiles_of(tile):
                    return _compared(made, on, layout, dict(wanted), f"trial {number}: {what}")
            except LayoutError as e:
                refused = Outcome("refused", f"trial {number}: {what}\n  {e}")
        return refused
    finally:
        if mesh is not None:
            on.free()


def check(number: int, ranks: int) -> None:
    """Raises unless a trial on NumPy kernels is right; for trials that once were wrong."""
    outcome = trial(number, ranks, kernels="numpy")
    assert outcome.verdict == "right", outcome.what


@contextlib.contextmanager
def tiles_of(size: int | None) -> Iterator[None]:
    """Lets tiles and messages be small, as tensors are here, so that large ones' passes act."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "SMALLEST_BYTES", 1)
        if size is not None:
            patch.setattr(form_tiled_regions, "__defaults__", (size,))
            patch.setattr(tiled_regions, "LEAST_ROWS", 2)
            patch.setattr(tiled_regions, "LEAST_BAND_ROWS", 2)
            patch.setattr(messages, "SMALLEST_BYTES", 1)
        yield


def _compared(made: Fuzzed, mesh: Any, layout: str, wanted: dict, what: str) -> Outcome:
    alone = mm.SimulatedMesh(dict.fromkeys(mesh.shape.names, 1))
    reference = _compiled(made, alone, "", {"optimize": False, "kernels": "numpy"})
    start = {n: reference.variables[n] for n in reference.program.variables}
    right = _oracle(made, start)
    one_rank = _run(made, reference, None)
    tolerance = {}
    for name, want in right.items():
        error = _distance(one_rank[name], want)
        if error > HOPELESS[made.dtype]:
            return Outcome("hopeless", f"{what}\n  {name}: {error:.2g} on one rank")
        tolerance[name] = max(FLOOR[made.dtype], AMPLIFIED * error)
    limit = wanted.pop("memory_limit", None)
    if limit is not None:
        held = _compiled(made, mesh, layout, wanted).cost.peak_memory
        wanted["memory_limit"] = max(1, int(limit * held))
    try:
        step = _compiled(made, mesh, layout, wanted)
    except ConfigError as e:
        if limit is None:
            raise
        return Outcome("refused", f"{what}\n  {e}")
    got = _run(made, step, mesh if wanted["kernels"] == "numpy" else None)
    for name, want in right.items():
        error = _distance(got[name], want)
        if not error <= tolerance[name]:
            where = f"{name} {want.shape}: {error:.3g}, at most {tolerance[name]:.3g}"
            return Outcome("wrong", f"{what}\n  {where}")
    return Outcome("right", what)


def _compiled(made: Fuzzed, mesh: Any, layout: str, wanted: dict) -> Any:
    return mm.compile(made.graph, mesh, layout, fetches=made.fetches, updates=made.updates, seed=SEED, **wanted)


def _key(k: int, t: Tensor) -> str:
    return f"fetch {k} ({t.name})"


def _oracle(made: Fuzzed, start: Values) -> Values:
    """What a few steps fetch, and leave in the variables, in float64."""
    variables, out = dict(start), {}
    new = [u.value for u in made.updates]
    for step in range(TRAINING_STEPS):
        values = oracle.evaluate(made.graph, [*made.fetches, *new], made.feeds, variables, step, SEED)
        for k, t in enumerate(made.fetches):
            out[f"step {step} {_key(k, t)}"] = values[k]
        for u, value in zip(made.updates, values[len(made.fetches) :], strict=True):
            name = u.variable.name
            variables[name] = oracle.aligned(value, u.value.shape, u.variable.shape)
            out[f"step {step} variable {name}"] = variables[name]
    return out


def _run(made: Fuzzed, step: Any, counted: Any) -> Values:
    """The same by a compiled step; with ``counted``, a mesh, costs are compared too."""
    out = {}
    feeds = {n: a for n, a in made.feeds.items() if n in step.program.feeds}
    for number in range(TRAINING_STEPS):
        before = bytes_counted(counted) if counted is not None else 0
        fetched = step(feeds)
        if counted is not None:
            check_cost(step, counted, bytes_counted(counted) - before, "cost")
        for k, t in enumerate(made.fetches):
            out[f"step {number} {_key(k, t)}"] = result_array(fetched[t])
        for u in made.updates:
            name = u.variable.name
            out[f"step {number} variable {name}"] = np.asarray(step.variables[name])
    return out


def _distance(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference over the largest magnitude and 1; infinite where NaN or shapes differ."""
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    if got.shape != want.shape or not np.array_equal(np.isfinite(got), np.isfinite(want)):
        return float("inf")
    finite = np.isfinite(want)
    difference = np.abs(got[finite] - want[finite]).max(initial=0.0)
    return float(difference / max(1.0, np.abs(want[finite]).max(initial=0.0)))


def random_mesh(choose: Random, ranks: int) -> MeshShape:
    """``ranks`` ranks along one to three axes."""
    axes, left = {}, ranks
    for name in ("rows", "cols"):
        axes[name] = choose.one([n for n in range(1, left + 1) if left % n == 0])
        left //= axes[name]
    axes["planes"] = left
    kept = {n: k for n, k in axes.items() if k > 1 or choose.chance(0.2)}
    return MeshShape(kept or {"rows": ranks})


def random_layout(choose: Random, made: Fuzzed, mesh: MeshShape) -> str:
    """A layout that is legal for every tensor, were it not for constraints; most dims are split."""
    tensors, chosen = tensor_dims(made.graph), {}
    names = made.graph.dim_names
    for name in choose.some(names, 0.8):
        fitting: list[Axes] = [axes for axes in options(mesh) if legal({**chosen, name: axes}, tensors)]
        chosen[name] = choose.one(fitting)
    return as_text({n: axes for n, axes in chosen.items() if axes})
