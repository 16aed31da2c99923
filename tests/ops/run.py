"""Runs a built case on a mesh in one layout and compares everything it returns with the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import meshmpi as mm
from meshmpi.compiler.cost import bytes_by_collective
from meshmpi.graph import Tensor
from meshmpi.ir.scalar import FLOATS
from tests import oracle
from tests.ops.build import Built

if TYPE_CHECKING:
    from meshmpi.runtime.compiled import CompiledStep

SEED = 11


@dataclass
class Expected:
    """What one step must return, and leave in the variables."""

    fetches: dict[Tensor, np.ndarray]
    variables: dict[str, np.ndarray]


def fetched(built: Built, forward_only: bool) -> list[Tensor]:
    return built.outputs if forward_only else [*built.outputs, *built.gradients.values()]


def expected(built: Built) -> list[Expected]:
    """The oracle's answer for each step worth running: two where a step leaves something behind."""
    stateful = {"Random", "StepNumber"} & {type(o).__name__ for o in built.graph.operations}
    steps, variables = [], dict(built.variables)
    wanted = fetched(built, forward_only=False)
    new = [u.value for u in built.updates]
    for step in range(2 if stateful or built.updates else 1):
        values = oracle.evaluate(built.graph, wanted + new, built.feeds, variables, step, SEED)
        for u, value in zip(built.updates, values[len(wanted) :], strict=True):
            variables[u.variable.name] = oracle.aligned(value, u.value.shape, u.variable.shape)
        fetches = dict(zip(wanted, values[: len(wanted)], strict=True))
        steps.append(Expected(fetches, dict(variables)))
    return steps


def check(
    built: Built, steps: Sequence[Expected], mesh: Any, layout: str, optimize: bool, forward_only: bool = False
) -> CompiledStep:
    """Compiles, runs and compares; AssertionError says what differs and in which layout."""
    compiled = compile_case(built, mesh, layout, optimize, forward_only)
    feeds = {n: a for n, a in built.feeds.items() if n in compiled.program.feeds}
    label = f"{built.case.name} layout '{layout}' optimize={optimize}"
    for number, want in enumerate(steps):
        before = bytes_counted(mesh)
        got = compiled(feeds)
        check_cost(compiled, mesh, bytes_counted(mesh) - before, label)
        for t in fetched(built, forward_only):
            what = f"{label}, step {number}: {t.name} {t.shape}"
            compare(result_array(got[t]), want.fetches[t], t.dtype, built.case.tolerance, what)
        for name in [u.variable.name for u in built.updates]:
            dtype = built.graph.variables[name].dtype
            what = f"{label}, step {number}: variable {name}"
            compare(compiled.variables[name], want.variables[name], dtype, built.case.tolerance, what)
    return compiled


def bytes_counted(mesh: Any) -> int:
    """Bytes that the collectives of this process's first rank have sent, as the mesh counts."""
    counters = mesh.counters[0] if isinstance(mesh.counters, list) else mesh.counters
    return sum(row[2] for table in counters.values() for row in table.values())


def check_cost(compiled: CompiledStep, mesh: Any, sent: int, label: str) -> None:
    """What was predicted is what happened: bytes and FLOP on each rank, memory on rank 0.

    The prediction for the whole mesh is the most that any rank has.
    """
    cost = compiled.cost
    here = mesh.shape.coordinates(mesh.rank)
    tables = bytes_by_collective(compiled.program, here).values()
    expected = sum(n for table in tables for n in table.values())
    assert sent == expected <= cost.bytes_sent, (
        f"{label}: {sent} bytes sent, {expected} predicted for rank {mesh.rank} and {cost.bytes_sent} for the busiest"
    )
    if mesh.rank == 0:
        if "shift" not in cost.bytes_by:
            assert sent == cost.bytes_sent, f"{label}: {sent} bytes, {cost.bytes_sent} predicted"
        held = compiled._executor.states[0].held_memory
        assert held == dict(cost.memory), f"{label}: {held} held, {cost.memory} predicted"
    flops, own = sum(compiled.counted_flops.values()), compiled.cost_of(mesh.rank).flops
    assert flops == own * compiled.step_number, f"{label}: {flops} FLOP, not {own}"
    assert own <= cost.flops, f"{label}: {own} FLOP, {cost.flops} of the busiest rank"


def compile_case(built: Built, mesh: Any, layout: str, optimize: bool, forward_only: bool = False) -> CompiledStep:
    return mm.compile(
        built.graph,
        mesh,
        layout=layout,
        fetches=fetched(built, forward_only),
        updates=built.updates,
        optimize=optimize,
        kernels="numpy",
        seed=SEED,
    )


def result_array(value: object) -> np.ndarray:
    """The global array of a fetched value."""
    return value.numpy() if isinstance(value, mm.ShardedArray) else np.asarray(value)


def compare(got: np.ndarray, want: np.ndarray, dtype: str, tolerance: float, what: str) -> None:
    """Exact for integers and bools; else within ``tolerance`` of the largest finite magnitude."""
    got = np.asarray(got)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    if dtype not in FLOATS:
        assert np.array_equal(got, want), f"{what}: {_difference(got, want, got != want)}"
        return
    got = got.astype(np.float64)
    finite = np.isfinite(want)
    size = max(1.0, float(np.max(np.abs(want[finite]), initial=0.0)))
    special = ~np.isclose(got, want, equal_nan=True) & ~(finite & np.isfinite(got))
    assert not special.any(), f"{what}: {_difference(got, want, special)}"
    error = np.abs(np.where(finite, got, 0) - np.where(finite, want, 0)) / size
    assert error.max(initial=0.0) <= tolerance, f"{what}: {_difference(got, want, error > tolerance)}"


def _difference(got: np.ndarray, want: np.ndarray, wrong: np.ndarray) -> str:
    """How many elements are wrong, and the first of them."""
    first = tuple(int(k) for k in np.argwhere(wrong)[0])
    values = f"{got[first]!r}, expected {want[first]!r}"
    return f"{wrong.sum()} of {wrong.size} differ, at {first}: {values}"


def gradient_errors(built: Built, rng: np.random.Generator) -> Mapping[str, float]:
    """Name -> relative difference of <v, gradient> from the oracle's central difference along v."""
    assert built.loss is not None
    values = oracle.evaluate(built.graph, list(built.gradients.values()), built.feeds, built.variables, 0, SEED)
    out = {}
    for (name, g), value in zip(built.gradients.items(), values, strict=True):
        assert g.shape == built.sources[name].shape, f"gradient of {name} has dims {g.shape}"
        v = rng.standard_normal(value.shape)
        want = oracle.directional_derivative(built.graph, built.loss, name, v, built.feeds, built.variables, 0, SEED)
        out[name] = abs(float(np.sum(v * value)) - want) / max(1.0, abs(want))
    return out
