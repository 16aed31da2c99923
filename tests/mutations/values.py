"""What a variable may hold, and numbers that training starts from: types, decay, schedules."""

from __future__ import annotations

from typing import Any

from meshmpi import values
from meshmpi.checkpoint import shard
from meshmpi.graph import graph as graph_module
from meshmpi.graph.ops import elementwise
from meshmpi.nn import activations, attention, normalization, schedules
from meshmpi.runtime import compiled, variables
from meshmpi.transformer.decoding import beams
from meshmpi.transformer.pretrained.architectures import table
from tests.mutations.registry import Patch, mutation
from tests.pretrained import test_architectures

KEPT = "tests/runtime/test_kept_values.py"
REFUSED = f"{KEPT}::test_what_a_type_cannot_keep_is_refused"
DECAY = "tests/nn/test_optimizers.py::test_biases_and_norm_scales_do_not_decay_whatever_their_rank()"


@mutation(f"{REFUSED}('float_into_int32', 'assigned')")
def floats_become_integers_in_an_assignment(m: Patch) -> None:
    m.setattr(variables, "unfit", lambda array, dtype: "")


@mutation(f"{REFUSED}('beyond_uint8', 'feed')")
def feeds_wrap_around(m: Patch) -> None:
    right = compiled.unfit
    m.setattr(compiled, "unfit", lambda array, dtype: "" if array.dtype.kind in "iu" else right(array, dtype))


@mutation(f"{REFUSED}('bool_into_int32', 'first_value')")
def bools_count_as_integers(m: Patch) -> None:
    m.setitem(values._FAMILIES, "b", "integer")


@mutation(f"{KEPT}::test_initializers_follow_the_same_rule('int32', mm.constant_initializer(1.7), 'v')")
def constants_are_cut_to_integers(m: Patch) -> None:
    m.setattr(values, "_is_exact", lambda value, dtype: True)


@mutation(f"{KEPT}::test_a_first_value_is_refused_where_it_is_given('float_into_int32')")
def first_values_are_looked_at_when_they_are_stored(m: Patch) -> None:
    m.setattr(graph_module, "first_value", lambda *words: None)


@mutation(f"{DECAY}")
def biases_of_attention_decay(m: Patch) -> None:
    right = attention.get_variable
    m.setattr(attention, "get_variable", lambda *a, decays=True, **k: right(*a, **k))


@mutation(f"{DECAY}")
def scales_of_norms_decay(m: Patch) -> None:
    right = normalization.get_variable

    def wrong(name: str, *a: Any, decays: bool = True, **k: Any) -> Any:
        return right(name, *a, decays=decays or name == "scale", **k)

    m.setattr(normalization, "get_variable", wrong)


@mutation("tests/nn/test_schedules.py::test_values('warmup')")
def schedules_are_a_step_ahead(m: Patch) -> None:
    right = schedules._float
    m.setattr(schedules, "_float", lambda step: elementwise.add(right(step), 1.0))


@mutation("tests/nn/test_activations.py::test_derivative_at_zero_and_far_out('selu', SELU[0])")
def selu_takes_the_lower_branch_at_zero(m: Patch) -> None:
    m.setattr(activations.ew, "greater_equal", elementwise.greater)


@mutation("tests/checkpoint/test_checkpoint.py::test_table_of_types()")
def a_type_has_no_name_in_files(m: Patch) -> None:
    m.delitem(shard.FORMAT_NAMES, "uint8")


BEAMS = "tests/train/test_beams.py"


@mutation(f"{BEAMS}::test_only_the_best_candidates_may_end()")
def spare_candidates_of_a_beam_search_end(m: Patch) -> None:
    right = beams.Beams.extend

    def wrong(self: Any, values: Any, tokens: Any) -> Any:
        self.width, width = self.width + 1, self.width
        try:
            return right(self, values, tokens)
        finally:
            self.width = width

    m.setattr(beams.Beams, "extend", wrong)


@mutation("tests/pretrained/test_architectures.py::test_a_t5_v1_1_as_transformers_5_saves_it()")
def a_softmax_of_its_own_is_not_looked_for(m: Patch) -> None:
    right = table.architecture
    m.setattr(test_architectures, "architecture", lambda values, keys=(): right(values))
