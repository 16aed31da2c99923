"""Cross entropies and weighted means against NumPy, with gradients."""

import numpy as np
import pytest

import meshmpi as mm
from meshmpi import nn
from meshmpi.errors import ShapeError
from meshmpi.graph import Graph, ops
from tests.nn.build import check_gradients, value

RNG = np.random.default_rng(5)
LOGITS = RNG.normal(0, 3, (3, 4, 7))
IDS = RNG.integers(0, 7, (3, 4)).astype(np.int32)


def reference(logits, probabilities, z_loss=0.0, smoothing=0.0):
    top = logits.max(-1, keepdims=True)
    log_z = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    p = (1 - smoothing) * probabilities + smoothing / logits.shape[-1]
    return -(p * (logits - log_z[..., None])).sum(-1) + z_loss * log_z**2


def build(ids=True, **options):
    with Graph():
        logits = ops.placeholder("logits", "batch:3;length:4;vocab:7", "float64")
        shape = "batch:3;length:4" if ids else "batch:3;length:4;vocab:7"
        targets = ops.placeholder("targets", shape, "int32" if ids else "float64")
        return nn.softmax_cross_entropy_with_logits(logits, targets, "vocab", **options)


@pytest.mark.parametrize(("z_loss", "smoothing"), [(0, 0), (0.01, 0), (0, 0.1), (0.02, 0.3)])
def test_integer_targets(z_loss, smoothing):
    loss = build(z_loss=z_loss, label_smoothing=smoothing)
    assert loss.shape.names == ("batch", "length")
    feeds = {"logits": LOGITS, "targets": IDS}
    expected = reference(LOGITS, np.eye(7)[IDS], z_loss, smoothing)
    np.testing.assert_allclose(value(loss, feeds), expected, rtol=1e-12)
    with loss.graph:
        total = ops.reduce_sum(loss)
    check_gradients(total, feeds, {}, ["logits"])


def test_soft_targets():
    p = RNG.dirichlet(np.ones(7), (3, 4))
    loss = build(ids=False, z_loss=0.01, label_smoothing=0.2)
    feeds = {"logits": LOGITS, "targets": p}
    np.testing.assert_allclose(value(loss, feeds), reference(LOGITS, p, 0.01, 0.2), rtol=1e-12)
    with loss.graph:
        total = ops.reduce_sum(loss)
    check_gradients(total, feeds, {}, ["logits"])


def test_extreme_logits_give_a_finite_loss():
    logits = np.zeros((3, 4, 7))
    logits[..., 0], logits[..., 1] = 1e4, -1e4
    found = value(build(), {"logits": logits, "targets": np.ones((3, 4), np.int32)})
    np.testing.assert_allclose(found, 2e4)


def test_logits_are_not_gathered():
    """No Gather, TopK or Reshape: nothing that would make a split vocabulary whole."""
    kinds = {type(op).__name__ for op in build().graph.operations}
    assert kinds <= {"Placeholder", "Elementwise", "Reduce", "Range", "CustomGradient"}


def test_bad_targets():
    with Graph():
        logits = ops.placeholder("logits", "batch:3;vocab:7")
        ids = ops.placeholder("ids", "length:3", "int32")
        with pytest.raises(ShapeError, match=r"targets are int32\[length=3\]"):
            nn.softmax_cross_entropy_with_logits(logits, ids, "vocab")


def test_sigmoid_cross_entropy():
    with Graph():
        x = ops.placeholder("x", "n:6", "float64")
        t = ops.placeholder("t", "n:6", "float64")
        loss = nn.sigmoid_cross_entropy_with_logits(x, t)
        total = ops.reduce_sum(loss)
    feeds = {"x": np.array([-700, -2, 0, 0.5, 3, 900.0]), "t": np.array([0, 1, 0.3, 0.5, 0, 1.0])}
    x, t = feeds["x"], feeds["t"]
    expected = t * np.logaddexp(0, -x) + (1 - t) * np.logaddexp(0, x)
    np.testing.assert_allclose(value(loss, feeds), expected, rtol=1e-12, atol=1e-300)
    check_gradients(total, feeds, {}, ["x"])


def test_weighted_mean():
    with Graph():
        x = ops.placeholder("x", "batch:3;length:4", "float64")
        ids = ops.placeholder("ids", "batch:3;length:4", "int32")
        mean = nn.weighted_mean(x, nn.weights_nonzero(ids, 2, "float64"))
        plain = nn.weighted_mean(x)
    x, ids = LOGITS[..., 0], IDS.copy()
    ids[0] = 2
    assert value(mean, {"x": x, "ids": ids}) == pytest.approx(x[ids != 2].mean(), rel=1e-13)
    assert value(plain, {"x": x}) == pytest.approx(x.mean(), rel=1e-13)
    assert value(mean, {"x": x, "ids": np.full((3, 4), 2)}) == 0.0


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("layout", ["vocab:cols", "vocab:rows+cols", "batch:rows;vocab:cols"])
def test_a_split_vocabulary_stays_split(layout, soft):
    """7 classes over 3 and 6 ranks: the same loss and gradient; only sums of rows travel."""
    loss = build(ids=not soft, z_loss=0.02, label_smoothing=0.3)
    graph = loss.graph
    with graph:
        total = ops.reduce_sum(loss)
        (gradient,) = mm.gradients(total, [graph.placeholders["logits"]])
    targets = RNG.dirichlet(np.ones(7), (3, 4)) if soft else IDS
    feeds = {"logits": LOGITS, "targets": targets}
    step = mm.compile(graph, mm.SimulatedMesh("rows:2;cols:3"), layout, fetches=[loss, gradient])
    found = step(feeds)
    for t in (loss, gradient):
        np.testing.assert_allclose(found[t].numpy(), value(t, feeds), rtol=1e-11, atol=1e-12)
    assert step.program.counts().keys() & {"all_gather", "all_to_all", "shift"} == set()
    rows = 8 if "batch" in layout else 12  # of the rank that holds most
    # Of every row the largest logit, the sum of exponentials, and the expected logit.
    assert sum(step.program.values()["all_reduce"].values()) == 3 * rows
