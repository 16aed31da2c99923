"""Small expressions whose programs show what each operation sends; for docs/ops.md.

`EXAMPLES` has one expression for each public function, over the tensors of `TENSORS`;
`COMBINATIONS` shows several splits at once, storage layouts and constraints.
"""

from __future__ import annotations

from typing import NamedTuple

TENSORS: dict[str, tuple[str, str]] = {
    "x": ("a:8;b:12", "float32"),
    "y": ("b:12", "float32"),
    "w": ("b:12;c:16", "float32"),
    "n": ("a:8", "int32"),
    "rows": ("a:8;c:16", "float32"),
    "i": ("a:8;b:12", "int32"),
    "flag": ("a:8;b:12", "bool"),
    "scalar": ("", "int32"),
    "ids": ("batch:4;length:8", "int32"),
    "text": ("batch:4;length:8;d_model:16", "float32"),
    "q": ("batch:4;length:8;heads:4;d_kv:4", "float32"),
    "k": ("batch:4;memory_length:8;heads:4;d_kv:4", "float32"),
    "k_same": ("batch:4;length:8;heads:4;d_kv:4", "float32"),
    "grid": ("batch:4;height:8;width:8;heads:4;d_kv:4", "float32"),
    "picture_text": ("batch:4;height:8;width:8;d_model:16", "float32"),
    "series": ("batch:4;length:16;channels:6", "float32"),
    "image": ("batch:4;height:16;width:16;channels:6", "float32"),
    "volume": ("batch:4;depth:8;height:8;width:8;channels:6", "float32"),
    "blocks": ("blocks:4;block_length:4;d:6", "float32"),
    "logits": ("batch:4;length:8;vocab:24", "float32"),
}
"""Name -> (shape, data type); `v` is a variable with the shape of `w`."""

UNARY = (
    "abs",
    "cos",
    "erf",
    "exp",
    "floor",
    "identity",
    "isfinite",
    "log",
    "log1p",
    "negative",
    "reciprocal",
    "rsqrt",
    "sigmoid",
    "sign",
    "sin",
    "sqrt",
    "square",
    "tanh",
    "to_bfloat16",
    "to_float",
    "to_int32",
    "elu",
    "gelu",
    "leaky_relu",
    "relu",
    "selu",
    "silu",
    "softplus",
    "squared_relu",
    "swish",
)
BINARY = (
    "add",
    "divide",
    "equal",
    "floordiv",
    "greater",
    "greater_equal",
    "less",
    "less_equal",
    "maximum",
    "minimum",
    "mod",
    "multiply",
    "not_equal",
    "pow",
    "sub",
    "subtract",
)

