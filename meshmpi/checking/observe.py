"""Runs a program and shows an observer the values of each instruction, completed, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Union

import numpy as np

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


def watched(executor: Executor) -> Iterator[Instruction]:
    """Runs a step call by call; yields every instruction when its results are there.

    What is reduced in the background is there after the `Wait`, which is yielded for it.
    """
    calls = iter(executor.calls)
    waiting = next(calls, None)
    for i in executor.program.instructions:
        while waiting is not None and (waiting[1] is i or waiting[1] is None):
            waiting[0]()
            waiting = next(calls, None)
        if not i.in_background:
            yield i


def _finished(executor: Executor, v: int) -> tuple[Blocks, Blocks | None]:
    """The blocks of a value, of which what is pending is finished in copies, for an `Observer`."""
    t, blocks = executor.program.types[v], {s.rank: s.arrays[v] for s in executor.states}
    if not t.partial:
        return blocks, None

    def reduced(copies: Blocks, op: str) -> Blocks:
        executor.mesh.bind(*(AllReduce(x, t.partial, op) for x in copies.values()))()
        return copies

    sizes = None
    if t.pending == "sum":
        sizes = reduced({r: np.abs(b, out=np.empty_like(b)) for r, b in blocks.items()}, "sum")
    return reduced({r: b.copy() for r, b in blocks.items()}, t.pending), sizes


def run_observed(
    program: Program,
    mesh: AnyMesh,
    feeds: Mapping[str, Any],
    variables: Mapping[str, np.ndarray],
    step: int,
    kernels: Kernels,
    observe: Observer,
) -> tuple[dict[str, Blocks], dict[str, Blocks]]:
    """One step of a verified program on whole feeds and variables, whose every value is shown to ``observe``.

    Returns:
        Fetch name -> blocks, and variable name -> blocks after the step.
    """
    simulated = mesh.simulated
    store = VariableStore(mesh, list(range(mesh.shape.size)) if simulated else [mesh.rank])
    for variable in program.variables.values():
        store.add(variable, program.seed)
    store.assign({n: a for n, a in variables.items() if n in program.variables})
    executor = Executor(program, mesh, store, kernels)
    executor.runtime.step = step
    for name, t in program.feeds.items():
        whole = np.asarray(feeds[name]).astype(numpy_dtype(t.dtype))
        for s in executor.states:
            np.copyto(s.feeds[name], block_of(whole, t, mesh.shape, s.coordinates))
    for i in watched(executor):
        for v in i.outputs:
            if not program.types[v].halos:  # no tensor of a graph is held with halos
                observe(i, v, *_finished(executor, v))
    fetched = {name: {s.rank: s.arrays[v].copy() for s in executor.states} for name, v in program.fetches.items()}
    return fetched, {name: dict(store.blocks[name]) for name in program.variables}
