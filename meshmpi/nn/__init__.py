"""Layers, losses, attention, Transformer models, optimizers, schedules: compositions of primitives.

Depends on graph, ops and autodiff only: no layout, no lowering, no arrays, no MPI.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from meshmpi.graph.arguments import check_all as _check_all

if _TYPE_CHECKING:
    from meshmpi.nn import optimize, schedules
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

_HOMES = {
    "activations": "ACTIVATIONS elu gelu leaky_relu relu selu silu softplus squared_relu swish",
    "attention": (
        "AttentionInitializers AttentionOptions attention_initializers attention_mask_autoregressive "
        "attention_mask_ignore_padding attention_mask_local attention_mask_same_segment compress_mean "
        "dot_product_attention multihead_attention multihead_self_attention_memory_compressed "
        "rename_length_to_memory_length"
    ),
    "control": "cwise repeat while_loop",
    "convolution": (
        "conv1d conv2d conv2d_transpose conv3d conv3d_transpose depthwise_conv separable_conv1d separable_conv2d"
    ),
    "experts": "ExpertsOutput mixture_of_experts",
    "functions": (
        "clip_activation_gradient clip_by_global_norm clip_by_value global_norm log_softmax one_hot "
        "reduce_logsumexp softmax"
    ),
    "initializers": (
        "Distribution Initializer constant_initializer default_initializer ones_initializer "
        "random_normal_initializer random_uniform_initializer truncated_normal_initializer "
        "variance_scaling_initializer zeros_initializer"
    ),
    "layers": "GATED_UNITS dense dense_product dense_relu_dense embedding embedding_weights residual",
    "local_attention": (
        "halo_exchange left_halo_exchange local_attention_1d local_attention_2d local_self_attention "
        "local_self_attention_2d"
    ),
    "losses": (
        "corr sigmoid_cross_entropy_with_logits softmax_cross_entropy_with_logits weighted_mean weights_nonzero"
    ),
    "normalization": "batch_norm layer_norm rezero rms_norm rms_norm_subsampled scale_norm",
    "ordering": (
        "argmax argmin argsort dynamic_shift nth_largest_element nth_smallest_element reduce_first sort top_1"
    ),
    "pooling": "avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d",
    "positions": "RotaryScaling relative_position_bias relative_position_bucket rotary sinusoid_positions",
    "randomness": "annealed_dropout dropout multiplicative_jitter sample_with_temperature",
    "routing": "Gating",
}
"""Module -> its public names.  A module is imported when one of them is first used: on a cluster thousands of
ranks open these files at once, and a script needs few."""
LATER = {"optimize": "meshmpi.nn.optimize", "schedules": "meshmpi.nn.schedules"}
"""Modules that are imported when they are first used.  The front adds those of the upper floors."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = sorted([*_HOME_OF, "schedules"])


def __getattr__(name: str) -> _Any:
    import importlib

    if name in LATER:
        return importlib.import_module(LATER[name])
    home = _HOME_OF.get(name, name)
    if home not in _HOMES:
        raise AttributeError(f"module 'meshmpi.nn' has no attribute '{name}'")
    module, names = importlib.import_module(f"meshmpi.nn.{home}"), _HOMES[home].split()
    globals().update((n, getattr(module, n)) for n in names)
    _check_all(globals(), names)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *LATER})
