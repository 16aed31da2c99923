"""Every row of the table, in its legal layouts, against the oracle.

The 2x3 mesh exposes swapped axes; uneven sizes expose wrong blocks (some are empty); the mesh of
three axes exposes what two hide.
"""

from __future__ import annotations

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.errors import LayoutError
from tests.layouts import legal_layouts
from tests.ops.build import EVEN, UNEVEN, Case, build
from tests.ops.cases import CASES
from tests.ops.run import SEED, check, compile_case, expected, gradient_errors

MESHES = {"2x3": "rows:2;cols:3", "2x2x2": "rows:2;cols:2;planes:2"}
PARTS = {
    "few": ("2x3", "uneven", 0, 6),
    "2x3-uneven": ("2x3", "uneven", 6, 16),
    "2x2x2-uneven": ("2x2x2", "uneven", 1, 7),
    "2x3-even": ("2x3", "even", 1, 5),
}
"""Mesh, sizes, first and last layout of the list in which those that cover most pairs of choices come first.
Most rows have 11 to 19 on the 2x3 mesh.  `make test` runs the first part."""
SIZES = {"even": EVEN, "uneven": UNEVEN}


@pytest.mark.parametrize("case", [c for c in CASES if c.smooth and c.gradients], ids=lambda c: c.name)
def test_gradient_is_the_central_difference(case: Case):
    built = build(case, UNEVEN)
    if built.loss is None:  # integers and bools
        return
    for name, error in gradient_errors(built, np.random.default_rng(3)).items():
        assert error < 1e-6, f"{case.name}: gradient of {name} is off by {error:.2e}"


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_case_in_legal_layouts(case: Case, part: str):
    mesh, sizes, first, last = PARTS[part]
    built = build(case, SIZES[sizes])
    simulated = mm.SimulatedMesh(MESHES[mesh])
    layouts = legal_layouts(built.graph, simulated.shape, min(last, case.limit))[first:]
    steps = expected(built) if layouts else []
    refused = 0
    for n, layout in enumerate(layouts):
        try:
            check(built, steps, simulated, layout, optimize=True)
        except LayoutError:
            refused += 1
            continue
        if n % 2 == 0:
            check(built, steps, simulated, layout, optimize=False)
        if n % 6 == 1:  # programs without gradients, too: other values die, other passes act
            check(built, steps, simulated, layout, optimize=True, forward_only=True)
    assert not refused or (case.refuses and refused <= len(layouts) * 0.8), f"{refused} refused"


def test_every_elementwise_function_has_a_row():
    from meshmpi.ir.scalar import SCALAR_FUNCTIONS

    used = {o.function for case in CASES for o in build(case, UNEVEN).graph.operations if hasattr(o, "function")}
    assert [f for f in SCALAR_FUNCTIONS if f not in used] == []


def test_every_primitive_has_a_row():
    from meshmpi.graph import Operation
    from tests.oracle import _RULES

    def subclasses(c: type) -> list[type]:
        return [s for d in c.__subclasses__() for s in (d, *subclasses(d))]

    known = [c.__name__ for c in subclasses(Operation) if c.__module__.startswith("meshmpi.")]
    used = {type(o).__name__ for case in CASES for o in build(case, UNEVEN).graph.operations}
    assert [n for n in known if n not in used] == []
    assert [n for n in known if n not in _RULES] == []
    assert len(known) <= 26  # primitives stay few; the rest is composed


def test_the_same_layout_twice_is_bit_identical():
    built = build(next(c for c in CASES if c.name == "attention_by_hand"), UNEVEN)
    mesh, layout = mm.SimulatedMesh(MESHES["2x3"]), "a:rows;c:cols"
    runs = [compile_case(built, mesh, layout, True) for _ in range(2)]
    assert runs[0].program.text() == runs[1].program.text()
    for t, value in runs[0](built.feeds).items():
        again = runs[1](built.feeds)[t].numpy()
        assert np.array_equal(value.numpy(), again)


def test_another_seed_gives_other_numbers_and_every_layout_the_same():
    with mm.Graph() as graph:
        u = mm.random_uniform("a:5;b:7")
        w = mm.get_variable("w", "a:5;b:7", initializer=mm.truncated_normal_initializer(stddev=0.1))
    first = None
    mesh = mm.SimulatedMesh(MESHES["2x3"])
    for layout in legal_layouts(graph, mesh.shape):
        step = mm.compile(graph, mesh, layout=layout, fetches=[u, w], seed=SEED)
        values = [step()[t].numpy() for t in (u, w)]
        first = first or values
        assert all(np.array_equal(a, b) for a, b in zip(values, first, strict=True)), layout
        assert not np.array_equal(step()[u].numpy(), values[0]), "the same numbers at every step"
    other = mm.compile(graph, mesh, layout="", fetches=[u, w], seed=SEED + 1)()
    assert not np.array_equal(other[u].numpy(), first[0])
    assert not np.array_equal(other[w].numpy(), first[1])
