"""Every optimizer over several steps against formulas in float64 NumPy, through the oracle."""

import numpy as np
import pytest

from meshmpi import nn
from meshmpi.dims import Dimension, Shape
from meshmpi.errors import ShapeError, VariableError
from meshmpi.graph import Graph, ops
from meshmpi.graph.autodiff import gradients
from meshmpi.nn import optimize, schedules
from meshmpi.nn.optimize.base import chosen
from tests.nn.build import Arrays, initial, run_updates, value

SHAPES = {"w": "rows:4;cols:6", "b": "cols:6", "deep": "rows:4;mid:2;cols:6"}
STEPS = 5
RNG = np.random.default_rng(13)
START: Arrays = {n: RNG.normal(size=Shape(s).sizes) for n, s in SHAPES.items()}
TARGET: Arrays = {n: RNG.normal(size=Shape(s).sizes) for n, s in SHAPES.items()}


def gradient(now: Arrays) -> Arrays:
    """The gradient of the loss sum((w - target)**2 + w**4 / 4)."""
    return {n: 2 * (now[n] - TARGET[n]) + now[n] ** 3 for n in SHAPES}


def build(optimizer):
    with Graph() as graph:
        losses = []
        for n, shape in SHAPES.items():
            w = ops.get_variable(n, shape, "float64", decays=n != "b")
            t = ops.placeholder(f"{n}_target", shape, "float64")
            losses.append(ops.reduce_sum(ops.square(w - t) + ops.square(ops.square(w)) * 0.25))
        updates = optimizer.minimize(ops.add_n(losses))
    return graph, updates


def run(optimizer, steps=STEPS) -> Arrays:
    graph, updates = build(optimizer)
    feeds = {f"{n}_target": t for n, t in TARGET.items()}
    return run_updates(updates, {**initial(graph), **START}, feeds, steps)


def check(optimizer, step, tolerance=1e-12):
    """``step(name, w, g, state, t)`` -> new w, with t = 1, 2, ... and a dict of its own state."""
    found = run(optimizer)
    now, states = dict(START), {n: {} for n in SHAPES}
    for t in range(1, STEPS + 1):
        g = gradient(now)
        now = {n: step(n, now[n], g[n], states[n], t) for n in SHAPES}
    for n in SHAPES:
        np.testing.assert_allclose(found[n], now[n], rtol=tolerance, atol=tolerance, err_msg=n)
    assert found[f"{optimizer.name}/step"] == STEPS
    return found, states


def rate_at(t):
    return 0.01 * min(1, (t - 1) / 3)


RATE = schedules.product(0.01, schedules.linear_warmup(3))
# float32 schedules are 6e-8 from the formula; five steps of 0.01 each stay below this.
WITH_SCHEDULE = 1e-8


def test_sgd():
    check(optimize.SGD(0.01), lambda n, w, g, s, t: w - 0.01 * g)
    check(optimize.SGD(RATE), lambda n, w, g, s, t: w - rate_at(t) * g, WITH_SCHEDULE)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum(nesterov):
    def step(n, w, g, s, t):
        s["v"] = 0.8 * s.get("v", 0) + g
        return w - 0.01 * (g + 0.8 * s["v"] if nesterov else s["v"])

    found, states = check(optimize.Momentum(0.01, 0.8, nesterov=nesterov), step)
    np.testing.assert_allclose(found["momentum/w/v"], states["w"]["v"], rtol=1e-12)


def adam(rate, b1=0.9, b2=0.999, eps=1e-8, decay=0.0):
    def step(n, w, g, s, t):
        s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
        s["v"] = b2 * s.get("v", 0) + (1 - b2) * g * g
        m, v = s["m"] / (1 - b1**t), s["v"] / (1 - b2**t)
        shrunk = w * (1 - rate(t) * decay) if n != "b" else w
        return shrunk - rate(t) * m / (np.sqrt(v) + eps)

    return step


def test_adam():
    found, states = check(optimize.Adam(0.01), adam(lambda t: 0.01), 1e-11)
    np.testing.assert_allclose(found["adam/deep/v"], states["deep"]["v"], rtol=1e-10)
    check(optimize.Adam(RATE, 0.5, 0.9, 1e-3), adam(rate_at, 0.5, 0.9, 1e-3), WITH_SCHEDULE)
    check(optimize.Adam(0.01, 0.0, 0.9), adam(lambda t: 0.01, 0.0, 0.9), 1e-11)


def test_adamw_decays_what_is_made_to():
    step = adam(lambda t: 0.01, decay=0.3)
    check(optimize.AdamW(0.01, weight_decay=0.3), step, 1e-11)
    check(
        optimize.AdamW(RATE, weight_decay=0.3, decays=lambda v: v.name != "b"), adam(rate_at, decay=0.3), WITH_SCHEDULE
    )


