"""Mixtures of experts against loops in NumPy: routing, capacities, losses, gradients, traffic."""

import math

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.errors import ConfigError, ShapeError
from tests.nn.build import check_gradients, random_variables, value
from tests.nn.textbook import softmax

RNG = np.random.default_rng(23)
E, D, FF = 3, 4, 5
EXPERTS, HIDDEN = mm.Dimension("experts", E), mm.Dimension("d_ff", FF)
X = RNG.normal(size=(3, 7, D))
MASK = np.arange(7) < np.array([[7], [4], [0]])


def groups_of(array, size):
    """Rows of [row, token, ...] cut into parts as equal as padding allows, or joined."""
    rows, length = array.shape[:2]
    joined = min(size // length, rows)
    if joined > 1:
        count = math.ceil(rows / joined)
        joined = math.ceil(rows / count)
        padded = np.zeros((count * joined, *array.shape[1:]), array.dtype)
        padded[:rows] = array
        return padded.reshape(count, joined * length, *array.shape[2:])
    count = math.ceil(length / size)
    part = math.ceil(length / count)
    padded = np.zeros((rows, count * part, *array.shape[2:]), array.dtype)
    padded[:, :length] = array
    return padded.reshape(rows * count, part, *array.shape[2:])


def placed(probs, real, gating, training=True):
    """(group, token, expert, gate) of every place taken, and the balance loss of every group."""
    taken, losses = [], []
    for group, p in enumerate(probs):
        tokens, experts = p.shape
        room = dict.fromkeys(range(experts), gating.capacity(tokens, experts, training))
        order = np.argsort(-p, axis=-1, kind="stable")[:, : gating.choices]
        if gating.chooser == "experts":
            for e in range(experts):
                ranked = np.argsort(np.where(real[group], -p[:, e], np.inf), kind="stable")
                best = [t for t in ranked if real[group, t]][: room[e]]
                taken += [(group, t, e, p[t, e]) for t in best]
            continue
        shares = np.take_along_axis(p, order, -1)
        if gating.choices > 1:
            shares = shares / shares.sum(-1, keepdims=True)
        for c in range(gating.choices):
            for t in range(tokens):
                e, gate = order[t, c], shares[t, c]
                asks = c == 0 or gating.second_policy == "all"
                if gating.second_policy == "threshold":
                    asks = c == 0 or gate > gating.second_threshold
                if real[group, t] and asks:
                    if room[e]:
                        taken.append((group, t, e, gate))
                    room[e] = max(0, room[e] - 1)
        n = max(1, real[group].sum())
        first = np.array([(real[group] & (order[:, 0] == e)).sum() for e in range(experts)])
        losses.append((n, experts * (first * (p * real[group][:, None]).sum(0)).sum() / n / n))
    counted = sum(real[g].sum() for g in range(len(probs)))
    return taken, sum(n * x for n, x in losses) / counted


def textbook(x, v, gating, real, training=True, prefix="experts"):
    """(output, balance loss, places taken) of one level."""
    size = gating.group_size or x.shape[1]
    g, counts = groups_of(x, size), groups_of(real, size)
    probs = softmax(g @ v[f"{prefix}/router"])
    taken, balance = placed(probs, counts, gating, training)
    y = np.zeros_like(g)
    for group, t, e, gate in taken:
        h = np.maximum(g[group, t] @ v[f"{prefix}/wi/kernel"][e], 0)
        y[group, t] += gate * (h @ v[f"{prefix}/wo/kernel"][e])
    joined = size // x.shape[1] > 1
    y = y.reshape(-1, x.shape[1], D) if joined else y.reshape(x.shape[0], -1, D)
    return y[: x.shape[0], : x.shape[1]], balance, taken


def build(gating, experts=EXPERTS, masked=False, training=True, rows=3, length=7, **options):
    with mm.Graph() as graph:
        x = mm.placeholder("x", f"batch:{rows};length:{length};d_model:{D}", "float64")
        mask = mm.placeholder("mask", f"batch:{rows};length:{length}", "bool") if masked else None
        found = mm.mixture_of_experts(x, experts, HIDDEN, gating, training, mask=mask, **options)
        total = mm.reduce_sum(mm.square(found.output)) + found.loss
    return graph, found, total


GATINGS = {
    "switch": mm.Gating(),
    "switch_dropping": mm.Gating(capacity_factor=0.7, min_capacity=1),
    "top_2": mm.Gating(choices=2, capacity_factor=0.6, min_capacity=1),
    "top_3": mm.Gating(choices=3, capacity_factor=0.6, min_capacity=2),
    "threshold": mm.Gating(choices=2, second_policy="threshold", second_threshold=0.3),
    "first_of_two": mm.Gating(choices=2, second_policy="none"),
    "small_groups": mm.Gating(group_size=3, capacity_factor=1.0, min_capacity=1),
    "joined_rows": mm.Gating(choices=2, group_size=14, capacity_factor=0.5),
    "all_in_one": mm.Gating(group_size=1000, capacity_factor=0.8),
    "experts_choose": mm.Gating(chooser="experts", capacity_factor=0.8, min_capacity=1),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", GATINGS)
def test_against_loops(name, masked):
    gating = GATINGS[name]
    graph, found, total = build(gating, masked=masked)
    variables, real = random_variables(graph), MASK if masked else np.ones((3, 7), bool)
    feeds = {"x": X, "mask": MASK} if masked else {"x": X}
    y, balance, taken = textbook(X, variables, gating, real)
    np.testing.assert_allclose(value(found.output, feeds, variables), y, rtol=1e-11, atol=1e-13)
    asked = real.sum() * (gating.choices if gating.second_policy == "all" else 1)
    dropped = float(value(found.dropped, feeds, variables))
    if gating.chooser == "experts":
        reached = len(dict.fromkeys((g, t) for g, t, _, _ in taken))
        assert dropped == pytest.approx(1 - reached / real.sum(), abs=1e-6)
    else:
        assert float(value(found.balance_loss, feeds, variables)) == pytest.approx(balance)
        if gating.second_policy != "threshold":
            assert dropped == pytest.approx(1 - len(taken) / asked, abs=1e-6)
    check_gradients(total, feeds, variables, tolerance=1e-5 if name == "joined_rows" else 1e-6)


def test_some_tests_drop_tokens():
    for name in ("switch_dropping", "top_2", "top_3", "joined_rows"):
        graph, found, _ = build(GATINGS[name])
        dropped = float(value(found.dropped, {"x": X}, random_variables(graph)))
        assert dropped > 0.05, name


def test_padding_takes_no_place_and_gets_zeros():
    graph, found, _ = build(mm.Gating(capacity_factor=1.0), masked=True)
    variables = random_variables(graph)
    y = value(found.output, {"x": X, "mask": MASK}, variables)
    assert not y[~MASK].any()
    other = np.where(MASK[..., None], X, 100.0)
    np.testing.assert_array_equal(value(found.output, {"x": other, "mask": MASK}, variables), y)


def test_z_loss_and_factors():
    graph, found, _ = build(mm.Gating(balance_loss=0.5, z_loss=0.25), masked=True)
    variables = random_variables(graph)
    feeds = {"x": X, "mask": MASK}
    logits = X @ variables["experts/router"]
    log_z = np.log(np.exp(logits).sum(-1))
    z = (log_z**2)[MASK].mean()
    assert float(value(found.z_loss, feeds, variables)) == pytest.approx(z)
    balance = float(value(found.balance_loss, feeds, variables))
    assert float(value(found.loss, feeds, variables)) == pytest.approx(0.5 * balance + 0.25 * z)


def test_balance_loss_is_one_when_even():
    graph, found, _ = build(mm.Gating(capacity_factor=9.0))
    variables = random_variables(graph)
    variables["experts/router"][:] = 0.0  # equal gates: the first expert is every first choice
    assert float(value(found.balance_loss, {"x": X}, variables)) == pytest.approx(1.0)


def test_evaluation_has_its_own_capacity():
    gating = mm.Gating(capacity_factor=0.5, eval_capacity_factor=3.0, min_capacity=1)
    graph, found, _ = build(gating, training=False)
    variables = random_variables(graph)
    wanted, _, _ = textbook(X, variables, gating, np.ones((3, 7), bool), training=False)
    np.testing.assert_allclose(value(found.output, {"x": X}, variables), wanted, rtol=1e-11)
    assert float(value(found.dropped, {"x": X}, variables)) == pytest.approx(0.0, abs=1e-6)


def test_capacity():
    gating = mm.Gating(choices=2, capacity_factor=1.25, min_capacity=4)
    assert gating.capacity(64, 8, True) == 20
    assert gating.capacity(64, 8, False) == 32
    assert gating.capacity(6, 8, True) == 4
    assert gating.capacity(3, 8, True) == 3
    assert mm.Gating(capacity_factor=1.0, min_capacity=1).capacity(7, 3, True) == 3  # 7 / 3, up


def test_random_second_choices():
    """The second expert counts with probability gate / threshold, with its whole gate."""
    gating = mm.Gating(choices=2, second_policy="random", second_threshold=0.4, capacity_factor=9.0)
    graph, found, _ = build(gating)
    v = random_variables(graph)
    (draw,) = [op.output for op in graph.operations if op.base_name == "second_expert"]
    drawn = value(draw, {"x": X}, v)
    probs = softmax(X @ v["experts/router"])
    order = np.argsort(-probs, -1)
    wanted, asked = np.zeros_like(X), 0
    for n, t in np.ndindex(3, 7):
        first, second = probs[n, t, order[n, t, :2]] / probs[n, t, order[n, t, :2]].sum()
        for c, gate in enumerate([first, second]):
            if c == 0 or drawn[n, t] < gate / 0.4:
                e, asked = order[n, t, c], asked + c
                h = np.maximum(X[n, t] @ v["experts/wi/kernel"][e], 0)
                wanted[n, t] += gate * (h @ v["experts/wo/kernel"][e])
    assert 3 < asked < 18  # of 21
    np.testing.assert_allclose(value(found.output, {"x": X}, v), wanted, rtol=1e-11, atol=1e-13)


def test_sampled_choices_follow_the_gates():
    gating = mm.Gating(selection="sample", capacity_factor=9.0, balance_loss=0.0)
    with mm.Graph() as graph:
        x = mm.ones("batch:50;length:60;d_model:4", "float64")
        found = mm.mixture_of_experts(x, EXPERTS, HIDDEN, gating, True)
    variables = random_variables(graph)
    probs = softmax(variables["experts/router"].sum(0))
    # All tokens are alike: balance = experts * sum of (share chosen) * gate.
    balance = float(value(found.balance_loss, {}, variables))
    assert balance == pytest.approx(E * (probs**2).sum(), abs=0.05)
    assert balance != pytest.approx(E * probs.max(), abs=0.05)


def test_activation_and_biases():
    graph, _, total = build(mm.Gating(), activation="tanh", use_bias=True, name="moe")
    names = [f"moe/{n}" for n in ("router", "wi/kernel", "wi/bias", "wo/kernel", "wo/bias")]
    assert list(graph.variables) == names
    check_gradients(total, {"x": X}, random_variables(graph))


# -- two levels ------------------------------------------------------------------------------------

OUTER, INNER = mm.Dimension("outer_experts", 2), mm.Dimension("inner_experts", 3)
ROOMY = mm.Gating(choices=2, capacity_factor=5.0)


def test_two_levels_with_room_are_a_product_of_gates():
    graph, found, total = build((mm.Gating(capacity_factor=5.0), ROOMY), (OUTER, INNER))
    v = random_variables(graph)
    assert {n: x.shape for n, x in v.items()} == {
        "experts/router": (D, 2),
        "experts/inner/router": (2, D, 3),
        "experts/wi/kernel": (2, 3, D, FF),
        "experts/wo/kernel": (2, 3, FF, D),
    }
    outer = softmax(X @ v["experts/router"])
    wanted = np.zeros_like(X)
    for n, t in np.ndindex(3, 7):
        i = outer[n, t].argmax()
        inner = softmax(X[n, t] @ v["experts/inner/router"][i])
        best = np.argsort(-inner)[:2]
        for j in best:
            h = np.maximum(X[n, t] @ v["experts/wi/kernel"][i, j], 0) @ v["experts/wo/kernel"][i, j]
            wanted[n, t] += outer[n, t, i] * inner[j] / inner[best].sum() * h
    found_y = value(found.output, {"x": X}, v)
    np.testing.assert_allclose(found_y, wanted, rtol=1e-11, atol=1e-13)
    check_gradients(total, {"x": X}, v)


def test_empty_places_of_the_first_level_do_not_count_at_the_second():
    """Half of the outer experts' places are empty here; the balance is that of the tokens."""
    graph, found, _ = build((mm.Gating(capacity_factor=5.0), ROOMY), (OUTER, INNER))
    v = random_variables(graph)
    outer = softmax(X @ v["experts/router"])
    _, balance = placed(outer, np.ones((3, 7), bool), mm.Gating())
    for i, n in np.ndindex(2, 3):
        p = softmax(X[n, outer[n].argmax(-1) == i] @ v["experts/inner/router"][i])
        if len(p):
            first = np.bincount(p.argmax(-1), minlength=3)
            balance += 3 * (first * p.sum(0)).sum() / len(p) / 21
    assert float(value(found.balance_loss, {"x": X}, v)) == pytest.approx(balance)


def test_two_levels_that_drop_and_mask():
    gating = (mm.Gating(capacity_factor=0.8, min_capacity=1), mm.Gating(min_capacity=1))
    graph, found, total = build(gating, (OUTER, INNER), masked=True)
    v, feeds = random_variables(graph), {"x": X, "mask": MASK}
    y = value(found.output, feeds, v)
    assert not y[~MASK].any() and (np.abs(y[MASK]).sum(-1) == 0).any()
    check_gradients(total, feeds, v)


# -- layouts and traffic ---------------------------------------------------------------------------

MESH = "rows:2;cols:3"
LAYOUTS = [
    "batch:rows",
    "batch:rows;experts:cols",
    "batch:rows+cols;experts:cols",
    "batch:rows;d_ff:rows",
    "batch:rows;experts:rows",
    "batch:cols;experts:cols",
    "batch:rows+cols;experts:rows+cols",
    "batch:rows+cols;experts:cols;expert_batch:rows",
    "batch:rows;experts:cols;expert_batch:rows",
    "batch:rows;experts:rows;d_ff:cols",
    "experts:rows;d_model:cols",
    "length:cols;experts:rows",
    "group_tokens:cols",
    "all_experts:cols;batch:rows",
    "groups:cols;batch:rows;experts:cols;expert_batch:rows",
]


def steps(layout, gating, experts=EXPERTS, rows=5, **options):
    """Losses of three training steps; 5 rows, 7 tokens and 3 experts are uneven."""
    graph, found, total = build(gating, experts, rows=rows, **options)
    with graph:
        updates = mm.optimize.Adam(0.01).minimize(total)
    mesh = mm.SimulatedMesh(MESH)
    fetched = [total, found.loss, found.dropped]
    step = mm.compile(graph, mesh, layout, fetches=fetched, updates=updates, seed=3)
    array = np.random.default_rng(2).normal(size=(rows, 7, D))
    return [tuple(step(x=array).values()) for _ in range(3)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["top_2", "small_groups", "experts_choose", "joined_rows"])
def test_every_layout_is_one_rank(name):
    gating = GATINGS[name]
    wanted = steps("", gating)
    for layout in LAYOUTS if name == "top_2" else LAYOUTS[::2]:
        optional = layout.replace("groups:", "groups?:").replace("expert_batch:", "expert_batch?:")
        np.testing.assert_allclose(steps(optional, gating), wanted, rtol=1e-10, err_msg=layout)


@pytest.mark.parametrize("layout", ["batch:rows", "batch:rows+cols", "batch:rows;d_ff:cols"])
@pytest.mark.parametrize("experts", [EXPERTS, (OUTER, INNER)])
def test_tokens_stay_where_the_experts_are_whole(layout, experts):
    """Data-parallel users need not know the names that dims have inside."""
    graph, found, _ = build(GATINGS["top_2"], experts, rows=6)
    counts = mm.plan(graph, MESH, layout, fetches=[found.output], updates=[]).program.counts()
    assert not {"all_gather", "all_to_all", "take_shard"} & set(counts), counts


@pytest.mark.matrix
def test_every_layout_with_random_numbers():
    gating = mm.Gating(choices=2, second_policy="random", second_threshold=0.9, jitter=0.1)
    wanted = steps("", gating, dropout_rate=0.2)
    for layout in ("batch:rows;experts:rows", "batch:cols;experts:rows;d_ff:cols"):
        found = steps(layout, gating, dropout_rate=0.2)
        np.testing.assert_allclose(found, wanted, rtol=1e-10)


@pytest.mark.matrix
def test_two_levels_in_layouts():
    gating = (mm.Gating(choices=2), mm.Gating(min_capacity=2))
    wanted = steps("", gating, (OUTER, INNER))
    for layout in (
        "batch:rows;outer_experts:rows",
        "batch:cols;inner_experts:cols",
        "batch:cols+rows;outer_experts:rows;outer_batch:cols;inner_experts:cols",
        "batch:rows;outer_experts:rows;inner_experts:cols",
    ):
        found = steps(layout, gating, (OUTER, INNER))
        np.testing.assert_allclose(found, wanted, rtol=1e-10, err_msg=layout)


def test_tokens_travel_by_all_to_all():
    """One to the experts and one back, and for gradients one back and one to: nothing else."""
    experts = mm.Dimension("experts", 4)
    with mm.Graph() as graph:
        tokens = mm.placeholder("x", f"batch:8;length:16;d_model:{D}", "float64")
        x = tokens * mm.get_variable("scale", [mm.Dimension("d_model", D)], "float64")
        found = mm.mixture_of_experts(x, experts, HIDDEN, mm.Gating(choices=2), True)
        total = mm.reduce_sum(mm.square(found.output)) + found.loss
        updates = mm.optimize.SGD(0.1).minimize(total)
    layout = "batch:all;experts:all"
    forward = mm.plan(graph, "all:4", layout, fetches=[total], updates=[]).program
    both = mm.plan(graph, "all:4", layout, fetches=[total], updates=updates).program
    assert forward.counts()["all_to_all"] == 2
    assert both.counts()["all_to_all"] == 4
    capacity = mm.Gating(choices=2).capacity(16, 4, True)
    sent = 2 * 4 * capacity * D  # rows of a rank, experts, places, numbers
    assert forward.values() == {"all_to_all": {"all": 2 * sent}, "all_reduce": {"all": 2}}
    # Besides: gradients of router and scale, the loss, the balance loss.  Experts' are local.
    values = both.values()
    assert values["all_to_all"] == {"all": 4 * sent}
    assert sorted(values) == ["all_reduce", "all_to_all"]
    assert values["all_reduce"]["all"] <= D * 4 + D + 2 + 2


def test_two_levels_travel_over_one_axis_each():
    graph, _, total = build((mm.Gating(), mm.Gating()), (OUTER, mm.Dimension("inner", 2)), rows=4)
    layout = "batch:cols+rows;outer_experts:rows;outer_batch:cols;inner:cols"
    program = mm.plan(graph, "rows:2;cols:2", layout, fetches=[total]).program
    kinds = program.values()
    assert sorted(kinds["all_to_all"]) == ["cols", "rows"]
    assert "all_gather" not in kinds


def test_dispatch_costs_no_arithmetic():
    """By index; a one-hot matrix would cost 2 * tokens * places * d_model FLOP, four times."""
    d, length, experts = mm.Dimension("d_model", 64), mm.Dimension("length", 256), 16
    with mm.Graph() as graph:
        x = mm.placeholder("x", [mm.Dimension("batch", 2), length, d])
        y = mm.mixture_of_experts(x, mm.Dimension("experts", experts), mm.Dimension("d_ff", 8))
        total = mm.reduce_sum(mm.square(y.output))
    places = experts * mm.Gating().capacity(256, experts, False)
    flops = mm.plan(graph, "all:1", "", fetches=[total]).cost.flops
    networks = 2 * (2 * places * 64 * 8) * 2
    one_hot_both_ways = 2 * (2 * 256 * places * 64) * 2
    assert networks < flops < networks + 0.06 * one_hot_both_ways


def mixed(shape, mask=None):
    mask = mask and mm.placeholder("m", mask, "bool")
    return mm.mixture_of_experts(mm.placeholder("x", shape), EXPERTS, HIDDEN, mask=mask)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mm.Gating(second_policy="treshold"), r"second_policy is 'treshold'.*'threshold'"),
        (lambda: mm.Gating(capacity_factor=0), "capacity_factor is 0"),
        (lambda: mm.Gating(group_size=0), "group_size is 0"),
        (lambda: build(mm.Gating(choices=4)), "chooses 4 of the 3 experts"),
        (lambda: mixed("batch:3;length:7;d_model:4", "m:2"), r"mask is bool\[m=2\]"),
        (lambda: mixed("d_model:4"), r"the input is \[d_model=4\]"),
        (lambda: build((mm.Gating(), mm.Gating())), "2 gatings for one level"),
    ],
)
def test_errors(call, message):
    with mm.Graph(), pytest.raises((ConfigError, ShapeError), match=message):
        call()
