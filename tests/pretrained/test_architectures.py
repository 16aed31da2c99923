"""What configs of Hugging Face mean: entries, sizes, refusals.  Needs none of its packages."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.errors import ConfigError, ShapeError
from meshmpi.nn.positions import RotaryScaling
from meshmpi.transformer.models import encoder_decoder_parameter_count, parameter_count
from meshmpi.transformer.pretrained.architectures import ARCHITECTURES, architecture, model_inputs, model_logits
from meshmpi.transformer.pretrained.architectures.options import HARMLESS, Options
from tests.nn.build import value
from tests.pretrained.whole import arrays_of, by_variable, read_whole, variables_of, where

GPT2 = {"model_type": "gpt2", "n_embd": 12, "n_head": 3, "n_layer": 2, "vocab_size": 19, "n_positions": 8}
SIZES = {
    "hidden_size": 12,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "intermediate_size": 10,
    "vocab_size": 19,
    "max_position_embeddings": 8,
}
T5 = {
    "model_type": "t5",
    "d_model": 12,
    "num_heads": 3,
    "d_kv": 5,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "d_ff": 10,
    "vocab_size": 19,
}
TABLES = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
SWITCH = {
    **T5,
    "model_type": "switch_transformers",
    "num_experts": 3,
    "expert_capacity": 4,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 2,
}
ESM = {
    **SIZES,
    "model_type": "esm",
    "position_embedding_type": "rotary",
    "token_dropout": True,
    "mask_token_id": 18,
    "pad_token_id": 1,
}
LLAMA = {**SIZES, "model_type": "llama", "num_key_value_heads": 3}
BERT = {**SIZES, "model_type": "bert"}
WITHOUT_FF = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
CONFIGS = {
    "gpt2": (GPT2, ()),
    "gpt2_untied": ({**GPT2, "tie_word_embeddings": False, "n_inner": 7}, ()),
    "gpt_neox": ({**SIZES, "model_type": "gpt_neox", "rotary_pct": 0.5}, ()),
    "llama": (LLAMA, ()),
    "llama_gqa": ({**LLAMA, "num_attention_heads": 6, "head_dim": 4, "attention_bias": True}, ()),
    "llama_mqa": ({**LLAMA, "num_key_value_heads": 1, "tie_word_embeddings": True}, ()),
    "mistral": ({**LLAMA, "model_type": "mistral", "sliding_window": 3}, ()),
    "mistral_whole": ({**LLAMA, "model_type": "mistral", "sliding_window": None}, ()),
    "qwen2": ({**LLAMA, "model_type": "qwen2", "max_window_layers": 2}, ()),
    "qwen3": ({**LLAMA, "model_type": "qwen3"}, ()),
    "olmo": ({**LLAMA, "model_type": "olmo"}, ()),
    "olmo2": ({**LLAMA, "model_type": "olmo2", "num_key_value_heads": 1}, ()),
    "opt": ({**WITHOUT_FF, "model_type": "opt", "ffn_dim": 10}, ()),
    "phi3": ({**LLAMA, "model_type": "phi3", "num_key_value_heads": 1}, ()),
    "starcoder2": ({**LLAMA, "model_type": "starcoder2"}, ()),
    "t5": (T5, ()),
    "t5_v1_1": ({**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, ()),
    "t5_two_tables": ({**T5, "tie_word_embeddings": False}, TABLES),
    "switch": (SWITCH, ()),
    "esm": (ESM, ()),
    "esm_untied": ({**ESM, "tie_word_embeddings": False, "emb_layer_norm_before": True}, ()),
    "bert": (BERT, ()),
    "roberta": ({**BERT, "model_type": "roberta"}, ()),
    "camembert": ({**BERT, "model_type": "camembert"}, ()),
    "xlm_roberta": ({**BERT, "model_type": "xlm-roberta", "tie_word_embeddings": False}, ()),
    "distilbert": ({**WITHOUT_FF, "model_type": "distilbert", "hidden_dim": 10}, ()),
    "bert_untied": ({**BERT, "tie_word_embeddings": False}, ()),
}


def described(name):
    config, keys = CONFIGS[name]
    return architecture(json.loads(json.dumps(config)), keys=keys)


def shapes_of(found):
    with mm.Graph() as graph:
        source = 5 if found.kind == "encoder_decoder" else 0
        logits = model_logits(found, model_inputs(found, 2, 6, source))
    assert logits.shape.sizes == (2, 6, found.config.vocab)
    return {v.name: v.shape for v in graph.trainable_variables}


def test_every_architecture_is_tried():
    assert sorted({c["model_type"] for c, _ in CONFIGS.values()}) == sorted(ARCHITECTURES)


HOSTILE = [
    10**9,
    10**400,
    1 << 24,
    -1,
    0,
    0.5,
    math.nan,
    math.inf,
    "x",
    "",
    [],
    [1],
    {},
    {"a": 1},
    True,
    False,
    {"rope_type": "linear", "factor": "x"},
    {"rope_type": []},
]


@pytest.mark.parametrize("name", CONFIGS)
def test_whatever_an_option_says_it_is_taken_or_refused(name):
    """No other error, and none that takes long: layers are not made before they are counted."""
    config, keys = CONFIGS[name]
    known = Options(config, name)
    architecture_of = ARCHITECTURES[config["model_type"]]
    architecture_of(known)
    started = time.monotonic()
    read = [key for key in known.known if key not in HARMLESS]
    for key in dict.fromkeys(["model_type", *read]):
        for hostile in HOSTILE:
            try:
                architecture({**config, key: hostile}, keys=keys)
            except (ConfigError, ShapeError) as error:
                assert error.remedy and len(str(error)) < 900, (key, hostile)
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("name", CONFIGS)
def test_entries_are_the_variables(name):
    """Each variable is filled wholly, and each array of the file used wholly, once."""
    found = described(name)
    shapes = shapes_of(found)
    assert sorted(by_variable(found)) == sorted(shapes)
    for variable, entries in by_variable(found).items():
        counts = np.zeros(shapes[variable].sizes, int)
        for e in entries:
            at = {d.name: i for d, i in e.at}
            assert sorted([*e.dims, *(d for d, _ in e.at)]) == sorted(shapes[variable]), e
            counts[tuple(at.get(d.name, slice(None)) for d in shapes[variable])] += 1
        assert (counts == 1).all(), variable
    arrays = {}
    for e in found.entries:
        array = arrays.setdefault(e.keys[0], np.zeros(e.file_shape, int))
        assert array.shape == e.file_shape
        array[where(e)] += 1
    assert all((a == 1).all() for a in arrays.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_number_of_parameters(name):
    found = described(name)
    total = sum(s.size for s in shapes_of(found).values())
    count = parameter_count if found.kind != "encoder_decoder" else encoder_decoder_parameter_count
    assert count(found.config) == total


@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back(name):
    found, rng = described(name), np.random.default_rng(3)
    shapes = shapes_of(found)
    variables = {n: rng.normal(size=s.sizes).astype(np.float32) for n, s in shapes.items()}
    arrays = arrays_of(found, variables, shapes)
    back = variables_of(found, arrays, shapes)
    assert all(np.array_equal(back[n], variables[n]) for n in variables)
    legacy = {}
    for e in found.entries:  # the oldest names, and no prefix
        legacy[e.keys[-1].removeprefix(found.prefix)] = arrays[e.keys[0]]
    back = variables_of(found, legacy, shapes)
    assert all(np.array_equal(back[n], variables[n]) for n in variables)


def test_meaning_of_entries():
    """Linears are (out, in), Conv1Ds (in, out), and heads lie side by side."""
    llama, gpt2 = described("llama_gqa"), described("gpt2")
    shapes = shapes_of(llama)
    array = np.arange(24 * 12, dtype=np.float32).reshape(24, 12)
    entry = by_variable(llama)["decoder/layer_000/attention/q"][0]
    q = read_whole(entry, array, shapes[entry.variable])
    assert shapes[entry.variable].names == ("d_model", "heads", "query_heads", "d_kv")
    # Head 3 of the queries is the second of the two that use head 1 of the keys.
    assert q[5, 1, 1, 2] == array[3 * 4 + 2, 5]
    fused = np.arange(12 * 36, dtype=np.float32).reshape(12, 36)
    entry = by_variable(gpt2)["decoder/layer_001/attention/v"][0]
    assert entry.keys == ("transformer.h.1.attn.c_attn.weight",)
    v = read_whole(entry, fused, shapes_of(gpt2)[entry.variable])
    assert v[7, 2, 3] == fused[7, 24 + 2 * 4 + 3]


PUBLISHED = {
    "gpt2": ({"model_type": "gpt2"}, 124_439_808),
    "llama-2-7b": ({"model_type": "llama"}, 6_738_415_616),
    "llama-3-8b": (
        {
            "model_type": "llama",
            "vocab_size": 128256,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "rope_theta": 500000.0,
            "max_position_embeddings": 8192,
        },
        8_030_261_248,
    ),
    "mistral-7b": ({"model_type": "mistral"}, 7_241_732_096),
    "qwen2-0.5b": (
        {
            "model_type": "qwen2",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "num_hidden_layers": 24,
            "tie_word_embeddings": True,
        },
        494_032_768,
    ),
    "t5-small": ({"model_type": "t5", "d_ff": 2048, "d_kv": 64, "d_model": 512, "n_positions": 512}, 60_506_624),
    "t5-v1_1-small": (
        {
            "model_type": "t5",
            "d_ff": 1024,
            "d_kv": 64,
            "num_heads": 6,
            "num_layers": 8,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
        },
        76_961_152,
    ),
    "bert-base-uncased": ({"model_type": "bert"}, 109_514_298),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    values, wanted = PUBLISHED[name]
    found = architecture(values)
    count = parameter_count if found.kind != "encoder_decoder" else encoder_decoder_parameter_count
    assert count(found.config) == wanted
    assert sum(math.prod(e.file_shape) for e in found.entries) >= wanted


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        ({}, {}, "model_type None; there are bert"),
        (GPT2, {"model_type": "gpt3"}, "model_type 'gpt3'.*Did you mean 'gpt2'"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention=True"),
        (GPT2, {"activation_function": "mish"}, "activation_function='mish'"),
        (GPT2, {"n_head": "three"}, "'n_head' is 'three'"),
        (GPT2, {"new_trick": 3, "other": [1]}, r"new_trick=3, other=\[1\].*ignore=\['new_trick'"),
        (LLAMA, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "type 'yarn' with .*factor"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}}, "'linear' with"),
        (LLAMA, {"hidden_act": "relu2"}, "hidden_act='relu2', which has no gated unit"),
        (LLAMA, {"num_key_value_heads": 2}, "2 memory heads do not divide heads=3"),
        (LLAMA, {"num_attention_heads": 5}, "has 5 heads and a width of 12"),
        (GPT2, {"n_head": 5}, "has 5 heads and a width of 12"),
        (BERT, {"hidden_size": 11}, "has 3 heads and a width of 11"),
        ({**LLAMA, "model_type": "mistral"}, {"attention_bias": True}, "attention_bias=True"),
        ({**LLAMA, "model_type": "qwen2"}, {"use_sliding_window": True}, "use_sliding_window=True"),
        ({**LLAMA, "model_type": "qwen2"}, {"layer_types": ["full_attention", "sliding"]}, "layer_types=.*'sliding'"),
        (T5, {"is_decoder": True}, "is_decoder=True"),
        (T5, {"feed_forward_proj": "gated-mish"}, "feed_forward_proj='mish'"),
        (SWITCH, {"router_bias": True}, "router_bias=True"),
        (SWITCH, {"router_dtype": "bfloat16"}, "router_dtype='bfloat16'"),
        (SWITCH, {"num_sparse_encoder_layers": 4}, "num_sparse_encoder_layers=4 of 3 layers"),
        (ESM, {"position_embedding_type": "absolute"}, "position_embedding_type='absolute'"),
        (ESM, {"position_embedding_type": None}, "position_embedding_type='absolute'"),
        (ESM, {"mask_token_id": None}, "no 'mask_token_id'"),
        (ESM, {"pad_token_id": None}, "no 'pad_token_id'"),
        (ESM, {"is_folding_model": True}, "is_folding_model=True"),
        (BERT, {"position_embedding_type": "relative_key"}, "position_embedding_type='relative"),
        (BERT, {"is_decoder": True}, "is_decoder=True"),
    ],
)
def test_what_is_not_implemented_is_refused(base, change, message):
    with pytest.raises((ConfigError, ShapeError), match=message):
        architecture({**base, **change})


def test_what_changes_nothing_is_let_through():
    plain = architecture(GPT2)
    more = {
        "use_cache": False,
        "architectures": ["X"],
        "unheard_of": None,
        "switched_off": False,
        "task_specific_params": {"a": 1},
        "torch_dtype": "float16",
        "embd_pdrop": 0.1,
    }
    assert architecture({**GPT2, **more}).config == plain.config
    assert architecture({**GPT2, "my_note": "x"}, ignore=["my_note"]).config == plain.config
    by_other_names = {
        "model_type": "gpt2",
        "hidden_size": 12,
        "num_attention_heads": 3,
        "num_hidden_layers": 2,
        "vocab_size": 19,
        "max_position_embeddings": 8,
    }
    assert architecture(by_other_names).config == plain.config


def test_special_tokens():
    assert described("t5").special == {"pad": 0, "eos": 1, "decoder_start": 0}
    found = architecture({**LLAMA, "eos_token_id": [7, 8], "pad_token_id": 3})
    assert found.special == {"bos": 1, "eos": 7, "pad": 3}
    assert described("esm").special == {"bos": 0, "eos": 2, "pad": 1, "mask": 18}


def test_softmax_of_t5():
    """The scale hangs on the tie, unless the file says it: transformers 5 ties all by itself."""
    wanted = {
        (None, None): (True, True),
        (False, None): (False, False),
        (True, None): (True, True),
        (True, False): (True, False),
        (False, True): (False, True),
    }
    for (tie, scale), (tied, scaled) in wanted.items():
        config = architecture({**T5, "tie_word_embeddings": tie, "scale_decoder_outputs": scale}).config
        assert (config.tied_softmax, config.softmax_scale != 1.0) == (tied, scaled)


@pytest.mark.parametrize("theirs", ["gelu", "gelu_new"])
def test_gelus(theirs):
    wanted = {"gelu": "gelu_exact", "gelu_new": "gelu"}
    assert architecture({**BERT, "hidden_act": theirs}).config.activation == wanted[theirs]


def test_which_layers_of_a_switch_have_experts():
    """As in transformers: the second of every few, or all."""
    for layers, sparse in ((3, 1), (4, 2), (6, 2), (12, 3), (2, 2), (1, 1), (4, 0), (5, 3)):
        values = {**SWITCH, "num_layers": layers, "num_sparse_encoder_layers": sparse}
        config = architecture(values).config.encoder_stack
        step = layers // sparse if sparse else layers
        found = [config.has_experts(i) for i in range(layers)]
        assert found == [i % step == 1 or step == 1 for i in range(layers)]


def test_window_of_mistral():
    """4096 where the file says nothing, none where it says null."""
    values = {**LLAMA, "model_type": "mistral"}
    assert architecture(values).config.local_window == 4096
    assert described("mistral").config.local_window == 3
    assert described("mistral_whole").config.local_window == 0


def test_inputs():
    gpt2, t5, bert = (described(n) for n in ("gpt2", "t5", "bert"))
    with mm.Graph() as graph:
        with pytest.raises(ShapeError, match="kind lm, and source_length is 4"):
            model_inputs(gpt2, 2, 6, 4)
        with pytest.raises(ShapeError, match="kind encoder_decoder, and source_length is 0"):
            model_inputs(t5, 2, 6)
        inputs = model_inputs(bert, 2, 6)
        assert list(graph.placeholders) == ["tokens", "mask", "types"]
        with pytest.raises(ShapeError, match="needs a source"):
            model_logits(t5, inputs)


# -- slowed rotations ------------------------------------------------------------------------------


def test_slowed_rotations():
    rate = 500.0 ** (-np.arange(8) / 8)
    with mm.Graph():
        x = mm.placeholder("rate", "d_kv:8", "float64")
        linear, llama3 = (RotaryScaling.parse(t).rates(x) for t in ("linear:4", "llama3:8,1,4,64"))
    np.testing.assert_allclose(value(linear, {"rate": rate}), rate / 4, rtol=1e-14)
    wave = 2 * np.pi / rate
    between = (64 / wave - 1) / 3
    wanted = np.where(wave > 64, rate / 8, np.where(wave < 16, rate, (1 - between) * rate / 8 + between * rate))
    assert (wave > 64).any() and (wave < 16).any() and ((wave > 16) & (wave < 64)).any()
    np.testing.assert_allclose(value(llama3, {"rate": rate}), wanted, rtol=1e-13)
    for text in ("linear:4", "llama3:8,1,4,131072"):
        assert str(RotaryScaling.parse(text)) == text
    assert RotaryScaling.parse("") is None


def test_a_t5_v1_1_as_transformers_5_saves_it():
    """It says "tied" of a model whose file has a softmax of its own, and unscaled outputs."""
    values = {
        "model_type": "t5",
        "num_layers": 1,
        "d_model": 8,
        "num_heads": 2,
        "d_kv": 4,
        "d_ff": 12,
        "vocab_size": 40,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": True,
        "scale_decoder_outputs": False,
    }
    found = architecture(values, keys=["shared.weight", "lm_head.weight"]).config
    assert (found.tied_softmax, found.scale_softmax) == (False, False)
    assert architecture(values, keys=["shared.weight"]).config.tied_softmax
    old = {**values, "scale_decoder_outputs": True}
    assert architecture(old, keys=["shared.weight", "lm_head.weight"]).config.tied_softmax
