"""Inputs and right answers of the loops, and the sizes of the products.  Needs only NumPy.

An implementation is a function ``loops(data)`` -> {name of a loop: call}, where the call returns
its results in the order of `Data.answers` (or None where it works in place).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Loops = Mapping[str, Callable[[], Any]]
SOFTMAX, CROSS, NORM, RELU, ADAM = ((8192, 256), (1024, 8192), (2048, 512), (2048, 1024), (1024, 1024))
"""Rows and columns: attention weights, logits, residual stream, feed-forward, one matrix."""
EPSILON, RATE, BETA1, BETA2, ADAM_EPSILON = 1e-5, 1e-3, 0.9, 0.999, 1e-8
ADAM_STEP = 10
PRODUCTS = ((1, 2048, 512, 512), (1, 2048, 512, 8192), (32, 256, 64, 256))
"""(count, rows, summed, columns): a projection, the logits, attention's scores."""
NAMES = (
    "softmax forward",
    "softmax backward",
    "cross-entropy both",
    "layer norm forward",
    "layer norm backward",
    "bias + relu forward",
    "bias + relu backward",
    "Adam",
)
TOLERANCE = 2e-5
"""Largest error, relative to the largest element of the answer.  float32 sums of 8192 elements."""


def product_name(count: int, m: int, k: int, n: int) -> str:
    """As "32 x 256 x 64 x 256"."""
    return f"{f'{count} of ' if count > 1 else ''}{m} x {k} x {n}"


class Data:
    """Inputs, float32 and C-contiguous."""

    def __init__(self, scale: float = 1.0):
        random = np.random.default_rng(5)

        def normal(*sizes: int) -> np.ndarray:
            return random.standard_normal(sizes, np.float32)

        def scaled(sizes: tuple[int, int]) -> tuple[int, int]:
            return max(2, int(sizes[0] * scale)), sizes[1]

        self.scores, self.d_weights = normal(*scaled(SOFTMAX)), normal(*scaled(SOFTMAX))
        self.logits = normal(*scaled(CROSS))
        self.targets = random.integers(0, CROSS[1], len(self.logits)).astype(np.int32)
        self.x, self.dy = normal(*scaled(NORM)), normal(*scaled(NORM))
        self.scale, self.shift = normal(NORM[1]), normal(NORM[1])
        self.h, self.dh = normal(*scaled(RELU)), normal(*scaled(RELU))
        self.bias = normal(RELU[1])
        self.w, self.m, self.g = (normal(*scaled(ADAM)) for _ in range(3))
        self.v = np.abs(normal(*scaled(ADAM)))
        # What the backward loops are given, as the forward ones would leave it.
        self.weights = _softmax(self.scores.astype(np.float64)).astype(np.float32)
        self.mean = self.x.mean(1, dtype=np.float64).astype(np.float32)
        variance = self.x.var(1, dtype=np.float64)
        self.inverse = (1 / np.sqrt(variance + EPSILON)).astype(np.float32)
        self.y = np.maximum(self.h + self.bias, np.float32(0))
        self.correction1 = 1 / (1 - BETA1**ADAM_STEP)
        self.correction2 = 1 / (1 - BETA2**ADAM_STEP)

    def elements(self, name: str) -> int:
        """Elements of a loop, by which its time is divided."""
        arrays = {"softmax": self.scores, "cross-entropy": self.logits, "layer": self.x, "bias": self.h, "Adam": self.w}
        return arrays[name.split()[0]].size

    def answers(self, name: str) -> Sequence[np.ndarray]:
        """The right results of a loop in float64; empty for Adam, which changes its inputs."""
        return {
            "softmax forward": lambda: [_softmax(_wide(self.scores))],
            "softmax backward": self._softmax_backward,
            "cross-entropy both": self._cross_entropy,
            "layer norm forward": lambda: [self._normed() * self.scale + self.shift],
            "layer norm backward": self._norm_backward,
            "bias + relu forward": lambda: [np.maximum(_wide(self.h) + self.bias, 0)],
            "bias + relu backward": self._relu_backward,
            "Adam": list,
        }[name]()

    def _softmax_backward(self) -> list[np.ndarray]:
        p, d = _wide(self.weights), _wide(self.d_weights)
        return [p * (d - (p * d).sum(1, keepdims=True))]

    def _cross_entropy(self) -> list[np.ndarray]:
        x, at = _wide(self.logits), np.arange(len(self.logits))
        p = _softmax(x)
        loss = -np.log(p[at, self.targets]).mean()
        p[at, self.targets] -= 1
        return [np.array(loss), p / len(x)]

    def _normed(self) -> np.ndarray:
        return (_wide(self.x) - self.mean[:, None]) * self.inverse[:, None]

    def _norm_backward(self) -> list[np.ndarray]:
        z, d = self._normed(), _wide(self.dy)
        g = d * self.scale
        means = g.mean(1, keepdims=True), (g * z).mean(1, keepdims=True)
        dx = self.inverse[:, None] * (g - means[0] - z * means[1])
        return [dx, (d * z).sum(0), d.sum(0)]

    def _relu_backward(self) -> list[np.ndarray]:
        d = np.where(self.y > 0, _wide(self.dh), 0)
        return [d, d.sum(0)]


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


def error(found: Sequence[Any], answers: Sequence[np.ndarray]) -> float:
    """Largest error of any result, relative to the largest element of its answer."""
    worst = 0.0
    for x, y in zip(found, answers, strict=True):
        off = float(np.abs(np.asarray(x, np.float64).reshape(y.shape) - y).max())
        worst = max(worst, off / float(np.abs(y).max()))
    return worst


def operands(count: int, m: int, k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The two factors of a product, [count, m, k] and [count, k, n]."""
    random = np.random.default_rng(6)
    return tuple(random.standard_normal(s, np.float32) for s in ((count, m, k), (count, k, n)))


ATTENTION_TOKENS, HEADS, D_KV = 2048, 8, 64
"""Batch times length, and the sizes of the yardstick's attention."""


def attention_inputs(length: int) -> list[np.ndarray]:
    """q, k, v and the gradient of the result, each [batch, heads, length, d_kv]."""
    random = np.random.default_rng(7)
    sizes = (max(1, ATTENTION_TOKENS // length), HEADS, length, D_KV)
    return [random.standard_normal(sizes, np.float32) for _ in range(4)]


def sizes_of_results(results: Sequence[Any]) -> list[float]:
    """Root of the mean square of each result, by which implementations are compared."""
    return [float(np.sqrt(np.square(np.asarray(x, np.float64)).mean())) for x in results]
