"""BERT: norms behind sublayers, kinds of tokens, a transform before the logits.

Source: Devlin et al. 2019.
"""

from __future__ import annotations

from meshmpi.transformer.models import TransformerConfig
from meshmpi.transformer.pretrained.architectures.entries import Architecture, Entry
from meshmpi.transformer.pretrained.architectures.options import Options
from meshmpi.transformer.pretrained.architectures.parts import Parts

PREFIX = "bert."
IGNORED = (
    r"(bert\.)?pooler\..*",  # of other tasks
    r"cls\.seq_relationship\..*",
    r"(bert\.)?embeddings\.position_ids",  # 0, 1, 2, ...
)
LEGACY = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
"""Names of norms in the first files."""


def bert(options: Options) -> Architecture:
    """The architecture of a ``BertForMaskedLM``."""
    config = _config(options)
    special = options.special(pad=0)
    options.finish()
    # An untied softmax takes its bias along, and this one is left unused.
    ignored = IGNORED if config.tied_softmax else (*IGNORED, r"cls\.predictions\.bias")
    return Architecture("bert", "encoder", config, _entries(config), PREFIX, ignored, special, options.values)


def _config(options: Options) -> TransformerConfig:
    width, heads = encoder_only(options)
    options.only("position_embedding_type", "absolute")
    return TransformerConfig(
        vocab=options.count("vocab_size", 30522),
        length=options.count("max_position_embeddings", 512),
        d_model=width,
        d_ff=options.count("intermediate_size", 3072),
        heads=heads,
        d_kv=options.head(width, heads),
        layers=options.repeated("num_hidden_layers", 12),
        norm="layer",
        norm_epsilon=options.number("layer_norm_eps", 1e-12),
        norm_after=True,
        activation=options.activation("hidden_act", "gelu"),
        ff_bias=True,
        attention_bias=True,
        embedding_norm=True,
        token_types=options.count("type_vocab_size", 2, least=0),
        head_transform=True,
        softmax_bias=True,
        tied_softmax=options.flag("tie_word_embeddings", True),
        initializers="gpt2",
        scale_logits=True,
        attention_dropout=options.number("attention_probs_dropout_prob", 0.1),
        residual_dropout=options.number("hidden_dropout_prob", 0.1),
        padding_id=options.count("pad_token_id", 0, least=-1),
    )


def encoder_only(options: Options) -> tuple[int, int]:
    """(width, heads) of a model that is not a decoder."""
    for key in ("is_decoder", "add_cross_attention", "is_encoder_decoder"):
        options.only(key, False)
    width = options.count("hidden_size", 768)
    return width, options.repeated("num_attention_heads", 12)


def _entries(config: TransformerConfig) -> tuple[Entry, ...]:
    parts = Parts(config, LEGACY)
    vocab = [config.vocab_dim]
    tied = ("cls.predictions.decoder.weight",)
    table = f"{PREFIX}embeddings"
    parts.add(
        "encoder/embedding",
        f"{table}.word_embeddings.weight",
        vocab,
        parts.model,
        ties=tied if config.tied_softmax else (),
    )
    places, kinds = [config.length_dim], [config.types_dim]
    parts.add("encoder/positions", f"{table}.position_embeddings.weight", places, parts.model)
    parts.add("encoder/token_types", f"{table}.token_type_embeddings.weight", kinds, parts.model)
    parts.norm("encoder/embedding_norm", f"{table}.LayerNorm")
    for i in range(config.layers):
        ours, theirs = f"encoder/layer_{i:03d}", f"{PREFIX}encoder.layer.{i}"
        attention_of(parts, ours, theirs)
        parts.norm(f"{ours}/attention_norm", f"{theirs}.attention.output.LayerNorm")
        parts.feed_forward(f"{ours}/feed_forward", [f"{theirs}.intermediate.dense"], f"{theirs}.output.dense")
        parts.norm(f"{ours}/feed_forward_norm", f"{theirs}.output.LayerNorm")
    head = "cls.predictions"
    transform(parts, f"{head}.transform.dense", f"{head}.transform.LayerNorm")
    if config.tied_softmax:
        parts.add("encoder/softmax_bias", f"{head}.bias", vocab, ties=(f"{head}.decoder.bias",))
    else:
        parts.add("encoder/softmax", tied[0], vocab, parts.model)
        parts.add("encoder/softmax_bias", f"{head}.decoder.bias", vocab)
    return parts.done()


def attention_of(parts: Parts, ours: str, theirs: str) -> None:
    """The projections of a layer of BERT, and of what descends from its code."""
    own = f"{theirs}.attention.self"
    parts.attention(
        f"{ours}/attention", f"{own}.query", f"{own}.key", f"{own}.value", f"{theirs}.attention.output.dense"
    )


def transform(parts: Parts, dense: str, norm: str) -> None:
    """The layer before the logits."""
    new = [parts.config.transform_dim]
    parts.linear("encoder/head/kernel", "encoder/head/bias", dense, parts.model, new, True)
    parts.norm("encoder/head_norm", norm)