EXAMPLES: dict[str, str] = {
    **{name: f"{name}(x)" for name in UNARY},
    **{name: f"{name}(x, y)" for name in BINARY},
    "logical_not": "logical_not(flag)",
    "logical_and": "logical_and(flag, flag)",
    "logical_or": "logical_or(flag, flag)",
    "where": "where(flag, x, y)",
    "add_n": "add_n([x, y, x])",
    "broadcast": "broadcast(y, [D('a', 8), b])",
    "cast": "cast(x, 'float64')",
    # sources
    "placeholder": "placeholder('fed', [a, b])",
    "get_variable": "get_variable('v', [b, c])",
    "read_stored": "read_stored(v.variable)",
    "assign": "assign(v, v * 0.5).value",
    "constant": "constant(2.0, [a, b])",
    "zeros": "zeros([a, b])",
    "zeros_like": "zeros_like(x)",
    "ones": "ones([a, b])",
    "ones_like": "ones_like(x)",
    "range": "range(b)",
    "step_number": "step_number()",
    "random_uniform": "random_uniform([a, b])",
    "random_normal": "random_normal([a, b])",
    # contraction, reductions
    "einsum": "einsum([x, w], [a, c])",
    "matmul": "matmul(x, w)",
    "conv": "conv(series, get_variable('f', 'taps:3;channels:6;out:4'),"
    " [ConvDims('length', 'taps', 'length', before=1)], 'batch:4;length:16;out:4')",
    **{
        f"reduce_{op}": f"reduce_{op}(x, reduced_dim=b)"
        for op in ("sum", "mean", "max", "min", "prod", "variance", "std")
    },
    "reduce_any": "reduce_any(flag, reduced_dim=b)",
    "reduce_all": "reduce_all(flag, reduced_dim=b)",
    # shapes
    "transpose": "transpose(x, [b, a])",
    "reshape": "reshape(x, 'a:8;d:3;e:4')",
    "rename": "rename(x, {'a': 'd'})",
    "rename_dimension": "rename_dimension(x, 'b', 'd')",
    "replace_dimensions": "replace_dimensions(x, [a, b], D('ab', 96))",
    "slice": "slice(x, 2, 4, b)",
    "split": "split(x, b, 2)",
    "pad": "pad(x, [1, 2], b)",
    "concat": "concat([x, x], 'b')",
    "stack": "stack([x, x], 'pair')",
    "unstack": "unstack(x, a)[:2]",
    "shift": "shift(x, 1, b, wrap=True)",
    "dynamic_shift": "dynamic_shift(x, scalar, b, wrap=True)",
    "cumsum": "cumsum(x, b)",
    # indexing, order
    "gather": "gather(w, n, b)",
    "scatter_add": "scatter_add(x, n, D('rows_of_y', 10))",
    "put": "put(w, rows, n, b)",
    "top_k": "top_k(x, b, D('k', 2))",
    "top_1": "top_1(x, b)",
    "argmax": "argmax(x, b)",
    "argmin": "argmin(x, b)",
    "sort": "sort(x, b)",
    "argsort": "argsort(x, b)",
    "nth_largest_element": "nth_largest_element(x, 1, b)",
    "nth_smallest_element": "nth_smallest_element(x, 1, b)",
    "reduce_first": "reduce_first(x, b)",
    # placement, control
    "constrain": "constrain(x, 'b:')",
    "stop_gradient": "stop_gradient(x)",
    "as_stored": "as_stored(x, v.variable)",
    "local_function": "local_function(lambda t: t.cumsum(1), [x], [x], [a], gradient=lambda ts, ys, dys: dys)",
    "custom_gradient": "custom_gradient(lambda t: square(t), lambda ts, ys, dys: [dys[0]], [x])",
    "cwise": "cwise(lambda s, t: s * t, [x, y])",
    "repeat": "repeat(lambda t: tanh(t), 3, [x], shared_variables=True)",
    "while_loop": "while_loop(lambda t: less(reduce_sum(t), 1.0), lambda t: [t * 0.5], [x], max_steps=2)",
    # softmax and its kin
    "softmax": "softmax(x, b)",
    "log_softmax": "log_softmax(x, b)",
    "reduce_logsumexp": "reduce_logsumexp(x, b)",
    "one_hot": "one_hot(n, b)",
    "clip_by_value": "clip_by_value(x, -1.0, 1.0)",
    "global_norm": "global_norm([x])",
    "clip_by_global_norm": "clip_by_global_norm([x, w], 1.0)",
    # layers
    "dense": "dense(text, D('d_ff', 32))",
    "dense_relu_dense": "dense_relu_dense(text, D('d_ff', 32))",
    "dense_product": "dense_product(text, ['d_model'], [D('d_ff', 32)])",
    "layer_norm": "layer_norm(text, 'd_model')",
    "rms_norm": "rms_norm(text, 'd_model')",
    "rms_norm_subsampled": "rms_norm_subsampled(text, 'd_model')",
    "scale_norm": "scale_norm(text, 'd_model')",
    "batch_norm": "batch_norm(image, True)",
    "embedding": "embedding(ids, D('vocab', 24), D('d_model', 16))",
    "embedding_weights": "embedding_weights(D('vocab', 24), D('d_model', 16))",
    "conv1d": "conv1d(series, D('out', 4))",
    "conv2d": "conv2d(image, D('out', 4))",
    "conv3d": "conv3d(volume, D('out', 4))",
    "conv2d_transpose": "conv2d_transpose(image, D('out', 4))",
    "conv3d_transpose": "conv3d_transpose(volume, D('out', 4))",
    "depthwise_conv": "depthwise_conv(image, (3, 3))",
    "separable_conv1d": "separable_conv1d(series, D('out', 4))",
    "separable_conv2d": "separable_conv2d(image, D('out', 4))",
    **{
        f"{op}_pool{n}d": f"{op}_pool{n}d({x})"
        for op in ("avg", "max")
        for n, x in ((1, "series"), (2, "image"), (3, "volume"))
    },
    # attention
    "dot_product_attention": "dot_product_attention(q, k, k, 'memory_length', 'd_kv', 'd_kv')",
    "multihead_attention": "multihead_attention(text, None, None, D('d_kv', 4), D('heads', 4))",
    "rename_length_to_memory_length": "rename_length_to_memory_length(text)",
    "local_attention_1d": "local_attention_1d(q, k_same, k_same, 'length', 'd_kv', 'd_kv', 2)",
    "local_attention_2d": "local_attention_2d(grid, grid, grid, ('height', 'width'), 'd_kv', 'd_kv', (2, 2))",
    "local_self_attention": "local_self_attention(text, D('d_kv', 4), D('heads', 4), 2)",
    "local_self_attention_2d": "local_self_attention_2d(picture_text, D('d_kv', 4), D('heads', 4), (2, 2))",
    "halo_exchange": "halo_exchange(blocks, 'blocks', 'block_length', 1)",
    "left_halo_exchange": "left_halo_exchange(blocks, 'blocks', 'block_length', 1)",
    "compress_mean": "compress_mean(text, 'length', 2)",
    "multihead_self_attention_memory_compressed": "multihead_self_attention_memory_compressed("
    "text, False, 2, D('d_kv', 4), D('heads', 4))",
    "attention_mask_autoregressive": "attention_mask_autoregressive(D('length', 8), D('memory_length', 8))",
    "attention_mask_ignore_padding": "attention_mask_ignore_padding(ids)",
    "attention_mask_local": "attention_mask_local(D('length', 8), D('memory_length', 8), 2)",
    "attention_mask_same_segment": "attention_mask_same_segment(ids, rename_length_to_memory_length(ids))",
    "relative_position_bias": "relative_position_bias(D('heads', 4), D('length', 8), D('memory_length', 8))",
    "relative_position_bucket": "relative_position_bucket(range(b) - range(a))",
    "rotary": "rotary(q, 'length', 'd_kv')",
    "sinusoid_positions": "sinusoid_positions(D('length', 8), D('d_model', 16))",
    # experts, losses, randomness
    "mixture_of_experts": "mixture_of_experts(text, D('experts', 4), D('d_ff', 32))",
    "softmax_cross_entropy_with_logits": "softmax_cross_entropy_with_logits(logits, ids, D('vocab', 24))",
    "sigmoid_cross_entropy_with_logits": "sigmoid_cross_entropy_with_logits(x, x)",
    "weighted_mean": "weighted_mean(x, y)",
    "corr": "corr(x, x * 2.0)",
    "annealed_dropout": "annealed_dropout(x, True, 0.1, 1000)",
    "clip_activation_gradient": "clip_activation_gradient(x, 1.0)",
    "residual": "residual(x, tanh)",
    "rezero": "rezero(x)",
    "weights_nonzero": "weights_nonzero(n)",
    "dropout": "dropout(x, is_training=True, rate=0.1)",
    "multiplicative_jitter": "multiplicative_jitter(x, is_training=True)",
    "sample_with_temperature": "sample_with_temperature(x, b)",
}
"""Function -> an expression that uses it."""