def test_biases_and_norm_scales_do_not_decay_whatever_their_rank():
    batch, length, model = Dimension("batch", 2), Dimension("length", 3), Dimension("d_model", 4)
    with Graph() as graph:
        x = ops.placeholder("x", [batch, length, model], "float64")
        y = nn.layer_norm(x, model, name="norm")
        kv, heads = Dimension("d_kv", 3), Dimension("heads", 2)
        y = nn.multihead_attention(y, None, None, kv, heads, use_bias=True, name="attention")
        y = nn.dense(nn.rezero(y), Dimension("out", 2), name="dense")
        ops.einsum([y, ops.get_variable("own", "out:2", "float64")], [batch, length])
    kept = {v.name for v in graph.trainable_variables if not v.decays}
    ends = {"scale", "bias", "q_bias", "k_bias", "v_bias", "o_bias"}
    assert kept == {n for n in graph.variables if n.rsplit("/", 1)[-1] in ends} and len(kept) == 8
    assert len(graph.variables["attention/q_bias"].shape) == 2
    by_name = optimize.AdamW(0.1, decays=["own"])
    assert chosen(by_name.decays, graph.variables["attention/q_bias"]), "a user's choice counts"


def adafactor(rate, minimum_size, beta1=0.0, clip=1.0, scaled=True):
    """As Shazeer and Stern 2018, algorithms 4 and 5, with the larger dims as rows and columns."""

    def step(n, w, g, s, t):
        d = 1 - t**-0.8
        squares = g * g + 1e-30
        axes = sorted(range(g.ndim), key=lambda i: -g.shape[i])[:2]
        if g.ndim >= 2 and g.shape[axes[1]] >= minimum_size:
            means = {a: squares.mean(a, keepdims=True) for a in axes}
            for a in axes:
                s[a] = d * s.get(a, 0) + (1 - d) * means[a]
            row, col = s[axes[0]], s[axes[1]]
            u = g / np.sqrt(row / row.mean(axes[1], keepdims=True)) / np.sqrt(col)
        else:
            s["v"] = d * s.get("v", 0) + (1 - d) * squares
            u = g / np.sqrt(s["v"])
        u = u / max(1.0, np.sqrt((u * u).mean()) / clip)
        u = u * rate(t) * (max(np.sqrt((w * w).mean()), 1e-3) if scaled else 1.0)
        if beta1:
            s["m"] = u = beta1 * s.get("m", 0) + (1 - beta1) * u
        return w - u

    return step


@pytest.mark.parametrize("minimum_size", [4, 5, 128])
@pytest.mark.parametrize("options", [{}, {"beta1": 0.9}, {"clip": 0.5, "scaled": False}])
def test_adafactor(minimum_size, options):
    mine = optimize.Adafactor(
        0.05,
        beta1=options.get("beta1", 0.0),
        clipping_threshold=options.get("clip", 1.0),
        multiply_by_parameter_scale=options.get("scaled", True),
        min_dim_size_to_factor=minimum_size,
    )
    found, _ = check(mine, adafactor(lambda t: 0.05, minimum_size, **options), 1e-11)
    assert ("adafactor/w/row" in found) == (minimum_size <= 4)
    assert "adafactor/b/v" in found
    if minimum_size == 4:
        assert found["adafactor/deep/row"].shape == (4, 2)
        assert found["adafactor/deep/col"].shape == (2, 6)


def test_adafactor_default_learning_rate():
    check(optimize.Adafactor(), adafactor(lambda t: min(t**-0.5, 0.01), 128), WITH_SCHEDULE)


def test_clip_norm():
    def clipped(now):
        g = gradient(now)
        norm = np.sqrt(sum((x**2).sum() for x in g.values()))
        return {n: x * min(1, 0.5 / norm) for n, x in g.items()}

    found, now = run(optimize.SGD(0.1, clip_norm=0.5)), dict(START)
    for _ in range(STEPS):
        g = clipped(now)
        now = {n: now[n] - 0.1 * g[n] for n in now}
    for n in SHAPES:
        np.testing.assert_allclose(found[n], now[n], rtol=1e-12)


def test_learning_rate_as_a_tensor():
    with Graph():
        w = ops.get_variable("w", "n:3", "float64")
        rate = ops.placeholder("rate", [])
        updates = optimize.SGD(rate).minimize(ops.reduce_sum(ops.square(w)))
    start = {"w": np.ones(3), "sgd/step": np.int32(4)}
    found = run_updates(updates, start, {"rate": np.array(0.25)})
    np.testing.assert_allclose(found["w"], 0.5)
    assert found["sgd/step"] == 5


def test_first_step_of_adam_is_exact_in_float32():
    """1 - 0.999**t in float32 would be off by 5e-5; the step must still be the learning rate."""
    with Graph():
        w = ops.get_variable("w", "n:2")
        updates = optimize.Adam(0.5, epsilon=0.0).minimize(ops.reduce_sum(w * 3.0))
    scalars = [op.output.dtype for op in updates[0].value.graph.operations if op.output.shape == ()]
    assert "float64" in scalars
    assert {u.variable.name for u in updates} == {"w", "adam/w/m", "adam/w/v", "adam/step"}


