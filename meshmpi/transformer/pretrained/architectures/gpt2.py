"""GPT-2: learned positions, layer norms before sublayers, queries, keys and values in one matrix.

Source: Radford et al. 2019.
"""

from __future__ import annotations

from meshmpi.transformer.models import TransformerConfig
from meshmpi.transformer.pretrained.architectures.entries import Architecture, Entry, FileDim
from meshmpi.transformer.pretrained.architectures.options import Options
from meshmpi.transformer.pretrained.architectures.parts import Parts

PREFIX = "transformer."
IGNORED = (
    r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",  # causal masks of older files
)


def gpt2(options: Options) -> Architecture:
    """The architecture of a ``GPT2LMHeadModel``."""
    config = _config(options)
    special = options.special(bos=50256, eos=50256)
    options.finish()
    return Architecture("gpt2", "lm", config, _entries(config), PREFIX, IGNORED, special, options.values)


def _config(options: Options) -> TransformerConfig:
    width, heads = (options.count("n_embd", 768, "hidden_size"), options.repeated("n_head", 12, "num_attention_heads"))
    options.only("scale_attn_by_inverse_layer_idx", False)
    options.only("add_cross_attention", False)
    options.only("is_encoder_decoder", False)
    return TransformerConfig(
        vocab=options.count("vocab_size", 50257),
        length=options.count("n_positions", 1024, "max_position_embeddings"),
        d_model=width,
        d_ff=options.count("n_inner", 4 * width),
        heads=heads,
        d_kv=options.head(width, heads),
        layers=options.repeated("n_layer", 12, "num_hidden_layers"),
        norm="layer",
        norm_epsilon=options.number("layer_norm_epsilon", 1e-5),
        activation=options.activation("activation_function", "gelu_new"),
        ff_bias=True,
        attention_bias=True,
        initializers="gpt2",
        tied_softmax=options.flag("tie_word_embeddings", True),
        scale_logits=options.flag("scale_attn_weights", True),
        attention_dropout=options.number("attn_pdrop", 0.1),
        residual_dropout=options.number("resid_pdrop", 0.1),
        embedding_dropout=options.number("embd_pdrop", 0.1),
    )


def _entries(config: TransformerConfig) -> tuple[Entry, ...]:
    parts = Parts(config)
    tied = ("lm_head.weight",) if config.tied_softmax else ()
    vocab = [config.vocab_dim]
    parts.add("decoder/embedding", f"{PREFIX}wte.weight", vocab, parts.model, ties=tied)
    parts.add("decoder/positions", f"{PREFIX}wpe.weight", [config.length_dim], parts.model)
    for i in range(config.layers):
        ours, theirs = f"decoder/layer_{i:03d}", f"{PREFIX}h.{i}"
        parts.norm(f"{ours}/attention_norm", f"{theirs}.ln_1")
        _attention(parts, f"{ours}/attention", f"{theirs}.attn")
        parts.norm(f"{ours}/feed_forward_norm", f"{theirs}.ln_2")
        # A Conv1D, unlike a Linear, is (in, out).
        for letter, key, dims in (
            ("wi", "c_fc", (parts.model, parts.hidden)),
            ("wo", "c_proj", (parts.hidden, parts.model)),
        ):
            parts.add(f"{ours}/feed_forward/{letter}/kernel", f"{theirs}.mlp.{key}.weight", *dims)
            parts.add(f"{ours}/feed_forward/{letter}/bias", f"{theirs}.mlp.{key}.bias", dims[1])
    parts.norm("decoder/final_norm", f"{PREFIX}ln_f")
    if not config.tied_softmax:
        parts.add("decoder/softmax", "lm_head.weight", vocab, parts.model)
    return parts.done()


def _attention(parts: Parts, ours: str, theirs: str) -> None:
    width = parts.config.heads * parts.config.d_kv
    for n, letter in enumerate("qkv"):
        part = FileDim(tuple(parts.queries), n * width, 3 * width)
        parts.add(f"{ours}/{letter}", f"{theirs}.c_attn.weight", parts.model, part)
        parts.add(f"{ours}/{letter}_bias", f"{theirs}.c_attn.bias", part)
    parts.add(f"{ours}/o", f"{theirs}.c_proj.weight", parts.queries, parts.model)
    parts.add(f"{ours}/o_bias", f"{theirs}.c_proj.bias", parts.model)
