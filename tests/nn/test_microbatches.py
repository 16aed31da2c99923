"""Gradient accumulation: the gradients and the traffic of one big batch, less memory."""

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.errors import ShapeError
from meshmpi.nn import optimize
from tests.nn.build import value

RNG = np.random.default_rng(5)
HIDDEN = mm.Dimension("hidden", 6)


def model(features):
    h = mm.dense(features["x"], HIDDEN, activation="tanh", name="wi")
    y = mm.dense(h, mm.Dimension("io", 4), name="wo")
    error = mm.reduce_mean(mm.square(y - features["t"]), reduced_dim="io")
    return {"loss": mm.reduce_mean(error), "error": error, "count": mm.constant(3, dtype="int32")}


def build(parts, batch=12, dtype="float64", clip=None):
    with mm.Graph() as graph:
        x, t = (mm.placeholder(n, f"batch:{batch};io:4", dtype) for n in "xt")
        outputs, pairs = optimize.serialize_training_step({"x": x, "t": t}, model, "batch", parts)
        updates = optimize.Adam(0.01, clip_norm=clip).apply_gradients(pairs)
    return graph, outputs, pairs, updates


def feeds(batch=12):
    rng = np.random.default_rng(batch)
    return {n: rng.normal(size=(batch, 4)) for n in "xt"}


def test_parts_are_every_kth_row():
    with mm.Graph():
        x = mm.placeholder("x", "io:2;batch:6", "float64")
        parts = optimize.microbatches(x, "batch", 3)
        assert optimize.microbatches(x, "batch", 1) == [x]
    array = RNG.normal(size=(2, 6))
    for j, part in enumerate(parts):
        np.testing.assert_array_equal(value(part, {"x": array}), array[:, j::3])


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_outputs_are_those_of_the_whole_batch(parts):
    graph, outputs, pairs, _ = build(parts)
    _, wanted, wanted_pairs, _ = build(1)
    rng = np.random.default_rng(1)
    weights = {v.name: rng.normal(size=v.shape.sizes) for v in graph.trainable_variables}
    for name in ("loss", "error"):
        np.testing.assert_allclose(
            value(outputs[name], feeds(), weights), value(wanted[name], feeds(), weights), rtol=1e-13
        )
    assert value(outputs["count"], feeds(), weights) == 3
    assert [v.name for _, v in pairs] == ["wi/kernel", "wi/bias", "wo/kernel", "wo/bias"]
    for (g, v), (w, _) in zip(pairs, wanted_pairs, strict=True):
        np.testing.assert_allclose(
            value(g, feeds(), weights), value(w, feeds(), weights), rtol=1e-11, atol=1e-15, err_msg=v.name
        )


LAYOUTS = ["", "batch:rows", "batch:cols", "batch:rows;hidden:cols", "batch:rows+cols", "io:cols"]


@pytest.mark.parametrize("batch", [12, 20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_is_that_of_the_whole_batch(layout, batch):
    """20 rows in 4 parts are uneven over 3 and 6 ranks."""
    losses = []
    for parts, where in ((1, ""), (4, layout)):
        graph, outputs, _, updates = build(parts, batch, clip=0.1)
        mesh = mm.SimulatedMesh("rows:2;cols:3")
        step = mm.compile(graph, mesh, where, fetches=[outputs["loss"]], updates=updates)
        losses.append([step(feeds(batch))[outputs["loss"]] for _ in range(3)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-11)


@pytest.mark.parametrize("storage", [None, "io?:rows;hidden?:rows"])
@pytest.mark.parametrize("layout", ["batch:rows", "batch:rows;hidden:cols"])
def test_gradients_are_reduced_once(layout, storage):
    """Count and elements of every collective over the batch's axis as with one big batch."""
    traffic = []
    for parts in (1, 4):
        graph, outputs, _, updates = build(parts, 16)
        program = mm.plan(
            graph, "rows:2;cols:2", layout, fetches=[outputs["loss"]], updates=updates, storage=storage
        ).program
        sent = {kind: axes.get("rows", 0) for kind, axes in program.values().items()}
        counts = {k: n for k, n in program.counts().items() if k in sent}
        traffic.append(({k: n for k, n in sent.items() if n}, counts))
    assert traffic[0][0] == traffic[1][0]
    if "hidden" not in layout:  # its own all_reduces come once per part, of a part's size
        assert all(traffic[1][1][kind] <= n for kind, n in traffic[0][1].items())


def test_gradients_are_kept_once():
    """Their sum and those of one part, not one for every part, where weights are what is large."""
    wide = mm.Dimension("wide", 300)

    def deep(features):
        x = features["x"]
        for i in range(4):
            x = mm.dense(x, wide._replace(name=f"wide_{i}"), activation="tanh", name=f"layer_{i}")
        return {"loss": mm.reduce_mean(mm.square(x))}

    peaks = []
    for parts in (2, 8):
        with mm.Graph() as graph:
            x = mm.placeholder("x", "batch:16;io:300")
            outputs, pairs = optimize.serialize_training_step({"x": x}, deep, "batch", parts)
            updates = optimize.SGD(0.1).apply_gradients(pairs)
        plan = mm.plan(graph, "rows:1", "", fetches=[outputs["loss"]], updates=updates)
        peaks.append(plan.cost.memory["arena"])
    assert peaks[1] < 1.05 * peaks[0]


def test_memory_is_that_of_a_part():
    peaks = []
    for parts in (1, 8):
        graph, outputs, _, updates = build(parts, 4096)
        plan = mm.plan(graph, "rows:1", "", fetches=[outputs["loss"]], updates=updates)
        fed = 2 * 4096 * 4 * 8
        peaks.append(plan.cost.peak_memory - fed)
    assert peaks[1] < peaks[0] / 2


def test_a_feature_without_the_batch_goes_to_every_part():
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:4;io:4", "float64")
        scale = mm.placeholder("scale", "", "float64")

        def scaled(features):
            w = mm.get_variable("w", "io:4", "float64")
            return {"loss": mm.reduce_mean(features["x"] * w * features["scale"])}

        features = {"x": x, "scale": scale}
        outputs, _ = optimize.serialize_training_step(features, scaled, "batch", 2, variables=[])
    array, w = RNG.normal(size=(4, 4)), RNG.normal(size=4)
    found = value(outputs["loss"], {"x": array, "scale": np.array(2.0)}, {"w": w})
    np.testing.assert_allclose(found, 2 * (array * w).mean(), rtol=1e-12)
    assert list(graph.variables) == ["w"]


class TestErrors:
    def test_parts_that_do_not_divide(self):
        with mm.Graph(), pytest.raises(ShapeError, match=r"'batch' \(12\).* into 5 equal parts"):
            optimize.microbatches(mm.placeholder("x", "batch:12"), "batch", 5)

    @pytest.mark.parametrize("result", [{"cost": 0}, {"loss": 1}])
    def test_no_number_as_loss(self, result):
        with mm.Graph(), pytest.raises(ShapeError, match="model_fn returned"):
            x = mm.placeholder("x", "batch:12")
            optimize.serialize_training_step({"x": x}, lambda f: dict.fromkeys(result, f["x"]), "batch", 2)
