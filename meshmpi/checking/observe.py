"""A program run with eyes: after each instruction, the values it made, finished, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Union

import numpy as np

from meshmpi.dims import Axes
from meshmpi.ir.program import Instruction, Program
from meshmpi.kernels import numpy_dtype
from meshmpi.kernels.native import NativeKernels
from meshmpi.runtime.arrays import block_of
from meshmpi.runtime.executor import Executor
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.runtime.operands import AllReduce
from meshmpi.runtime.variables import VariableStore

Blocks = dict[int, np.ndarray]
"""Rank -> its block; the ranks that this process plays."""
Kernels = Union[str, NativeKernels]
Observer = Callable[[Instruction, int, Blocks, "Blocks | None"], None]
"""Called with an instruction, a value it made, the blocks of that value and, where a sum is still
pending, the sums of the magnitudes of its terms: how much rounding it may yet get."""


class ObservedExecutor(Executor):
    """Runs a program and shows every value right after the instruction that made it.

    What is pending is finished in copies first, so that blocks are those of the whole value.
    Values held with halos are not shown: no tensor of a graph is.
    """

    def __init__(self, program: Program, mesh: AnyMesh, store: VariableStore, kernels: Kernels, observe: Observer):
        self._observe, self._built = observe, None if isinstance(kernels, str) else kernels
        super().__init__(program, mesh, store, kernels if isinstance(kernels, str) else "native")

    def _native_kernels(self, kernels: str) -> NativeKernels | None:
        return super()._native_kernels(kernels) if self._built is None else self._built

    def _bind(self, i: Instruction) -> list[Callable[[], None]]:
        return [*super()._bind(i), lambda: self._show(i)]

    def _show(self, i: Instruction) -> None:
        if i.in_background:
            return  # still on its way: what waits for it shows it
        for v in i.outputs:
            t = self.program.types[v]
            if t.halos:
                continue
            blocks = {s.rank: s.arrays[v] for s in self.states}
            sizes = None
            if t.partial:
                if t.pending == "sum":
                    sizes = {r: np.abs(b, out=np.empty_like(b)) for r, b in blocks.items()}
                    self._finish(sizes, t.partial, "sum")
                blocks = {r: b.copy() for r, b in blocks.items()}
                self._finish(blocks, t.partial, t.pending)
            self._observe(i, v, blocks, sizes)

    def _finish(self, blocks: Blocks, axes: Axes, op: str) -> None:
        self.mesh.bind(*(AllReduce(block, axes, op) for block in blocks.values()))()


def run_observed(
    program: Program,
    mesh: AnyMesh,
    feeds: Mapping[str, Any],
    variables: Mapping[str, np.ndarray],
    step: int,
    kernels: Kernels,
    observe: Observer,
) -> tuple[dict[str, Blocks], dict[str, Blocks]]:
    """One step of a program.

    Args:
        program: Verified.
        mesh: A Mesh or SimulatedMesh of its shape.
        feeds: Placeholder name -> whole array.
        variables: Name -> whole array at the start.
        step: The number of the step.
        kernels: As of `mm.compile`, or those that were built for this program, the same object.
        observe: Sees every value.

    Returns:
        Fetch name -> blocks, and variable name -> blocks after the step.
    """
    simulated = mesh.simulated
    store = VariableStore(mesh, list(range(mesh.shape.size)) if simulated else [mesh.rank])
    for variable in program.variables.values():
        store.add(variable, program.seed)
    store.assign({n: a for n, a in variables.items() if n in program.variables})
    executor = ObservedExecutor(program, mesh, store, kernels, observe)
    executor.runtime.step = step
    for name, t in program.feeds.items():
        whole = np.asarray(feeds[name]).astype(numpy_dtype(t.dtype))
        for s in executor.states:
            np.copyto(s.feeds[name], block_of(whole, t, mesh.shape, s.coordinates))
    executor.run()
    fetched = {name: {s.rank: s.arrays[v].copy() for s in executor.states} for name, v in program.fetches.items()}
    return fetched, {name: dict(store.blocks[name]) for name in program.variables}
