"""Runs a built case on a mesh in one layout and compares everything it returns with the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import meshmpi as mm
from meshmpi.graph import Tensor
from meshmpi.scalar import FLOATS
from tests import oracle
from tests.ops.build import Built

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
    built: Built, steps: Sequence[Expected], mesh: object, layout: str, optimize: bool,
    forward_only: bool = False,
) -> mm.CompiledStep:  # fmt: skip
    """Compiles, runs and compares; AssertionError says what differs and in which layout."""
    compiled = compile_case(built, mesh, layout, optimize, forward_only)
    feeds = {n: a for n, a in built.feeds.items() if n in compiled.program.feeds}
    label = f"{built.case.name} layout '{layout}' optimize={optimize}"
    for number, want in enumerate(steps):
        got = compiled(feeds)
        for t in fetched(built, forward_only):
            what = f"{label}, step {number}: {t.name} {t.shape}"
            compare(result_array(got[t]), want.fetches[t], t.dtype, built.case.tolerance, what)
        for name in [u.variable.name for u in built.updates]:
            dtype = built.graph.variables[name].dtype
            what = f"{label}, step {number}: variable {name}"
            compare(compiled.variables[name], want.variables[name], dtype, built.case.tolerance, what)
    return compiled


def compile_case(
    built: Built, mesh: object, layout: str, optimize: bool, forward_only: bool = False
) -> mm.CompiledStep:
    return mm.compile(
        built.graph, mesh, layout=layout, fetches=fetched(built, forward_only),
        updates=built.updates, optimize=optimize, kernels="numpy", seed=SEED,
    )  # fmt: skip


def result_array(value: object) -> np.ndarray:
    """The global array of a fetched value."""
    return value.numpy() if isinstance(value, mm.ShardedArray) else np.asarray(value)


def compare(
    got: np.ndarray, want: np.ndarray, dtype: str, tolerance: float, what: str
) -> None:
    """Exact for integers and bools; else within ``tolerance`` of the largest finite magnitude."""
    got = np.asarray(got)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    if dtype not in FLOATS:
        assert np.array_equal(got, want), f"{what}:\n{got}\nexpected\n{want}"
        return
    got = got.astype(np.float64)
    finite = np.isfinite(want)
    size = max(1.0, float(np.max(np.abs(want[finite]), initial=0.0)))
    assert np.array_equal(np.where(finite, 0, got), np.where(finite, 0, want), equal_nan=True), (
        f"{what}: NaN or infinity differ:\n{got}\nexpected\n{want}"
    )
    error = float(np.max(np.abs(got[finite] - want[finite]), initial=0.0)) / size
    assert error <= tolerance, f"{what}: error {error:.2e} > {tolerance:.0e}\n{got}\nexpected\n{want}"


def gradient_errors(built: Built, rng: np.random.Generator) -> Mapping[str, float]:
    """Name -> relative difference of <v, gradient> from the oracle's central difference along v."""
    assert built.loss is not None
    values = oracle.evaluate(
        built.graph, list(built.gradients.values()), built.feeds, built.variables, 0, SEED
    )
    out = {}
    for (name, g), value in zip(built.gradients.items(), values, strict=True):
        assert g.shape == built.sources[name].shape, f"gradient of {name} has dims {g.shape}"
        v = rng.standard_normal(value.shape)
        want = oracle.directional_derivative(
            built.graph, built.loss, name, v, built.feeds, built.variables
        )
        out[name] = abs(float(np.sum(v * value)) - want) / max(1.0, abs(want))
    return out
