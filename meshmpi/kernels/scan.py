"""cumsum and block_sum: running sums along one dim, and the sums of whole blocks they go on from.

Sums over bfloat16 are formed in float32.
"""

from __future__ import annotations

import math

import numpy as np

from meshmpi.ir.kinds import BlockSum, Cumsum
from meshmpi.kernels.binding import (
    Arrays,
    Bound,
    Call,
    Operand,
    Plan,
    Runtime,
    Scratch,
    Slot,
    accumulator_dtype,
    nothing,
    quiet,
)


def _around(array: np.ndarray, operand: Operand, dim: str) -> np.ndarray:
    """The array as [dims before, dim, dims behind]."""
    at, sizes = operand.type.shape.position(dim), operand.sizes
    return array.reshape(math.prod(sizes[:at]), sizes[at], math.prod(sizes[at + 1 :]))


class BlockSumPlan(Plan):
    """The sum of the own block along a dim; the output has one element there."""

    def __init__(self, call: Call):
        self.call = call

    def bind(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        x = _around(inputs[0], self.call.inputs[0], self.call.of(BlockSum).dim)
        y = _around(outputs[0], self.call.outputs[0], self.call.of(BlockSum).blocks)[:, 0]

        def run() -> None:
            np.add.reduce(x, axis=1, dtype=y.dtype, out=y)

        return quiet(run)


class CumsumPlan(Plan):
    """Inputs x and, where its dim is split, the sums of all blocks; output in the order of x."""

    def __init__(self, call: Call):
        self.call = call
        self.attrs = call.of(Cumsum)
        x, dim = call.inputs[0], self.attrs.dim
        self.sum_dtype = accumulator_dtype(x.dtype)
        mesh, axes = call.program.mesh, x.type.split(dim)
        index = mesh.block_index(axes, call.coordinates)
        self.others = slice(index + 1, None) if self.attrs.reverse else slice(0, index)
        at = x.type.shape.position(dim)
        before, behind = math.prod(x.sizes[:at]), math.prod(x.sizes[at + 1 :])
        scratch = Scratch()
        self.sums: Slot | None = None
        if self.sum_dtype != x.dtype:
            self.sums = scratch.reserve((before, x.sizes[at], behind), self.sum_dtype)
        self.carry: Slot | None = None
        if len(call.inputs) > 1:
            self.carry = scratch.reserve((before, behind), self.sum_dtype)
        self.workspace_bytes = scratch.bytes

    def bind(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        if not outputs[0].size:
            return nothing
        dim = self.attrs.dim
        x = _around(inputs[0], self.call.inputs[0], dim)
        y = _around(outputs[0], self.call.outputs[0], dim)
        sums = y if self.sums is None else self.sums.array(workspace)
        add_along = self._bind_sums(x, sums)
        carry = totals = None
        if self.carry is not None:
            totals = _around(inputs[1], self.call.inputs[1], self.attrs.blocks)
            carry, totals = self.carry.array(workspace), totals[:, self.others]

        def run() -> None:
            add_along()
            if carry is not None and totals is not None:
                np.add.reduce(totals, axis=1, dtype=carry.dtype, out=carry)
                np.add(sums, carry[:, None], out=sums)
            if sums is not y:
                np.copyto(y, sums, casting="unsafe")

        return quiet(run)

    def _bind_sums(self, x: np.ndarray, sums: np.ndarray) -> Bound:
        """A function that writes the running sums of the own block."""
        if self.attrs.reverse:
            x, sums = x[:, ::-1], sums[:, ::-1]
        exclusive = self.attrs.exclusive
        first, rest = sums[:, :1], sums[:, 1:] if exclusive else sums
        added = x[:, :-1] if exclusive else x

        def run() -> None:
            if exclusive:
                first.fill(0)
            if rest.size:
                np.add.accumulate(added, axis=1, dtype=rest.dtype, out=rest)

        return run
