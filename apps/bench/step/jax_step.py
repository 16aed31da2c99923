"""Worker of the peers' environment: the yardstick step in JAX, one jitted function.

One process, which uses all its cores, or data-parallel over processes that gloo connects.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from apps.bench.step import yardstick as ys
from apps.bench.step.yardstick import Sizes, Start

Values = dict[str, jax.Array]


def norm(p: Values, name: str, x: jax.Array) -> jax.Array:
    """Layer norm over the last axis."""
    centred = x - x.mean(-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + ys.NORM_EPSILON)
    return centred * scale * p[f"{name}/scale"] + p[f"{name}/bias"]


def layer(p: Values, at: str, x: jax.Array, seen: jax.Array, d_kv: int) -> jax.Array:
    """Attention and feed-forward with their residual connections; ``seen`` is the causal mask."""
    h = norm(p, f"{at}/attention_norm", x)
    q, k, v = (jnp.einsum("bld,dhk->bhlk", h, p[f"{at}/attention/{name}"]) for name in "qkv")
    scores = jnp.einsum("bhlk,bhmk->bhlm", q, k) / np.sqrt(d_kv).astype(np.float32)
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1)
    mixed = jnp.einsum("bhlm,bhmk->bhlk", weights, v)
    x = x + jnp.einsum("bhlk,hkd->bld", mixed, p[f"{at}/attention/o"])
    ff = f"{at}/feed_forward"
    h = norm(p, f"{ff}_norm", x)
    h = jax.nn.relu(h @ p[f"{ff}/wi/kernel"] + p[f"{ff}/wi/bias"])
    return x + h @ p[f"{ff}/wo/kernel"] + p[f"{ff}/wo/bias"]


def mean_loss(p: Values, x: jax.Array, y: jax.Array, s: Sizes) -> jax.Array:
    """Mean cross-entropy, nats per token."""
    h = p["embedding"][x] + p["positions"]
    seen = jnp.tril(jnp.ones((s.length, s.length), bool))
    for k in range(s.layers):
        h = layer(p, f"layer_{k:03d}", h, seen, s.d_kv)
    logits = norm(p, "final_norm", h) @ p["softmax"]
    of_targets = jnp.take_along_axis(logits, y[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - of_targets).mean()


def train(state: tuple, x: jax.Array, y: jax.Array, s: Sizes) -> tuple[tuple, jax.Array]:
    """One step of Adam; state is (variables, means, mean squares, number of steps)."""
    p, means, squares, n = state
    loss, g = jax.value_and_grad(mean_loss)(p, x, y, s)
    n = n + 1
    means = jax.tree.map(lambda m, d: ys.BETA1 * m + (1 - ys.BETA1) * d, means, g)
    squares = jax.tree.map(lambda v, d: ys.BETA2 * v + (1 - ys.BETA2) * d * d, squares, g)
    c1, c2 = 1 - ys.BETA1**n, 1 - ys.BETA2**n

    def moved(w: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return w - ys.RATE * (m / c1) / (jnp.sqrt(v / c2) + ys.EPSILON)

    return (jax.tree.map(moved, p, means, squares), means, squares, n), loss


def main() -> None:
    """Runs the steps and prints this process's result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("single", "dp"))
    parser.add_argument("--start", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    rank = int(os.environ.get("RANK", "0"))
    if options.mode == "dp":
        ys.pin(rank)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(address, int(os.environ["WORLD_SIZE"]), rank)
    start = Start(options.start)
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    whole, rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("batch",)))

    def put(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(x.shape, sharding, lambda part: x[part])

    def zeros() -> Values:
        return {n: put(np.zeros_like(start[n]), whole) for n in start.names}

    variables = {n: put(start[n], whole) for n in start.names}
    state: Any = (variables, zeros(), zeros(), put(np.zeros((), np.float32), whole))
    run = jax.jit(train, static_argnums=3, donate_argnums=0)

    def step(number: int) -> float:
        nonlocal state
        x, y = (put(a, rows) for a in start.batch(number))
        state, loss = run(state, x, y, start.sizes)
        return float(loss)

    ys.emit(rank=rank, version=f"jax {jax.__version__}", **ys.timed_steps(step, options.steps))


if __name__ == "__main__":
    main()
