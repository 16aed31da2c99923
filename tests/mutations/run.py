"""Runs the fast part of the table under a mutation and tells what noticed it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

import meshmpi as mm
from apps.matmul.formulas import Sizes
from apps.matmul.measure import measure
from meshmpi.errors import LayoutError, MeshmpiError
from meshmpi.ir.program import Violation
from meshmpi.kernels.native import available
from tests.layouts import legal_layouts
from tests.mutations.registry import Mutation
from tests.ops.build import EVEN, UNEVEN, Built, build
from tests.ops.cases import CASES
from tests.ops.run import Expected, check, compare, expected, gradient_errors, result_array

FAST = [
    "softmax_by_hand",
    "sum_of_two_products",
    "divide_union",
    "tanh",
    "matmul_transposed",
    "einsum_of_three",
    "reduce_max_shares_ties",
    "gather",
    "gather_along_its_own_name",
    "split",
    "top_k",
    "ranges",
    "constants",
    "random_numbers",
    "rename",
    "reshape_divides_dims",
    "swap_of_variables",
    "step_number",
    "stop_gradient",
    "slots_stored_elsewhere",
    "constrained_and_released",
    "replace_dimensions",
    "one_tensor_many_times",
    "shift",
    "two_layer_network",
]
"""Cases chosen so that most mistakes show in some; a mutation names its own case, tried first."""
EVEN_TOO = ("constrained_and_released", "rename", "slots_stored_elsewhere")
MESH = "rows:2;cols:3"
NOTICED = (AssertionError, MeshmpiError, Violation, ValueError, LookupError, pytest.fail.Exception, RuntimeWarning)
"""How a mistake shows: wrong values, counts or memory; a program, shape or array refused, or not
refused where `pytest.raises` expects it; numbers that NumPy warns of.  Others
(a name that is gone, a wrong number of arguments) are mistakes of the mutation itself."""


def _matmul_volumes() -> None:
    """Elements and bytes of a product on a 2x2x2 mesh are those worked out by hand."""
    layout = "i:rows;j:cols;k:planes"
    m = measure(Sizes(7, 11, 9), mm.SimulatedMesh("rows:2;cols:2;planes:2"), layout)
    assert all(line.agrees for line in m.lines), m.lines


CHECKS = {"matmul volumes": _matmul_volumes}
"""What may stand in place of a case in a mutation: for predictions, which no value shows."""
IN_C = " in C"
"""Ends the name of a case that shows the mistake in generated kernels only."""


class Caught(NamedTuple):
    """What noticed a mutation.

    Attributes:
        case: The row, check or test.
        kind: Of the exception, which is not kept: it would keep alive what its frames opened.
        text: Its message.
    """

    case: str
    kind: str
    text: str


def caught(mutation: Mutation) -> Caught | None:
    """The first case that notices the mutation; None where it survives all."""
    parts = list(_parts(mutation.shows_in))
    for part in parts:
        if "::" in part[0]:
            importlib.import_module(part[0].split(".py")[0].replace("/", "."))
        elif part[0] not in CHECKS:
            _wanted(*part)  # the oracle's answers, before anything is broken
    with _remains_collected(), pytest.MonkeyPatch.context() as patch:
        mutation.put(patch)
        for name, even in parts:
            try:
                run_case(name, even, thorough=name == mutation.shows_in)
            except NOTICED as e:
                return Caught(name, type(e).__name__, str(e))
    return None


@contextlib.contextmanager
def _remains_collected() -> Iterator[None]:
    """What a test left open as it failed is closed here, not told by whichever test comes next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda unraisable: None)
        try:
            yield
        finally:
            gc.collect()


def _parts(first: str = "") -> Iterator[tuple[str, bool]]:
    """(case, whether with even sizes)."""
    if first:
        yield first, False
        if not first.endswith(IN_C) and first not in CHECKS and "::" not in first:
            yield first, True
    for name in FAST:
        if name != first:
            yield name, False
    for name in EVEN_TOO:
        if name != first:
            yield name, True


def _run_test(call: str) -> None:
    """Calls a test function elsewhere: ``tests/nn/test_x.py::test_y(arguments)``."""
    file, expression = call.split("::")
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    eval(expression, vars(module))


def run_fast_part() -> None:
    """Every case of the fast part; raises where one is wrong."""
    for name, even in _parts():
        run_case(name, even)


@cache
def _case(name: str):
    return next(c for c in CASES if c.name == name)


def _built(name: str, even: bool) -> Built:
    return build(_case(name.removesuffix(IN_C)), EVEN if even else UNEVEN)


@cache
def _wanted(name: str, even: bool) -> list[list[np.ndarray]]:
    """Per step: values of the fetches in order, and the variables."""
    steps = expected(_built(name, even))
    return [[*step.fetches.values(), *step.variables.values()] for step in steps]


def run_case(name: str, even: bool, thorough: bool = False) -> None:
    """Builds the graph anew, under the mutation, and compares with the right answers.

    Args:
        name: Of the case.
        even: Whether its sizes are.
        thorough: In more layouts, each also without gradients: then more sums stay pending.
    """
    if name in CHECKS:
        CHECKS[name]()
        return
    if "::" in name:
        _run_test(name)
        return
    answers, built = _wanted(name, even), _built(name, even)
    if name.endswith(IN_C):
        run_generated(built, answers[0])
        return
    if built.case.smooth and built.loss is not None and not even:
        errors = gradient_errors(built, np.random.default_rng(3))
        assert max(errors.values()) < 1e-6, f"{name}: {errors}"
    keys = [*built.outputs, *built.gradients.values()]
    names = list(built.variables)
    steps = [
        Expected(dict(zip(keys, a, strict=False)), dict(zip(names, a[len(a) - len(names) :], strict=True)))
        for a in answers
    ]
    mesh = mm.SimulatedMesh(MESH)
    alone = name == "two_layer_network"
    for n, layout in enumerate(legal_layouts(built.graph, mesh.shape, 12 if thorough else 8)):
        try:
            check(built, steps, mesh, layout, n != 1, forward_only=alone)
            if thorough and not alone:
                check(built, steps, mesh, layout, True, forward_only=True)
        except LayoutError:
            assert built.case.refuses


def run_generated(built: Built, answers: list[np.ndarray]) -> None:
    """The outputs by generated C kernels, on one rank; skips where there is no compiler."""
    if not available():
        pytest.skip("there is no C compiler on this machine")
    step = mm.compile(built.graph, mm.SimulatedMesh("rows:1"), fetches=built.outputs, kernels="native")
    got = step({n: a for n, a in built.feeds.items() if n in step.program.feeds})
    for t, want in zip(built.outputs, answers, strict=False):
        compare(result_array(got[t]), want, t.dtype, 1e-11, f"{built.case.name} in C: {t}")
