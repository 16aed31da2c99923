"""Defaults and orders of arguments that docs/porting.md says or implies, against the code."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import meshmpi as mm

ORDERS = {
    "dense": "x new_dims reduced_dims expert_dims use_bias activation",
    "dense_product": "x reduced_dims new_dims activation_functions",
    "layer_norm": "x dim epsilon name",
    "dropout": "x is_training keep_prob rate noise_shape",
    "softmax_cross_entropy_with_logits": "logits targets vocab_dim",
    "one_hot": "indices output_dim on_value off_value dtype",
    "einsum": "xs output_shape reduced_dims",
    "gather": "weights indices dim",
    "slice": "x begin size slice_dim_name",
    "pad": "x paddings dim_name",
    "split": "x split_dim num_or_size_splits",
    "stack": "xs dim_name axis",
    "concat": "xs concat_dim_name",
    "shift": "x offset dim wrap",
    "top_k": "x reduced_dim k_dim",
    "cumsum": "x dim exclusive",
    "rename_dimension": "x old_name new_name",
    "replace_dimensions": "x old_dims new_dims",
    "reshape": "x new_shape",
    "transpose": "x new_shape",
    "broadcast": "x new_shape",
    "where": "condition if_true if_false output_shape",
    "gradients": "ys xs grad_ys",
    "random_uniform": "shape minval maxval dtype",
    "random_normal": "shape mean stddev dtype",
    "conv2d": "x output_dim filter_size strides",
}
"""Function -> its first parameters, in the order of the reference (without its mesh)."""
DEFAULTS: list[tuple[Any, str, Any]] = [
    (mm.layer_norm, "epsilon", 1e-6),
    (mm.dense, "use_bias", True),
    (mm.one_hot, "off_value", 0.0),
    (mm.optimize.Momentum, "momentum", 0.9),
    (mm.optimize.AdamW, "beta1", 0.9),
    (mm.optimize.AdamW, "beta2", 0.999),
    (mm.optimize.AdamW, "epsilon", 1e-8),
    (mm.optimize.Adafactor, "decay_exponent", 0.8),
    (mm.optimize.Adafactor, "beta1", 0.0),
    (mm.optimize.Adafactor, "epsilon1", 1e-30),
    (mm.optimize.Adafactor, "epsilon2", 1e-3),
    (mm.optimize.Adafactor, "clipping_threshold", 1.0),
    (mm.optimize.Adafactor, "min_dim_size_to_factor", 128),
    (mm.dot_product_attention, "scale", None),
    (mm.leaky_relu, "alpha", 0.2),
    (mm.gelu, "exact", False),
    (mm.multihead_attention, "scale", None),
]


@pytest.mark.parametrize("name", ORDERS)
def test_arguments_stand_in_the_order_of_the_reference(name: str):
    wanted = ORDERS[name].split()
    assert list(inspect.signature(getattr(mm, name)).parameters)[: len(wanted)] == wanted


@pytest.mark.parametrize(("function", "parameter", "value"), DEFAULTS)
def test_defaults(function: Any, parameter: str, value: Any):
    assert inspect.signature(function).parameters[parameter].default == value


@pytest.mark.parametrize(("scale", "factor"), [(None, 0.5), (1.0, 1.0), (0.25, 0.25)])
def test_the_scale_of_attention(scale: float | None, factor: float):
    """By default 1 / sqrt(d_kv); scale=1.0 is the reference's."""
    rng = np.random.default_rng(7)
    q, k, v = (rng.normal(size=s) for s in ((3, 4), (5, 4), (5, 2)))
    with mm.Graph() as graph:
        tensors = [mm.placeholder(n, s, "float64") for n, s in (("q", "l:3;d:4"), ("k", "m:5;d:4"), ("v", "m:5;e:2"))]
        y = mm.dot_product_attention(*tensors, "m", "d", "e", scale=scale)
    got = mm.compile(graph, mm.SimulatedMesh("r:1"), fetches=[y])(q=q, k=k, v=v)[y].numpy()
    weights = np.exp(q @ k.T * factor)
    want = weights / weights.sum(1, keepdims=True) @ v
    assert np.allclose(got, want, rtol=1e-12, atol=1e-12)


def test_first_values_of_layers():
    """Kernels of dense: variance 1 / fan in; biases 0; scales of norms 1; embeddings normal."""
    with mm.Graph() as graph:
        x = mm.placeholder("x", "b:2;io:400")
        y = mm.layer_norm(mm.dense(x, "h:300", name="layer"), "h", name="norm")
        ids = mm.placeholder("ids", "b:2", "int32")
        e = mm.embedding(ids, "vocab:100", "d:90", name="table")
    values = mm.compile(graph, mm.SimulatedMesh("r:1"), fetches=[y, e]).variables
    assert np.std(values["layer/kernel"]) == pytest.approx(400**-0.5, rel=0.01)
    assert not values["layer/bias"].any() and not values["norm/bias"].any()
    assert (values["norm/scale"] == 1.0).all()
    assert np.std(values["table"]) == pytest.approx(1.0, rel=0.03)
