"""The Transformer models against a textbook forward pass; sizes against the paper's tables."""

import numpy as np
import pytest

from meshmpi.errors import ArgumentError, ConfigError, LayoutError, ShapeError
from meshmpi.graph import Graph, ops
from meshmpi.nn import optimize
from meshmpi.transformer import models
from tests.nn.build import check_gradients, random_variables, value
from tests.nn.textbook import Textbook, cross_entropy

RNG = np.random.default_rng(17)
SMALL = models.TransformerConfig(vocab=11, length=6, d_model=8, d_ff=10, heads=2, d_kv=3, layers=2, dtype="float64")
YARDSTICK = {"norm": "layer", "norm_epsilon": 1e-5, "ff_bias": True, "initializers": "gpt2"}
"""The model that the peers are compared on: layer norm with scale and bias, feed-forward biases,
no attention biases, an untied softmax matrix without bias."""
VARIANTS = {
    "paper": {},
    "yardstick": YARDSTICK,
    "gpt2": {**YARDSTICK, "activation": "gelu", "attention_bias": True, "tied_softmax": True},
    "bare": {"norm_scale": False, "learned_positions": False, "scale_logits": True},
    "bare_layer": {"norm": "layer", "norm_scale": False, "norm_bias": False, "tied_softmax": True},
}
TOKENS = RNG.integers(0, 11, (3, 6)).astype(np.int32)
TARGETS = RNG.integers(0, 11, (3, 6)).astype(np.int32)
FEEDS = {"tokens": TOKENS, "targets": TARGETS}


def build(config, training=False, length=6):
    with Graph() as graph:
        tokens, targets = (ops.placeholder(n, f"batch:3;length:{length}", "int32") for n in ("tokens", "targets"))
        loss, logits = models.lm_loss(config, tokens, targets, training)
    return graph, loss, logits


@pytest.mark.parametrize("name", VARIANTS)
def test_language_model(name):
    config = SMALL.with_options(**VARIANTS[name])
    graph, loss, logits = build(config)
    assert logits.shape.names == ("batch", "length", "vocab")
    variables = random_variables(graph)
    expected = Textbook(config, variables).lm(TOKENS)
    np.testing.assert_allclose(value(logits, FEEDS, variables), expected, rtol=1e-10, atol=1e-12)
    mean = cross_entropy(expected, TARGETS).mean()
    assert float(value(loss, FEEDS, variables)) == pytest.approx(mean, rel=1e-11)
    assert sum(v.shape.size for v in graph.trainable_variables) == models.parameter_count(config)


@pytest.mark.parametrize("name", ["paper", "gpt2"])
def test_gradients_of_the_language_model(name):
    config = SMALL.with_options(layers=1, **VARIANTS[name])
    graph, loss, _ = build(config)
    check_gradients(loss, FEEDS, random_variables(graph))


def test_yardstick_at_its_initial_values():
    """The yardstick, narrow, drawn by its initializers: the loss is near log(vocab)."""
    config = models.TransformerConfig(vocab=64, length=16, d_model=16, d_ff=32, heads=4, d_kv=4, layers=4, **YARDSTICK)
    with Graph() as graph:
        tokens = ops.placeholder("tokens", "batch:2;length:16", "int32")
        targets = ops.placeholder("targets", "batch:2;length:16", "int32")
        loss, _ = models.lm_loss(config, tokens, targets, training=True)
    variables = {}
    for v in graph.variables.values():
        drawn = v.initializer.resolve(v.shape)
        z = RNG.standard_normal(v.shape.sizes) if drawn.kind == "normal" else 0.0
        variables[v.name] = np.broadcast_to(z * drawn.scale + drawn.shift, v.shape.sizes)
    ids = RNG.integers(0, 64, (2, 17)).astype(np.int32)
    feeds = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
    logits = Textbook(config, variables).lm(feeds["tokens"])
    expected = cross_entropy(logits, feeds["targets"]).mean()
    assert float(value(loss, feeds, variables)) == pytest.approx(expected, rel=1e-12)
    assert expected == pytest.approx(np.log(64), abs=0.1)


def test_names_of_the_variables():
    graph, _, _ = build(SMALL.with_options(layers=1, **VARIANTS["gpt2"]))
    layer = "decoder/layer_000"
    assert list(graph.variables) == [
        "decoder/embedding",
        "decoder/positions",
        *(f"{layer}/attention_norm/{n}" for n in ("scale", "bias")),
        *(f"{layer}/attention/{n}" for p in "qkvo" for n in (p, f"{p}_bias")),
        *(f"{layer}/feed_forward_norm/{n}" for n in ("scale", "bias")),
        *(f"{layer}/feed_forward/{m}/{n}" for m in ("wi", "wo") for n in ("kernel", "bias")),
        "decoder/final_norm/scale",
        "decoder/final_norm/bias",
    ]
    assert "decoder/softmax" in build(SMALL)[0].variables


