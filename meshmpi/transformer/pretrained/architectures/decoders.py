"""Describes decoders, the language models: GPT-2, GPT-NeoX, OPT, and LLaMA with its successors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshmpi.errors import ConfigError
from meshmpi.nn.positions import RotaryScaling
from meshmpi.transformer.pretrained.architectures.options import Options, short
from meshmpi.transformer.pretrained.architectures.row import (
    Keys,
    Row,
    Values,
    activation,
    count,
    flag,
    gated,
    number,
    repeated,
    sizes,
)

_SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Types of rotations -> their numbers, in our order."""


def _head_width(options: Options) -> int | None:
    """The width of a head, where the file gives one."""
    return None if options.get("head_dim", None) is None else options.count("head_dim", None)


def _opt_width(options: Options) -> int:
    """The width of OPT, whose embeddings could have another one."""
    width = options.count("hidden_size", 768)
    options.only("word_embed_proj_dim", width)
    return width


def _own_heads(options: Options) -> int:
    """Heads of keys and values; as many as those of queries where the file says nothing."""
    return options.count("num_key_value_heads", options.repeated("num_attention_heads", 32))


def _window(options: Options) -> int:
    """A null switches the window off; a missing key does not."""
    size = options.count("sliding_window", 4096, least=0)
    return 0 if options.values.get("sliding_window", size) is None else size


def _rotations(options: Options, whole: bool = True) -> Values:
    """The base and the scaling of rotations, in the words of present or older configs.

    Heads that are not rotated as a ``whole`` are refused, unless the row reads which part is.
    """
    given, aliases = options.table("rope_parameters", "rope_scaling"), () if whole else ("rotary_emb_base",)
    found = Options(given, options.name)
    base = found.number("rope_theta", options.number("rope_theta", 10000.0, *aliases))
    kind = found.word("rope_type", found.word("type", "default"))
    names = _SCALINGS.get(kind)
    if whole:
        found.only("partial_rotary_factor", 1.0)
    others = sorted(given.keys() - {"rope_theta", "rope_type", "type", "partial_rotary_factor"})
    if names is None or others != sorted(names):
        raise ConfigError(
            f"this {options.name} model has rotations of type '{kind}' with"
            f" {', '.join(others) or 'no numbers'}, which are not implemented.",
            f"Use a model with those of type {', '.join(_SCALINGS)}.",
        )
    numbers = [float(found.number(n, None)) for n in names]
    return {"rotary_base": float(base), "rotary_scaling": str(RotaryScaling(kind, *numbers)) if names else ""}


def _rotations_of_neox(options: Options) -> Values:
    """Rotations of a part of each head, in the words of present or older configs."""
    given = Options(options.table("rope_parameters", "rope_scaling"), options.name)
    share = given.number("partial_rotary_factor", options.number("rotary_pct", 0.25))
    width = options.head(options.count("hidden_size", 6144), options.repeated("num_attention_heads", 64))
    if not 0 < int(width * min(share, 2)) <= width:
        raise ConfigError(
            f"this {options.name} model rotates a share of {short(share)} of heads of width {width}.",
            "Give a share above 0 and up to 1.",
        )
    return {**_rotations(options, whole=False), "rotary_width": int(width * share)}


def _rotations_without_windows(options: Options) -> Values:
    """As `_rotations`, of models that could have windows in some layers."""
    kinds = options.get("layer_types", [])
    if not isinstance(kinds, list) or any(k != "full_attention" for k in kinds):
        raise ConfigError(
            f"this {options.name} model has layer_types={short(kinds)}, which are not implemented.",
            "Use a model whose layers all have 'full_attention'.",
        )
    return _rotations(options)