NO_EXAMPLE = ("attention_initializers",)
"""Functions that make no tensors; so do all of `meshmpi.nn.initializers`."""


class Combination(NamedTuple):
    """An expression, a layout on {rows: 2, cols: 2}, and how variables are kept."""

    code: str
    layout: str
    storage: str = ""


COMBINATIONS = [
    Combination("einsum([x, w], [a, c])", "a:rows;c:cols"),
    Combination("einsum([x, w], [a, c])", "b:rows+cols"),
    Combination("einsum([x, w], [a, c])", "a:rows;b:cols"),
    Combination("constrain(einsum([x, w], [a, c]), 'a:cols')", "b:cols"),
    Combination("gradients([reduce_sum(square(einsum([x, v], [a, c])))], [v])[0]", "a:rows"),
    Combination("gradients([reduce_sum(square(einsum([x, v], [a, c])))], [v])[0]", "c:cols"),
    Combination("einsum([x, v], [a, c])", "a:rows", "b:rows"),
    Combination("reduce_max(x)", "a:rows;b:cols"),
    Combination(
        "softmax_cross_entropy_with_logits(logits, ids, D('vocab', 24))", "batch:rows;vocab:cols"
    ),
    Combination("gather(w, n, b)", "a:rows;b:rows"),
    Combination("transpose(x, [b, a])", "a:rows;b:cols"),
    Combination("reshape(x, [D('ab', 96)])", "a:rows;ab:rows"),
    Combination("rename(x, {'a': 'd'})", "a:rows;d:rows"),
    Combination("rename(x, {'a': 'd'})", "a:rows;d:cols"),
    Combination("rename(x, {'a': 'd', 'b': 'e'})", "a:rows;e:rows"),
    Combination("conv2d(image, D('out', 4))", "height:rows;width:cols"),
    Combination(
        "mixture_of_experts(text, D('experts', 4), D('d_ff', 32))", "batch:rows;experts:rows"
    ),
]
