"""ESM-2, of proteins: rotations, norms before sublayers, hidden tokens as dropped ones.

Source: Lin et al. 2023.
"""

from __future__ import annotations

from meshmpi.transformer.models import TransformerConfig
from meshmpi.transformer.pretrained.architectures.bert import LEGACY, attention_of, encoder_only, transform
from meshmpi.transformer.pretrained.architectures.entries import Architecture, Entry
from meshmpi.transformer.pretrained.architectures.options import Options
from meshmpi.transformer.pretrained.architectures.parts import Parts

PREFIX = "esm."
HIDDEN_SHARE = 0.15 * 0.8
"""Share of tokens that all ESM models saw hidden in training: of 15 % that were chosen, 80 %."""
IGNORED = (
    # Frequencies of rotations, with a literal star in files of transformers 5.
    r"(esm\.)?encoder\.layer\.(\d+|\*)\.attention\.self\.rotary_embeddings\.inv_freq",
    r"(esm\.)?rotary_embeddings\.inv_freq",
    # Not used where positions are rotations.
    r"(esm\.)?embeddings\.(position_ids|position_embeddings\.weight)",
    r"(esm\.)?(contact_head|pooler)\..*",  # of other tasks
)


def esm(options: Options) -> Architecture:
    """The architecture of an ``EsmForMaskedLM`` with rotations: ESM-2."""
    config = _config(options)
    special = options.special(bos=0, eos=2)
    options.finish()
    return Architecture("esm", "encoder", config, _entries(config), PREFIX, IGNORED, special, options.values)


def _config(options: Options) -> TransformerConfig:
    width, heads = encoder_only(options)
    options.only("position_embedding_type", "rotary", default="absolute")
    options.only("hidden_act", "gelu")
    options.only("is_folding_model", False)
    # Of the folding model only.
    options.known += ["esmfold_config", "vocab_list"]
    dropped = options.flag("token_dropout", False)
    return TransformerConfig(
        vocab=options.count("vocab_size", None),
        length=options.count("max_position_embeddings", 1026),
        d_model=width,
        d_ff=options.count("intermediate_size", 3072),
        heads=heads,
        d_kv=options.head(width, heads),
        layers=options.repeated("num_hidden_layers", 12),
        norm="layer",
        norm_epsilon=options.number("layer_norm_eps", 1e-12),
        activation="gelu_exact",
        ff_bias=True,
        attention_bias=True,
        embedding_norm=options.flag("emb_layer_norm_before", False),
        learned_positions=False,
        rotary=True,
        rotary_base=options.number("rope_theta", 10000.0),
        head_transform=True,
        softmax_bias=True,
        tied_softmax=options.flag("tie_word_embeddings", True),
        initializers="gpt2",
        scale_logits=True,
        attention_dropout=options.number("attention_probs_dropout_prob", 0.1),
        residual_dropout=options.number("hidden_dropout_prob", 0.1),
        embedding_dropout=0.0,
        token_dropout=HIDDEN_SHARE if dropped else 0.0,
        mask_id=options.count("mask_token_id", None if dropped else -1, least=-1),
        padding_id=options.count("pad_token_id", None, least=-1),
    )


def _entries(config: TransformerConfig) -> tuple[Entry, ...]:
    parts = Parts(config, LEGACY)
    vocab, decoder = [config.vocab_dim], "lm_head.decoder.weight"
    parts.add(
        "encoder/embedding",
        f"{PREFIX}embeddings.word_embeddings.weight",
        vocab,
        parts.model,
        ties=(decoder,) if config.tied_softmax else (),
    )
    if config.embedding_norm:
        parts.norm("encoder/embedding_norm", f"{PREFIX}embeddings.layer_norm")
    for i in range(config.layers):
        ours, theirs = f"encoder/layer_{i:03d}", f"{PREFIX}encoder.layer.{i}"
        parts.norm(f"{ours}/attention_norm", f"{theirs}.attention.LayerNorm")
        attention_of(parts, ours, theirs)
        parts.norm(f"{ours}/feed_forward_norm", f"{theirs}.LayerNorm")
        parts.feed_forward(f"{ours}/feed_forward", [f"{theirs}.intermediate.dense"], f"{theirs}.output.dense")
    parts.norm("encoder/final_norm", f"{PREFIX}encoder.emb_layer_norm_after")
    transform(parts, "lm_head.dense", "lm_head.layer_norm")
    if not config.tied_softmax:
        parts.add("encoder/softmax", decoder, vocab, parts.model)
    parts.add("encoder/softmax_bias", "lm_head.bias", vocab)
    return parts.done()
