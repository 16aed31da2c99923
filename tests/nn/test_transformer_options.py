"""Options of Transformers: experts, memory heads, positions, local windows, gated units."""

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.errors import ConfigError
from meshmpi.transformer import models
from tests.nn.build import random_variables, value
from tests.nn.textbook import Textbook

SMALL = models.TransformerConfig(
    vocab=11, length=8, d_model=8, d_ff=12, heads=4, d_kv=4, layers=2, dtype="float64", learned_positions=False
)
EXPERTS = {"experts": 3, "experts_every": 1, "expert_capacity": 1.0, "expert_z_loss": 0.01}
OPTIONS = {
    "multi_query": {"memory_heads": 1, "attention_bias": True},
    "grouped_query": {"memory_heads": 2, "rotary": True},
    "relative": {"relative_buckets": 8, "memory_heads": 2},
    "local": {"local_window": 3, "rotary": True, "memory_heads": 1},
    "gated": {"activation": "swiglu", "ff_bias": True},
    "switch": {**EXPERTS, "learned_positions": True},
    "switch_every_second": {**EXPERTS, "experts_every": 2, "activation": "geglu"},
    "top_2": {**EXPERTS, "expert_choices": 2, "expert_group": 4, "ff_bias": True},
}
IDS = np.random.default_rng(3).integers(1, 11, (4, 9)).astype(np.int32)
TOKENS, TARGETS = IDS[:, :-1], IDS[:, 1:]


def build(config, training=True, mixtures=None):
    with mm.Graph() as graph:
        tokens, targets = (mm.placeholder(n, "batch:4;length:8", "int32") for n in ("tokens", "targets"))
        loss, logits = models.lm_loss(config, tokens, targets, training, mixtures)
    return graph, loss, logits


@pytest.mark.parametrize("name", OPTIONS)
def test_number_of_parameters(name):
    config = SMALL.with_options(**OPTIONS[name])
    graph, _, _ = build(config)
    assert sum(v.shape.size for v in graph.trainable_variables) == models.parameter_count(config)
    with mm.Graph() as graph:
        source = mm.placeholder("source", "batch:4;source_length:8", "int32")
        tokens, targets = (mm.placeholder(n, "batch:4;length:8", "int32") for n in "ab")
        models.encoder_decoder_loss(config, source, tokens, targets)
    count = sum(v.shape.size for v in graph.trainable_variables)
    assert count == models.encoder_decoder_parameter_count(config)


@pytest.mark.parametrize("name", OPTIONS)
def test_no_position_sees_a_later_one(name):
    """Also through experts: earlier tokens take their places first."""
    config = SMALL.with_options(**{**OPTIONS[name], "expert_group": 0})
    graph, _, logits = build(config, training=False)
    variables = random_variables(graph)
    if config.expert_choices > 1:  # second choices are placed behind the first ones of all tokens
        config = config.with_options(expert_eval_capacity=9.0)
        _, _, logits = build(config, training=False)
    before = value(logits, {"tokens": TOKENS}, variables)
    changed = TOKENS.copy()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    after = value(logits, {"tokens": changed}, variables)
    np.testing.assert_allclose(after[:, :5], before[:, :5], rtol=1e-12)
    assert np.abs(after[:, 5:] - before[:, 5:]).max() > 1e-3


def test_local_window():
    """One layer with a window of 3: a token reaches its own and the two next positions."""
    config = SMALL.with_options(local_window=3, layers=1)
    graph, _, logits = build(config)
    variables, changed = random_variables(graph), TOKENS.copy()
    changed[:, 2] = (changed[:, 2] + 1) % 11
    difference = np.abs(
        value(logits, {"tokens": changed}, variables) - value(logits, {"tokens": TOKENS}, variables)
    ).max((0, 2))
    np.testing.assert_array_equal(difference > 1e-9, [False, False, True, True, True] + [False] * 3)


def test_a_window_of_everything_is_full_attention():
    for other in ({"rotary": True}, {"memory_heads": 1}):
        graph, _, full = build(SMALL.with_options(**other))
        _, _, local = build(SMALL.with_options(local_window=20, **other))
        variables = random_variables(graph)
        found, wanted = (value(t, {"tokens": TOKENS}, variables) for t in (local, full))
        np.testing.assert_allclose(found, wanted, rtol=1e-11)


def test_one_expert_is_a_feed_forward_layer():
    config = SMALL.with_options(experts=1, experts_every=1, expert_balance=0.0, expert_capacity=9.0)
    mixtures = []
    graph, _, logits = build(config, mixtures=mixtures)
    variables = random_variables(graph)
    feeds = {"tokens": TOKENS, "targets": TARGETS}
    plain = {n: a[0] if a.ndim == 3 and "/w" in n else a for n, a in variables.items()}
    wanted = Textbook(SMALL, plain).lm(TOKENS)
    np.testing.assert_allclose(value(logits, feeds, variables), wanted, rtol=1e-11)
    assert len(mixtures) == 2


