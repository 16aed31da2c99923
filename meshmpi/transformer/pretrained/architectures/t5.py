"""T5, T5 v1.1 and Switch: encoder-decoders with shared biases by distance and plain scales.

Logits of attention are not divided by sqrt(d_kv).  A stack has one table of biases, which its first
block holds and all use; attention to the source has none.  T5's softmax is the embedding, and
divides by sqrt(d_model); that of v1.1 is a matrix of its own, and does not.

Sources: Raffel et al. 2020; Shazeer 2020 (v1.1); Fedus et al. 2022 (Switch).
"""

from __future__ import annotations

from typing import Any

from meshmpi.dims import Dimension
from meshmpi.errors import ConfigError
from meshmpi.nn.layers import factors
from meshmpi.transformer.models import TransformerConfig
from meshmpi.transformer.pretrained.architectures.entries import Architecture
from meshmpi.transformer.pretrained.architectures.gated import gated
from meshmpi.transformer.pretrained.architectures.options import MOST_EXPERTS, MOST_REPEATED, Options
from meshmpi.transformer.pretrained.architectures.parts import Parts

_CROSS_BIAS = r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
_TABLES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def t5(options: Options) -> Architecture:
    """The architecture of a ``T5ForConditionalGeneration``, of v1.0 or v1.1."""
    name = options.word("feed_forward_proj", "relu")
    unit = options.flag("is_gated_act", name.startswith("gated-"))
    # transformers means the tanh approximation where the file says "gated-gelu", and the exact one
    # elsewhere; newer files name it themselves.
    usual = "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")
    inner = options.word("dense_act_fn", usual)
    activation = (
        gated(options, "feed_forward_proj", inner) if unit else options.activation_named(inner, "feed_forward_proj")
    )
    tied = options.flag("tie_word_embeddings", True)
    scaled = options.flag("scale_decoder_outputs", tied)
    if not scaled and "lm_head.weight" in options.keys:
        # transformers 5 saves v1.1 (and FLAN) as tied, with the softmax that is not.
        tied = False
    config = TransformerConfig(
        **_sizes(options, 512, 6, 8),
        activation=activation,
        tied_softmax=tied,
        scale_softmax=scaled,
        shared_embedding=tied or not all(k in options.keys for k in _TABLES),
    )
    return _architecture("t5", config, options, _DENSE)


