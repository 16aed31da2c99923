"""Translates the options of a config.json to a `TransformerConfig`, one function per architecture."""

from __future__ import annotations

from typing import Any

from meshmpi.errors import ConfigError
from meshmpi.nn.positions import RotaryScaling
from meshmpi.transformer.pretrained.architectures.options import MOST_EXPERTS, MOST_REPEATED, Options, short

Values = dict[str, Any]
"""Arguments of `TransformerConfig`."""
_HIDDEN_SHARE = 0.15 * 0.8
"""Share of tokens that all ESM models saw hidden in training: of 15 % that were chosen, 80 %."""
_TABLES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Types of rotations -> their numbers, in our order."""


def _encoder(options: Options) -> Values:
    """What BERT and ESM have in common."""
    for key in ("is_decoder", "add_cross_attention", "is_encoder_decoder"):
        options.only(key, False)
    width, heads = options.count("hidden_size", 768), options.repeated("num_attention_heads", 12)
    return {
        "d_model": width,
        "d_ff": options.count("intermediate_size", 3072),
        "heads": heads,
        "d_kv": options.head(width, heads),
        "layers": options.repeated("num_hidden_layers", 12),
        "norm": "layer",
        "norm_epsilon": options.number("layer_norm_eps", 1e-12),
        "ff_bias": True,
        "attention_bias": True,
        "head_transform": True,
        "softmax_bias": True,
        "tied_softmax": options.flag("tie_word_embeddings", True),
        "initializers": "gpt2",
        "scale_logits": True,
        "attention_dropout": options.number("attention_probs_dropout_prob", 0.1),
        "residual_dropout": options.number("hidden_dropout_prob", 0.1),
    }


def bert(options: Options) -> Values:
    """Norms behind sublayers, kinds of tokens, a transform before the logits.  Source: Devlin et al. 2019."""
    options.only("position_embedding_type", "absolute")
    return _encoder(options) | {
        "vocab": options.count("vocab_size", 30522),
        "length": options.count("max_position_embeddings", 512),
        "norm_after": True,
        "activation": options.activation("hidden_act", "gelu"),
        "embedding_norm": True,
        "token_types": options.count("type_vocab_size", 2, least=0),
        "padding_id": options.count("pad_token_id", 0, least=-1),
    }


def esm(options: Options) -> Values:
    """ESM-2 of proteins: rotations, and hidden tokens as dropped ones.  Source: Lin et al. 2023."""
    values = _encoder(options)
    options.only("position_embedding_type", "rotary", default="absolute")
    options.only("hidden_act", "gelu")
    options.only("is_folding_model", False)
    options.known += ["esmfold_config", "vocab_list"]  # used by the folding model only
    dropped = options.flag("token_dropout", False)
    return values | {
        "vocab": options.count("vocab_size", None),
        "length": options.count("max_position_embeddings", 1026),
        "activation": "gelu_exact",
        "embedding_norm": options.flag("emb_layer_norm_before", False),
        "learned_positions": False,
        "rotary": True,
        "rotary_base": options.number("rope_theta", 10000.0),
        "embedding_dropout": 0.0,
        "token_dropout": _HIDDEN_SHARE if dropped else 0.0,
        "mask_id": options.count("mask_token_id", None if dropped else -1, least=-1),
        "padding_id": options.count("pad_token_id", None, least=-1),
    }


def gpt2(options: Options) -> Values:
    """Learned positions; queries, keys and values in one matrix.  Source: Radford et al. 2019."""
    width, heads = options.count("n_embd", 768, "hidden_size"), options.repeated("n_head", 12, "num_attention_heads")
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention", "is_encoder_decoder"):
        options.only(key, False)
    return {
        "vocab": options.count("vocab_size", 50257),
        "length": options.count("n_positions", 1024, "max_position_embeddings"),
        "d_model": width,
        "d_ff": options.count("n_inner", 4 * width),
        "heads": heads,
        "d_kv": options.head(width, heads),
        "layers": options.repeated("n_layer", 12, "num_hidden_layers"),
        "norm": "layer",
        "norm_epsilon": options.number("layer_norm_epsilon", 1e-5),
        "activation": options.activation("activation_function", "gelu_new"),
        "ff_bias": True,
        "attention_bias": True,
        "initializers": "gpt2",
        "tied_softmax": options.flag("tie_word_embeddings", True),
        "scale_logits": options.flag("scale_attn_weights", True),
        "attention_dropout": options.number("attn_pdrop", 0.1),
        "residual_dropout": options.number("resid_pdrop", 0.1),
        "embedding_dropout": options.number("embd_pdrop", 0.1),
    }


def _llama_like(options: Options, length: int, hidden: int, memory_heads: int = 0, vocab: int = 32000) -> Values:
    """What LLaMA, Mistral and Qwen2 have in common, and where they have other defaults."""
    width, heads = options.count("hidden_size", 4096), options.repeated("num_attention_heads", 32)
    options.only("is_encoder_decoder", False)
    return {
        "vocab": options.count("vocab_size", vocab),
        "length": options.count("max_position_embeddings", length),
        "d_model": width,
        "d_ff": options.count("intermediate_size", hidden),
        "heads": heads,
        "d_kv": options.head(width, heads)
        if options.get("head_dim", None) is None
        else options.count("head_dim", None),
        "layers": options.repeated("num_hidden_layers", 32),
        "memory_heads": options.count("num_key_value_heads", memory_heads or heads),
        "norm": "rms",
        "norm_epsilon": options.number("rms_norm_eps", 1e-6),
        "activation": options.gated("hidden_act", options.word("hidden_act", "silu")),
        "tied_softmax": options.flag("tie_word_embeddings", False),
        "scale_softmax": False,
        "learned_positions": False,
        "rotary": True,
        **_rotations(options),
        "initializers": "gpt2",
        "scale_logits": True,
        "attention_dropout": options.number("attention_dropout", 0.0),
    }


def llama(options: Options) -> Values:
    """Rotations, RMS norms, SwiGLU.  Source: Touvron et al. 2023."""
    values = _llama_like(options, length=2048, hidden=11008)
    return values | {
        "ff_bias": options.flag("mlp_bias", False),
        "attention_bias": options.flag("attention_bias", False),
    }


def mistral(options: Options) -> Values:
    """As LLaMA, but a token sees a window only.  Source: Jiang et al. 2023."""
    values = _llama_like(options, length=131072, hidden=14336, memory_heads=8)
    # A null switches the window off; a missing key does not.
    window = options.count("sliding_window", 4096, least=0)
    return values | {"local_window": 0 if options.values.get("sliding_window", window) is None else window}


def qwen2(options: Options) -> Values:
    """As LLaMA with biases of queries, keys and values; all layers see all tokens.  Source: Yang et al. 2024."""
    options.only("use_sliding_window", False)
    values = _llama_like(options, length=32768, hidden=22016, memory_heads=32, vocab=151936)
    kinds = options.get("layer_types", [])
    if not isinstance(kinds, list) or any(k != "full_attention" for k in kinds):
        raise ConfigError(
            f"this qwen2 model has layer_types={short(kinds)}, which are not implemented.",
            "Use a model whose layers all have 'full_attention'.",
        )
    options.known += ["sliding_window", "max_window_layers"]  # where windows would be; none is switched on
    return values | {"attention_bias": True, "attention_output_bias": False}


def _rotations(options: Options) -> Values:
    """The base and the scaling of rotations, in the words of present or older configs."""
    given = options.table("rope_parameters", "rope_scaling")
    found = Options(given, options.name)
    base = found.number("rope_theta", options.number("rope_theta", 10000.0))
    kind = found.word("rope_type", found.word("type", "default"))
    names = _SCALINGS.get(kind)
    others = sorted(given.keys() - {"rope_theta", "rope_type", "type"})
    if names is None or others != sorted(names):
        raise ConfigError(
            f"this {options.name} model has rotations of type '{kind}' with"
            f" {', '.join(others) or 'no numbers'}, which are not implemented.",
            f"Use a model with those of type {', '.join(_SCALINGS)}.",
        )
    numbers = [float(found.number(n, None)) for n in names]
    return {"rotary_base": float(base), "rotary_scaling": str(RotaryScaling(kind, *numbers)) if names else ""}


def _t5_like(options: Options, width: int, layers: int, heads: int) -> Values:
    """What T5 and Switch have in common, and where they have other defaults.

    Logits of attention are not divided by sqrt(d_kv).  A stack has one table of biases by distance, which its first
    block holds and all use; attention to the source has none.
    """
    options.only("is_decoder", False)
    options.only("is_encoder_decoder", True)
    layers = options.repeated("num_layers", layers, "num_hidden_layers")
    dropped = ("attention_dropout", "ff_dropout", "residual_dropout", "final_dropout")
    return {
        "vocab": options.count("vocab_size", 32128),
        # There is no longest text; older files say on what it was trained.
        "length": options.count("n_positions", 512, "max_position_embeddings"),
        "d_model": options.count("d_model", width, "hidden_size"),
        "d_ff": options.count("d_ff", 2048),
        "heads": options.repeated("num_heads", heads, "num_attention_heads"),
        "d_kv": options.count("d_kv", 64, "head_dim"),
        "layers": options.repeated("num_decoder_layers", layers),
        "encoder_layers": layers,
        "norm": "rms",
        "norm_epsilon": options.number("layer_norm_epsilon", 1e-6),
        "learned_positions": False,
        "scale_logits": False,
        "initializers": "paper",
        "relative_buckets": options.count("relative_attention_num_buckets", 32),
        "relative_distance": options.count("relative_attention_max_distance", 128),
        **dict.fromkeys(dropped, options.number("dropout_rate", 0.1)),
        "padding_id": options.count("pad_token_id", 0, least=-1),
    }


def _softmax(options: Options, tied: bool, scaled: bool) -> Values:
    shared = tied or not all(k in options.keys for k in _TABLES)
    return {"tied_softmax": tied, "scale_softmax": scaled, "shared_embedding": shared}


def t5(options: Options) -> Values:
    """T5 (Raffel et al. 2020), whose softmax is the embedding, and v1.1 (Shazeer 2020), where it is another matrix."""
    key = "feed_forward_proj"
    name = options.word(key, "relu")
    unit = options.flag("is_gated_act", name.startswith("gated-"))
    # transformers means the tanh approximation where the file says "gated-gelu", and the exact one
    # elsewhere; newer files name it themselves.
    inner = options.word("dense_act_fn", "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-"))
    activation = options.gated(key, inner) if unit else options.activation_named(inner, key)
    tied = options.flag("tie_word_embeddings", True)
    scaled = options.flag("scale_decoder_outputs", tied)
    if not scaled and "lm_head.weight" in options.keys:
        tied = False  # transformers 5 saves v1.1 (and FLAN) as tied, with the softmax that is not
    return {**_t5_like(options, 512, 6, 8), "activation": activation, **_softmax(options, tied, scaled)}


def switch(options: Options) -> Values:
    """T5 with experts.  Source: Fedus et al. 2022."""
    options.only("router_bias", False)
    options.only("router_dtype", "float32")
    options.only("add_cross_attention", False)
    options.flag("router_ignore_padding_tokens", False)  # transformers reads it and does nothing with it
    tied = options.flag("tie_word_embeddings", True)
    values = _t5_like(options, 768, 12, 12) | _softmax(options, tied, tied)
    encoder, decoder = values["encoder_layers"], values["layers"]
    return values | {
        "activation": options.activation("dense_act_fn", "relu"),
        "experts": options.count("num_experts", 8, most=MOST_EXPERTS // (encoder + decoder)),
        "experts_every": _experts_every(options, "encoder", encoder),
        "experts_remainder": 2,
        "decoder_experts_every": _experts_every(options, "decoder", decoder),
        "expert_places": options.count("expert_capacity", 64),
        "experts_skip_padding": False,
        "expert_balance": options.number("router_aux_loss_coef", 0.001),
        "expert_z_loss": options.number("router_z_loss_coef", 0.001),
        "expert_jitter": options.number("router_jitter_noise", 0.01),
    }


def _experts_every(options: Options, stack: str, layers: int) -> int:
    """n where every n-th layer of a stack has experts; the second is the first that has."""
    sparse = options.count(f"num_sparse_{stack}_layers", 3, least=0)
    step = options.count(f"{stack}_sparse_step", layers // sparse if sparse else layers, least=0, most=MOST_REPEATED)
    if step < 1:
        raise ConfigError(
            f"this {options.name} model has num_sparse_{stack}_layers={sparse} of {layers} layers.",
            "Use a model with no more of them than layers.",
        )
    return step