_GPT2: Keys = {
    "vocab": count("vocab_size", 50257),
    "length": count("n_positions", 1024, "max_position_embeddings"),
    "d_model": count("n_embd", 768, "hidden_size"),
    "d_ff": lambda options: options.count("n_inner", 4 * options.count("n_embd", 768, "hidden_size")),
    "heads": repeated("n_head", 12, "num_attention_heads"),
    "layers": repeated("n_layer", 12, "num_hidden_layers"),
    "norm": "layer",
    "norm_epsilon": number("layer_norm_epsilon", 1e-5),
    "activation": activation("activation_function", "gelu_new"),
    "ff_bias": True,
    "attention_bias": True,
    "initializers": "gpt2",
    "tied_softmax": flag("tie_word_embeddings", True),
    "scale_logits": flag("scale_attn_weights", True),
    "attention_dropout": number("attn_pdrop", 0.1),
    "residual_dropout": number("resid_pdrop", 0.1),
    "embedding_dropout": number("embd_pdrop", 0.1),
}
_GPT2_NAMES = """
    decoder/embedding                 transformer.wte
    decoder/positions                 transformer.wpe
    decoder/layer/attention_norm      transformer.h.{i}.ln_1
    decoder/layer/attention/q         transformer.h.{i}.attn.c_attn[q/qkv]
    decoder/layer/attention/k         transformer.h.{i}.attn.c_attn[k/qkv]
    decoder/layer/attention/v         transformer.h.{i}.attn.c_attn[v/qkv]
    decoder/layer/attention/o         transformer.h.{i}.attn.c_proj
    decoder/layer/feed_forward_norm   transformer.h.{i}.ln_2
    decoder/layer/feed_forward/wi     transformer.h.{i}.mlp.c_fc
    decoder/layer/feed_forward/wo     transformer.h.{i}.mlp.c_proj
    decoder/final_norm                transformer.ln_f
    decoder/softmax                   lm_head
    """


_LLAMA: Keys = {
    **sizes(32000, 2048, 4096, 11008, 32, 32),
    "d_kv": _head_width,
    "memory_heads": _own_heads,
    "norm": "rms",
    "norm_epsilon": number("rms_norm_eps", 1e-6),
    "activation": gated("hidden_act", "silu"),
    "tied_softmax": flag("tie_word_embeddings", False),
    "scale_softmax": False,
    "learned_positions": False,
    "rotary": True,
    "initializers": "gpt2",
    "scale_logits": True,
    "attention_dropout": number("attention_dropout", 0.0),
}
"""Fields that are read alike for LLaMA and its successors."""
_BIASES = {"ff_bias": flag("mlp_bias", False), "attention_bias": flag("attention_bias", False)}
_NO_SCALES = {"norm": "layer", "norm_epsilon": 1e-5, "norm_scale": False, "norm_bias": False}
_MISTRAL = {**_LLAMA, "length": count("max_position_embeddings", 131072), "d_ff": count("intermediate_size", 14336)}
_QWEN2: Keys = {
    **_LLAMA,
    **sizes(151936, 32768, 4096, 22016, 32, 32),
    "memory_heads": count("num_key_value_heads", 32),
    "attention_bias": True,
    "attention_output_bias": False,
}
_LLAMA_NAMES = """
    decoder/embedding                 model.embed_tokens
    decoder/layer/attention_norm      model.layers.{i}.input_layernorm
    decoder/layer/attention/q         model.layers.{i}.self_attn.q_proj
    decoder/layer/attention/k         model.layers.{i}.self_attn.k_proj
    decoder/layer/attention/v         model.layers.{i}.self_attn.v_proj
    decoder/layer/attention/o         model.layers.{i}.self_attn.o_proj
    decoder/layer/feed_forward_norm   model.layers.{i}.post_attention_layernorm
    decoder/layer/feed_forward/wi     model.layers.{i}.mlp.gate_proj model.layers.{i}.mlp.up_proj
    decoder/layer/feed_forward/wo     model.layers.{i}.mlp.down_proj
    decoder/final_norm                model.norm
    decoder/softmax                   lm_head
    """
_PHI3_NAMES = """
    decoder/embedding                 model.embed_tokens
    decoder/layer/attention_norm      model.layers.{i}.input_layernorm
    decoder/layer/attention/q         model.layers.{i}.self_attn.qkv_proj[q/qkv]
    decoder/layer/attention/k         model.layers.{i}.self_attn.qkv_proj[k/qkv]
    decoder/layer/attention/v         model.layers.{i}.self_attn.qkv_proj[v/qkv]
    decoder/layer/attention/o         model.layers.{i}.self_attn.o_proj
    decoder/layer/feed_forward_norm   model.layers.{i}.post_attention_layernorm
    decoder/layer/feed_forward/wi     model.layers.{i}.mlp.gate_up_proj[0/2] model.layers.{i}.mlp.gate_up_proj[1/2]
    decoder/layer/feed_forward/wo     model.layers.{i}.mlp.down_proj
    decoder/final_norm                model.norm
    decoder/softmax                   lm_head
    """
_QUERY_NORMS = """
    decoder/layer/attention/q_norm    model.layers.{i}.self_attn.q_norm
    decoder/layer/attention/k_norm    model.layers.{i}.self_attn.k_norm
    """
