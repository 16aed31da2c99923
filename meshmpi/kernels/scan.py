"""cumsum and block_sum: running sums along one dim, and the sums of whole blocks they go on from.

Sums over bfloat16 are formed in float32.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from meshmpi.ir.kinds import BlockSum, Cumsum
from meshmpi.kernels.binding import Arrays, Call, Operand, Plan, Runtime, Scratch
from meshmpi.kernels.steps import Bound, copying, quiet, run_all
from meshmpi.kernels.views import accumulator_dtype


def _around(operand: Operand, dim: str) -> tuple[int, int, int]:
    """Sizes of an operand seen as [dims before, dim, dims behind]."""
    at, sizes = operand.names.index(dim), operand.sizes
    return math.prod(sizes[:at]), sizes[at], math.prod(sizes[at + 1 :])


def plan_block_sum(call: Call) -> Plan:
    """The sum of the own block along a dim; the output has one element there."""
    attrs = call.of(BlockSum)

    def bind(inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        x = inputs[0].reshape(_around(call.inputs[0], attrs.dim))
        y = outputs[0].reshape(_around(call.outputs[0], attrs.blocks))[:, 0]
        return quiet(partial(np.add.reduce, x, axis=1, dtype=y.dtype, out=y))

    return Plan(bind)


def plan_cumsum(call: Call) -> Plan:
    """Inputs x and, where its dim is split, the sums of all blocks; output in the order of x."""
    attrs, operand = call.of(Cumsum), call.inputs[0]
    dtype = accumulator_dtype(operand.dtype)
    index = call.program.mesh.block_index(operand.type.split(attrs.dim), call.coordinates)
    others = slice(index + 1, None) if attrs.reverse else slice(0, index)
    shape = _around(operand, attrs.dim)
    scratch = Scratch()
    wide = scratch.reserve(shape, dtype) if dtype != operand.dtype else None
    carried = scratch.reserve((shape[0], shape[2]), dtype) if len(call.inputs) > 1 else None

    def bind(inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        y = outputs[0].reshape(shape)
        sums = y if wide is None else wide.array(workspace)
        steps = _running(inputs[0].reshape(shape), sums, attrs)
        if carried is not None:
            totals = inputs[1].reshape(_around(call.inputs[1], attrs.blocks))[:, others]
            carry = carried.array(workspace)
            steps.append(partial(np.add.reduce, totals, axis=1, dtype=dtype, out=carry))
            steps.append(partial(np.add, sums, carry[:, None], out=sums))
        if wide is not None:
            steps.append(copying(y, sums))
        return quiet(run_all(steps))

    return Plan(bind, scratch.bytes)


def _running(x: np.ndarray, sums: np.ndarray, attrs: Cumsum) -> list[Bound]:
    """What writes the running sums of the own block."""
    if attrs.reverse:
        x, sums = x[:, ::-1], sums[:, ::-1]
    steps: list[Bound] = []
    if attrs.exclusive:
        steps.append(partial(sums[:, :1].fill, 0))
        x, sums = x[:, :-1], sums[:, 1:]
    if sums.size:
        steps.append(partial(np.add.accumulate, x, axis=1, dtype=sums.dtype, out=sums))
    return steps
