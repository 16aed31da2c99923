"""The loops in JAX, each one jitted function; one thread (see `apps.bench.loops.worker`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from apps.bench.loops.data import ADAM_EPSILON, BETA1, BETA2, EPSILON, RATE, Data, Loops, operands

jax.config.update("jax_platforms", "cpu")


def loops(d: Data) -> Loops:
    """See `apps.bench.loops.data`."""
    made: dict[str, tuple[Callable[..., Any], tuple]] = {
        "softmax forward": (lambda x: [jax.nn.softmax(x, 1)], (d.scores,)),
        "softmax backward": (lambda p, dp: [p * (dp - (p * dp).sum(1, keepdims=True))], (d.weights, d.d_weights)),
        "cross-entropy both": (jax.value_and_grad(_cross_entropy), (d.logits, d.targets)),
        "layer norm forward": (_norm, (d.x, d.scale, d.shift)),
        "layer norm backward": (_norm_backward, (d.x, d.scale, d.mean, d.inverse, d.dy)),
        "bias + relu forward": (lambda x, b: [jnp.maximum(x + b, 0)], (d.h, d.bias)),
        "bias + relu backward": (_relu_backward, (d.y, d.dh)),
    }
    return {**{name: _jitted(f, *x) for name, (f, x) in made.items()}, "Adam": _adam(d)}


def _jitted(function: Callable[..., Any], *arrays: Any) -> Callable[[], Any]:
    run, held = jax.jit(function), [jax.device_put(x) for x in arrays]
    return lambda: jax.block_until_ready(run(*held))


def _cross_entropy(x: jax.Array, targets: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(x, targets[:, None], 1)[:, 0]
    return (jax.nn.logsumexp(x, axis=1) - chosen).mean()


def _norm(x: jax.Array, scale: jax.Array, shift: jax.Array) -> list[jax.Array]:
    centred = x - x.mean(1, keepdims=True)
    variance = jnp.square(centred).mean(1, keepdims=True)
    return [centred * jax.lax.rsqrt(variance + EPSILON) * scale + shift]


def _norm_backward(
    x: jax.Array, scale: jax.Array, mean: jax.Array, inverse: jax.Array, dy: jax.Array
) -> list[jax.Array]:
    z, g = (x - mean[:, None]) * inverse[:, None], dy * scale
    means = [t.mean(1, keepdims=True) for t in (g, g * z)]
    return [inverse[:, None] * (g - means[0] - z * means[1]), (dy * z).sum(0), dy.sum(0)]


def _relu_backward(y: jax.Array, dy: jax.Array) -> list[jax.Array]:
    d = jnp.where(y > 0, dy, 0)
    return [d, d.sum(0)]


def _adam(d: Data) -> Callable[[], None]:
    c1, c2 = d.correction1, d.correction2

    def update(w: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> tuple:
        m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
        return w - RATE * (m * c1) / (jnp.sqrt(v * c2) + ADAM_EPSILON), m, v

    run, g = jax.jit(update, donate_argnums=(0, 1, 2)), jax.device_put(d.g)
    state: Any = [jax.device_put(x) for x in (d.w, d.m, d.v)]

    def call() -> None:
        nonlocal state
        state = jax.block_until_ready(run(*state, g))

    return call


def product(count: int, m: int, k: int, n: int) -> Callable[[], Any]:
    """A jitted matrix product."""
    return _jitted(jnp.matmul, *operands(count, m, k, n))


def attention(arrays: list[Any]) -> Callable[[], Any]:
    """Causal attention and its gradients, jitted together."""
    *_, length, d_kv = arrays[0].shape

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("bhld,bhmd->bhlm", q, k) / jnp.sqrt(jnp.float32(d_kv))
        seen = jnp.tril(jnp.ones((length, length), bool))
        return jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1) @ v

    def both(q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array) -> list[jax.Array]:
        y, pull = jax.vjp(forward, q, k, v)
        return [y, *pull(dy)]

    return _jitted(both, *arrays)
