"""Operations and their lowering."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.graph.ops import indexing, sources
from meshmpi.ir import verify as verifying
from meshmpi.ir.kinds import AllReduce, Gather, LocalFunction, Random, View
from meshmpi.ir.kinds.functions import Function
from meshmpi.ir.program import LocalType
from meshmpi.kernels import random_numbers, ufunc_steps
from tests.mutations.registry import Patch, mutation

# The module; `meshmpi.compiler.lowering.lower` is the function of the same name.
lowering = sys.modules["meshmpi.compiler.lowering.lower"]


@mutation("swap_of_variables")
def an_update_sees_the_new_value_of_another(m: Patch) -> None:
    m.setattr(lowering.Lowering, "_apart", lambda self, value: value)
    m.setattr(verifying._StoredValues, "is_overwritten", lambda self, v: False)


@mutation("constants")
def constants_are_rounded_to_integers(m: Patch) -> None:
    right = sources.fill
    m.setattr(sources, "fill", lambda value, dtype: right(int(value) if value == value else value, dtype))


@mutation("einsum_of_three")
def a_sum_is_finished_over_its_first_axis_only(m: Patch) -> None:
    right = lowering.Lowering.finish

    def wrong(self: Any, value: int) -> int:
        t = self.types[value]
        if len(t.partial) < 2:
            return right(self, value)
        return self._move(value, AllReduce(t.partial[:1], t.pending))

    m.setattr(lowering.Lowering, "finish", wrong)


@mutation("matmul_transposed")
def a_summed_out_split_dim_is_forgotten(m: Patch) -> None:
    m.setattr(lowering.Lowering, "pending", lambda self, t, axes, op="sum": t)


@mutation("einsum_of_three")
def intermediate_products_lose_dims_that_only_operands_need(m: Patch) -> None:
    def wrong(self: Any, a: int, b: int, others: Any, output_shape: Any) -> Any:
        dims = dict.fromkeys([*self.types[a].shape, *self.types[b].shape])
        kept = [d for d in dims if output_shape.find(d.name) >= 0]
        return mm.Shape(kept or list(dims))

    m.setattr(lowering.Lowering, "_pair_shape", wrong)


@mutation("local_function")
def two_functions_of_one_name_are_one(m: Patch) -> None:
    m.setattr(Function, "__repr__", lambda self: self.name.rstrip("_23456789"))


@mutation("local_function")
def parts_of_a_functions_sum_are_not_added_up(m: Patch) -> None:
    right = lowering.Lowering.emit_many

    def wrong(self: Any, attrs: Any, inputs: Any, types: Any) -> list[int]:
        return right(self, attrs, inputs, [t.finished() for t in types] if isinstance(attrs, LocalFunction) else types)

    m.setattr(lowering.Lowering, "emit_many", wrong)
    m.setattr(LocalFunction, "check", lambda self, program, i, xs: None)


@mutation("einsum_with_lonely_dims")
def lonely_dims_are_not_summed(m: Patch) -> None:
    m.setattr(lowering.Lowering, "_sum_alone", lambda self, value, other, shape: value)


@mutation("einsum_of_three")
def splits_of_intermediate_products_may_clash(m: Patch) -> None:
    m.setattr(lowering.Lowering, "_without_clash", lambda self, a, b: (a, b))


@mutation("reduce_max_shares_ties")
def maxima_over_a_split_dim_are_summed(m: Patch) -> None:
    right = lowering.Lowering.pending
    m.setattr(lowering.Lowering, "pending", lambda self, t, axes, op="sum": right(self, t, axes, "sum"))


@mutation("transpose")
def transposing_only_renames_the_axes(m: Patch) -> None:
    """The elements stay where they were."""

    def wrong(self: Any, value: int, shape: Any) -> int:
        x = self.types[value]
        if x.shape == shape:
            return value
        t = LocalType(shape, x.dtype, tuple(x.split(n) for n in shape.names))
        return self.emit(View(), [value], t)

    m.setattr(lowering.Lowering, "transpose", wrong)


@mutation("updates_by_transposed_and_copied_variables")
def updates_are_written_in_the_order_of_dims_of_the_value(m: Patch) -> None:
    right = lowering.Lowering.write

    def wrong(self: Any, updates: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(lowering.Lowering, "transpose", lambda self, value, shape: value)
            right(self, updates)

    m.setattr(lowering.Lowering, "write", wrong)


@mutation("random_numbers")
def all_random_tensors_share_one_key(m: Patch) -> None:
    def wrong(self: Any, lower: Any) -> None:
        drawn = Random(self.distribution, "random")
        lower.define(self.output, lower.emit(drawn, [], lower.type_of(self.output)))

    m.setattr(sources.Random, "lower", wrong)


@mutation("random_numbers")
def random_numbers_are_the_same_at_every_step(m: Patch) -> None:
    right = random_numbers.stream_key
    m.setattr(random_numbers, "stream_key", lambda seed, key, step: right(seed, key, 0))


@mutation("random_numbers")
def mean_and_deviation_are_swapped(m: Patch) -> None:
    right = sources.random_normal

    def wrong(shape: Any, mean: float = 0.0, stddev: float = 1.0, **options: Any) -> Any:
        return right(shape, stddev, mean, **options)

    m.setattr(mm, "random_normal", wrong)


@mutation("gather")
def a_lookup_in_a_split_table_takes_the_own_rows_only(m: Patch) -> None:
    """The sum over the blocks of the table is not pending."""

    def wrong(self: Any, lower: Any) -> None:
        table, index = self.inputs
        out = lower.type_of(self.output)
        values = [lower.value(table), lower.value(index)]
        lower.define(self.output, lower.emit(Gather(self.dim), values, out))

    m.setattr(indexing.Gather, "lower", wrong)


@mutation("swap_of_variables")
def the_first_update_wins(m: Patch) -> None:
    right = lowering.Lowering.write
    m.setattr(lowering.Lowering, "write", lambda self, updates: right(self, updates[:1]))


@mutation("slots_stored_elsewhere")
def updates_are_not_taken_to_their_storage_layout(m: Patch) -> None:
    right = lowering.Lowering.write

    def wrong(self: Any, updates: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(lowering.Lowering, "redistribute", lambda self, value, splits: value)
            right(self, updates)

    m.setattr(lowering.Lowering, "write", wrong)


@mutation("casts")
def casts_keep_their_type(m: Patch) -> None:
    """Rounding is forgotten where a float becomes an integer."""
    right = ufunc_steps.UfuncSteps._step

    def wrong(self: Any, step: Any, values: dict) -> int:
        if step.function == "cast" and step.dtype == "int32":
            source = values[step.args[0]]
            if self.dtypes[source].kind == "f":
                rounded = self.emit(np.rint, [source], self.dtypes[source])
                return self.copy(rounded, np.dtype("int32"))
        return right(self, step, values)

    m.setattr(ufunc_steps.UfuncSteps, "_step", wrong)


@mutation("variable_in_two_types")
def a_variable_is_read_in_the_type_it_is_stored_in(m: Patch) -> None:
    m.setattr(lowering.Lowering, "cast", lambda self, value, dtype: value)
