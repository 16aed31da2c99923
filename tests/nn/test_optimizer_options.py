"""LAMB, rates by variable, decay schedules and exclusions against NumPy; slots stored split."""

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.errors import ConfigError
from meshmpi.graph import Graph, ops
from meshmpi.nn import optimize, schedules
from tests.nn.build import initial, run_updates
from tests.nn.test_optimizers import RATE, START, TARGET, WITH_SCHEDULE, adafactor, adam, build, check, rate_at, run


def lamb(rate, decay, decays=lambda n: n != "b", adapts=lambda n: True, eps=1e-6):
    """You et al. 2020, algorithm 2."""

    def step(n, w, g, s, t):
        s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
        s["v"] = 0.999 * s.get("v", 0) + 0.001 * g * g
        u = s["m"] / (1 - 0.9**t) / (np.sqrt(s["v"] / (1 - 0.999**t)) + eps)
        if decays(n):
            u = u + decay(t) * w
        norms = np.linalg.norm(w), np.linalg.norm(u)
        ratio = norms[0] / norms[1] if adapts(n) and all(norms) else 1.0
        return w - rate(t) * ratio * u

    return step


def test_lamb():
    found, states = check(optimize.LAMB(0.02, weight_decay=0.3), lamb(lambda t: 0.02, lambda t: 0.3), 1e-11)
    np.testing.assert_allclose(found["lamb/w/m"], states["w"]["m"], rtol=1e-10)
    check(
        optimize.LAMB(RATE, weight_decay=schedules.linear_decay(4), decays=["deep$"], adapts=["^w$"]),
        lamb(rate_at, lambda t: max(0, 1 - (t - 1) / 4), lambda n: n != "deep", lambda n: n != "w"),
        WITH_SCHEDULE,
    )


def test_lamb_at_weights_of_zero():
    """The trust ratio is then 1: a variable that begins with zeros can leave them."""
    with Graph() as graph:
        w = ops.get_variable("w", "n:2", "float64", mm.zeros_initializer())
        updates = optimize.LAMB(0.5, epsilon=0.0).minimize(ops.reduce_sum(w * 3.0))
    found = run_updates(updates, initial(graph), {})
    np.testing.assert_allclose(found["w"], -0.5, rtol=1e-12)


def test_decay_schedule_and_excluded_names():
    def step(n, w, g, s, t):
        decay = max(0.0, 1 - (t - 1) / 4)
        plain = adam(lambda t: 0.01)(n, w, g, s, t)
        return plain - 0.01 * decay * w if n != "deep" else plain

    mine = optimize.AdamW(0.01, weight_decay=schedules.linear_decay(4), decays=["deep"])
    check(mine, step, WITH_SCHEDULE)


def test_a_rate_for_each_variable():
    rates = {"^deep": 0.03, "w": RATE, "": 0.01}

    def step(n, w, g, s, t):
        return w - {"deep": 0.03, "w": rate_at(t), "b": 0.01}[n] * g

    check(optimize.SGD(rates), step, WITH_SCHEDULE)


@pytest.mark.parametrize("make", [optimize.Adam, optimize.Momentum, optimize.LAMB])
def test_rates_by_variable_are_those_of_the_variable(make):
    one, two = run(make(0.01)), run(make(0.02))
    found = run(make({"^w$": 0.02, "": 0.01}))
    np.testing.assert_array_equal(found["b"], one["b"])
    np.testing.assert_array_equal(found["w"], two["w"])


def test_a_schedule_is_in_the_graph_once():
    calls = []

    def schedule(step):
        calls.append(step)
        return schedules.constant(0.1)(step)

    build(optimize.Adam({"w|b": schedule, "": 0.1}))
    assert len(calls) == 1


