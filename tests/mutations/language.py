"""Running sums, ranking, lookups in batches, gradients of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import meshmpi as mm
from meshmpi.graph import autodiff
from meshmpi.graph.ops import elementwise, placement, reductions, regions
from meshmpi.kernels import indexing, numpy_kernels, ranking
from tests.mutations.registry import Patch, mutation


def _planned(m: Patch, kind: str, changed: Callable[[Any], Any]) -> None:
    """A kind is planned for a changed call, on the arrays that the changed call has."""
    right = numpy_kernels.PLANS[kind]

    def wrong(call: Any) -> Any:
        other = changed(call)
        plan = right(other)
        return plan._replace(make=lambda ins, *rest: plan.make(ins[: len(other.inputs)], *rest))

    m.setitem(numpy_kernels.PLANS, kind, wrong)


@mutation("cumsum")
def running_sums_start_anew_in_each_block(m: Patch) -> None:
    _planned(m, "cumsum", lambda call: call._replace(inputs=call.inputs[:1]))


@mutation("cumsum")
def running_sums_in_reverse_go_on_from_the_blocks_before(m: Patch) -> None:
    def wrong(call: Any) -> Any:
        mesh = call.program.mesh
        axes = call.inputs[0].type.split(call.instruction.attrs.dim)
        turned = {a: mesh.count((a,)) - 1 - k if a in axes else k for a, k in call.coordinates.items()}
        return call._replace(coordinates=turned) if call.instruction.attrs.reverse else call

    _planned(m, "cumsum", wrong)


@mutation("cumsum")
def exclusive_sums_include_their_element(m: Patch) -> None:
    _planned(m, "cumsum", lambda call: call._replace(instruction=call.instruction.replaced(exclusive=False)))


@mutation("cumsum")
def the_gradient_of_a_running_sum_runs_the_same_way(m: Patch) -> None:
    def wrong(self: Any, dys: Any) -> list:
        return [reductions.cumsum(dys[0], self.dim, self.exclusive, self.reverse)]

    m.setattr(reductions.Cumsum, "grad", wrong)


@mutation("top_k_of_long_rows")
def candidates_forget_where_they_came_from(m: Patch) -> None:
    """Positions within the block instead of global ones."""

    def wrong(call: Any) -> Any:
        x = call.inputs[0]
        own = x._replace(block=tuple((0, stop - start) for start, stop in x.block))
        return call._replace(inputs=(own, *call.inputs[1:]))

    _planned(m, "top_k", wrong)


@mutation("top_k_of_long_rows")
def candidates_are_numbered_anew(m: Patch) -> None:
    _planned(m, "top_k", lambda call: call._replace(inputs=call.inputs[:1]))


@mutation("top_k_smallest")
def the_smallest_are_the_largest(m: Patch) -> None:
    _planned(m, "top_k", lambda call: call._replace(instruction=call.instruction.replaced(smallest=False)))


@mutation("top_k_of_special_values")
def nan_counts_as_the_smallest(m: Patch) -> None:
    right = ranking.falling_keys

    def wrong(x: np.ndarray, out: np.ndarray) -> None:
        right(np.where(np.isnan(x), -np.inf, x) if x.dtype.kind == "f" else x, out)

    m.setattr(ranking, "falling_keys", wrong)


@mutation("gather_in_batches")
def every_batch_reads_the_rows_of_the_first(m: Patch) -> None:
    right = indexing._Rows.bind

    def wrong(self: Any, index: np.ndarray, workspace: np.ndarray) -> tuple:
        run, row, outside = right(self, index, workspace)
        rows = self.stop - self.start

        def first() -> None:
            run()
            if rows:
                np.remainder(row, rows, out=row)

        return first, row, outside

    m.setattr(indexing._Rows, "bind", wrong)


@mutation("custom_gradient_is_straight_through")
def a_gradient_of_ones_own_is_ignored(m: Patch) -> None:
    def wrong(self: Any, dys: Any) -> list:
        return [*dys, *(None for _ in self.inputs[self.count :])]

    m.setattr(placement.CustomGradient, "grad", wrong)


@mutation("custom_gradient")
def a_gradient_of_ones_own_is_added_to_the_usual_one(m: Patch) -> None:
    right = placement.CustomGradient.grad

    def wrong(self: Any, dys: Any) -> list:
        return [*dys, *right(self, dys)[self.count :]] if self.rule else right(self, dys)

    m.setattr(placement.CustomGradient, "grad", wrong)


@mutation("recompute_grad")
def recomputing_draws_other_random_numbers(m: Patch) -> None:
    right = regions.Region.again

    def wrong(self: Any, externals: Any, name: str) -> list:
        graph = self.results[0].graph
        start = len(graph.operations)
        results = right(self, externals, name)
        for operation in graph.operations[start:]:
            if hasattr(operation, "distribution"):
                operation.key = f"{name} anew"
        return results

    m.setattr(regions.Region, "again", wrong)


@mutation("tests/test_regions.py::test_memory_grows_by_the_input_of_each_layer_only()")
def what_is_recomputed_is_kept_all_the_same(m: Patch) -> None:
    """Without a barrier the second computation is found to be the first."""
    m.setattr(autodiff, "behind_barrier", lambda x, name: x)


@mutation("recompute_grad")
def recomputing_loses_the_gradients_of_what_it_captured(m: Patch) -> None:
    right = regions.region_of

    def wrong(fn: Any, inputs: Any, what: str) -> tuple:
        region, single = right(fn, inputs, what)
        captured = [t for t in region.externals if t not in inputs]
        if what != "recompute_grad" or not captured:
            return region, single
        return region._replace(externals=tuple(inputs)), single

    m.setattr(autodiff, "region_of", wrong)


@mutation("reduce_prod_with_zeros")
def products_are_divided_by_each_factor(m: Patch) -> None:
    """Right without zeros, NaN with one."""

    def wrong(x: Any, shape: Any) -> Any:
        product = reductions.reduce_prod(x, output_shape=shape)
        return elementwise.divide(product, x, output_shape=x.shape)

    m.setattr(reductions, "_product_of_others", wrong)


@mutation("while_loop")
def a_loop_goes_on_after_its_end(m: Patch) -> None:
    """All turns count."""
    right = mm.while_loop

    def wrong(cond_fn: Any, body_fn: Any, inputs: Any, **options: Any) -> Any:
        always = mm.equal(mm.step_number() * 0, 0)
        return right(lambda *state: always, body_fn, inputs, **options)

    m.setattr(mm, "while_loop", wrong)


@mutation("repeat")
def a_loop_makes_one_turn_too_few(m: Patch) -> None:
    right = mm.repeat

    def wrong(body: Any, n: int, inputs: Any, **options: Any) -> Any:
        return right(body, max(0, n - 1), inputs, **options)

    m.setattr(mm, "repeat", wrong)
