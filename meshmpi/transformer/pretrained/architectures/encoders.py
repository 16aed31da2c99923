"""Describes encoders of masked language models: BERT with its successors, and ESM."""

from __future__ import annotations

from meshmpi.transformer.pretrained.architectures.options import Options
from meshmpi.transformer.pretrained.architectures.row import (
    Keys,
    Row,
    Values,
    activation,
    count,
    flag,
    number,
    repeated,
    sizes,
)

_LEGACY = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
"""Names of norms in the first files of BERT."""

_NO_DECODER = {"is_decoder": (False,), "add_cross_attention": (False,), "is_encoder_decoder": (False,)}
_ENCODER: Keys = {
    "norm": "layer",
    "norm_epsilon": number("layer_norm_eps", 1e-12),
    "ff_bias": True,
    "attention_bias": True,
    "head_transform": True,
    "softmax_bias": True,
    "tied_softmax": flag("tie_word_embeddings", True),
    "initializers": "gpt2",
    "scale_logits": True,
    "attention_dropout": number("attention_probs_dropout_prob", 0.1),
    "residual_dropout": number("hidden_dropout_prob", 0.1),
}
"""Fields that are read alike for BERT and ESM."""
_BERT: Keys = {
    **sizes(30522, 512, 768, 3072, 12, 12),
    **_ENCODER,
    "norm_after": True,
    "activation": activation("hidden_act", "gelu"),
    "embedding_norm": True,
    "token_types": count("type_vocab_size", 2, least=0),
    "padding_id": count("pad_token_id", 0, least=-1),
}
_BERT_NAMES = """
    encoder/embedding                 bert.embeddings.word_embeddings
    encoder/positions                 bert.embeddings.position_embeddings
    encoder/token_types               bert.embeddings.token_type_embeddings
    encoder/embedding_norm            bert.embeddings.LayerNorm
    encoder/layer/attention/q         bert.encoder.layer.{i}.attention.self.query
    encoder/layer/attention/k         bert.encoder.layer.{i}.attention.self.key
    encoder/layer/attention/v         bert.encoder.layer.{i}.attention.self.value
    encoder/layer/attention/o         bert.encoder.layer.{i}.attention.output.dense
    encoder/layer/attention_norm      bert.encoder.layer.{i}.attention.output.LayerNorm
    encoder/layer/feed_forward/wi     bert.encoder.layer.{i}.intermediate.dense
    encoder/layer/feed_forward/wo     bert.encoder.layer.{i}.output.dense
    encoder/layer/feed_forward_norm   bert.encoder.layer.{i}.output.LayerNorm
    encoder/head                      cls.predictions.transform.dense
    encoder/head_norm                 cls.predictions.transform.LayerNorm
    encoder/softmax                   cls.predictions.decoder
    encoder/softmax_bias              cls.predictions cls.predictions.decoder
    """


_ROBERTA_NAMES = _BERT_NAMES.replace(" bert.", " roberta.").replace("cls.predictions.transform.dense", "lm_head.dense")
_ROBERTA_NAMES = _ROBERTA_NAMES.replace("cls.predictions.transform.LayerNorm", "lm_head.layer_norm")
_ROBERTA_NAMES = _ROBERTA_NAMES.replace("cls.predictions", "lm_head")
_ROBERTA: Keys = {
    **_BERT,
    "vocab": count("vocab_size", 50265),
    "length": lambda options: options.count("max_position_embeddings", 512) - _after_padding(options),
    "padding_id": count("pad_token_id", 1, least=-1),
    "position_offset": lambda options: _after_padding(options),
}
_DISTILBERT: Keys = {
    **_ENCODER,
    "vocab": count("vocab_size", 30522),
    "length": count("max_position_embeddings", 512),
    "d_model": count("dim", 768, "hidden_size"),
    "d_ff": count("hidden_dim", 3072),
    "heads": repeated("n_heads", 12, "num_attention_heads"),
    "layers": repeated("n_layers", 6, "num_hidden_layers"),
    "norm_after": True,
    "norm_epsilon": 1e-12,
    "activation": activation("activation", "gelu"),
    "embedding_norm": True,
    "attention_dropout": number("attention_dropout", 0.1),
    "residual_dropout": number("dropout", 0.1),
    "padding_id": count("pad_token_id", 0, least=-1),
}
_DISTILBERT_NAMES = """
    encoder/embedding                 distilbert.embeddings.word_embeddings
    encoder/positions                 distilbert.embeddings.position_embeddings
    encoder/embedding_norm            distilbert.embeddings.LayerNorm
    encoder/layer/attention/q         distilbert.transformer.layer.{i}.attention.q_lin
    encoder/layer/attention/k         distilbert.transformer.layer.{i}.attention.k_lin
    encoder/layer/attention/v         distilbert.transformer.layer.{i}.attention.v_lin
    encoder/layer/attention/o         distilbert.transformer.layer.{i}.attention.out_lin
    encoder/layer/attention_norm      distilbert.transformer.layer.{i}.sa_layer_norm
    encoder/layer/feed_forward/wi     distilbert.transformer.layer.{i}.ffn.lin1
    encoder/layer/feed_forward/wo     distilbert.transformer.layer.{i}.ffn.lin2
    encoder/layer/feed_forward_norm   distilbert.transformer.layer.{i}.output_layer_norm
    encoder/head                      vocab_transform
    encoder/head_norm                 vocab_layer_norm
    encoder/softmax                   vocab_projector
    encoder/softmax_bias              vocab_projector
    """


