"""Tiny random models of `transformers`, made by it, and what it computes with them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshmpi.transformer.pretrained.architectures import Architecture, architecture

BATCH, LENGTH, SOURCE = 3, 7, 9
SMALL = {
    "hidden_size": 12,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "intermediate_size": 10,
    "vocab_size": 23,
    "max_position_embeddings": 16,
}
T5 = {
    "d_model": 12,
    "num_heads": 3,
    "d_kv": 5,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "d_ff": 10,
    "vocab_size": 23,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "decoder_start_token_id": 0,
    "initializer_factor": 1.0,
}
GPT2 = {
    "n_embd": 12,
    "n_head": 3,
    "n_layer": 2,
    "vocab_size": 23,
    "n_positions": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ESM = {
    **SMALL,
    "position_embedding_type": "rotary",
    "token_dropout": True,
    "mask_token_id": 22,
    "pad_token_id": 1,
    "layer_norm_eps": 1e-5,
}
SWITCH = {**T5, "num_experts": 3, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 3}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 12,
}
_WITHOUT_FF = {name: size for name, size in SMALL.items() if name != "intermediate_size"}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {**GPT2, "n_inner": 10}),
    "gpt2_untied": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {**GPT2, "tie_word_embeddings": False, "scale_attn_weights": False, "activation_function": "relu"},
    ),
    "pythia": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**SMALL, "rotary_pct": 0.5}),
    "gpt_neox": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {**SMALL, "use_parallel_residual": False, "rotary_pct": 1.0, "rotary_emb_base": 500, "attention_bias": False},
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", SMALL),
    "llama_gqa": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            **SMALL,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 4,
            "hidden_act": "gelu_new",
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": LLAMA3,
        },
    ),
    "llama_mqa": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            **SMALL,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e3, "factor": 2.0},
        },
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**SMALL, "num_key_value_heads": 1, "sliding_window": 3}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**SMALL, "num_key_value_heads": 3}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**SMALL, "num_key_value_heads": 1, "head_dim": 6}),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", {**SMALL, "tie_word_embeddings": True}),
    "olmo2": (
        "Olmo2Config",
        "Olmo2ForCausalLM",
        {**SMALL, "num_attention_heads": 6, "num_key_value_heads": 3, "attention_bias": True},
    ),
    "opt": ("OPTConfig", "OPTForCausalLM", {**_WITHOUT_FF, "ffn_dim": 10}),
    "phi3": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {**SMALL, "num_attention_heads": 6, "num_key_value_heads": 3, "sliding_window": 3, "pad_token_id": 0},
    ),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {**SMALL, "num_key_value_heads": 1}),
    "t5": ("T5Config", "T5ForConditionalGeneration", T5),
    "t5_v1_1": (
        "T5Config",
        "T5ForConditionalGeneration",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "t5_two_tables": ("T5Config", "T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-silu"}),
    "switch": ("SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration", SWITCH),
    "esm2": ("EsmConfig", "EsmForMaskedLM", ESM),
    "esm2_other": (
        "EsmConfig",
        "EsmForMaskedLM",
        {**ESM, "token_dropout": False, "emb_layer_norm_before": True, "tie_word_embeddings": False},
    ),
    "bert": ("BertConfig", "BertForMaskedLM", SMALL),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", SMALL),
    "xlm_roberta": (
        "XLMRobertaConfig",
        "XLMRobertaForMaskedLM",
        {**SMALL, "type_vocab_size": 1, "tie_word_embeddings": False},
    ),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {"dim": 12, "n_heads": 3, "n_layers": 2, "hidden_dim": 10, "vocab_size": 23, "max_position_embeddings": 16},
    ),
    "bert_other": (
        "BertConfig",
        "BertForMaskedLM",
        {**SMALL, "hidden_act": "silu", "type_vocab_size": 3, "tie_word_embeddings": False},
    ),
}
"""Name -> (class of its config, class of the model, options)."""


@dataclass
class Reference:
    """A model of `transformers`, and what it computes.

    Attributes:
        architecture: What its config means to us.
        arrays: Its weights, by key.
        feeds: Of `model_inputs`.
        probe: [batch, length, vocab], 0 at padding: the loss is sum(probe * logits).
        logits: [batch, length, vocab].
        gradients: Of the loss by key.
    """

    architecture: Architecture
    arrays: dict[str, np.ndarray]
    feeds: dict[str, np.ndarray]
    probe: np.ndarray
    logits: np.ndarray
    gradients: dict[str, np.ndarray] = field(default_factory=dict)


def made(name: str) -> tuple[Any, Architecture]:
    """(A random model in evaluation mode, its architecture).

    Weights are random everywhere, so that no bias is 0 and no scale 1.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    kind, model, options = MODELS[name]
    config = getattr(transformers, kind)(**options)
    if name in ("t5_v1_1", "t5_two_tables"):
        # transformers 5 ties these whatever it is told, unless it is told afterwards.
        config.tie_word_embeddings = False
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    made = getattr(transformers, model)(config).eval()
    if name == "t5_v1_1":  # the weights of the published ones
        made.encoder.embed_tokens.weight = made.shared.weight
        made.decoder.embed_tokens.weight = made.shared.weight
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    values = json.loads(config.to_json_string())
    return made, architecture(values, keys=[k for k, _ in made.named_parameters()])


def reference(name: str, seed: int = 1) -> Reference:
    """Logits and gradients of a model on a batch with padding on the left and on the right."""
    import torch

    model, found = made(name)
    rng = np.random.default_rng(seed)
    vocab = found.config.vocab
    feeds = {"tokens": rng.integers(3, vocab, (BATCH, LENGTH)), "mask": _mask(LENGTH, 2, 3)}
    call = {"input_ids": "tokens", "attention_mask": "mask"}
    if found.kind == "encoder_decoder":
        feeds |= {"source": rng.integers(3, vocab, (BATCH, SOURCE)), "source_mask": _mask(SOURCE, 4, 1)}
        call = {
            "input_ids": "source",
            "attention_mask": "source_mask",
            "decoder_input_ids": "tokens",
            "decoder_attention_mask": "mask",
        }
    if found.config.token_types:
        feeds["types"] = rng.integers(0, found.config.token_types, (BATCH, LENGTH))
        call["token_type_ids"] = "types"
    if found.config.mask_id >= 0:
        feeds["tokens"][:, 3] = found.config.mask_id
    pad = max(found.config.padding_id, 0)
    feeds["tokens"] = np.where(feeds["mask"], feeds["tokens"], pad)
    logits = model(**{k: torch.tensor(feeds[v]) for k, v in call.items()}).logits
    probe = rng.normal(size=logits.shape) * feeds["mask"][..., None]
    (logits * torch.tensor(probe, dtype=torch.float32)).sum().backward()
    weights = dict(model.named_parameters())
    return Reference(
        found,
        {k: p.detach().numpy() for k, p in weights.items()},
        {k: v.astype(np.int32) for k, v in feeds.items()},
        probe.astype(np.float32),
        logits.detach().numpy(),
        {k: np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy() for k, p in weights.items()},
    )


def _mask(length: int, left: int, right: int) -> np.ndarray:
    """1 for tokens: a whole row, one with padding on the left, one with padding on the right."""
    mask = np.ones((BATCH, length), np.int64)
    mask[1, :left] = 0
    mask[2, length - right :] = 0
    return mask
