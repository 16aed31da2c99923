"""Local kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from meshmpi.kernels import blas, indexing, numpy_kernels, product_choice, ranking, reduction, structure, ufunc_steps
from meshmpi.kernels.binding import Plan
from meshmpi.kernels.native import source, storage
from meshmpi.kernels.steps import zeroing
from tests.mutations.registry import Patch, mutation


@mutation("step_number")
def bias_corrections_never_advance(m: Patch) -> None:
    """The step number stays 0."""
    m.setitem(numpy_kernels.PLANS, "step", lambda call: Plan(lambda ins, outs, workspace, runtime: zeroing(outs[0])))


def _pairs(m: Patch, kind: str, pairs: Callable[[Any, Any, Any], list]) -> None:
    m.setitem(numpy_kernels.PLANS, kind, lambda call: structure.plan_copies(call, pairs))


@mutation("transpose")
def transposing_keeps_the_order_in_memory(m: Patch) -> None:
    _pairs(m, "transpose", lambda call, ins, out: [(out, ins[0].reshape(out.shape))])


@mutation("pad")
def pads_are_zero_whatever_their_number(m: Patch) -> None:
    def wrong(call: Any, inputs: Any, out: np.ndarray) -> list:
        front, kept, behind = structure.pad_pairs(call, inputs, out)
        return [(to, np.zeros_like(to)) for to, _ in (front, behind)] + [kept]

    _pairs(m, "pad", wrong)


@mutation("pad")
def pads_change_sides(m: Patch) -> None:
    def wrong(call: Any, inputs: Any, out: np.ndarray) -> list:
        pad = call.instruction.attrs
        swapped = call._replace(instruction=call.instruction.replaced(before=pad.after, after=pad.before))
        return structure.pad_pairs(swapped, inputs, out)

    _pairs(m, "pad", wrong)


@mutation("shift")
def parts_are_joined_in_reverse(m: Patch) -> None:
    def wrong(call: Any, inputs: Any, out: np.ndarray) -> list:
        turned = call._replace(inputs=call.inputs[::-1])
        return structure.concat_pairs(turned, inputs[::-1], out)

    _pairs(m, "concat", wrong)


@mutation("slice_with_stride")
def strides_begin_at_zero(m: Patch) -> None:
    def wrong(call: Any, inputs: Any, out: np.ndarray) -> list:
        ((to, _),) = structure.slice_pairs(call, inputs, out)
        position = call.inputs[0].type.shape.position(call.instruction.attrs.dim)
        whole = inputs[0][(slice(None),) * position + (slice(None, None, call.instruction.attrs.stride),)]
        order = [call.inputs[0].type.shape.position(n) for n in call.outputs[0].names]
        cut = tuple(slice(0, n) for n in to.shape)
        return [(to, whole.transpose(order)[cut])]

    _pairs(m, "slice", wrong)


@mutation("reduce_max_of_negative_numbers")
def an_empty_block_has_the_maximum_zero(m: Patch) -> None:
    m.setattr(reduction, "identity", lambda op, dtype: 0)


@mutation("reduce_max")
def maxima_and_minima_are_swapped(m: Patch) -> None:
    m.setitem(reduction.UFUNCS, "max", np.minimum)


@mutation("reduce_many_bfloat16")
def narrow_sums_are_kept_narrow(m: Patch) -> None:
    """bfloat16 is summed in bfloat16 instead of float32."""
    m.setattr(reduction, "accumulator_dtype", lambda dtype: dtype)


@mutation("gather")
def indices_outside_take_the_nearest_row(m: Patch) -> None:
    def wrong(self: Any, index: np.ndarray, workspace: np.ndarray) -> tuple:
        run, row, outside = right(self, index, workspace)

        def clipped() -> None:
            run()
            np.clip(row, 0, max(self.stop - self.start - 1, 0), out=row)
            outside.fill(False)

        return clipped, row, outside

    right = indexing._Rows.bind
    m.setattr(indexing._Rows, "bind", wrong)


@mutation("scatter_add")
def of_equal_indices_the_last_update_counts(m: Patch) -> None:
    """Updates are assigned instead of added."""

    def wrong(source: np.ndarray, total: np.ndarray, *buffers: np.ndarray) -> Any:
        def put(order: np.ndarray, rows: np.ndarray) -> None:
            total[rows] = source[order]

        return put

    m.setattr(indexing, "adding_rows", wrong)


@mutation("scatter_add")
def updates_outside_are_added_to_the_edge(m: Patch) -> None:
    right = indexing._Rows.bind

    def wrong(self: Any, index: np.ndarray, workspace: np.ndarray) -> tuple:
        run, row, outside = right(self, index, workspace)

        def clipped() -> None:
            run()
            np.clip(row, 0, max(self.stop - self.start - 1, 0), out=row)
            outside.fill(False)

        return clipped, row, outside

    m.setattr(indexing._Rows, "bind", wrong)


@mutation("top_k_of_ties")
def of_ties_the_last_comes_first(m: Patch) -> None:
    def wrong(rows: np.ndarray, keys: np.ndarray, k: int, smallest: bool) -> np.ndarray:
        return np.argsort(rows, axis=1, kind="stable")[:, ::-1][:, :k]

    m.setattr(ranking, "ranked", wrong)


@mutation("top_k")
def the_largest_are_not_sorted(m: Patch) -> None:
    right = ranking.ranked
    m.setattr(ranking, "ranked", lambda *arguments: np.sort(right(*arguments), 1))


def _function(m: Patch, name: str, wrong: Callable[..., Any]) -> None:
    assert name in ufunc_steps._UFUNCS
    m.setitem(ufunc_steps._UFUNCS, name, wrong)


@mutation("float_floordiv_and_mod")
def remainders_have_the_sign_of_the_dividend(m: Patch) -> None:
    """As in C."""
    _function(m, "mod", np.fmod)


@mutation("integer_arithmetic")
def quotients_are_cut_towards_zero(m: Patch) -> None:
    """As in C."""

    def wrong(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
        np.copyto(out, np.trunc(x / y), casting="unsafe")

    _function(m, "floordiv", wrong)


@mutation("special_values_travel")
def a_number_wins_over_nan(m: Patch) -> None:
    _function(m, "maximum", np.fmax)


@mutation("power_of_numbers")
def powers_go_through_the_logarithm(m: Patch) -> None:
    """As in Mesh-TensorFlow: NaN for a negative base."""

    def wrong(code: Any, args: Any, dtype: np.dtype) -> int:
        x, y = args
        log = code.emit(np.log, [x], dtype)
        return code.emit(np.exp, [code.emit(np.multiply, [log, y], dtype)], dtype)

    m.setitem(ufunc_steps._COMPOSED, "power", wrong)


@mutation("where_of_tensors")
def where_takes_the_other_side(m: Patch) -> None:
    right = ufunc_steps.UfuncSteps.select
    m.setattr(ufunc_steps.UfuncSteps, "select", lambda self, c, a, b, dtype: right(self, c, b, a, dtype))


@mutation("special_values_travel")
def where_multiplies_by_its_condition(m: Patch) -> None:
    """A NaN of the side that is not taken comes through."""

    def wrong(self: Any, condition: Any, a: Any, b: Any, dtype: np.dtype) -> int:
        c = self.copy(condition, dtype)
        not_c = self.emit(np.subtract, [np.array(1, dtype), c], dtype)
        left = self.emit(np.multiply, [c, a], dtype)
        return self.emit(np.add, [left, self.emit(np.multiply, [not_c, b], dtype)], dtype)

    m.setattr(ufunc_steps.UfuncSteps, "select", wrong)


@mutation("integer_types")
def numbers_are_computed_in_float64(m: Patch) -> None:
    """int64 beyond 2 ** 53 loses its last digits, and nothing wraps."""

    def wrong(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            np.copyto(out, x.astype(np.float64) * y.astype(np.float64) + 0.25, casting="unsafe")

    _function(m, "multiply", wrong)


@mutation("softmax_by_hand")
def a_fused_kernel_runs_its_body_once_too_early(m: Patch) -> None:
    """Two instructions of a fused kernel change places."""
    right = numpy_kernels.PLANS["fused"]

    def wrong(call: Any) -> Any:
        body = call.instruction.body
        return right(call._replace(instruction=call.instruction.replaced(body=(*body[1:], body[0]))))

    m.setitem(numpy_kernels.PLANS, "fused", wrong)


@mutation("sum_of_two_products")
def equal_shapes_share_a_plan(m: Patch) -> None:
    """Whatever is computed from them."""
    m.setattr(numpy_kernels, "repr", lambda attrs: "", raising=False)


@mutation("sum_of_two_products")
def plans_are_shared_whatever_the_dims_are_called(m: Patch) -> None:
    m.setattr(numpy_kernels, "_form", lambda x: (x.sizes, x.type.dtype))


@mutation("tests/kernels/test_blas.py::test_batches(library('openblas'), 'outer backwards', 'float32')")
def steps_back_in_memory_stay_where_they_are(m: Patch) -> None:
    def wrong(x: np.ndarray) -> np.ndarray:
        at = np.array([x.__array_interface__["data"][0]], np.intp)
        for size, step in zip(x.shape[:-2], x.strides[:-2], strict=True):
            at = (at[:, None] + np.arange(size) * max(step, 0)).reshape(-1)
        return at

    m.setattr(blas, "_addresses", wrong)


@mutation("tests/kernels/test_native.py::test_wide_buffers_lie_in_the_workspace('softmax')")
def scratch_of_generated_code_overlaps(m: Patch) -> None:
    right = storage.Scratch.reserve

    def wrong(self: Any, shape: Any, dtype: Any) -> Any:
        return right(self, shape, dtype)._replace(offset=0)

    m.setattr(storage, "Scratch", type("Overlapping", (storage.Scratch,), {"reserve": wrong}))


@mutation("tests/kernels/test_native.py::test_wide_buffers_lie_in_the_workspace('layer_norm')")
def scratch_of_generated_code_is_not_planned(m: Patch) -> None:
    m.setattr(numpy_kernels, "scratch_bytes", lambda *arguments: 0)


@mutation("tests/kernels/test_product_choice.py::test_all_ranks_take_the_same()")
def the_first_rank_alone_chooses_the_library(m: Patch) -> None:
    def wrong(of_ranks: Any) -> str:
        common = [n for n in of_ranks[0] if all(n in names for names in of_ranks)]
        return min(common, key=lambda n: of_ranks[0][n])

    m.setattr(blas, "agree", wrong)


@mutation("tests/kernels/test_product_choice.py::test_the_turns_of_a_busy_machine()")
def the_first_turn_of_a_library_counts(m: Patch) -> None:
    m.setattr(product_choice, "CALM_ROUNDS", 1)


@mutation("tests/checking/test_verify_layouts.py::test_rows_of_bfloat16_in_generated_kernels()")
def generated_kernels_keep_bfloat16_in_a_result_as_whole_numbers(m: Patch) -> None:
    right = source.Writer._buffer
    m.setattr(source.Writer, "_buffer", lambda self, v: (right(self, v)[0], "float32"))