def switch(options: Options) -> Architecture:
    """The architecture of a ``SwitchTransformersForConditionalGeneration``."""
    options.only("router_bias", False)
    options.only("router_dtype", "float32")
    options.only("add_cross_attention", False)
    # transformers reads this option, and does nothing with it.
    options.flag("router_ignore_padding_tokens", False)
    tied = options.flag("tie_word_embeddings", True)
    layers = options.repeated("num_layers", 12, "num_hidden_layers")
    decoder_layers = options.repeated("num_decoder_layers", layers)
    config = TransformerConfig(
        **_sizes(options, 768, 12, 12),
        activation=options.activation("dense_act_fn", "relu"),
        tied_softmax=tied,
        scale_softmax=tied,
        shared_embedding=tied or not all(k in options.keys for k in _TABLES),
        experts=options.count("num_experts", 8, most=MOST_EXPERTS // (layers + decoder_layers)),
        experts_every=_step(options, "encoder", layers),
        experts_remainder=2,
        decoder_experts_every=_step(options, "decoder", decoder_layers),
        expert_places=options.count("expert_capacity", 64),
        experts_skip_padding=False,
        expert_balance=options.number("router_aux_loss_coef", 0.001),
        expert_z_loss=options.number("router_z_loss_coef", 0.001),
        expert_jitter=options.number("router_jitter_noise", 0.01),
    )
    return _architecture("switch_transformers", config, options, _SPARSE)


def _step(options: Options, stack: str, layers: int) -> int:
    """Every how many-th layer of a stack has experts; the second is the first that has.

    Raises:
        ConfigError: More layers have experts than there are layers.
    """
    sparse = options.count(f"num_sparse_{stack}_layers", 3, least=0)
    step = options.count(f"{stack}_sparse_step", layers // sparse if sparse else layers, least=0, most=MOST_REPEATED)
    if step < 1:
        raise ConfigError(
            f"this {options.name} model has num_sparse_{stack}_layers={sparse} of {layers} layers.",
            "Use a model with no more of them than layers.",
        )
    return step


def _sizes(options: Options, width: int, layers: int, heads: int) -> dict[str, Any]:
    """What T5 and Switch have in common, and where they have other defaults."""
    options.only("is_decoder", False)
    options.only("is_encoder_decoder", True)
    layers = options.repeated("num_layers", layers, "num_hidden_layers")
    dropout = options.number("dropout_rate", 0.1)
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
        "attention_dropout": dropout,
        "ff_dropout": dropout,
        "residual_dropout": dropout,
        "final_dropout": dropout,
        "padding_id": options.count("pad_token_id", 0, least=-1),
    }


_DENSE = "DenseReluDense"
_SPARSE = "mlp"


def _architecture(name: str, config: TransformerConfig, options: Options, feed_forward: str) -> Architecture:
    special = options.special(pad=0, eos=1)
    special.setdefault("decoder_start", special["pad"])
    options.finish()
    parts = Parts(config)
    ignored = [_CROSS_BIAS]
    vocab = [config.vocab_dim]
    tied = ("lm_head.weight",) if config.tied_softmax else ()
    if config.shared_embedding:
        parts.add("embedding", "shared.weight", vocab, parts.model, ties=(*_TABLES, *tied))
    else:
        for stack, key in zip(("encoder", "decoder"), _TABLES, strict=True):
            parts.add(f"{stack}/embedding", key, vocab, parts.model)
        ignored.append(r"shared\.weight")
    for stack, layers in (("encoder", config.encoder_stack), ("decoder", config.decoder_stack)):
        _stack(parts, stack, layers, feed_forward)
    if not config.tied_softmax:
        parts.add("decoder/softmax", "lm_head.weight", vocab, parts.model)
    return Architecture(name, "encoder_decoder", config, parts.done(), "", tuple(ignored), special, options.values)


def _stack(parts: Parts, stack: str, config: TransformerConfig, feed_forward: str) -> None:
    first = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    buckets = [Dimension("buckets", config.relative_buckets)]
    parts.add(f"{stack}/relative_position_bias", first, buckets, parts.heads)
    for i in range(config.layers):
        ours, theirs = f"{stack}/layer_{i:03d}", f"{stack}.block.{i}.layer"
        parts.norm(f"{ours}/attention_norm", f"{theirs}.0.layer_norm")
        own = [f"{theirs}.0.SelfAttention.{n}" for n in "qkvo"]
        parts.attention(f"{ours}/attention", *own)
        last = 1
        if stack == "decoder":
            parts.norm(f"{ours}/encdec_attention_norm", f"{theirs}.1.layer_norm")
            cross = [f"{theirs}.1.EncDecAttention.{n}" for n in "qkvo"]
            parts.attention(f"{ours}/encdec_attention", *cross)
            last = 2
        parts.norm(f"{ours}/feed_forward_norm", f"{theirs}.{last}.layer_norm")
        _feed_forward(parts, config, i, f"{ours}/feed_forward", f"{theirs}.{last}.{feed_forward}")
    parts.norm(f"{stack}/final_norm", f"{stack}.final_layer_norm")


def _feed_forward(parts: Parts, config: TransformerConfig, layer: int, ours: str, theirs: str) -> None:
    count = len(factors(config.activation))
    names = ["wi"] if count == 1 else [f"wi_{n}" for n in range(count)]
    if not config.has_experts(layer):
        parts.feed_forward(ours, [f"{theirs}.{n}" for n in names], f"{theirs}.wo")
        return
    everyone = config.experts_dim._replace(name=f"all_{config.experts_dim.name}")
    parts.add(f"{ours}/router", f"{theirs}.router.classifier.weight", [everyone], parts.model)
    for n in range(config.experts):
        expert = f"{theirs}.experts.expert_{n}"
        parts.feed_forward(ours, [f"{expert}.{w}" for w in names], f"{expert}.wo", at=((config.experts_dim, n),))
