"""Every seeded bug of tests/mutations.py is caught by a fast part of the table."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.errors import LayoutError
from tests.layouts import legal_layouts
from tests.mutations import MUTATIONS
from tests.ops.build import EVEN, UNEVEN, build
from tests.ops.cases import CASES
from tests.ops.run import Expected, check, expected, gradient_errors

FAST = [
    "softmax_by_hand", "sum_of_two_products", "divide_union", "tanh", "matmul_transposed",
    "einsum_of_three", "reduce_max_shares_ties", "gather", "gather_along_its_own_name", "split",
    "top_k", "ranges", "constants", "random_numbers", "rename", "reshape_divides_dims",
    "swap_of_variables", "step_number", "stop_gradient", "slots_stored_elsewhere",
    "constrained_and_released", "replace_dimensions", "one_tensor_many_times", "shift",
    "two_layer_network",
]  # fmt: skip
"""Cases chosen so that each mistake shows in some; quickest first is no aim."""
MESH = "rows:2;cols:3"


def test_the_fast_part_passes_without_a_mutation():
    _run()


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name: str, monkeypatch: pytest.MonkeyPatch):
    _wanted()  # the oracle's answers, before anything is broken
    MUTATIONS[name](monkeypatch)
    with pytest.raises(Exception) as caught:
        _run()
    assert not isinstance(caught.value, (ImportError, NameError, AttributeError)), caught.value


def test_there_are_enough_mutations():
    assert len(MUTATIONS) >= 30


@cache
def _wanted() -> dict[tuple[str, bool], list[Expected]]:
    return {(c, even): _answers(c, even) for c, even in _parts()}


def _parts() -> Iterator[tuple[str, bool]]:
    for name in FAST:
        yield name, False
    for name in ("constrained_and_released", "rename", "slots_stored_elsewhere"):
        yield name, True


def _case(name: str):
    return next(c for c in CASES if c.name == name)


def _answers(name: str, even: bool) -> list[list[tuple[np.ndarray, ...]]]:
    """Per step: values of the fetches in order, and the variables."""
    built = build(_case(name), EVEN if even else UNEVEN)
    return [[*step.fetches.values(), *step.variables.values()] for step in expected(built)]


def _run() -> None:
    """Builds each graph anew, under the mutation, and compares with the right answers."""
    for (name, even), answers in _wanted().items():
        built = build(_case(name), EVEN if even else UNEVEN)
        if built.case.smooth and built.loss is not None and not even:
            errors = gradient_errors(built, np.random.default_rng(3))
            assert max(errors.values()) < 1e-6, f"{name}: {errors}"
        keys = [*built.outputs, *built.gradients.values()]
        names = list(built.variables)
        steps = [
            Expected(
                dict(zip(keys, a, strict=False)),
                dict(zip(names, a[len(a) - len(names) :], strict=True)),
            )
            for a in answers
        ]
        mesh = mm.SimulatedMesh(MESH)
        layouts = legal_layouts(built.graph, mesh.shape, 9 if even else 7)
        for n, layout in enumerate(layouts):
            try:
                check(built, steps, mesh, layout, n != 1, forward_only=name == "two_layer_network")
            except LayoutError:
                assert built.case.refuses
