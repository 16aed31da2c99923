"""The encoder alone, options of masked language models, and padding in all models."""

from __future__ import annotations

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.errors import ConfigError, ShapeError
from meshmpi.transformer import models
from tests.nn.build import check_gradients, random_variables, value

SMALL = models.TransformerConfig(
    vocab=11, length=8, d_model=6, d_ff=10, heads=3, d_kv=4, layers=2, dtype="float64", padding_id=0, mask_id=10
)
BERT = {
    "norm": "layer",
    "norm_after": True,
    "embedding_norm": True,
    "token_types": 2,
    "head_transform": True,
    "softmax_bias": True,
    "tied_softmax": True,
    "attention_bias": True,
    "ff_bias": True,
    "activation": "gelu_exact",
    "initializers": "gpt2",
}
ESM = {
    **BERT,
    "norm_after": False,
    "embedding_norm": False,
    "token_types": 0,
    "token_dropout": 0.12,
    "learned_positions": False,
    "rotary": True,
}
OPTIONS = {
    "plain": {},
    "bert": BERT,
    "esm": ESM,
    "output_bias": {"attention_output_bias": True},
    "relative": {"learned_positions": False, "relative_buckets": 8, "relative_distance": 5},
    "gated_head": {"head_transform": True, "activation": "swiglu", "softmax_bias": True},
    "experts": {"experts": 2, "experts_every": 2, "experts_remainder": 1, "expert_places": 3},
    "olmo2": {"memory_heads": 1, "query_norm": "all", "norm_output": True, "rotary": True},
    "roberta": {"norm_after": True, "position_offset": 1},
    "parallel": {"parallel": True, "rotary": True, "rotary_width": 2, "norm": "layer"},
    "grouped": {"memory_heads": 1, "rotary": True, "rotary_base": 50.0, "rotary_scaling": "linear:3"},
}
RNG = np.random.default_rng(2)
TOKENS = RNG.integers(1, 10, (3, 8)).astype(np.int32)
TOKENS[0, 2] = TOKENS[1, 4] = TOKENS[1, 3] = 10
TOKENS[1, 6:] = 0
TARGETS = RNG.integers(1, 10, (3, 8)).astype(np.int32)
WEIGHTS = (RNG.random((3, 8)) < 0.5).astype(np.float64)
FEEDS = {"tokens": TOKENS, "targets": TARGETS, "weights": WEIGHTS}


def build(config, training=False, **options):
    with mm.Graph() as graph:
        tokens = mm.placeholder("tokens", "batch:3;length:8", "int32")
        targets = mm.placeholder("targets", "batch:3;length:8", "int32")
        weights = mm.placeholder("weights", "batch:3;length:8", "float64")
        loss, logits = models.masked_lm_loss(config, tokens, targets, weights, training, **options)
    return graph, loss, logits


@pytest.mark.parametrize("name", OPTIONS)
def test_number_of_parameters(name):
    config = SMALL.with_options(**OPTIONS[name])
    graph, _, _ = build(config)
    assert sum(v.shape.size for v in graph.trainable_variables) == models.parameter_count(config)
    config = config.with_options(token_dropout=0.0, encoder_layers=3, decoder_experts_every=1, shared_embedding=False)
    config = config.with_options(parallel=False)  # which encoder-decoders refuse
    with mm.Graph() as graph:
        source = mm.placeholder("source", "batch:3;source_length:8", "int32")
        models.encoder_decoder(config, source, mm.placeholder("tokens", "batch:3;length:8", "int32"))
    count = sum(v.shape.size for v in graph.trainable_variables)
    assert count == models.encoder_decoder_parameter_count(config)
    assert "encoder/layer_002/attention/q" in graph.variables
    assert "decoder/layer_002/attention/q" not in graph.variables


@pytest.mark.parametrize("name", OPTIONS)
def test_every_token_sees_every_other_and_no_padding(name):
    config = SMALL.with_options(**{**OPTIONS[name], "expert_places": 8 * ("expert" in name)})
    graph, _, logits = build(config)
    variables = random_variables(graph)
    whole = value(logits, FEEDS, variables)
    for row, place, reached in ((0, 7, True), (1, 7, False)):
        tokens = TOKENS.copy()
        tokens[row, place] = 7 if reached else 0
        if not reached:  # padding stays padding: other rows change, and it does not matter where
            tokens[1, 6:], mask = 5, TOKENS != 0
            with graph, mm.scope(reuse=True):
                real = mm.placeholder("real", "batch:3;length:8", "bool")
                changed = models.masked_lm(config, graph.placeholders["tokens"], mask=real)
            found = value(changed, {"tokens": tokens, "real": mask}, variables)
            np.testing.assert_allclose(found[mask], whole[mask], rtol=1e-11)
        else:
            found = value(logits, {"tokens": tokens}, variables)
            assert (np.abs(found[0] - whole[0]).max(-1) > 1e-6).all()
            np.testing.assert_array_equal(found[2], whole[2])


