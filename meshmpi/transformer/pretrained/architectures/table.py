"""The architectures, one row per ``model_type`` of a config.json."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from meshmpi.errors import ConfigError, suggest
from meshmpi.nn.layers import factors
from meshmpi.transformer.models import TransformerConfig
from meshmpi.transformer.pretrained.architectures import configs
from meshmpi.transformer.pretrained.architectures.entries import Architecture, entries_of
from meshmpi.transformer.pretrained.architectures.options import Options, short


@dataclass(frozen=True)
class Row:
    """What is known of an architecture; called with options, it makes the `Architecture`.

    Fields without a word are those of `Architecture` and arguments of `entries_of`.
    """

    kind: str
    config: Callable[[Options], configs.Values]  # reads the options
    names: str | Callable[[TransformerConfig], str]  # for `entries_of`; a function where it depends on the config
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    special: Mapping[str, int] = field(default_factory=dict[str, int])  # token ids that a file may leave out
    legacy: tuple[tuple[str, str], ...] = ()
    conv1d: bool = False

    def __call__(self, options: Options) -> Architecture:
        config = TransformerConfig(**self.config(options))
        special = options.special(**self.special)
        options.finish()
        if self.kind == "encoder_decoder":
            special.setdefault("decoder_start", special["pad"])
        names = self.names if isinstance(self.names, str) else self.names(config)
        entries = entries_of(config, names, self.legacy, self.conv1d)
        return Architecture(
            options.name, self.kind, config, entries, self.prefix, self.ignored, special, options.values
        )


def _bert_names(config: TransformerConfig) -> str:
    # An untied softmax takes its bias along; the other one is then not used.
    bias = "cls.predictions " if config.tied_softmax else ""
    return f"""
        encoder/embedding                 bert.embeddings.word_embeddings
        encoder/positions                 bert.embeddings.position_embeddings
        encoder/token_types               bert.embeddings.token_type_embeddings
        encoder/embedding_norm            bert.embeddings.LayerNorm
        encoder/layer/attention/q         bert.encoder.layer.{{i}}.attention.self.query
        encoder/layer/attention/k         bert.encoder.layer.{{i}}.attention.self.key
        encoder/layer/attention/v         bert.encoder.layer.{{i}}.attention.self.value
        encoder/layer/attention/o         bert.encoder.layer.{{i}}.attention.output.dense
        encoder/layer/attention_norm      bert.encoder.layer.{{i}}.attention.output.LayerNorm
        encoder/layer/feed_forward/wi     bert.encoder.layer.{{i}}.intermediate.dense
        encoder/layer/feed_forward/wo     bert.encoder.layer.{{i}}.output.dense
        encoder/layer/feed_forward_norm   bert.encoder.layer.{{i}}.output.LayerNorm
        encoder/head                      cls.predictions.transform.dense
        encoder/head_norm                 cls.predictions.transform.LayerNorm
        encoder/softmax                   cls.predictions.decoder
        encoder/softmax_bias              {bias}cls.predictions.decoder
        """


_ESM_NAMES = """
    encoder/embedding                 esm.embeddings.word_embeddings
    encoder/embedding_norm            esm.embeddings.layer_norm
    encoder/layer/attention_norm      esm.encoder.layer.{i}.attention.LayerNorm
    encoder/layer/attention/q         esm.encoder.layer.{i}.attention.self.query
    encoder/layer/attention/k         esm.encoder.layer.{i}.attention.self.key
    encoder/layer/attention/v         esm.encoder.layer.{i}.attention.self.value
    encoder/layer/attention/o         esm.encoder.layer.{i}.attention.output.dense
    encoder/layer/feed_forward_norm   esm.encoder.layer.{i}.LayerNorm
    encoder/layer/feed_forward/wi     esm.encoder.layer.{i}.intermediate.dense
    encoder/layer/feed_forward/wo     esm.encoder.layer.{i}.output.dense
    encoder/final_norm                esm.encoder.emb_layer_norm_after
    encoder/head                      lm_head.dense
    encoder/head_norm                 lm_head.layer_norm
    encoder/softmax                   lm_head.decoder
    encoder/softmax_bias              lm_head
    """


_GPT2_NAMES = """
    decoder/embedding                 transformer.wte
    decoder/positions                 transformer.wpe
    decoder/layer/attention_norm      transformer.h.{i}.ln_1
    decoder/layer/attention/q         transformer.h.{i}.attn.c_attn[0/3]
    decoder/layer/attention/k         transformer.h.{i}.attn.c_attn[1/3]
    decoder/layer/attention/v         transformer.h.{i}.attn.c_attn[2/3]
    decoder/layer/attention/o         transformer.h.{i}.attn.c_proj
    decoder/layer/feed_forward_norm   transformer.h.{i}.ln_2
    decoder/layer/feed_forward/wi     transformer.h.{i}.mlp.c_fc
    decoder/layer/feed_forward/wo     transformer.h.{i}.mlp.c_proj
    decoder/final_norm                transformer.ln_f
    decoder/softmax                   lm_head
    """


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
_LLAMA_IGNORED = (r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)
"""Frequencies of rotations in older files."""


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


_T5_IGNORED = (r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight", r"shared\.weight")
_LEGACY = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
"""Names of norms in the first files of BERT."""

ARCHITECTURES: dict[str, Row] = {
    "bert": Row(
        "encoder",
        configs.bert,
        _bert_names,
        "bert.",
        (
            r"(bert\.)?pooler\..*",  # for other tasks
            r"cls\.seq_relationship\..*",
            r"(bert\.)?embeddings\.position_ids",  # 0, 1, 2, ...
            r"cls\.predictions\.bias",
        ),
        {"pad": 0},
        _LEGACY,
    ),
    "esm": Row(
        "encoder",
        configs.esm,
        _ESM_NAMES,
        "esm.",
        (
            # Frequencies of rotations, with a literal star in files of transformers 5.
            r"(esm\.)?(encoder\.layer\.(\d+|\*)\.attention\.self\.)?rotary_embeddings\.inv_freq",
            r"(esm\.)?embeddings\.(position_ids|position_embeddings\.weight)",  # not used where positions are rotations
            r"(esm\.)?(contact_head|pooler)\..*",  # for other tasks
        ),
        {"bos": 0, "eos": 2},
        _LEGACY,
    ),
    "gpt2": Row(
        "lm",
        configs.gpt2,
        _GPT2_NAMES,
        "transformer.",
        (r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),  # causal masks of older files
        {"bos": 50256, "eos": 50256},
        conv1d=True,
    ),
    "llama": Row("lm", configs.llama, _LLAMA_NAMES, "model.", _LLAMA_IGNORED, {"bos": 1, "eos": 2}),
    "mistral": Row("lm", configs.mistral, _LLAMA_NAMES, "model.", _LLAMA_IGNORED, {"bos": 1, "eos": 2}),
    "qwen2": Row("lm", configs.qwen2, _LLAMA_NAMES, "model.", _LLAMA_IGNORED),
    "switch_transformers": Row(
        "encoder_decoder",
        configs.switch,
        lambda config: _t5_names(config, "mlp"),
        ignored=_T5_IGNORED,
        special={"pad": 0, "eos": 1},
    ),
    "t5": Row("encoder_decoder", configs.t5, _t5_names, ignored=_T5_IGNORED, special={"pad": 0, "eos": 1}),
}
"""model_type -> its row."""


def architecture(config: Mapping[str, object], ignore: Sequence[str] = (), keys: Collection[str] = ()) -> Architecture:
    """The model that a config.json describes.

    Args:
        config: Keys and values, as ``json.load`` gives them.
        ignore: Further keys that change nothing in this model.
        keys: Names of the arrays in the checkpoint.  An untied T5 has one embedding for source and
            target or two; only its arrays show which.

    Returns:
        Its Transformer and where its variables stand in files.

    Raises:
        ConfigError: The ``model_type`` is unknown, or an option has a value that is not
            implemented; both are named.

    Example:
        >>> from meshmpi.transformer.pretrained.architectures import architecture
        >>> found = architecture({"model_type": "gpt2", "n_layer": 2})
        >>> found.kind, found.config.layers, found.entries[0].keys
        ('lm', 2, ('transformer.wte.weight',))
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"the config is of model_type {short(name)}; there are {known}.",
            suggest(str(name), ARCHITECTURES) if name else "Give the config.json of one of them.",
        )
    return ARCHITECTURES[name](Options(config, name, ignore, keys))
