"""Passes: rewriting that changes what a program means."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from meshmpi.compiler.passes import clean, fold, fusion, messages, pipeline, rematerialise
from meshmpi.compiler.passes import reductions as reduction_pass
from meshmpi.compiler.passes.rewrite import fetched, only_user, users
from meshmpi.ir import verify as verifying
from meshmpi.ir.kinds import computing, regions
from meshmpi.ir.types import LocalDim
from meshmpi.kernels import expressions
from tests.mutations.registry import Patch, mutation


@mutation("two_layer_network")
def any_map_passes_a_pending_sum(m: Patch) -> None:
    m.setattr(computing, "linear_in", lambda expr, pending: True)


@mutation("constants")
def multiplying_by_two_is_a_copy(m: Patch) -> None:
    def wrong(i: Any, program: Any) -> bool:
        expr = i.attrs.expr
        if len(i.inputs) != 1 or len(i.outputs) != 1 or len(expr.steps) != 1:
            return False
        if program.types[i.inputs[0]] != program.types[i.outputs[0]]:
            return False
        return expr.steps[0].function in ("identity", "multiply") and "i0" in expr.steps[0].args

    m.setattr(fold, "_is_copy", wrong)


@mutation("sum_of_two_products")
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

    _replace_pass(m, clean.cse, wrong)


@mutation("softmax_by_hand")
def fusion_swaps_the_operands(m: Patch) -> None:
    right = fusion.merged_maps

    def wrong(producer: Any, consumer: Any, keep: list) -> Any:
        merged = right(producer, consumer, keep)
        expr = merged.attrs.expr
        steps = tuple(s._replace(args=s.args[::-1]) if s.function == "subtract" else s for s in expr.steps)
        return merged.replaced(expr=expr._replace(steps=steps))

    m.setattr(fusion, "merged_maps", wrong)


@mutation("slots_stored_elsewhere")
def reduce_scatter_forgets_the_other_axes(m: Patch) -> None:
    right = reduction_pass.form_reduce_scatter

    def wrong(program: Any) -> Any:
        p = right(program)
        made = {i.outputs[0]: i for i in p.instructions if i.outputs}
        dropped = {
            i.outputs[0]: i.inputs[0]
            for i in p.instructions
            if i.kind == "all_reduce" and made[i.inputs[0]].kind == "reduce_scatter"
        }
        kept = [i for i in p.instructions if not i.outputs or i.outputs[0] not in dropped]
        return clean.with_substitution(p, kept, dropped)

    _replace_pass(m, reduction_pass.form_reduce_scatter, wrong)


def _replace_pass(m: Patch, old: Any, new: Any) -> None:
    """In the table of passes, and where it is the default of an argument."""
    assert old in pipeline.PASSES, old
    passes = tuple(new if p is old else p for p in pipeline.PASSES)
    m.setattr(pipeline, "PASSES", passes)
    m.setattr(pipeline.optimize, "__defaults__", (passes, None))


def _misinform(m: Patch, one: Any, **instead: Any) -> None:
    """Runs one of the passes with functions of its module replaced."""

    def wrong(program: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            for name, function in instead.items():
                inner.setattr(sys.modules[one.__module__], name, function)
            return one(program)

    _replace_pass(m, one, wrong)


@mutation("numbers_folded_together")
def constants_are_subtracted_the_wrong_way_round(m: Patch) -> None:
    m.setitem(fold._ARITHMETIC, "subtract", lambda a, b: b - a)


@mutation("constants")
def inputs_keep_their_number_when_a_constant_before_them_goes(m: Patch) -> None:
    right = fold._with_literals

    def wrong(i: Any, constants: dict) -> Any:
        new = right(i, constants)
        if new is i or len(new.inputs) != 1 or i.inputs[0] not in constants:
            return new
        steps = tuple(s._replace(args=tuple("i1" if a == "i0" else a for a in s.args)) for s in new.attrs.expr.steps)
        return new.replaced(expr=new.attrs.expr._replace(steps=steps))

    m.setattr(fold, "_with_literals", wrong)


@mutation("swap_of_variables")
def a_copy_of_a_variable_is_no_copy(m: Patch) -> None:
    m.setattr(fold, "_stored", lambda program: set())
    m.setattr(verifying._StoredValues, "is_overwritten", lambda self, v: False)


@mutation("updates_read_old_values")
def only_the_first_write_is_kept(m: Patch) -> None:
    def wrong(program: Any) -> Any:
        p = clean.dce(program)
        writes = [i for i in p.instructions if i.kind == "write"]
        return clean.dce(p.with_instructions([i for i in p.instructions if i not in writes[1:]]))

    _replace_pass(m, clean.dce, wrong)


@mutation("sum_of_two_products")
def reductions_are_sent_together_too_late(m: Patch) -> None:
    def wrong(program: Any) -> Any:
        late = [i for i in program.instructions if i.kind == "all_reduce"]
        rest = [i for i in program.instructions if i.kind != "all_reduce"]
        return program.with_instructions([*rest, *late])

    _replace_pass(m, messages.combine, wrong)


@mutation("reduce_max_shares_ties")
def reductions_over_other_axes_share_a_message(m: Patch) -> None:
    right = messages._joined

    def wrong(group: list) -> Any:
        return right(group).replaced(attrs=group[0].attrs)

    def key_without_axes(program: Any) -> Any:
        waiting, out = [], []
        for i in program.instructions:
            used = any(v in w.outputs for w in waiting for v in i.inputs)
            if waiting and (used or (i.kind == "all_reduce" and i.attrs.op != "sum")):
                out.append(wrong(waiting))
                waiting = []
            if i.kind == "all_reduce" and i.attrs.op == "sum":
                waiting.append(i)
            else:
                out.append(i)
        return program.with_instructions([*out, *([wrong(waiting)] if waiting else [])])

    _replace_pass(m, messages.combine, key_without_axes)


@mutation("one_tensor_many_times")
def a_map_used_twice_is_merged_into_one_user(m: Patch) -> None:
    _misinform(m, fusion.fuse, only_user=lambda p: {v: us[0] for v, us in users(p).items() if v not in fetched(p)})


@mutation("constrained_and_released")
def a_map_that_is_fetched_is_merged_away(m: Patch) -> None:
    _misinform(m, fusion.fuse, only_user=lambda program: only_user(replace(program, fetches={})))


@mutation("softmax_by_hand")
def maps_over_rows_are_merged_as_if_over_all_points(m: Patch) -> None:
    """The inputs of the merged map are those of the consumer only."""
    right = fusion.merged_maps

    def wrong(producer: Any, consumer: Any, keep: list) -> Any:
        merged = right(producer, consumer, keep)
        n = len(producer.attrs.expr.steps)
        results = tuple(f"t{n - 1}" if len(merged.attrs.expr.steps) > n + 1 else r for r in merged.attrs.expr.results)
        return merged.replaced(expr=merged.attrs.expr._replace(results=results))

    m.setattr(fusion, "merged_maps", wrong)


@mutation("centered_over_rows in C")
def a_fused_kernel_uses_a_sum_over_rows_before_it_is_complete(m: Patch) -> None:
    right = fusion._Open.accepts

    def wrong(self: Any, program: Any, i: Any) -> bool:
        over_rows, self.over_rows = self.over_rows, {}
        try:
            return right(self, program, i)
        finally:
            self.over_rows = over_rows

    m.setattr(fusion._Open, "accepts", wrong)


@mutation("softmax_by_hand")
def a_fused_kernel_keeps_what_others_need_to_itself(m: Patch) -> None:
    right = fusion._Former._fused

    def wrong(self: Any, s: Any) -> Any:
        self.used = {v: [u for u in us if u in s.body] for v, us in self.used.items()}
        return right(self, s)

    m.setattr(fusion._Former, "_fused", wrong)


@mutation("dropout_by_hand")
def random_numbers_wait_for_a_user_that_never_comes(m: Patch) -> None:
    m.setattr(fusion._Former, "_place_held", lambda self, i, target: None)


@mutation("products_of_products")
def a_product_of_two_pending_sums_stays_pending(m: Patch) -> None:
    right = reduction_pass.passes_through

    def wrong(program: Any, i: Any, pending: Any, axes: Any) -> bool:
        return i.kind == "contract" or right(program, i, pending, axes)

    m.setattr(reduction_pass, "passes_through", wrong)


@mutation("products_of_products")
def squares_of_pending_sums_stay_pending(m: Patch) -> None:
    right = computing.linear_in

    def wrong(expr: Any, pending: Any) -> bool:
        steps = tuple(s._replace(function="negative") if s.function == "square" else s for s in expr.steps)
        return right(expr._replace(steps=steps), pending)

    m.setattr(computing, "linear_in", wrong)


@mutation("products_of_products")
def maxima_of_pending_sums_stay_pending(m: Patch) -> None:
    right = reduction_pass.passes_through

    def wrong(program: Any, i: Any, pending: Any, axes: Any) -> bool:
        return i.kind == "reduce" or right(program, i, pending, axes)

    m.setattr(reduction_pass, "passes_through", wrong)


@mutation("shapes_of_products")
def pads_are_added_to_pending_sums(m: Patch) -> None:
    """The number around would be summed over the ranks."""
    right = reduction_pass.passes_through

    def wrong(program: Any, i: Any, pending: Any, axes: Any) -> bool:
        return i.kind == "pad" or right(program, i, pending, axes)

    m.setattr(reduction_pass, "passes_through", wrong)


@mutation("products_of_products")
def an_added_number_counts_once_per_rank(m: Patch) -> None:
    """sum + 1.0 is thought to be linear in the sum."""

    right = computing.linear_in

    def wrong(expr: Any, pending: Any) -> bool:
        (first, *more) = expr.steps
        added = first.function in ("add", "subtract") and not isinstance(first.args[1], str)
        return (added and not more) or right(expr, pending)

    m.setattr(computing, "linear_in", wrong)


@mutation("constrained_and_whole")
def blocks_are_reduced_although_the_whole_is_needed_too(m: Patch) -> None:
    def one_that_takes(program: Any) -> dict:
        takes = {v: u for v, us in users(program).items() for u in us if u.kind == "take_shard"}
        return {**takes, **only_user(program)}

    _misinform(m, reduction_pass.form_reduce_scatter, only_user=one_that_takes)


@mutation("slots_stored_elsewhere")
def blocks_are_taken_before_maps_whose_whole_value_is_needed_too(m: Patch) -> None:
    _misinform(m, reduction_pass.shard_early, only_user=lambda p: {v: us[0] for v, us in users(p).items()})


@mutation("sum_of_two_products")
def chained_reductions_forget_the_inner_axes(m: Patch) -> None:
    right = reduction_pass._merge_chains

    def wrong(program: Any) -> Any:
        p = right(program)
        return p.with_instructions(
            i.replaced(axes=i.attrs.axes[-1:]) if i.kind == "all_reduce" else i for i in p.instructions
        )

    m.setattr(reduction_pass, "_merge_chains", wrong)


@mutation("tests/passes/test_local_blocks.py::test_passes_change_no_value('constrained_sum', 'numpy')")
def fused_kernels_take_equal_global_shapes_for_equal_blocks(m: Patch) -> None:
    """The verifier refuses what comes of it, before any kernel reads beyond a block."""
    m.setattr(fusion, "_dims", lambda program, v: tuple(map(LocalDim, program.types[v].shape)))


@mutation("tests/passes/test_verify.py::test_broken_programs_are_refused('a fused kernel over blocks of two kinds')")
def the_verifier_lets_fused_kernels_mix_blocks(m: Patch) -> None:
    m.setattr(regions, "held_differently", lambda types: None)


@mutation("tests/fuzz/trial.py::check(7176, ranks=1)")
def a_pass_takes_the_number_of_a_value_inside_a_fused_kernel(m: Patch) -> None:
    m.setattr(messages, "fresh", lambda program: max(program.types) + 1)


@mutation("tests/fuzz/trial.py::check(7111, ranks=8)")
def maps_in_place_compare_what_is_pending(m: Patch) -> None:
    """A map that is linear in a pending sum may have the memory of a finished input."""
    m.setattr(expressions, "_same_block", lambda a, b: a == b)


@mutation("tests/passes/test_rematerialise.py::test_what_a_reduction_makes_stays('sum', 'prod')")
def what_no_reader_can_make_is_dropped(m: Patch) -> None:
    m.setattr(rematerialise, "_runs_again", lambda i: True)