@pytest.mark.parametrize("name", ["bert", "esm"])
def test_gradients(name):
    config = SMALL.with_options(layers=1, **OPTIONS[name])
    graph, loss, _ = build(config)
    check_gradients(loss, FEEDS, random_variables(graph), tolerance=1e-5)


def test_loss_is_the_weighted_mean():
    graph, loss, logits = build(SMALL)
    variables = random_variables(graph)
    z = value(logits, FEEDS, variables)
    z = z - np.log(np.exp(z).sum(-1, keepdims=True))
    losses = -np.take_along_axis(z, TARGETS[..., None].astype(int), -1)[..., 0]
    wanted = (losses * WEIGHTS).sum() / WEIGHTS.sum()
    assert float(value(loss, FEEDS, variables)) == pytest.approx(wanted, rel=1e-12)


def test_token_dropout():
    """Hidden tokens are zeros; the others are scaled by 0.88 / (share that is seen)."""
    config = SMALL.with_options(token_dropout=0.12, learned_positions=False, layers=1)
    graph, _, _ = build(config)
    variables = random_variables(graph)
    with graph, mm.scope(reuse=True):
        tokens = graph.placeholders["tokens"]
        bare = models.encoder(config.with_options(token_dropout=0.0), tokens)
        found = models.encoder(config, tokens)
    # With all other weights zero, what comes out is the normalised embedding, whatever its scale.
    silent = {n: a if "embedding" in n or "scale" in n else 0 * a for n, a in variables.items()}
    a, b = value(found, FEEDS, silent), value(bare, FEEDS, silent)
    hidden = TOKENS == 10
    np.testing.assert_array_equal(a[hidden], 0.0)
    np.testing.assert_allclose(a[~hidden], b[~hidden], rtol=1e-5)
    # An RMS norm of huge epsilon is a constant factor, and shows the scale.
    config = config.with_options(norm_epsilon=1e12)
    with graph, mm.scope(reuse=True):
        a, b = (
            value(models.encoder(c, tokens), FEEDS, silent) for c in (config, config.with_options(token_dropout=0.0))
        )
    share = np.array([1 / 8, 2 / 6, 0.0])
    factor = np.where(hidden, 0.0, (0.88 / (1 - share))[:, None])
    np.testing.assert_allclose(a, b * factor[..., None], rtol=1e-8)


LAYOUTS = [
    ("rows:2;cols:2", "batch:rows;heads:cols;d_ff:cols;vocab:cols", ""),
    ("rows:2;cols:2", "d_model:rows;heads:cols;vocab:cols", ""),
    ("all:3", "length:all", "d_ff:all;d_transform?:all"),
    ("rows:2;cols:3", "batch:cols;experts?:cols;memory_length:rows", "vocab:rows"),
]


def results(config, mesh, layout, storage):
    graph, loss, logits = build(config)
    with graph:
        gradients = mm.gradients(loss, graph.trainable_variables)
    step = mm.compile(
        graph,
        mm.SimulatedMesh(mesh),
        layout,
        storage=storage,
        kernels="numpy",
        seed=5,
        fetches=[logits, loss, *gradients],
    )
    found = step(**FEEDS)
    return [np.asarray(found[t]) for t in (logits, loss, *gradients)]


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", OPTIONS)
def test_layouts(name):
    config = SMALL.with_options(**OPTIONS[name])
    wanted = results(config, "all:1", "", "")
    for mesh, layout, storage in LAYOUTS if name in ("bert", "esm") else LAYOUTS[1:3]:
        found = results(config, mesh, layout, storage)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-11, err_msg=layout)


@pytest.mark.matrix
def test_recomputing_changes_nothing():
    for name in ("bert", "experts"):
        config = SMALL.with_options(**OPTIONS[name], ff_dropout=0.1, embedding_dropout=0.2)
        found = []
        for recompute in ("none", "layers"):
            graph, loss, _ = build(config.with_options(recompute=recompute), training=True)
            updates = None
            with graph:
                updates = mm.optimize.Adam(1e-2).minimize(loss)
            step = mm.compile(
                graph, mm.SimulatedMesh("all:2"), "batch:all", fetches=[loss], updates=updates, kernels="numpy"
            )
            found.append([step(**FEEDS)[loss] for _ in range(2)])
        np.testing.assert_allclose(found[0], found[1], rtol=1e-12)
        assert found[0][0] > found[0][-1]