_OLMO2_NAMES = (
    _LLAMA_NAMES.replace("post_attention_layernorm", "post_feedforward_layernorm").replace(
        "input_layernorm", "post_attention_layernorm"
    )
    + _QUERY_NORMS
)
_STARCODER2_NAMES = _LLAMA_NAMES.replace("{i}.mlp.gate_proj model.layers.{i}.mlp.up_proj", "{i}.mlp.c_fc").replace(
    "mlp.down_proj", "mlp.c_proj"
)
_STARCODER2: Keys = {
    **_LLAMA,
    **sizes(49152, 4096, 3072, 12288, 24, 30),
    "memory_heads": count("num_key_value_heads", 2),
    "norm": "layer",
    "norm_epsilon": number("norm_epsilon", 1e-5),
    "activation": activation("hidden_act", "gelu_pytorch_tanh"),
    "tied_softmax": flag("tie_word_embeddings", True),
    "ff_bias": flag("use_bias", True),
    "attention_bias": flag("use_bias", True),
    "residual_dropout": number("residual_dropout", 0.0),
    "embedding_dropout": number("embedding_dropout", 0.0),
    "local_window": count("sliding_window", 0, least=0),
}
_NEOX: Keys = {
    **sizes(50432, 2048, 6144, 24576, 64, 44),
    "norm": "layer",
    "norm_epsilon": number("layer_norm_eps", 1e-5),
    "activation": activation("hidden_act", "gelu"),
    "ff_bias": True,
    "attention_bias": flag("attention_bias", True),
    "initializers": "gpt2",
    "scale_logits": True,
    "scale_softmax": False,
    "tied_softmax": flag("tie_word_embeddings", False),
    "learned_positions": False,
    "rotary": True,
    "parallel": flag("use_parallel_residual", True),
    "attention_dropout": number("attention_dropout", 0.0),
    "residual_dropout": number("hidden_dropout", 0.0),
}
_NEOX_NAMES = """
    decoder/embedding                 gpt_neox.embed_in
    decoder/layer/attention_norm      gpt_neox.layers.{i}.input_layernorm
    decoder/layer/attention/q         gpt_neox.layers.{i}.attention.query_key_value[q|qkv]
    decoder/layer/attention/k         gpt_neox.layers.{i}.attention.query_key_value[k|qkv]
    decoder/layer/attention/v         gpt_neox.layers.{i}.attention.query_key_value[v|qkv]
    decoder/layer/attention/o         gpt_neox.layers.{i}.attention.dense
    decoder/layer/feed_forward_norm   gpt_neox.layers.{i}.post_attention_layernorm
    decoder/layer/feed_forward/wi     gpt_neox.layers.{i}.mlp.dense_h_to_4h
    decoder/layer/feed_forward/wo     gpt_neox.layers.{i}.mlp.dense_4h_to_h
    decoder/final_norm                gpt_neox.final_layer_norm
    decoder/softmax                   embed_out
    """
_OPT: Keys = {
    **sizes(50272, 2048, 768, 3072, 12, 12),
    "d_model": _opt_width,
    "d_ff": count("ffn_dim", 3072),
    "norm": "layer",
    "norm_epsilon": 1e-5,
    "activation": activation("activation_function", "relu"),
    "ff_bias": True,
    "attention_bias": True,
    "initializers": "gpt2",
    "scale_logits": True,
    "tied_softmax": flag("tie_word_embeddings", True),
    "attention_dropout": number("attention_dropout", 0.0),
    "residual_dropout": number("dropout", 0.1),
    "embedding_dropout": 0.0,
    "position_offset": 2,
}
_OPT_NAMES = """
    decoder/embedding                 model.decoder.embed_tokens
    decoder/positions                 model.decoder.embed_positions
    decoder/layer/attention_norm      model.decoder.layers.{i}.self_attn_layer_norm
    decoder/layer/attention/q         model.decoder.layers.{i}.self_attn.q_proj
    decoder/layer/attention/k         model.decoder.layers.{i}.self_attn.k_proj
    decoder/layer/attention/v         model.decoder.layers.{i}.self_attn.v_proj
    decoder/layer/attention/o         model.decoder.layers.{i}.self_attn.out_proj
    decoder/layer/feed_forward_norm   model.decoder.layers.{i}.final_layer_norm
    decoder/layer/feed_forward/wi     model.decoder.layers.{i}.fc1
    decoder/layer/feed_forward/wo     model.decoder.layers.{i}.fc2
    decoder/final_norm                model.decoder.final_layer_norm
    decoder/softmax                   lm_head
    """
