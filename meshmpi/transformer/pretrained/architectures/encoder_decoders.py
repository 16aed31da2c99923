"""Describes encoder-decoders: T5, and Switch with its experts."""

from __future__ import annotations

from meshmpi.errors import ConfigError
from meshmpi.nn.layers import factors
from meshmpi.transformer.models import TransformerConfig
from meshmpi.transformer.pretrained.architectures.options import MOST_EXPERTS, MOST_REPEATED, Options
from meshmpi.transformer.pretrained.architectures.row import Keys, Row, Values, activation, count, number

_TABLES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def _t5(options: Options) -> Values:
    """T5 (Raffel et al. 2020), whose softmax is the embedding, and v1.1 (Shazeer 2020), where it is another matrix."""
    key = "feed_forward_proj"
    name = options.word(key, "relu")
    unit = options.flag("is_gated_act", name.startswith("gated-"))
    # transformers means the tanh approximation where the file says "gated-gelu", and the exact one
    # elsewhere; newer files name it themselves.
    inner = options.word("dense_act_fn", "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-"))
    found = options.gated(key, inner) if unit else options.activation_named(inner, key)
    tied = options.flag("tie_word_embeddings", True)
    scaled = options.flag("scale_decoder_outputs", tied)
    if not scaled and "lm_head.weight" in options.keys:
        tied = False  # transformers 5 saves v1.1 (and FLAN) as tied, with the softmax that is not
    return {"activation": found, **_t5_tables(options, 512, 6, 8, tied, scaled)}


def _switch(options: Options) -> Values:
    """T5 with experts.  Source: Fedus et al. 2022."""
    tied = options.flag("tie_word_embeddings", True)
    values = _t5_tables(options, 768, 12, 12, tied, tied)
    encoder, decoder = values["encoder_layers"], values["layers"]
    return values | {
        "experts": options.count("num_experts", 8, most=MOST_EXPERTS // (encoder + decoder)),
        "experts_every": _experts_every(options, "encoder", encoder),
        "decoder_experts_every": _experts_every(options, "decoder", decoder),
    }


def _t5_tables(options: Options, width: int, layers: int, heads: int, tied: bool, scaled: bool) -> Values:
    """Sizes, dropout, and which tables are one, where T5 and Switch differ."""
    layers = options.repeated("num_layers", layers, "num_hidden_layers")
    dropped = ("attention_dropout", "ff_dropout", "residual_dropout", "final_dropout")
    return {
        "d_model": options.count("d_model", width, "hidden_size"),
        "heads": options.repeated("num_heads", heads, "num_attention_heads"),
        "layers": options.repeated("num_decoder_layers", layers),
        "encoder_layers": layers,
        **dict.fromkeys(dropped, options.number("dropout_rate", 0.1)),
        "tied_softmax": tied,
        "scale_softmax": scaled,
        "shared_embedding": tied or not all(k in options.keys for k in _TABLES),
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


_T5: Keys = {
    "vocab": count("vocab_size", 32128),
    # There is no longest text; older files say on what it was trained.
    "length": count("n_positions", 512, "max_position_embeddings"),
    "d_ff": count("d_ff", 2048),
    "d_kv": count("d_kv", 64, "head_dim"),
    "norm": "rms",
    "norm_epsilon": number("layer_norm_epsilon", 1e-6),
    "learned_positions": False,
    "scale_logits": False,  # by sqrt(d_kv)
    "initializers": "paper",
    "relative_buckets": count("relative_attention_num_buckets", 32),
    "relative_distance": count("relative_attention_max_distance", 128),
    "padding_id": count("pad_token_id", 0, least=-1),
}
"""Fields that are read alike for T5 and Switch.

A stack has one table of biases by distance, which its first block holds and all use; attention to the source has none.
"""
_SWITCH: Keys = {
    **_T5,
    "activation": activation("dense_act_fn", "relu"),
    "experts_remainder": 2,
    "expert_places": count("expert_capacity", 64),
    "experts_skip_padding": False,
    "expert_balance": number("router_aux_loss_coef", 0.001),
    "expert_z_loss": number("router_z_loss_coef", 0.001),
    "expert_jitter": number("router_jitter_noise", 0.01),
}


def _t5_names(config: TransformerConfig, feed_forward: str = "DenseReluDense") -> str:
    tables = "embedding shared encoder.embed_tokens decoder.embed_tokens"
    if not config.shared_embedding:
        tables = "encoder/embedding encoder.embed_tokens\ndecoder/embedding decoder.embed_tokens"
    count = len(factors(config.activation))
    units = ["wi"] if count == 1 else [f"wi_{n}" for n in range(count)]
    lines = [tables]
    for stack, last in (("encoder", 1), ("decoder", 2)):
        ours, block = f"{stack}/layer", f"{stack}.block.{{i}}.layer"
        unit, first = f"{block}.{last}.{feed_forward}", f"{stack}.block.0.layer.0.SelfAttention"
        lines += [f"{stack}/relative_position_bias {first}.relative_attention_bias"]
        lines += [f"{ours}/attention_norm {block}.0.layer_norm"]
        lines += [f"{ours}/attention/{x} {block}.0.SelfAttention.{x}" for x in "qkvo"]
        if stack == "decoder":
            lines += [f"{ours}/encdec_attention_norm {block}.1.layer_norm"]
            lines += [f"{ours}/encdec_attention/{x} {block}.1.EncDecAttention.{x}" for x in "qkvo"]
        lines += [
            f"{ours}/feed_forward_norm {block}.{last}.layer_norm",
            f"{ours}/feed_forward/router {unit}.router.classifier",
            f"{ours}/feed_forward/wi {' '.join(f'{unit}{{e}}.{name}' for name in units)}",
            f"{ours}/feed_forward/wo {unit}{{e}}.wo",
            f"{stack}/final_norm {stack}.final_layer_norm",
        ]
    return "\n".join([*lines, "decoder/softmax lm_head"])


_IGNORED = (r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight", r"shared\.weight")
_SPECIAL = {"pad": 0, "eos": 1}
_T5_ONLY = {"is_decoder": (False,), "is_encoder_decoder": (True,)}
_SPECIAL = {"pad": 0, "eos": 1}
_T5_ONLY = {"is_decoder": (False,), "is_encoder_decoder": (True,)}


ENCODER_DECODERS: dict[str, Row] = {
    "switch_transformers": Row(
        "encoder_decoder",
        lambda config: _t5_names(config, "mlp"),
        _SWITCH,
        _switch,
        {**_T5_ONLY, "router_bias": (False,), "router_dtype": ("float32",), "add_cross_attention": (False,)},
        ignored=_IGNORED,
        special=_SPECIAL,
        harmless=("router_ignore_padding_tokens",),  # transformers reads it and does nothing with it
    ),
    "t5": Row("encoder_decoder", _t5_names, _T5, _t5, _T5_ONLY, ignored=_IGNORED, special=_SPECIAL),
}
