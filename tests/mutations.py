"""Seeded bugs: each is one plausible mistake, put in by monkeypatch; tests must catch every one.

A bug that a test missed once belongs into this list.  Rows: name -> what the mistake is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import meshmpi as mm
from meshmpi import autodiff, typerules
from meshmpi.dims import MeshShape
from meshmpi.kernels import numpy_kernels, structure
from meshmpi.kernels.binding import Operand
from meshmpi.lowering import redistribute
from meshmpi.ops import contraction, elementwise, indexing, reductions, sources
from meshmpi.ops import structure as ops_structure
from meshmpi.passes import clean, fold, fuse, memory, pipeline, scatter
from meshmpi.passes import reductions as reduction_pass
from meshmpi.program import LocalType
from meshmpi.runtime import arrays, executor
from meshmpi.runtime.simulated_mesh import SimulatedMesh

# The module; `meshmpi.lowering.lower` is the function of the same name.
lowering = sys.modules["meshmpi.lowering.lower"]
Patch = pytest.MonkeyPatch
MUTATIONS: dict[str, Callable[[Patch], None]] = {}


def mutation(put: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTATIONS[put.__name__] = put
    return put


# -- collectives -----------------------------------------------------------------------------------


@mutation
def all_reduce_is_forgotten(m: Patch) -> None:
    m.setattr(SimulatedMesh, "all_reduce", lambda self, xs, axes, op="sum", workspace=None: None)


@mutation
def all_reduce_takes_the_largest(m: Patch) -> None:
    right = SimulatedMesh.all_reduce
    m.setattr(
        SimulatedMesh,
        "all_reduce",
        lambda self, xs, axes, op="sum", workspace=None: right(self, xs, axes, "max"),
    )


@mutation
def all_reduce_runs_over_the_first_axis_only(m: Patch) -> None:
    right = SimulatedMesh.all_reduce
    m.setattr(
        SimulatedMesh, "all_reduce",
        lambda self, xs, axes, op="sum", workspace=None: right(self, xs, tuple(axes)[:1], op),
    )  # fmt: skip


@mutation
def blocks_are_ordered_by_rank(m: Patch) -> None:
    """Blocks over cols+rows are taken in the order of ranks, that of rows+cols."""
    m.setattr(
        SimulatedMesh, "_by_block", lambda self, axes: (list(g) for g in self.shape.groups(axes))
    )


@mutation
def reduce_scatter_keeps_the_mirrored_block(m: Patch) -> None:
    right = SimulatedMesh.reduce_scatter

    def wrong(
        self: Any, xs: list, outs: list, axis: int, sizes: list, axes: Any, *rest: Any
    ) -> None:
        right(self, [np.flip(x, axis).copy() for x in xs], outs, axis, sizes, axes, *rest)

    m.setattr(SimulatedMesh, "reduce_scatter", wrong)


@mutation
def all_to_all_swaps_its_axes(m: Patch) -> None:
    right = SimulatedMesh.all_to_all

    def wrong(
        self: Any, xs: list, outs: list, split: int, concat: int, *rest: Any, **more: Any
    ) -> None:
        right(self, xs, outs, split, concat, *rest, **more)
        for out in outs:
            out[...] = np.flip(out, concat)

    m.setattr(SimulatedMesh, "all_to_all", wrong)


# -- blocks ----------------------------------------------------------------------------------------


@mutation
def take_shard_is_off_by_one(m: Patch) -> None:
    right = structure.take_shard_pairs

    def wrong(call: Any, inputs: Any, out: Any) -> list:
        ((to, source),) = right(call, inputs, out)
        return [(to, np.roll(source, 1, axis=source.ndim - 1))]

    _replace_pairs(m, "take_shard", wrong)


@mutation
def take_shard_takes_the_first_block(m: Patch) -> None:
    def wrong(call: Any, inputs: Any, out: Any) -> list:
        return [(out, inputs[0][tuple(slice(0, n) for n in out.shape)])]

    _replace_pairs(m, "take_shard", wrong)


def _replace_pairs(m: Patch, kind: str, pairs: Callable) -> None:
    m.setitem(numpy_kernels.PLANS, kind, lambda call: structure.CopyPlan(call, pairs=pairs))


@mutation
def the_last_blocks_are_larger_than_the_first(m: Patch) -> None:
    """Feeds are cut with the rest in the last blocks, everything else with it in the first."""

    def wrong(array: np.ndarray, t: LocalType, mesh: MeshShape, coordinates: dict) -> np.ndarray:
        cuts = []
        for d, (start, stop), axes in zip(
            t.shape, t.block(mesh, coordinates), t.splits, strict=True
        ):
            shift = d.size % mesh.count(axes) if axes and start else 0
            cuts.append(slice(start - shift, stop - shift))
        return array[(*cuts, ...)]

    m.setattr(arrays, "block_of", wrong)
    from meshmpi.runtime import compiled

    m.setattr(compiled, "block_of", wrong)


@mutation
def iota_counts_within_the_block(m: Patch) -> None:
    class Wrong(structure.IotaPlan):
        def __init__(self, call: Any):
            super().__init__(call)
            self.start, self.stop = 0, self.stop - self.start

    m.setitem(numpy_kernels.PLANS, "iota", Wrong)


@mutation
def random_numbers_start_anew_in_each_block(m: Patch) -> None:
    from meshmpi.kernels import random_numbers

    right = random_numbers.Counters.__init__

    def wrong(self: Any, sizes: Any, block: Any) -> None:
        right(self, [b - a for a, b in block], [(0, b - a) for a, b in block])

    m.setattr(random_numbers.Counters, "__init__", wrong)


@mutation
def gather_forgets_where_its_block_starts(m: Patch) -> None:
    right = numpy_kernels.PLANS["gather"]

    def wrong(call: Any) -> Any:
        table, index = call.inputs
        block = tuple((0, b - a) for a, b in table.block)
        return right(call._replace(inputs=(Operand(table.value, table.type, block), index)))

    m.setitem(numpy_kernels.PLANS, "gather", wrong)


@mutation
def blocks_are_thought_to_nest(m: Patch) -> None:
    """5 elements over rows, then cols, are not 5 elements over rows+cols."""
    m.setattr(typerules, "nests", lambda *_: True)
    m.setattr(redistribute, "nests", lambda *_: True)


@mutation
def uneven_blocks_are_viewed_under_other_dims(m: Patch) -> None:
    def wrong(mesh: Any, ins: Any, splits: Any, outs: Any) -> list | None:
        if not any(splits):
            return [()] * len(outs)
        lead_in = next((k for k, d in enumerate(ins) if d.size > 1), 0)
        lead_out = next((k for k, d in enumerate(outs) if d.size > 1), 0)
        if not ins or not outs or any(s for k, s in enumerate(splits) if k != lead_in):
            return None
        return [splits[lead_in] if j == lead_out else () for j in range(len(outs))]

    m.setattr(typerules, "view_splits", wrong)
    m.setattr(lowering, "view_splits", wrong)


# -- gradients -------------------------------------------------------------------------------------


@mutation
def the_second_gradient_replaces_the_first(m: Patch) -> None:
    def wrong(total: dict, x: Any, dx: Any) -> None:
        total[x] = dx if dx.shape == x.shape else ops_structure.transpose(dx, x.shape)

    m.setattr(autodiff, "_accumulate", wrong)


@mutation
def division_forgets_a_sign(m: Patch) -> None:
    right = elementwise._DERIVATIVES["divide"]

    def wrong(dy: Any, y: Any, a: Any, b: Any) -> tuple:
        da, db = right(dy, y, a, b)
        return da, db if db is None else elementwise.negative(db)

    m.setitem(elementwise._DERIVATIVES, "divide", wrong)


@mutation
def tanh_is_differentiated_at_its_input(m: Patch) -> None:
    m.setitem(
        elementwise._DERIVATIVES, "tanh",
        lambda dy, y, x: (dy * (1.0 - elementwise.square(x)),),
    )  # fmt: skip


@mutation
def ties_get_the_whole_gradient_each(m: Patch) -> None:
    """As in Mesh-TensorFlow."""

    def wrong(self: Any, dys: Any) -> list:
        (x,), (dy,), y = self.inputs, dys, self.output
        if self.op == "sum":
            return [elementwise.broadcast(dy, x.shape)]
        return [elementwise.multiply(elementwise.cast(elementwise.equal(x, y), x.dtype), dy)]

    m.setattr(reductions.Reduce, "grad", wrong)


@mutation
def slices_of_gradients_are_put_one_too_far(m: Patch) -> None:
    def wrong(self: Any, dys: Any) -> list:
        (dy,) = dys
        return [ops_structure.shift(right(self, [dy])[0], 1, self.dim, wrap=True)]

    right = ops_structure.Slice.grad
    m.setattr(ops_structure.Slice, "grad", wrong)


@mutation
def einsum_forgets_the_third_operand(m: Patch) -> None:
    def wrong(self: Any, dys: Any) -> list:
        grads = []
        for i, x in enumerate(self.inputs):
            others = [dys[0], *[o for k, o in enumerate(self.inputs) if k != i][:1]]
            dims = {d for o in others for d in o.shape}
            shape = mm.Shape([d for d in x.shape if d in dims])
            dx = contraction.einsum(others, shape)
            grads.append(dx if shape == x.shape else elementwise.broadcast(dx, x.shape))
        return grads

    m.setattr(contraction.Einsum, "grad", wrong)


@mutation
def top_k_gives_its_gradient_to_the_last(m: Patch) -> None:
    right = indexing.TopK.grad

    def wrong(self: Any, dys: Any) -> list:
        (dx,) = right(self, dys)
        return [None if dx is None else ops_structure.shift(dx, 1, self.dim, wrap=True)]

    m.setattr(indexing.TopK, "grad", wrong)


@mutation
def the_gradient_of_stop_gradient_passes(m: Patch) -> None:
    from meshmpi.ops.placement import StopGradient

    m.setattr(StopGradient, "grad", lambda self, dys: [dys[0]])


# -- lowering and passes ---------------------------------------------------------------------------


@mutation
def an_update_sees_the_new_value_of_another(m: Patch) -> None:
    m.setattr(lowering.Lowering, "_apart", lambda self, value: value)
    m.setattr(typerules._StoredValues, "is_overwritten", lambda self, v: False)


@mutation
def any_map_passes_a_pending_sum(m: Patch) -> None:
    m.setattr(typerules, "linear_in", lambda expr, pending: True)
    m.setattr(reduction_pass, "linear_in", lambda expr, pending: True)


@mutation
def multiplying_by_two_is_a_copy(m: Patch) -> None:
    def wrong(i: Any, program: Any) -> bool:
        expr = i.attrs["expr"]
        if len(i.inputs) != 1 or len(i.outputs) != 1 or len(expr.steps) != 1:
            return False
        if program.types[i.inputs[0]] != program.types[i.outputs[0]]:
            return False
        return expr.steps[0].function in ("identity", "multiply") and "i0" in expr.steps[0].args

    m.setattr(fold, "_is_copy", wrong)


@mutation
def instructions_with_other_attributes_are_merged(m: Patch) -> None:
    def wrong(program: Any) -> Any:
        seen: dict = {}
        instead: dict[int, int] = {}
        kept = []
        for i in program.instructions:
            i = clean.substituted(i, instead)
            key = (i.kind, i.inputs, tuple(str(program.types[v]) for v in i.outputs))
            if i.kind not in ("write", "feed", "read") and key in seen:
                instead.update(zip(i.outputs, seen[key], strict=True))
                continue
            seen[key] = i.outputs
            kept.append(i)
        return clean.with_substitution(program, kept, instead)

    m.setattr(pipeline, "PASSES", tuple(wrong if p is clean.cse else p for p in pipeline.PASSES))
    m.setattr(pipeline.optimize, "__defaults__", (pipeline.PASSES,))


@mutation
def fusion_swaps_the_operands(m: Patch) -> None:
    right = fuse.merged_maps

    def wrong(producer: Any, consumer: Any, keep: list) -> Any:
        merged = right(producer, consumer, keep)
        expr = merged.attrs["expr"]
        steps = tuple(
            s._replace(args=s.args[::-1]) if s.function == "subtract" else s for s in expr.steps
        )
        return merged.replaced(attrs={"expr": expr._replace(steps=steps)})

    m.setattr(fuse, "merged_maps", wrong)


@mutation
def reduce_scatter_forgets_the_other_axes(m: Patch) -> None:
    right = scatter.form_reduce_scatter

    def wrong(program: Any) -> Any:
        p = right(program)
        made = {i.outputs[0]: i for i in p.instructions if i.outputs}
        dropped = {
            i.outputs[0]: i.inputs[0] for i in p.instructions
            if i.kind == "all_reduce" and made[i.inputs[0]].kind == "reduce_scatter"
        }  # fmt: skip
        kept = [i for i in p.instructions if not i.outputs or i.outputs[0] not in dropped]
        return clean.with_substitution(p, kept, dropped)

    _replace_pass(m, scatter.form_reduce_scatter, wrong)


def _replace_pass(m: Patch, old: Any, new: Any) -> None:
    m.setattr(
        pipeline.optimize, "__defaults__", (tuple(new if p is old else p for p in pipeline.PASSES),)
    )


@mutation
def views_do_not_keep_memory_alive(m: Patch) -> None:
    right = memory._Sharing._extend

    def wrong(self: Any, v: int) -> None:
        if v in self.shares:
            self.last.setdefault(self.root(v), -1)
        else:
            right(self, v)

    m.setattr(memory._Sharing, "_extend", wrong)


@mutation
def results_overwrite_inputs_still_needed(m: Patch) -> None:
    def wrong(self: Any, x: int, i: Any, n: int) -> bool:
        a, b = self.program.types[x], self.program.types[i.outputs[0]]
        same = (a.shape, a.splits, a.dtype) == (b.shape, b.splits, b.dtype)
        return same and isinstance(self.root(x), int) and len(i.inputs) == 1

    m.setattr(memory._Sharing, "_ends_here", wrong)


@mutation
def combined_values_come_back_in_reverse(m: Patch) -> None:
    right = executor._pack

    def wrong(*args: Any) -> tuple:
        message, rows = right(*args)
        outs = [y for _, _, y in rows][::-1]
        same = all(x.shape == y.shape for (x, _, _), y in zip(rows, outs, strict=True))
        return message, [
            (x, part, y) for (x, part, _), y in zip(rows, outs, strict=True)
        ] if same else rows

    m.setattr(executor, "_pack", wrong)


@mutation
def bias_corrections_never_advance(m: Patch) -> None:
    """The step number stays 0."""
    m.setattr(
        structure.StepPlan,
        "bind",
        lambda self, inputs, outputs, workspace, runtime: lambda: outputs[0].fill(0),
    )


@mutation
def constants_are_rounded_to_integers(m: Patch) -> None:
    right = sources.fill
    m.setattr(
        sources, "fill", lambda value, dtype: right(int(value) if value == value else value, dtype)
    )
