"""The loops as small graphs that `mm.compile` turns into programs, on NumPy or generated kernels.

What is timed is a run of the program, without the copying of feeds and fetches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import meshmpi as mm
from apps.bench.loops.data import ADAM_EPSILON, BETA1, BETA2, EPSILON, RATE, Data, Loops, operands

Fetches = list[mm.Tensor]


def loops(d: Data, kernels: str = "native") -> Loops:
    """See `apps.bench.loops.data`."""
    made: dict[str, tuple[Callable[..., Fetches], dict[str, np.ndarray]]] = {
        "softmax forward": (lambda x: [mm.softmax(x, "columns")], {"x": d.scores}),
        "softmax backward": (_softmax_backward, {"p": d.weights, "dp": d.d_weights}),
        "cross-entropy both": (_cross_entropy, {"x": d.logits, "targets": d.targets}),
        "layer norm forward": (_norm, {"x": d.x, "scale": d.scale, "shift": d.shift}),
        "layer norm backward": (
            _norm_backward,
            {"x": d.x, "scale": d.scale, "mean": d.mean, "inverse": d.inverse, "dy": d.dy},
        ),
        "bias + relu forward": (lambda x, bias: [mm.relu(x + bias)], {"x": d.h, "bias": d.bias}),
        "bias + relu backward": (_relu_backward, {"y": d.y, "dy": d.dh}),
    }
    calls = {name: _compiled(build, feeds, kernels) for name, (build, feeds) in made.items()}
    return {**calls, "Adam": _adam(d, kernels)}


def _placeholder(name: str, x: np.ndarray) -> mm.Tensor:
    """Vectors belong to rows or to columns by their name."""
    dims = ["rows", "columns"]
    if x.ndim == 1:
        dims = ["rows"] if name in ("targets", "mean", "inverse") else ["columns"]
    return mm.placeholder(name, list(zip(dims, x.shape, strict=True)), str(x.dtype))


def _compiled(build: Callable[..., Fetches], feeds: Mapping[str, np.ndarray], kernels: str) -> Callable[[], list]:
    with mm.Graph() as graph:
        fetches = build(**{name: _placeholder(name, x) for name, x in feeds.items()})
    step = mm.compile(graph, mm.SimulatedMesh("all:1"), fetches=fetches, kernels=kernels)
    return _run_of(step, step(feeds))


def _run_of(step: Any, found: Mapping[Any, Any]) -> Callable[[], list]:
    """A run of the program on the feeds that the first step left in place."""
    results = [x if isinstance(x, float) else x.numpy() for x in found.values()]
    run = step._executor.run

    def call() -> list:
        run()
        return results

    return call


def _softmax_backward(p: mm.Tensor, dp: mm.Tensor) -> Fetches:
    inner = mm.reduce_sum(p * dp, reduced_dim="columns")
    return [p * mm.subtract(dp, inner)]


def _cross_entropy(x: mm.Tensor, targets: mm.Tensor) -> Fetches:
    loss = mm.reduce_mean(mm.softmax_cross_entropy_with_logits(x, targets, "columns"))
    return [loss, *(g for g in mm.gradients(loss, [x]) if g is not None)]


def _norm(x: mm.Tensor, scale: mm.Tensor, shift: mm.Tensor) -> Fetches:
    centred = x - mm.reduce_mean(x, reduced_dim="columns")
    variance = mm.reduce_mean(mm.square(centred), reduced_dim="columns")
    return [centred * mm.rsqrt(variance + EPSILON) * scale + shift]


def _norm_backward(x: mm.Tensor, scale: mm.Tensor, mean: mm.Tensor, inverse: mm.Tensor, dy: mm.Tensor) -> Fetches:
    z, g = (x - mean) * inverse, dy * scale
    means = [mm.reduce_mean(t, reduced_dim="columns") for t in (g, g * z)]
    dx = (g - means[0] - z * means[1]) * inverse
    return [dx, *(mm.reduce_sum(t, reduced_dim="rows") for t in (dy * z, dy))]


def _relu_backward(y: mm.Tensor, dy: mm.Tensor) -> Fetches:
    d = mm.where(mm.greater(y, 0.0), dy, 0.0)
    return [d, mm.reduce_sum(d, reduced_dim="rows")]


def _adam(d: Data, kernels: str) -> Callable[[], list]:
    with mm.Graph() as graph:
        g = _placeholder("g", d.g)
        w = mm.get_variable("w", g.shape, initializer=d.w)
        adam = mm.optimize.Adam(RATE, BETA1, BETA2, ADAM_EPSILON)
        updates = adam.apply_gradients([(g, w)])
    step = mm.compile(graph, mm.SimulatedMesh("all:1"), updates=updates, kernels=kernels)
    step(g=d.g)
    return _run_of(step, {})


def product(count: int, m: int, k: int, n: int) -> Callable[[], list]:
    """One contraction, bound as in a model."""
    a, b = operands(count, m, k, n)
    with mm.Graph() as graph:
        x = mm.placeholder("x", [("count", count), ("m", m), ("k", k)])
        y = mm.placeholder("y", [("count", count), ("k", k), ("n", n)])
        z = mm.einsum([x, y], [*x.shape.without(["k"]), y.shape.dim("n")])
    step = mm.compile(graph, mm.SimulatedMesh("all:1"), fetches=[z])
    return _run_of(step, step(x=a, y=b))


def attention(arrays: list[np.ndarray]) -> Callable[[], list]:
    """Causal attention and its gradients for q, k, v, as the passes make it of the plain graph."""
    batch, heads, length, d_kv = arrays[0].shape
    q_dims = [("batch", batch), ("heads", heads), ("length", length), ("d_kv", d_kv)]
    k_dims = [("memory_length", n) if name == "length" else (name, n) for name, n in q_dims]
    with mm.Graph() as graph:
        q, dy = (mm.placeholder(name, q_dims) for name in ("q", "dy"))
        k, v = (mm.placeholder(name, k_dims) for name in "kv")
        band = mm.Band.causal("length", "memory_length")
        y = mm.dot_product_attention(q, k, v, "memory_length", "d_kv", "d_kv", band=band)
        gradients = [g for g in mm.gradients([y], [q, k, v], [dy]) if g is not None]
    step = mm.compile(graph, mm.SimulatedMesh("all:1"), fetches=[y, *gradients], kernels="auto")
    return _run_of(step, step(dict(zip(("q", "k", "v", "dy"), arrays, strict=True))))
