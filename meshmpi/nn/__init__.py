"""Layers, losses, attention, Transformer models, optimizers, schedules: compositions of primitives.

Depends on graph, ops and autodiff only: no layout, no lowering, no arrays, no MPI.
"""

from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from meshmpi.graph.arguments import check_all as _check_all
from meshmpi.nn import schedules
from meshmpi.nn.activations import ACTIVATIONS, elu, gelu, leaky_relu, relu, selu, silu, softplus, squared_relu, swish
from meshmpi.nn.attention import (
    AttentionInitializers,
    AttentionOptions,
    attention_initializers,
    attention_mask_autoregressive,
    attention_mask_ignore_padding,
    attention_mask_local,
    attention_mask_same_segment,
    compress_mean,
    dot_product_attention,
    multihead_attention,
    multihead_self_attention_memory_compressed,
    rename_length_to_memory_length,
)
from meshmpi.nn.control import cwise, repeat, while_loop
from meshmpi.nn.convolution import (
    conv1d,
    conv2d,
    conv2d_transpose,
    conv3d,
    conv3d_transpose,
    depthwise_conv,
    separable_conv1d,
    separable_conv2d,
)
from meshmpi.nn.experts import ExpertsOutput, mixture_of_experts
from meshmpi.nn.functions import (
    clip_activation_gradient,
    clip_by_global_norm,
    clip_by_value,
    global_norm,
    log_softmax,
    one_hot,
    reduce_logsumexp,
    softmax,
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
    GATED_UNITS,
    dense,
    dense_product,
    dense_relu_dense,
    embedding,
    embedding_weights,
    residual,
)
from meshmpi.nn.local_attention import (
    halo_exchange,
    left_halo_exchange,
    local_attention_1d,
    local_attention_2d,
    local_self_attention,
    local_self_attention_2d,
)
from meshmpi.nn.losses import (
    corr,
    sigmoid_cross_entropy_with_logits,
    softmax_cross_entropy_with_logits,
    weighted_mean,
    weights_nonzero,
)
from meshmpi.nn.normalization import batch_norm, layer_norm, rezero, rms_norm, rms_norm_subsampled, scale_norm
from meshmpi.nn.ordering import (
    argmax,
    argmin,
    argsort,
    dynamic_shift,
    nth_largest_element,
    nth_smallest_element,
    reduce_first,
    sort,
    top_1,
)
from meshmpi.nn.pooling import avg_pool1d, avg_pool2d, avg_pool3d, max_pool1d, max_pool2d, max_pool3d
from meshmpi.nn.positions import (
    RotaryScaling,
    relative_position_bias,
    relative_position_bucket,
    rotary,
    sinusoid_positions,
)
from meshmpi.nn.randomness import annealed_dropout, dropout, multiplicative_jitter, sample_with_temperature
from meshmpi.nn.routing import Gating

if _TYPE_CHECKING:
    from meshmpi.nn import optimize

__all__ = sorted(
    name
    for name, value in vars().items()
    if not name.startswith("_") and (value is schedules or not isinstance(value, _ModuleType))
)
_check_all(globals(), __all__)

LATER = {"optimize": "meshmpi.nn.optimize"}
"""Modules that are imported when they are first used, so that `import meshmpi` opens few files.
The front adds those of the upper floors."""


def __getattr__(name: str) -> _Any:
    if name in LATER:
        import importlib

        return importlib.import_module(LATER[name])
    raise AttributeError(f"module 'meshmpi.nn' has no attribute '{name}'")