def test_the_future_is_not_seen():
    graph, _, logits = build(SMALL)
    variables = random_variables(graph)
    changed = {**FEEDS, "tokens": TOKENS.copy()}
    changed["tokens"][:, 4:] = (TOKENS[:, 4:] + 1) % 11
    before, after = (value(logits, f, variables) for f in (FEEDS, changed))
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert not np.allclose(before[:, 4:], after[:, 4:])


def test_shorter_sequences_use_the_first_positions():
    graph, _, logits = build(SMALL, length=4)
    variables = random_variables(graph)
    assert variables["decoder/positions"].shape == (6, 8)
    feeds = {"tokens": TOKENS[:, :4]}
    expected = Textbook(SMALL, variables).lm(TOKENS[:, :4])
    np.testing.assert_allclose(value(logits, feeds, variables), expected, rtol=1e-10, atol=1e-12)


def test_padding_does_not_count():
    graph, loss, _ = build(SMALL.with_options(padding_id=0))
    variables = random_variables(graph)
    targets = TARGETS.copy()
    targets[0, 2:], targets[1] = 0, 0
    losses = cross_entropy(Textbook(SMALL, variables).lm(TOKENS), targets)
    found = value(loss, {**FEEDS, "targets": targets}, variables)
    assert float(found) == pytest.approx(losses[targets != 0].mean(), rel=1e-11)


def test_smoothing_and_z_loss_act_in_training_only():
    config = SMALL.with_options(label_smoothing=0.2, z_loss=0.1)
    losses = []
    for training in (False, True):
        graph, loss, _ = build(config, training)
        losses.append(float(value(loss, FEEDS, random_variables(graph))))
    logits = Textbook(SMALL, random_variables(graph)).lm(TOKENS)
    log_z = np.log(np.exp(logits).sum(-1))
    smooth = 0.8 * cross_entropy(logits, TARGETS) + 0.2 * (log_z - logits.mean(-1)) + 0.1 * log_z**2
    assert losses == [
        pytest.approx(cross_entropy(logits, TARGETS).mean(), rel=1e-11),
        pytest.approx(smooth.mean(), rel=1e-11),
    ]


def test_dropout_in_training_only():
    options = {"attention_dropout": 0.3, "ff_dropout": 0.3, "residual_dropout": 0.3}
    config = SMALL.with_options(**options, logit_jitter=0.01)

    def noise(training, **changes):
        graph, _, _ = build(config.with_options(**changes), training)
        return [op for op in graph.operations if type(op).__name__ == "Random"]

    assert noise(False) == []
    # Embedding; in each of two layers attention weights, hidden units, two sublayers; logits.
    assert len(noise(True)) == 1 + 2 * 4 + 1
    shapes = {op.output.shape.names for op in noise(True, dropout_over_length=True)}
    assert shapes == {
        ("batch", "d_model"),
        ("batch", "heads", "memory_length"),
        ("batch", "d_ff"),
        ("batch", "length", "vocab"),
    }


def test_bfloat16_activations():
    config = SMALL.with_options(dtype="float32", activation_dtype="bfloat16")
    graph, loss, logits = build(config, True)
    assert (loss.dtype, logits.dtype) == ("float32", "bfloat16")
    assert {v.dtype for v in graph.variables.values()} == {"float32"}
    products = [op for op in graph.operations if type(op).__name__ == "Einsum"]
    assert {op.output.dtype for op in products} == {"bfloat16"}
    optimize.Adam(1e-3).minimize(loss)
    assert {v.dtype for v in graph.variables.values()} == {"float32", "int32"}


def test_residual_constraint():
    graph, _, _ = build(SMALL.with_options(residual_constraint="length:cols"))
    constrained = [op for op in graph.operations if type(op).__name__ == "Constrain"]
    # The embedding, two outputs of sublayers per layer and the norms before them, the last norm.
    assert len(constrained) == 1 + 4 * SMALL.layers + 1
    assert {str(op.layout) for op in constrained} == {"length:cols"}
    with pytest.raises(LayoutError, match="'lenght'"):
        build(SMALL.with_options(residual_constraint="lenght:cols"))