_OPT_ONLY = {"_remove_final_layer_norm": (False,)} | dict.fromkeys(
    ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"), (True,)
)
_LLAMA_IGNORED = (r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)
"""Frequencies of rotations in older files."""


def _llama(keys: Keys, also: Callable[[Options], Values] = _rotations, **more: Any) -> Row:
    """A row with LLaMA's names."""
    only = {"is_encoder_decoder": (False,), **more.pop("only", {})}
    more = {"names": _LLAMA_NAMES, "ignored": _LLAMA_IGNORED, "special": {"bos": 1, "eos": 2}, **more}
    return Row("lm", keys=keys, also=also, only=only, prefix="model.", **more)


DECODERS: dict[str, Row] = {
    "gpt2": Row(  # Radford et al. 2019
        "lm",
        _GPT2_NAMES,
        _GPT2,
        only=dict.fromkeys(("scale_attn_by_inverse_layer_idx", "add_cross_attention", "is_encoder_decoder"), (False,)),
        prefix="transformer.",
        ignored=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),  # causal masks of older files
        special={"bos": 50256, "eos": 50256},
        conv1d=True,
    ),
    "gpt_neox": Row(  # Black et al. 2022; Pythia, Biderman et al. 2023
        "lm",
        _NEOX_NAMES,
        _NEOX,
        _rotations_of_neox,
        only={"is_decoder": (False,)},
        prefix="gpt_neox.",
        # Causal masks and frequencies of rotations in older files.
        ignored=(r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
        special={"bos": 0, "eos": 2},
        legacy=(("embed_out.weight", "lm_head.weight"),),
    ),
    "llama": _llama({**_LLAMA, **_BIASES}),  # Touvron et al. 2023
    "mistral": _llama(  # Jiang et al. 2023
        {**_MISTRAL, "memory_heads": count("num_key_value_heads", 8), "local_window": _window}
    ),
    "olmo": _llama(  # Groeneveld et al. 2024
        {**_LLAMA, "vocab": count("vocab_size", 50304), **_NO_SCALES, **_BIASES},
        only={"clip_qkv": (None,)},
        special={"eos": 50279, "pad": 1},
    ),
    "olmo2": _llama(  # OLMo team 2024
        {
            **_LLAMA,
            **_BIASES,
            "vocab": count("vocab_size", 50304),
            "norm_epsilon": number("rms_norm_eps", 1e-5),
            "query_norm": "all",
            "norm_output": True,
        },
        names=_OLMO2_NAMES,
        special={"eos": 50279, "pad": 1},
    ),
    "opt": Row(  # Zhang et al. 2022
        "lm",
        _OPT_NAMES,
        _OPT,
        only=_OPT_ONLY,
        prefix="model.",
        special={"bos": 2, "eos": 2, "pad": 1},
        harmless=("layerdrop", "init_std"),  # how it was trained
    ),
    "phi3": _llama(  # Abdin et al. 2024
        {
            **_LLAMA,
            **sizes(32064, 4096, 3072, 8192, 32, 32),
            "norm_epsilon": number("rms_norm_eps", 1e-5),
            "residual_dropout": number("resid_pdrop", 0.0),
            "embedding_dropout": number("embd_pdrop", 0.0),
            "local_window": count("sliding_window", 0, least=0),
        },
        names=_PHI3_NAMES,
        only={"partial_rotary_factor": (1.0,)},
        special={"bos": 1, "eos": 32000, "pad": 32000},
        harmless=("original_max_position_embeddings",),  # for rotations that are refused
    ),
    "starcoder2": _llama(  # Lozhkov et al. 2024
        _STARCODER2,
        names=_STARCODER2_NAMES,
        only={"norm_type": ("layer_norm",), "mlp_type": ("default",)},
        special={"bos": 50256, "eos": 50256},
    ),
    "qwen3": _llama(  # Yang et al. 2025
        {
            **_QWEN2,
            "d_kv": count("head_dim", 128),
            "attention_bias": flag("attention_bias", False),
            "attention_output_bias": None,
            "query_norm": "head",
        },
        _rotations_without_windows,
        names=_LLAMA_NAMES + _QUERY_NORMS,
        only={"use_sliding_window": (False,)},
        special={},
        harmless=("sliding_window", "max_window_layers"),
    ),
    "qwen2": _llama(  # Yang et al. 2024
        _QWEN2,
        _rotations_without_windows,
        only={"use_sliding_window": (False,)},
        special={},
        harmless=("sliding_window", "max_window_layers"),  # where windows would be; none is switched on
    ),
}
