"""Computes one instruction on whole arrays with the NumPy kernels, which define every instruction.

A mesh of one rank holds every value whole, so the arrays are the graph's tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from meshmpi.ir.kinds import Shift
from meshmpi.ir.program import Instruction, Program
from meshmpi.kernels import Runtime, bind, numpy_dtype, workspace_bytes
from meshmpi.kernels.views import aligned_empty
from meshmpi.runtime.simulated_mesh import SimulatedMesh


def evaluate(i: Instruction, program: Program, inputs: Sequence[np.ndarray], step: int = 0) -> list[np.ndarray]:
    """The results of one instruction (neither feed nor read nor write), in new arrays.

    The program supplies types, seed and a mesh of one rank, perhaps with many axes.
    """
    here = dict.fromkeys(program.mesh.names, 0)
    outs = [program.types[v] for v in i.outputs]
    if i.communicates and not isinstance(i.attrs, Shift):  # changes nothing over axes of size 1
        return [np.array(x) for x in inputs]
    results = [np.empty(t.local_sizes(program.mesh, here), numpy_dtype(t.dtype)) for t in outs]
    if isinstance(i.attrs, Shift):
        axis, exchange = outs[0].shape.position(i.attrs.dim), i.attrs.exchange(program, i)
        mesh, value = SimulatedMesh(program.mesh), i.attrs.value
        xs = [[np.asarray(x, order="C")] for x in inputs]
        mesh.shift(xs, results, axis, exchange, i.attrs.axes, value)
        return results
    arrays = {v: np.asarray(x, order="C") for v, x in zip(i.inputs, inputs, strict=True)}
    arrays.update(zip(i.outputs, results, strict=True))
    workspace = aligned_empty(workspace_bytes(i, program, here))
    bind(i, program, here, arrays, workspace, Runtime(step))()
    return results


def evaluate_as(
    i: Instruction, program: Program, inputs: Sequence[np.ndarray], dtypes: Mapping[int, str]
) -> list[np.ndarray]:
    """`evaluate` with other data types: value -> type.  Each input needs a value of its own.

    Used to run the same sums over magnitudes and errors, which are float64 whatever the values are.
    """
    own = tuple(range(len(i.inputs) + len(i.outputs)))
    old = (*i.inputs, *i.outputs)
    types = {
        n: replace(t, dtype=dtypes.get(v, t.dtype))
        for n, v, t in ((n, v, program.types[v]) for n, v in zip(own, old, strict=True))
    }
    ins, outs = own[: len(i.inputs)], own[len(i.inputs) :]
    alone = Instruction(i.attrs, ins, outs, i.source)
    small = Program(program.mesh, types, (alone,), {}, {}, {}, program.seed)
    converted = [
        np.asarray(x).astype(numpy_dtype(types[n].dtype), copy=False) for n, x in zip(ins, inputs, strict=True)
    ]
    return evaluate(alone, small, converted)