class TestEncoderDecoder:
    SOURCE = np.array([[3, 1, 4, 1, 0], [5, 9, 2, 0, 0], [6, 5, 3, 5, 8]], np.int32)
    CONFIG = SMALL.with_options(padding_id=0)

    def build(self, config):
        with Graph() as graph:
            source = ops.placeholder("source", "batch:3;source_length:5", "int32")
            tokens = ops.placeholder("tokens", "batch:3;length:6", "int32")
            targets = ops.placeholder("targets", "batch:3;length:6", "int32")
            return graph, *models.encoder_decoder_loss(config, source, tokens, targets)

    @pytest.mark.parametrize("name", ["paper", "gpt2"])
    def test_forward(self, name):
        config = self.CONFIG.with_options(**VARIANTS[name])
        graph, loss, logits = self.build(config)
        variables, feeds = random_variables(graph), {**FEEDS, "source": self.SOURCE}
        expected = Textbook(config, variables).encoder_decoder(self.SOURCE, TOKENS)
        np.testing.assert_allclose(value(logits, feeds, variables), expected, rtol=1e-9, atol=1e-11)
        mean = cross_entropy(expected, TARGETS)[TARGETS != 0].mean()
        assert float(value(loss, feeds, variables)) == pytest.approx(mean, rel=1e-11)
        count = sum(v.shape.size for v in graph.trainable_variables)
        assert count == models.encoder_decoder_parameter_count(config)

    def test_gradients(self):
        graph, loss, _ = self.build(self.CONFIG.with_options(layers=1))
        check_gradients(loss, {**FEEDS, "source": self.SOURCE}, random_variables(graph))


LM_COUNTS = [142_881_792, 218_379_264, 369_374_208, 671_364_096, 1_275_343_872, 2_483_303_424, 4_899_222_528]
LM_TABLE = [0.14, 0.22, 0.37, 0.67, 1.28, 2.48, 4.90]
MT_TABLE = [0.15, 0.24, 0.42, 0.77, 1.48, 2.89]


@pytest.mark.parametrize("k", models.PAPER_LM_SIZES)
def test_sizes_of_the_papers_language_models(k):
    config = models.paper_language_model(k)
    with Graph() as graph:
        models.lm(config, ops.placeholder("tokens", "batch:256;length:256", "int32"), training=True)
    count = sum(v.shape.size for v in graph.trainable_variables)
    assert count == models.parameter_count(config) == LM_COUNTS[k]
    assert round(count / 1e9, 2) == LM_TABLE[k]


@pytest.mark.parametrize("k", models.PAPER_MT_SIZES)
def test_sizes_of_the_papers_translation_models(k):
    config = models.paper_translation_model(k)
    with Graph() as graph:
        source, tokens = (ops.placeholder(n, f"batch:128;{n}:256", "int32") for n in ("source_length", "length"))
        models.encoder_decoder(config, source, tokens, training=True)
    count = sum(v.shape.size for v in graph.trainable_variables)
    assert count == models.encoder_decoder_parameter_count(config)
    assert round(count / 1e9, 2) == MT_TABLE[k]


def test_size_of_the_big_model_of_vaswani():
    """Everything shared: the .21 B that the paper's Table 3 prints for it."""
    small = models.paper_translation_model(0)
    config = small.with_options(d_ff=4096, heads=16, d_kv=64, tied_softmax=True)
    assert round(models.encoder_decoder_parameter_count(config) / 1e9, 2) == 0.21


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "lyer"}, "Did you mean 'layer'"),
        ({"initializers": "gpt"}, "Did you mean 'gpt2'"),
        ({"activation": "rellu"}, "Did you mean 'relu'"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"layers": 0}, "layers is 0"),
        ({"ff_dropout": 1.0}, "ff_dropout is 1.0"),
        ({"layers": "4"}, "layers is '4'. It must be a valid integer"),
        ({"layers": True}, "layers is True. It must be a valid integer"),
        ({"tied_softmax": 1}, "tied_softmax is 1. It must be a valid boolean"),
        ({"d_modle": 3}, "d_modle is not a setting. Did you mean 'd_model'"),
        ({"residual_constraint": "length"}, "has no colon"),
    ],
)
def test_bad_options(changes, message):
    with pytest.raises((ConfigError, LayoutError, ArgumentError), match=message):
        SMALL.with_options(**changes)


def test_bad_tokens():
    with Graph():
        with pytest.raises(ShapeError, match=r"tokens are float32\[batch=3, length=4\]"):
            models.lm(SMALL, ops.placeholder("a", "batch:3;length:4"))
        with pytest.raises(ShapeError, match="length 7, but there are 6 positions"):
            models.lm(SMALL, ops.placeholder("b", "batch:3;length:7", "int32"))
