"""On real ranks: replicas stay equal in every layout, and a flipped bit in any of them is found.

``python -m tests.runtime.mpi_programs.replicas``; rank 0 prints how many flips were tried.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import meshmpi as mm
from meshmpi.nn.optimize import Adafactor, AdamW, Optimizer
from meshmpi.runtime.replicas import Replicas, compared
from meshmpi.runtime.world import world_size

STEPS = 5


def layouts(ranks: int) -> Iterator[tuple[str, str, str | None, str | None]]:
    """(mesh, layout, storage of variables, storage of slots)."""
    line = f"a:{ranks}"
    yield line, "batch:a", None, None
    yield line, "batch:a", None, "width:a"
    yield line, "batch:a", "width:a", None
    yield line, "hidden:a", None, None
    yield line, "length:a", None, None
    yield line, "vocab:a", None, None
    yield line, "", None, None
    if ranks == 4:
        square = "a:2;b:2"
        yield square, "batch:a;hidden:b", None, None
        yield square, "batch:a;length:b", None, None
        yield square, "batch:a;vocab:b", None, "width:a"
        yield square, "batch:a", "width:b", None
        yield square, "batch:a+b", None, None


def compiled(mesh: mm.Mesh, layout: str, storage: str | None, optimizer: Optimizer, kernels: str):
    """A language model of one layer; sizes that no mesh divides."""
    with mm.Graph() as graph:
        ids = mm.placeholder("ids", "batch:6;length:5", "int32")
        width, vocab = mm.Dimension("width", 10), mm.Dimension("vocab", 11)
        table = mm.get_variable("table", mm.Shape([vocab, width]))
        x = mm.gather(table, ids, vocab)
        x = mm.layer_norm(x, width, name="norm")
        x = mm.relu(mm.dense(x, mm.Dimension("hidden", 14), reduced_dims=width, name="up"))
        logits = mm.dense(x, vocab, reduced_dims="hidden", name="down")
        loss = mm.reduce_mean(mm.reduce_logsumexp(logits, reduced_dim=vocab))
        updates = optimizer.minimize(loss, watch=[loss])
    return mm.compile(
        graph, mesh, layout, fetches=[loss, optimizer.finite], updates=updates, storage=storage, kernels=kernels
    )


def flips(step: mm.CompiledStep, rng: np.random.Generator) -> int:
    """Flips a bit of each variable on one of the ranks that hold it alike; how many were found."""
    mesh, tried = step.mesh, 0
    for name, variable in step.variables.types.items():
        axes = tuple(a for a in mesh.shape.names if a not in variable.type.used_axes)
        for group in mesh.shape.groups(axes) if axes else ():
            guilty, place = int(rng.choice(group)), int(rng.integers(1 << 30))
            sizes = variable.type.local_sizes(mesh.shape, mesh.shape.coordinates(guilty))
            if len(group) < 2 or not np.prod(sizes):
                continue
            bits = step.variables.blocks[name].get(guilty)
            if bits is not None:
                raw = bits.reshape(-1).view(np.uint8)
                byte, mask = place // 8 % raw.size, np.uint8(1 << place % 8)
                raw[byte] ^= mask
            (found,) = Replicas(step.variables).differences()
            assert (found.name, found.ranks) == (name, group), (found, name, group, guilty)
            assert found.damaged == (guilty,) or (len(group) == 2 and not found.damaged), found
            assert len(set(mesh.comm.allgather(str(found)))) == 1
            if bits is not None:
                raw[byte] ^= mask
            tried += 1
    return tried


def main() -> None:
    ranks, rng, tried = world_size(), np.random.default_rng(5), 0
    for k, (mesh, layout, storage, slots) in enumerate(layouts(ranks)):
        optimizer = AdamW(0.01, storage=slots) if k % 2 else Adafactor(0.01, min_dim_size_to_factor=2, storage=slots)
        made = mm.Mesh(mesh)
        step = compiled(made, layout, storage, optimizer, "native" if k % 6 == 0 else "numpy")
        for n in range(STEPS):
            ids = np.random.default_rng(n).integers(0, 11, (6, 5)).astype(np.int32)
            assert step(ids=ids)[optimizer.finite]
            told = compared(step.variables, False, print)
            assert not told, f"{mesh} {layout} {storage} {slots}, step {n}: {told}"
        tried += flips(step, rng)
    if made.rank == 0:
        print(f"{tried} flips found")


if __name__ == "__main__":
    main()