# -- padding in a language model -------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"rotary": True},
        {"relative_buckets": 8},
        {"rotary": True, "local_window": 3},
        {"rotary": True, "experts": 2, "experts_every": 1, "expert_eval_capacity": 1.0},
    ],
    ids=["rotary", "relative", "local", "experts"],
)
def test_padding_on_the_left_changes_nothing(options):
    """With positions that count by distance, a text is the same behind padding as alone."""
    config = SMALL.with_options(learned_positions=False, **options)
    with mm.Graph() as graph:
        alone = models.lm(config, mm.placeholder("alone", "batch:3;length:5", "int32"))
        tokens = mm.placeholder("tokens", "batch:3;length:8", "int32")
        mask = mm.placeholder("mask", "batch:3;length:8", "bool")
        with mm.scope(reuse=True):
            padded = models.lm(config, tokens, mask=mask)
    variables = random_variables(graph)
    text = RNG.integers(1, 11, (3, 5)).astype(np.int32)
    mask = np.arange(8) >= np.array([[3]] * 3)
    wide = np.concatenate([np.full((3, 3), 4, np.int32), text], 1)
    found = value(padded, {"tokens": wide, "mask": mask}, variables)
    np.testing.assert_allclose(found[:, 3:], value(alone, {"alone": text}, variables), rtol=1e-10)


def test_masks_of_an_encoder_decoder():
    """A mask of the source stands for its padding; the target is seen where its mask says."""
    config = SMALL.with_options(learned_positions=False, relative_buckets=8, encoder_layers=1)
    with mm.Graph() as graph:
        source = mm.placeholder("source", "batch:3;source_length:8", "int32")
        tokens = mm.placeholder("tokens", "batch:3;length:5", "int32")
        by_id = models.encoder_decoder(config, source, tokens)
        real = mm.placeholder("real", "batch:3;source_length:8", "bool")
        mask = mm.placeholder("mask", "batch:3;length:5", "bool")
        plain = config.with_options(padding_id=-1)
        with mm.scope(reuse=True):
            by_mask = models.encoder_decoder(plain, source, tokens, source_mask=real, mask=mask)
    variables = random_variables(graph)
    target = RNG.integers(1, 11, (3, 5)).astype(np.int32)
    feeds = {"source": TOKENS, "tokens": target, "real": TOKENS != 0, "mask": target > 0}
    wanted = value(by_id, feeds, variables)
    np.testing.assert_allclose(value(by_mask, feeds, variables), wanted, rtol=1e-11)
    seen = np.ones((3, 5), bool)
    seen[:, 1] = False
    changed = target.copy()
    changed[:, 1] = 7
    first, other = (value(by_mask, {**feeds, "tokens": t, "mask": seen}, variables) for t in (target, changed))
    np.testing.assert_allclose(other[seen], first[seen], rtol=1e-11)
    assert np.abs(first[:, 2:] - wanted[:, 2:]).max() > 1e-4


# -- errors ----------------------------------------------------------------------------------------


def test_errors_of_models():
    with mm.Graph():
        tokens = mm.placeholder("tokens", "batch:3;length:8", "int32")
        with pytest.raises(ShapeError, match="local_window of 3, which is for decoders"):
            models.encoder(SMALL.with_options(local_window=3), tokens)
        with pytest.raises(ConfigError, match="token_dropout is 0.12: the embedding of a token"):
            models.lm(SMALL.with_options(token_dropout=0.12), tokens)
        longer = mm.placeholder("longer", "batch:3;length:9", "int32")
        with pytest.raises(ShapeError, match="have length 9, but there are 8 positions"):
            models.encoder(SMALL, longer)
        with pytest.raises(ShapeError, match=r"Give int32 \[batch, length\]"):
            models.encoder(SMALL, mm.placeholder("floats", "batch:3;length:8"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_id": 11}, "mask_id is 11, but vocab is 11"),
        ({"mask_id": -1, "token_dropout": 0.1}, "without a mask_id"),
        ({"token_dropout": 1.0}, "token_dropout is 1.0"),
        ({"embedding_dropout": -0.5}, "embedding_dropout is -0.5"),
        ({"token_types": -1}, "token_types is -1"),
        ({"encoder_layers": -2}, "encoder_layers is -2"),
        ({"rotary_base": 1.0}, "rotary_base is 1.0"),
        ({"rotary_scaling": "yarn:2"}, "no kind 'yarn'"),
        ({"rotary_scaling": "llama3:8,1,4"}, "rotary_scaling is 'llama3:8,1,4'"),
        ({"rotary_scaling": "linear"}, "rotary_scaling is 'linear'"),
        ({"rotary_scaling": "llama3:8,4,1,64"}, "do not fit"),
        ({"norm_after": 1}, "norm_after is 1. It must be a valid boolean"),
        ({"norm_after": True, "parallel": True}, "norm_after and parallel are both true"),
        ({"rotary_width": 3}, "rotary_width is 3 of d_kv"),
        ({"norm_after": True, "norm_output": True}, "norm_after and norm_output are both true"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigError, match=message):
        SMALL.with_options(**options)


def test_parallel_sublayers_are_refused_where_a_decoder_has_a_source():
    with mm.Graph():
        source, target = (mm.placeholder(n, f"batch:2;{n}:4", "int32") for n in ("source_length", "length"))
        with pytest.raises(ConfigError, match="parallel is true for an encoder-decoder"):
            mm.transformer.encoder_decoder(SMALL.with_options(parallel=True, length=4), source, target)
