"""LLaMA and its kin: rotations, RMS norms, SwiGLU, fewer heads of keys and values than of queries.

Sources: Touvron et al. 2023; Jiang et al. 2023 (Mistral, of which a token sees a window only); Yang
et al. 2024 (Qwen2, with biases of queries, keys and values).
"""

from __future__ import annotations

from typing import Any

from meshmpi.errors import ConfigError
from meshmpi.nn.positions import RotaryScaling
from meshmpi.transformer.models import TransformerConfig
from meshmpi.transformer.pretrained.architectures.entries import Architecture, Entry
from meshmpi.transformer.pretrained.architectures.gated import gated
from meshmpi.transformer.pretrained.architectures.options import Options, short
from meshmpi.transformer.pretrained.architectures.parts import Parts

PREFIX = "model."
IGNORED = (
    # Frequencies of rotations in older files.
    r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    r"(model\.)?rotary_emb\.inv_freq",
)
_SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Types of rotations -> their numbers, in our order."""
_SPECIAL = {"bos": 1, "eos": 2}
"""Ids of LLaMA where the file does not say them."""


def llama(options: Options) -> Architecture:
    """The architecture of a ``LlamaForCausalLM``."""
    config = _config(options, length=2048, hidden=11008).with_options(
        ff_bias=options.flag("mlp_bias", False), attention_bias=options.flag("attention_bias", False)
    )
    return _architecture("llama", config, options)


def mistral(options: Options) -> Architecture:
    """The architecture of a ``MistralForCausalLM``."""
    config = _config(options, length=131072, hidden=14336, memory_heads=8)
    # A null switches the window off; a missing key does not.
    window = options.count("sliding_window", 4096, least=0)
    if options.values.get("sliding_window", window) is None:
        window = 0
    return _architecture("mistral", config.with_options(local_window=window), options)


def qwen2(options: Options) -> Architecture:
    """The architecture of a ``Qwen2ForCausalLM``, of which all layers see all tokens."""
    options.only("use_sliding_window", False)
    config = _config(options, length=32768, hidden=22016, memory_heads=32, vocab=151936)
    kinds = options.get("layer_types", [])
    if not isinstance(kinds, list) or any(k != "full_attention" for k in kinds):
        raise ConfigError(
            f"this qwen2 model has layer_types={short(kinds)}, which are not implemented.",
            "Use a model whose layers all have 'full_attention'.",
        )
    # Where these windows would be; none is switched on.
    options.known += ["sliding_window", "max_window_layers"]
    config = config.with_options(attention_bias=True, attention_output_bias=False)
    return _architecture("qwen2", config, options, {})


def _architecture(
    name: str, config: TransformerConfig, options: Options, special: dict[str, int] = _SPECIAL
) -> Architecture:
    special = options.special(**special)
    options.finish()
    return Architecture(name, "lm", config, _entries(config), PREFIX, IGNORED, special, options.values)


def _config(options: Options, length: int, hidden: int, memory_heads: int = 0, vocab: int = 32000) -> TransformerConfig:
    """What they have in common, and where they have other defaults."""
    width = options.count("hidden_size", 4096)
    heads = options.repeated("num_attention_heads", 32)
    options.only("is_encoder_decoder", False)
    return TransformerConfig(
        vocab=options.count("vocab_size", vocab),
        length=options.count("max_position_embeddings", length),
        d_model=width,
        d_ff=options.count("intermediate_size", hidden),
        heads=heads,
        d_kv=options.head(width, heads) if options.get("head_dim", None) is None else options.count("head_dim", None),
        layers=options.repeated("num_hidden_layers", 32),
        memory_heads=options.count("num_key_value_heads", memory_heads or heads),
        norm="rms",
        norm_epsilon=options.number("rms_norm_eps", 1e-6),
        activation=gated(options, "hidden_act", options.word("hidden_act", "silu")),
        tied_softmax=options.flag("tie_word_embeddings", False),
        scale_softmax=False,
        learned_positions=False,
        rotary=True,
        **_rotations(options),
        initializers="gpt2",
        scale_logits=True,
        attention_dropout=options.number("attention_dropout", 0.0),
    )


def _rotations(options: Options) -> dict[str, Any]:
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
    scaling = str(RotaryScaling(kind, *numbers)) if names else ""
    return {"rotary_base": float(base), "rotary_scaling": scaling}


def _entries(config: TransformerConfig) -> tuple[Entry, ...]:
    parts = Parts(config)
    vocab = [config.vocab_dim]
    tied = ("lm_head.weight",) if config.tied_softmax else ()
    parts.add("decoder/embedding", f"{PREFIX}embed_tokens.weight", vocab, parts.model, ties=tied)
    for i in range(config.layers):
        ours, theirs = f"decoder/layer_{i:03d}", f"{PREFIX}layers.{i}"
        parts.norm(f"{ours}/attention_norm", f"{theirs}.input_layernorm")
        parts.attention(f"{ours}/attention", *(f"{theirs}.self_attn.{n}_proj" for n in ("q", "k", "v", "o")))
        parts.norm(f"{ours}/feed_forward_norm", f"{theirs}.post_attention_layernorm")
        parts.feed_forward(
            f"{ours}/feed_forward", [f"{theirs}.mlp.gate_proj", f"{theirs}.mlp.up_proj"], f"{theirs}.mlp.down_proj"
        )
    parts.norm("decoder/final_norm", f"{PREFIX}norm")
    if not config.tied_softmax:
        parts.add("decoder/softmax", "lm_head.weight", vocab, parts.model)
    return parts.done()