def test_bfloat16_variable_has_float32_slots():
    with Graph() as graph:
        w = ops.get_variable("w", "n:3", "bfloat16")
        updates = optimize.Adam(0.1).minimize(ops.reduce_sum(ops.square(w)))
    assert graph.variables["adam/w/m"].dtype == "float32"
    assert [u.value.dtype for u in updates] == ["bfloat16", "float32", "float32", "int32"]


def test_variable_read_in_two_types():
    """The gradient is the sum over all reads of a variable, whatever type they have."""
    with Graph() as graph:
        full = ops.get_variable("w", "n:3", "float32")
        with graph.scope(reuse=True):
            half = ops.get_variable("w", "n:3", ops.VariableDType("float32", "bfloat16"))
        loss = ops.reduce_sum(full * 2.0) + ops.reduce_sum(ops.cast(half, "float32") * 3.0)
        updates = optimize.SGD(1.0).minimize(loss)
    found = run_updates(updates, {**initial(graph), "w": np.zeros(3)}, {})
    np.testing.assert_allclose(found["w"], -5.0)


def test_chosen_and_unreached_variables():
    with Graph() as graph:
        a, b = ops.get_variable("a", "n:3"), ops.get_variable("b", "n:3")
        ops.get_variable("unused", "n:3")
        loss = ops.reduce_sum(a * b)
        only_b = optimize.SGD(0.1, name="one").minimize(loss, [b])
        both = optimize.SGD(0.1, name="two").minimize(loss)
    assert [u.variable.name for u in only_b] == ["b", "one/step"]
    assert [u.variable.name for u in both] == ["a", "b", "two/step"]
    assert graph.updates == only_b + both


def test_apply_gradients_takes_any_order_of_dims():
    rows, cols = Dimension("r", 2), Dimension("c", 3)
    with Graph() as graph:
        w = ops.get_variable("w", [rows, cols], "float64")
        g = ops.placeholder("g", [cols, rows], "float64")
        updates = optimize.SGD(1.0).apply_gradients([(g, w), (None, w)])
    array = RNG.normal(size=(3, 2))
    found = run_updates(updates, {**initial(graph), "w": np.zeros((2, 3))}, {"g": array})
    np.testing.assert_array_equal(found["w"], -array.T)


def test_slots_have_their_own_storage():
    _, updates = build(optimize.Adam(0.1, storage="rows:x;cols?:y;other:z"))
    slots = {u.variable.name: u.variable for u in updates}
    assert str(slots["adam/w/m"].storage) == "rows:x;cols?:y"
    assert str(slots["adam/b/m"].storage) == "cols?:y"
    assert slots["adam/w/v"].like is slots["w"]
    assert slots["w"].storage is None


def test_slots_go_with_gradients_of_gradients():
    """A loss that contains gradients can be minimised as well."""
    with Graph() as graph:
        w = ops.get_variable("w", "n:3", "float64")
        (g,) = gradients(ops.reduce_sum(ops.square(ops.square(w))), [w])
        updates = optimize.SGD(0.1).minimize(ops.reduce_sum(g))
    found = run_updates(updates, {**initial(graph), "w": np.full(3, 2.0)}, {})
    np.testing.assert_allclose(found["w"], 2 - 0.1 * 12 * 4)


def test_minimize_outside_of_the_graph_block():
    with Graph() as graph:
        w = ops.get_variable("w", "n:3", "float64")
        loss = ops.reduce_sum(w * w)
    updates = optimize.Adam(0.1).minimize(loss)
    assert updates[0].value.graph is graph
    assert value(loss, {}, {"w": np.ones(3)}) == 3.0


def twice(w, loss):
    for _ in range(2):
        optimize.SGD(0.1).minimize(loss)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w, loss: optimize.SGD(0.1).minimize(w), r"the loss is float32\[n=3\]"),
        (
            lambda w, loss: optimize.SGD(0.1).minimize(ops.reduce_sum(ops.placeholder("x", "n:3"))),
            r"depends on none of \['w'\]",
        ),
        (twice, r"optimizer 'sgd' already.*name='adam_2'"),
        (lambda w, loss: optimize.SGD(0.1).minimize(loss, [w * 2.0]), "is not the value of a variable"),
        (
            lambda w, loss: optimize.SGD(0.1).apply_gradients([(ops.placeholder("g", "m:2"), w)]),
            r"gradient \[m=2\].*'w' \[n=3\]",
        ),
        (lambda w, loss: optimize.SGD(w).minimize(loss), r"learning rate of 'sgd' is float32\[n=3\]"),
        (
            lambda w, loss: optimize.AdamW(0.1, weight_decay=w).minimize(loss),
            r"weight decay of 'adamw' is float32\[n=3\]",
        ),
        (lambda w, loss: optimize.SGD(0.1).apply_gradients([(None, w)]), "there is no gradient"),
    ],
)
def test_errors(call, message):
    with Graph():
        w = ops.get_variable("w", "n:3")
        loss = ops.reduce_sum(w * w)
        with pytest.raises((ShapeError, VariableError), match=message):
            call(w, loss)
