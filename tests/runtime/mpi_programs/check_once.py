"""Under mpirun: variables that the ranks of a host hold once, compared bit by bit with a simulated mesh.

Ranks are late at random, so that one without the others would read blocks too early or change them too soon.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import meshmpi as mm
from meshmpi.compiler.lowering import placement
from meshmpi.runtime.compiled import CompiledStep

MESHES = {2: "rows:2", 3: "rows:3", 4: "rows:2;cols:2", 6: "rows:3;cols:2"}
LAYOUT = {1: "batch:rows", 2: "batch:rows;hidden:cols"}
STEPS = 60


class Net:
    """Two layers whose dimensions no number of ranks divides."""

    def __init__(self) -> None:
        batch, io, hidden = mm.Dimension("batch", 12), mm.Dimension("io", 31), mm.Dimension("hidden", 48)
        with mm.Graph() as self.graph:
            x = mm.placeholder("x", [batch, io])
            self.w = mm.get_variable("w", [io, hidden])
            v = mm.get_variable("v", [hidden, io])
            y = mm.einsum([mm.tanh(mm.einsum([x, self.w], [batch, hidden])), v], [batch, io])
            self.loss = mm.reduce_mean(mm.square(y - x))
            self.updates = mm.optimize.Adam(1e-2, clip_norm=0.5).minimize(self.loss)
            # Changes a variable while no other collective keeps ranks together.
            z = mm.einsum([x, mm.tanh(self.w)], [batch, hidden])
            self.stirred = mm.tanh(mm.einsum([z, v], [batch, io]))
            self.stir = [mm.assign(self.w, 0.9 * self.w + 0.1), mm.assign(v, 0.9 * v - 0.1)]

    def compiled(self, mesh: Any, what: str = "train", late: Any = None, **options: Any) -> CompiledStep:
        fetches, updates = {
            "train": ({"loss": self.loss, "w": self.w}, self.updates),
            "evaluate": ({"y": self.stirred}, []),
            "stir": ({"y": self.stirred}, self.stir),
        }[what]
        step = mm.compile(self.graph, mesh, LAYOUT[len(mesh.shape.names)], fetches=fetches, updates=updates, **options)
        if late is not None:
            calls = step.executor._calls  # pyright: ignore[reportPrivateUsage]
            calls[:] = [delayed(call, late) for call in calls]
        return step


def delayed(call: Callable[[], None], late: random.Random) -> Callable[[], None]:
    def run() -> None:
        if late.random() < 0.1:
            time.sleep(late.choice([0.0001, 0.001]))
        call()

    return run


def trained(net: Net, mesh: Any, late: random.Random | None, **options: Any) -> list[Any]:
    """Losses and weights of training, evaluations and assignments in turn."""
    train = net.compiled(mesh, late=late, **options)
    options["variables"] = train.variables
    evaluate, stir = (net.compiled(mesh, what, late, **options) for what in ("evaluate", "stir"))
    found: list[Any] = []
    draw = np.random.default_rng(0)
    for number in range(STEPS):
        x = draw.standard_normal((12, 31)).astype(np.float32)
        result = train(x)
        found += [result["loss"], result["w"].numpy()]
        result = evaluate(x)  # its last call is no collective, and others may still be in it
        if number % 3 == 0:
            train.assign({"v": draw.standard_normal((48, 31)).astype(np.float32)})
        found += [result["y"].numpy(), stir(x)["y"].numpy(), stir(x)["y"].numpy()]
    return [*found, *(train.variables[name] for name in train.variables)]


def main() -> None:
    placement.SMALLEST_BYTES = 0
    net, mesh = Net(), mm.Mesh(MESHES[MPI.COMM_WORLD.size])
    found = trained(net, mesh, random.Random(mesh.rank))
    wanted = trained(net, mm.SimulatedMesh(mesh.shape, mesh.shared_axes()), None)
    apart = trained(net, mm.SimulatedMesh(mesh.shape), None, storage=f"*:{'+'.join(mesh.shape.names)}")
    for x, y, z in zip(found, wanted, apart, strict=True):
        assert np.array_equal(x, y) and np.array_equal(x, z), (x, y, z)
    held = trained(net, mesh, None, storage="*:")
    assert all(np.allclose(x, y, rtol=1e-3, atol=1e-5) for x, y in zip(found, held, strict=True))
    step = net.compiled(mesh)
    program = step.program.text()
    assert "in one array over rows" in program and "joined=True" in program, program
    block = step.variables.blocks["w"][mesh.rank]
    block[...] = mesh.rank
    mesh.comm.Barrier()
    seen = sorted(set(step.variables.wholes["w"][mesh.rank].ravel().tolist()))
    assert seen == sorted(float(r) for r in mesh.group(("rows",))), seen
    if mesh.rank == 0:
        print("held once")


main()
