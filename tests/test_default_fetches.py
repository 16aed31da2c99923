"""What `mm.plan` fetches without being asked."""

from __future__ import annotations

import linecache
import warnings

import pytest

import meshmpi as mm

MESH, LAYOUT = "rows:2;cols:2", "batch:rows;hidden:cols"


def loss_of_two_layers() -> tuple[mm.Tensor, mm.Tensor]:
    """The placeholder and the loss."""
    x = mm.placeholder("x", "batch:64;io:32")
    w = mm.get_variable("w", "io:32;hidden:128")
    v = mm.get_variable("v", "hidden:128;io:32")
    h = mm.relu(mm.einsum([x, w], "batch:64;hidden:128"))
    return x, mm.reduce_mean(mm.square(mm.einsum([h, v], "batch:64;io:32")))


def sources(found: mm.Plan) -> list[str]:
    """For each fetch the name of the tensor, and of what it is the gradient."""
    program = found.program
    made = {v: i.source.name for i in program.instructions for v in i.outputs}
    return [made[v] for v in program.fetches.values()]


@pytest.mark.parametrize("given", [False, True])
def test_a_training_step_computes_no_gradient_that_nothing_uses(given: bool):
    with mm.Graph() as graph:
        _, loss = loss_of_two_layers()
        updates = mm.optimize.SGD(0.1).minimize(loss)
    found = mm.plan(graph, MESH, LAYOUT, updates=updates if given else None)
    assert loss.name in found.program.fetches
    assert not any("gradient of" in s for s in sources(found))
    trained = mm.plan(graph, MESH, LAYOUT, fetches=[loss], updates=updates)
    assert found.cost.bytes_sent == trained.cost.bytes_sent == 20_484


def test_without_its_updates_such_a_graph_is_that_of_the_loss():
    with mm.Graph() as graph:
        _, loss = loss_of_two_layers()
        mm.optimize.SGD(0.1).minimize(loss)
    found = mm.plan(graph, MESH, LAYOUT, updates=[])
    assert loss.name in found.program.fetches
    assert not any("gradient of" in s for s in sources(found))


def test_gradients_that_a_user_asks_for_are_fetched():
    with mm.Graph() as graph:
        x, loss = loss_of_two_layers()
        (dx,) = mm.gradients(loss, [x])
    assert dx is not None
    assert dx.name in mm.plan(graph, MESH, LAYOUT).program.fetches


def test_updates_without_gradients_leave_them_as_they_are():
    with mm.Graph() as graph:
        x, loss = loss_of_two_layers()
        (dx,) = mm.gradients(loss, [x])
        mean = mm.get_variable("mean", "", initializer=mm.zeros_initializer(), trainable=False)
        mm.assign(mean, 0.9 * mean + 0.1 * loss)
    assert dx is not None
    assert dx.name in mm.plan(graph, MESH, LAYOUT).program.fetches


def test_a_named_gradient_is_fetched_from_a_training_step():
    with mm.Graph() as graph:
        x, loss = loss_of_two_layers()
        (dx,) = mm.gradients(loss, [x])
        mm.optimize.SGD(0.1).minimize(loss)
    assert dx is not None
    assert dx.name not in mm.plan(graph, MESH, LAYOUT).program.fetches
    assert dx.name in mm.plan(graph, MESH, LAYOUT, fetches=[dx]).program.fetches


# ---- updates that compile() was not given --------------------------------------------------------


def compiled(**options) -> mm.Graph:
    with mm.Graph() as graph:
        _, loss = loss_of_two_layers()
        options = {k: v(loss) if callable(v) else v for k, v in options.items()}
    mm.compile(graph, mm.SimulatedMesh("a:1"), fetches=[loss], **options)
    return graph


def test_updates_that_are_left_out_are_named_once_and_with_the_users_line():
    with mm.Graph() as graph:
        _, loss = loss_of_two_layers()
        mm.optimize.Adam(0.1).minimize(loss)
    mesh = mm.SimulatedMesh("a:1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            mm.compile(graph, mesh, fetches=[loss])
    (warning,) = caught
    assert warning.category is mm.UnusedUpdatesWarning
    text = str(warning.message)
    names = [u.variable.name for u in graph.updates]
    assert all(f"'{name}'" in text for name in names[:4]) and f"and {len(names) - 4} more" in text
    assert text.count("test_default_fetches.py:") == 1 and "updates=[]" in text
    assert warning.filename == __file__
    assert "mm.compile(graph, mesh" in linecache.getline(__file__, warning.lineno)


@pytest.mark.parametrize(
    "options",
    [{"updates": []}, {"updates": ()}, {"updates": mm.optimize.SGD(0.1).minimize}, {}],
    ids=["empty list", "empty tuple", "the optimizer's", "a graph without updates"],
)
def test_nothing_is_said_of_updates_that_were_decided_upon(options):
    compiled(**options)  # a warning would be an error here


def test_updates_of_the_users_own_count_too():
    with mm.Graph() as graph:
        n = mm.get_variable("n", (), "int32")
        mm.assign(n, n + 1)
    with pytest.warns(mm.UnusedUpdatesWarning, match=r"updates of 'n' \(the first made at"):
        mm.compile(graph, mm.SimulatedMesh("a:1"), fetches=[n])
