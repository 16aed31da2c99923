"""Layers, losses, attention, Transformer models, optimizers, schedules: composed from primitives.

Sees graph, ops and autodiff only: no layout, no lowering, no arrays, no MPI.
"""

from meshmpi.nn import optimize, schedules, transformer
from meshmpi.nn.activations import (
    ACTIVATIONS,
    elu,
    gelu,
    leaky_relu,
    relu,
    selu,
    silu,
    softplus,
    squared_relu,
    swish,
)
from meshmpi.nn.attention import (
    AttentionInitializers,
    attention_initializers,
    attention_mask_autoregressive,
    attention_mask_ignore_padding,
    dot_product_attention,
    multihead_attention,
    rename_length_to_memory_length,
)
from meshmpi.nn.experts import ExpertsOutput, mixture_of_experts
from meshmpi.nn.functions import (
    argmax,
    clip_by_global_norm,
    clip_by_value,
    global_norm,
    log_softmax,
    one_hot,
    reduce_logsumexp,
    softmax,
    top_1,
)
from meshmpi.nn.initializers import (
    Distribution,
    Initializer,
    constant_initializer,
    default_initializer,
    ones_initializer,
    random_normal_initializer,
    random_uniform_initializer,
    truncated_normal_initializer,
    variance_scaling_initializer,
    zeros_initializer,
)
from meshmpi.nn.layers import (
    dense,
    dense_relu_dense,
    embedding,
    embedding_weights,
    layer_norm,
    rms_norm,
)
from meshmpi.nn.losses import (
    sigmoid_cross_entropy_with_logits,
    softmax_cross_entropy_with_logits,
    weighted_mean,
    weights_nonzero,
)
from meshmpi.nn.randomness import dropout, multiplicative_jitter, sample_with_temperature
from meshmpi.nn.routing import Gating

__all__ = [
    "ACTIVATIONS", "AttentionInitializers", "Distribution", "ExpertsOutput", "Gating",
    "Initializer", "argmax", "attention_initializers", "attention_mask_autoregressive",
    "attention_mask_ignore_padding", "clip_by_global_norm", "clip_by_value",
    "constant_initializer", "default_initializer", "dense", "dense_relu_dense",
    "dot_product_attention", "dropout", "elu", "embedding", "embedding_weights", "gelu",
    "global_norm", "layer_norm", "leaky_relu", "log_softmax", "mixture_of_experts",
    "multihead_attention", "multiplicative_jitter", "one_hot", "ones_initializer", "optimize",
    "random_normal_initializer", "random_uniform_initializer", "reduce_logsumexp", "relu",
    "rename_length_to_memory_length", "rms_norm", "sample_with_temperature", "schedules",
    "selu", "sigmoid_cross_entropy_with_logits", "silu", "softmax",
    "softmax_cross_entropy_with_logits", "softplus", "squared_relu", "swish", "top_1",
    "transformer", "truncated_normal_initializer", "variance_scaling_initializer",
    "weighted_mean", "weights_nonzero", "zeros_initializer",
]  # fmt: skip