def test_adafactor_with_rates_and_decay_exponent():
    found, _ = check(
        optimize.Adafactor({"w": 0.05, "": 0.02}, min_dim_size_to_factor=4),
        lambda n, w, g, s, t: adafactor(lambda t: 0.05 if n == "w" else 0.02, 4)(n, w, g, s, t),
        1e-11,
    )
    assert found["adafactor/w/row"].shape == (4,)


def test_adafactor_with_the_decay_of_adam():
    """Without factors, clipping and scales this is Adam without a mean of gradients."""
    mine = optimize.Adafactor(
        0.02, beta2=0.9, factored=False, clipping_threshold=None, multiply_by_parameter_scale=False
    )
    check(mine, adam(lambda t: 0.02, 0.0, 0.9, 0.0), 1e-10)


def test_no_rate_for_a_variable():
    with pytest.raises(ConfigError, match=r"no learning rate of 'sgd' matches variable 'deep'.*'w'"):
        build(optimize.SGD({"w": 0.1, "b": 0.1}))


# -- on meshes -------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda **o: optimize.SGD(0.01, clip_norm=3.0),
    "momentum": lambda **o: optimize.Momentum(0.01, nesterov=True, **o),
    "adam": lambda **o: optimize.Adam(0.01, **o),
    "adamw": lambda **o: optimize.AdamW({"w": 0.02, "": 0.01}, weight_decay=0.1, clip_norm=3.0, **o),
    "adafactor": lambda **o: optimize.Adafactor(0.05, min_dim_size_to_factor=4, **o),
    "adafactor_whole": lambda **o: optimize.Adafactor(0.05, beta1=0.5, **o),
    "lamb": lambda **o: optimize.LAMB(0.02, weight_decay=0.1, **o),
}
LAYOUTS = ["", "rows:x", "cols:y;rows:x", "cols:x+y", "mid:y;cols:x"]
STORAGES = [None, "cols?:y", "rows?:x+y", "cols?:x;rows?:y", "mid?:x"]


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_layout_and_storage(name):
    """On x:2, y:3: 4 rows and 6 columns are uneven over x+y, 2 of mid over y leave a rank empty."""
    wanted = run(OPTIMIZERS[name](), 3)
    for layout in LAYOUTS:
        for storage in STORAGES:
            graph, updates = build(OPTIMIZERS[name](storage=storage))
            try:
                step = mm.compile(graph, mm.SimulatedMesh("x:2;y:3"), layout, updates=updates)
            except mm.LayoutError:
                assert storage and layout  # a rule without "?" would be needed to mean this
                continue
            step.assign(START)
            for _ in range(3):
                step({f"{n}_target": t for n, t in TARGET.items()})
            for n in wanted:
                np.testing.assert_allclose(
                    step.variables[n], wanted[n], rtol=1e-9, atol=1e-11, err_msg=f"{n} {layout} {storage}"
                )


def test_factored_slots_are_stored_split():
    """ZeRO with Adafactor: gradients are scattered, row and column means kept where they fit."""
    with Graph() as graph:
        x = ops.placeholder("x", "batch:8;rows:6;cols:4", "float64")
        w = ops.get_variable("w", "rows:6;cols:4", "float64")
        loss = ops.reduce_sum(ops.square(ops.reduce_sum(x * w, reduced_dim=["rows", "cols"])))
        optimizer = optimize.Adafactor(0.1, min_dim_size_to_factor=4, storage="rows:x")
        updates = optimizer.minimize(loss)
    program = mm.plan(graph, "x:3", "batch:x", fetches=[loss], updates=updates).program
    types = {n: str(v.type) for n, v in program.variables.items()}
    assert types["w"] == "float64[rows=6, cols=4]"
    assert types["adafactor/w/row"] == "float64[cols=4]"
    assert types["adafactor/w/col"] == "float64[rows=6/x]"
    assert program.values()["reduce_scatter"] == {"x": 24}
    # Column means of squares, two mean squares, the mean of the row means, the loss: no matrix.
    assert program.values()["all_reduce"]["x"] <= 4 + 4