def _after_padding(options: Options) -> int:
    """The row of RoBERTa's position table for a text's first token: that behind the padding's."""
    return options.count("pad_token_id", 1, least=-1) + 1


def _rotated_only(options: Options) -> bool:
    """True; ConfigError where positions are learned."""
    options.only("position_embedding_type", "rotary", default="absolute")
    return True


def _dropped_tokens(options: Options) -> Values:
    """The share of tokens that all ESM models saw hidden in training: of 15 % that were chosen, 80 %."""
    dropped = options.flag("token_dropout", False)
    mask = options.count("mask_token_id", None if dropped else -1, least=-1)
    return {"token_dropout": 0.15 * 0.8 if dropped else 0.0, "mask_id": mask}


_ESM: Keys = {
    **sizes(None, 1026, 768, 3072, 12, 12),
    **_ENCODER,
    "activation": "gelu_exact",
    "embedding_norm": flag("emb_layer_norm_before", False),
    "learned_positions": False,
    "rotary": _rotated_only,
    "rotary_base": number("rope_theta", 10000.0),
    "embedding_dropout": 0.0,
    "padding_id": count("pad_token_id", None, least=-1),
}
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


_ROBERTA_ROW = Row(  # Liu et al. 2019, Martin et al. 2020, Conneau et al. 2020
    "encoder",
    _ROBERTA_NAMES,
    _ROBERTA,
    only={**_NO_DECODER, "position_embedding_type": ("absolute",)},
    prefix="roberta.",
    ignored=(r"(roberta\.)?pooler\..*", r"(roberta\.)?embeddings\.position_ids", r"lm_head\.bias"),
    special={"bos": 0, "eos": 2, "pad": 1},
    legacy=_LEGACY,
)
ENCODERS: dict[str, Row] = {
    "bert": Row(  # Devlin et al. 2019
        "encoder",
        _BERT_NAMES,
        _BERT,
        only={**_NO_DECODER, "position_embedding_type": ("absolute",)},
        prefix="bert.",
        ignored=(
            r"(bert\.)?pooler\..*",  # for other tasks
            r"cls\.seq_relationship\..*",
            r"(bert\.)?embeddings\.position_ids",  # 0, 1, 2, ...
            r"cls\.predictions\.bias",
        ),
        special={"pad": 0},
        legacy=_LEGACY,
    ),
    "distilbert": Row(  # Sanh et al. 2019
        "encoder",
        _DISTILBERT_NAMES,
        _DISTILBERT,
        prefix="distilbert.",
        special={"pad": 0},
        # The first values of positions; other tasks; a name of tie_word_embeddings that changes nothing.
        harmless=("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_"),
    ),
    **dict.fromkeys(("camembert", "roberta", "xlm-roberta"), _ROBERTA_ROW),
    "esm": Row(  # ESM-2 of proteins, Lin et al. 2023
        "encoder",
        _ESM_NAMES,
        _ESM,
        _dropped_tokens,
        only={**_NO_DECODER, "hidden_act": ("gelu",), "is_folding_model": (False,)},
        prefix="esm.",
        ignored=(
            # Frequencies of rotations, with a literal star in files of transformers 5.
            r"(esm\.)?(encoder\.layer\.(\d+|\*)\.attention\.self\.)?rotary_embeddings\.inv_freq",
            r"(esm\.)?embeddings\.(position_ids|position_embeddings\.weight)",  # not used where positions are rotations
            r"(esm\.)?(contact_head|pooler)\..*",  # for other tasks
        ),
        special={"bos": 0, "eos": 2},
        legacy=_LEGACY,
        harmless=("esmfold_config", "vocab_list"),  # used by the folding model only
    ),
}
