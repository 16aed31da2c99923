"""Blocks: who holds what, and what is counted within a block instead of globally."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from meshmpi import dims
from meshmpi.compiler.lowering import redistribute
from meshmpi.dims import MeshShape
from meshmpi.ir import types
from meshmpi.ir.kinds import AllReduce, moving, shaping
from meshmpi.ir.program import LocalType
from meshmpi.kernels import numpy_kernels, random_numbers, structure
from meshmpi.kernels.binding import Operand
from meshmpi.runtime import arrays, variables
from tests.mutations.registry import Patch, mutation

# The module; `meshmpi.compiler.lowering.lower` is the function of the same name.
lowering = sys.modules["meshmpi.compiler.lowering.lower"]


@mutation("rename")
def take_shard_is_off_by_one(m: Patch) -> None:
    right = structure.take_shard_pairs

    def wrong(call: Any, inputs: Any, out: Any) -> list:
        ((to, source),) = right(call, inputs, out)
        return [(to, np.roll(source, 1, axis=source.ndim - 1))]

    _replace_pairs(m, "take_shard", wrong)


@mutation("rename")
def take_shard_takes_the_first_block(m: Patch) -> None:
    def wrong(call: Any, inputs: Any, out: Any) -> list:
        return [(out, inputs[0][tuple(slice(0, n) for n in out.shape)])]

    _replace_pairs(m, "take_shard", wrong)


def _replace_pairs(m: Patch, kind: str, pairs: Callable) -> None:
    m.setitem(numpy_kernels.PLANS, kind, lambda call: structure.plan_copies(call, pairs))


@mutation("ranges")
def the_last_blocks_are_larger_than_the_first(m: Patch) -> None:
    """Feeds are cut with the rest in the last blocks, everything else with it in the first."""

    def wrong(array: np.ndarray, t: LocalType, mesh: MeshShape, coordinates: dict) -> np.ndarray:
        cuts = []
        for d, (start, stop), axes in zip(t.shape, t.block(mesh, coordinates), t.splits, strict=True):
            shift = d.size % mesh.count(axes) if axes and start else 0
            cuts.append(slice(start - shift, stop - shift))
        return array[(*cuts, ...)]

    m.setattr(arrays, "block_of", wrong)
    from meshmpi.runtime import compiled

    m.setattr(compiled, "block_of", wrong)


@mutation("ranges")
def iota_counts_within_the_block(m: Patch) -> None:
    _starts_at_zero(m, "iota", "outputs", 0)


@mutation("random_numbers")
def random_numbers_start_anew_in_each_block(m: Patch) -> None:
    right = random_numbers.Counters.__init__

    def wrong(self: Any, sizes: Any, block: Any) -> None:
        right(self, [b - a for a, b in block], [(0, b - a) for a, b in block])

    m.setattr(random_numbers.Counters, "__init__", wrong)


@mutation("gather")
def gather_forgets_where_its_block_starts(m: Patch) -> None:
    _starts_at_zero(m, "gather", "inputs", 0)


def _starts_at_zero(m: Patch, kind: str, side: str, position: int) -> None:
    """The block of one operand is taken to begin at 0."""
    right = numpy_kernels.PLANS[kind]

    def wrong(call: Any) -> Any:
        operands = list(getattr(call, side))
        x = operands[position]
        operands[position] = Operand(x.value, x.type, tuple((0, b - a) for a, b in x.block))
        return right(call._replace(**{side: tuple(operands)}))

    m.setitem(numpy_kernels.PLANS, kind, wrong)


@mutation("einsum_of_three")
def blocks_are_thought_to_nest(m: Patch) -> None:
    """5 elements over rows, then cols, are not 5 elements over rows+cols."""
    m.setattr(moving, "nests", lambda *_: True)
    m.setattr(redistribute, "nests", lambda *_: True)


@mutation("reshape_divides_dims")
def uneven_blocks_are_viewed_under_other_dims(m: Patch) -> None:
    def wrong(mesh: Any, ins: Any, splits: Any, outs: Any) -> list | None:
        if not any(splits):
            return [()] * len(outs)
        lead_in = next((k for k, d in enumerate(ins) if d.size > 1), 0)
        lead_out = next((k for k, d in enumerate(outs) if d.size > 1), 0)
        if not ins or not outs or any(s for k, s in enumerate(splits) if k != lead_in):
            return None
        return [splits[lead_in] if j == lead_out else () for j in range(len(outs))]

    m.setattr(shaping, "view_splits", wrong)
    m.setattr(lowering, "view_splits", wrong)


@mutation("ranges")
def the_rest_goes_to_the_last_block(m: Patch) -> None:
    """Everywhere alike; but costs are predicted for the rank at the origin."""

    def wrong(n: int, blocks: int, index: int) -> tuple[int, int]:
        base = n // blocks
        return index * base, n if index == blocks - 1 else (index + 1) * base

    for module in (dims, types):
        m.setattr(module, "block_range", wrong)


@mutation("slots_stored_elsewhere")
def the_last_axis_of_a_split_is_the_major_one(m: Patch) -> None:
    right = MeshShape.block_index
    m.setattr(MeshShape, "block_index", lambda self, axes, here: right(self, tuple(axes)[::-1], here))


@mutation("gather")
def scatter_add_forgets_where_its_block_starts(m: Patch) -> None:
    _starts_at_zero(m, "scatter_add", "outputs", 0)


@mutation("put_rows")
def put_forgets_where_its_block_starts(m: Patch) -> None:
    _starts_at_zero(m, "put", "inputs", 0)


@mutation("random_numbers")
def random_numbers_count_the_elements_of_the_block(m: Patch) -> None:
    """The start of the block is right, the row length is that of the block."""
    right = random_numbers.Counters.__init__

    def wrong(self: Any, sizes: Any, block: Any) -> None:
        right(self, [sizes[0], *(b - a for a, b in block[1:])] if sizes else sizes, block)

    m.setattr(random_numbers.Counters, "__init__", wrong)


@mutation("stored_elsewhere")
def initial_values_are_those_of_the_first_block(m: Patch) -> None:
    right = variables.VariableStore._fill

    def wrong(self: Any, block: np.ndarray, variable: Any, at: dict, *rest: Any) -> None:
        first = dict.fromkeys(at, 0)
        same = variable.type.local_sizes(self.mesh.shape, first) == block.shape
        given = isinstance(variable.initializer, np.ndarray)
        right(self, block, variable, first if same and given else at, *rest)

    m.setattr(variables.VariableStore, "_fill", wrong)


@mutation("slots_stored_elsewhere")
def a_tail_of_axes_is_joined_as_if_it_stood_alone(m: Patch) -> None:
    """all_gather over the first instead of the last axes of a split."""
    right = redistribute._gather

    def wrong(mesh: Any, x: Any, target: Any) -> Any:
        move = right(mesh, x, target)
        n, split = len(move.axes), x.split(move.dim)
        return dataclasses.replace(move, axes=split[:n])

    m.setattr(redistribute, "_gather", wrong)


@mutation("matmul volumes")
def the_largest_block_is_rounded_down(m: Patch) -> None:
    def wrong(self: LocalType, mesh: MeshShape) -> tuple[int, ...]:
        cuts = zip(self.shape, self.splits, strict=True)
        return tuple(d.size // mesh.count(s) if s else d.size for d, s in cuts)

    m.setattr(LocalType, "max_sizes", wrong)


@mutation("matmul volumes")
def a_ring_is_thought_to_send_everything_once(m: Patch) -> None:
    """Prediction and counters share the formula; only a formula of one's own shows it."""
    m.setattr(AllReduce, "sent", staticmethod(lambda nbytes, n: (n - 1) * nbytes // n))
