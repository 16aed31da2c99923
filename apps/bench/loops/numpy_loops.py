"""The loops in NumPy as one writes them with care: no array is made anew in a call."""

from __future__ import annotations

from typing import Any

import numpy as np

from apps.bench.loops.data import ADAM_EPSILON, BETA1, BETA2, EPSILON, RATE, Data, Loops, operands

F = np.float32


def loops(d: Data) -> Loops:
    """See `apps.bench.loops.data`."""
    return {
        "softmax forward": _softmax(d),
        "softmax backward": _softmax_backward(d),
        "cross-entropy both": _cross_entropy(d),
        "layer norm forward": _norm(d),
        "layer norm backward": _norm_backward(d),
        "bias + relu forward": _relu(d),
        "bias + relu backward": _relu_backward(d),
        "Adam": _adam(d),
    }


def product(count: int, m: int, k: int, n: int) -> Any:
    """np.matmul into a given array."""
    a, b = operands(count, m, k, n)
    y = np.empty((count, m, n), F)
    return lambda: np.matmul(a, b, out=y)


def _softmax(d: Data) -> Any:
    x, y = d.scores, np.empty_like(d.scores)
    column = np.empty((len(x), 1), F)

    def run() -> list:
        np.max(x, axis=1, keepdims=True, out=column)
        np.exp(np.subtract(x, column, out=y), out=y)
        np.sum(y, axis=1, keepdims=True, out=column)
        return [np.divide(y, column, out=y)]

    return run


def _softmax_backward(d: Data) -> Any:
    p, dp, y = d.weights, d.d_weights, np.empty_like(d.weights)
    column = np.empty((len(p), 1), F)

    def run() -> list:
        np.einsum("ij,ij->i", p, dp, out=column[:, 0])
        return [np.multiply(np.subtract(dp, column, out=y), p, out=y)]

    return run


def _cross_entropy(d: Data) -> Any:
    x, y, t, rows = d.logits, np.empty_like(d.logits), d.targets, np.arange(len(d.logits))
    most, total = np.empty((len(x), 1), F), np.empty((len(x), 1), F)

    def run() -> list:
        np.max(x, axis=1, keepdims=True, out=most)
        np.exp(np.subtract(x, most, out=y), out=y)
        np.sum(y, axis=1, keepdims=True, out=total)
        loss = (np.log(total) + most)[:, 0].mean() - x[rows, t].mean()
        total[...] *= len(x)
        np.divide(y, total, out=y)
        y[rows, t] -= F(1 / len(x))
        return [loss, y]

    return run


def _norm(d: Data) -> Any:
    x, y, column = d.x, np.empty_like(d.x), np.empty((len(d.x), 1), F)

    def run() -> list:
        np.mean(x, axis=1, keepdims=True, out=column)
        np.subtract(x, column, out=y)
        np.einsum("ij,ij->i", y, y, out=column[:, 0])
        np.sqrt(column / F(x.shape[1]) + F(EPSILON), out=column)
        np.divide(y, column, out=y)
        return [np.add(np.multiply(y, d.scale, out=y), d.shift, out=y)]

    return run


def _norm_backward(d: Data) -> Any:
    z, g, n = np.empty_like(d.x), np.empty_like(d.x), F(d.x.shape[1])
    inner, mean = np.empty((len(d.x), 1), F), np.empty((len(d.x), 1), F)

    def run() -> list:
        np.multiply(np.subtract(d.x, d.mean[:, None], out=z), d.inverse[:, None], out=z)
        of_scale, of_shift = np.einsum("ij,ij->j", d.dy, z), d.dy.sum(0)
        np.multiply(d.dy, d.scale, out=g)
        np.einsum("ij,ij->i", g, z, out=inner[:, 0])
        np.mean(g, axis=1, keepdims=True, out=mean)
        np.subtract(g, mean, out=g)
        np.subtract(g, np.multiply(z, inner / n, out=z), out=g)
        return [np.multiply(g, d.inverse[:, None], out=g), of_scale, of_shift]

    return run


def _relu(d: Data) -> Any:
    y = np.empty_like(d.h)
    return lambda: [np.maximum(np.add(d.h, d.bias, out=y), F(0), out=y)]


def _relu_backward(d: Data) -> Any:
    y, seen = np.empty_like(d.h), np.empty(d.h.shape, bool)

    def run() -> list:
        np.multiply(d.dh, np.greater(d.y, 0, out=seen), out=y)
        return [y, y.sum(0)]

    return run


def _adam(d: Data) -> Any:
    w, m, v = (x.copy() for x in (d.w, d.m, d.v))
    a, b = np.empty_like(w), np.empty_like(w)
    c1, c2 = F(RATE * d.correction1), F(d.correction2)

    def run() -> None:
        np.add(np.multiply(m, F(BETA1), out=m), np.multiply(d.g, F(1 - BETA1), out=a), out=m)
        np.multiply(np.square(d.g, out=a), F(1 - BETA2), out=a)
        np.add(np.multiply(v, F(BETA2), out=v), a, out=v)
        np.add(np.sqrt(np.multiply(v, c2, out=a), out=a), F(ADAM_EPSILON), out=a)
        np.subtract(w, np.divide(np.multiply(m, c1, out=b), a, out=b), out=w)

    return run