def test_losses_of_experts_count_in_training_only():
    config = SMALL.with_options(**EXPERTS)
    losses = []
    for training in (True, False):
        mixtures = []
        graph, loss, logits = build(config, training, mixtures)
        assert len(mixtures) == 2
        variables = random_variables(graph)
        feeds = {"tokens": TOKENS, "targets": TARGETS}
        extra = sum(float(value(m.loss, feeds, variables)) for m in mixtures) * training
        z = value(logits, feeds, variables)
        z = z - np.log(np.exp(z).sum(-1, keepdims=True))
        entropy = -np.take_along_axis(z, TARGETS[..., None].astype(int), -1).mean()
        losses.append(float(value(loss, feeds, variables)))
        assert losses[-1] == pytest.approx(entropy + extra, rel=1e-12)
        assert extra > 0.01 or not training
    assert losses[0] != losses[1]


LAYOUTS = [
    "batch:rows;experts?:rows;d_ff:cols;heads:cols;vocab:cols",
    "batch:cols;experts?:cols;expert_batch?:rows",
    "length:rows;d_model:cols",
]


def train(config, layout):
    with mm.Graph() as graph:
        tokens, targets = (mm.placeholder(n, "batch:4;length:8", "int32") for n in ("tokens", "targets"))
        loss, _ = models.lm_loss(config, tokens, targets, True)
        updates = mm.optimize.Adam(1e-2, clip_norm=1.0).minimize(loss)
    step = mm.compile(graph, mm.SimulatedMesh("rows:2;cols:3"), layout, fetches=[loss], updates=updates)
    return [step(tokens=TOKENS, targets=TARGETS)[loss] for _ in range(3)]


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", OPTIONS)
def test_layouts(name):
    config = SMALL.with_options(**OPTIONS[name], ff_dropout=0.1, residual_dropout=0.1)
    wanted = train(config, "")
    assert wanted[0] > wanted[-1]
    for layout in LAYOUTS:
        np.testing.assert_allclose(train(config, layout), wanted, rtol=1e-10, err_msg=layout)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ["switch", "top_2", "grouped_query", "relative", "local"])
def test_bfloat16(name):
    """Near the losses of float32: routers, softmax, norms and losses are computed in float32."""
    config = SMALL.with_options(**{**OPTIONS[name], "dtype": "float32"})
    wanted = train(config, "")
    found = train(config.with_options(activation_dtype="bfloat16"), "batch:rows;heads:cols")
    # 8 bits per rounding; a token near the border of two experts may take the other.
    np.testing.assert_allclose(found, wanted, rtol=4e-2)


def test_padding_of_the_source_takes_no_expert():
    """12 of 16 positions are padding, all alike: they would fill the 6 places of one expert."""
    config = SMALL.with_options(**EXPERTS, expert_eval_capacity=1.0, padding_id=0)
    mixtures = []
    with mm.Graph() as graph:
        source = mm.placeholder("source", "batch:4;source_length:16", "int32")
        tokens, targets = (mm.placeholder(n, "batch:4;length:8", "int32") for n in "ab")
        models.encoder_decoder_loss(config, source, tokens, targets, False, mixtures)
    assert len(mixtures) == 4 and config.gating().capacity(16, 3, False) == 6
    ids = np.concatenate([np.zeros((4, 12), np.int32), TOKENS[:, :4]], 1)
    for found in mixtures[:2]:
        dropped = value(found.dropped, {"source": ids}, random_variables(graph))
        assert float(dropped) == pytest.approx(0.0, abs=1e-6)


def test_switch_of_eight_experts_exchanges_and_gathers_nothing():
    config = SMALL.with_options(experts=8, experts_every=1)
    with mm.Graph() as graph:
        tokens = mm.placeholder("tokens", "batch:4;length:8", "int32")
        logits = models.lm(config, tokens, training=True)
    program = mm.plan(graph, "all:4", "batch:all;experts:all", fetches=[logits]).program
    assert program.counts()["all_to_all"] == 2 * config.layers
    assert list(program.values()) == ["all_to_all"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_heads": 3}, "3 memory heads do not divide heads=4"),
        ({"rotary": True, "d_kv": 3}, "rotary positions with d_kv 3"),
        ({"relative_buckets": 8, "local_window": 3}, "has no relative bias"),
        ({"experts": 2, "expert_choices": 3}, "3 of 2 experts"),
        ({"experts": 2, "expert_capacity": 0.0}, "capacity_factor is 0"),
        ({"experts": -1}, "experts is -1"),
        ({"activation": "gegul"}, "Did you mean 'geglu'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises((ConfigError, mm.ShapeError), match=message):
        SMALL.with_options(**options)
