"""Reading of arguments, proposals of errors, and what is left out of a launcher's words."""

from __future__ import annotations

import re
from typing import Any

from meshmpi.compiler.lowering import cures
from meshmpi.graph.arguments import annotations, rules
from meshmpi.launch import notices
from tests.mutations.registry import Patch, mutation

MEANT = "tests/test_meant.py::"
CURES = "tests/test_cures.py::"
NOTICES = "tests/runtime/test_notices.py::"


@mutation(f"{CURES}test_two_errors_do_not_send_each_other_in_a_circle()")
def the_first_proposal_is_not_tried(m: Patch) -> None:
    m.setattr(cures.Placing, "refuses", lambda self, rules: None)
    m.setattr(cures, "_changed", lambda error, mesh, at: iter([at]))


@mutation(f"{CURES}test_a_name_that_would_be_illegal_is_not_suggested()")
def illegal_names_are_suggested_too(m: Patch) -> None:
    m.setattr(cures, "_means", lambda error, found: True)


@mutation(f"{CURES}test_every_proposal_is_legal('rows:2;cols:2', 'a:rows', '')")
def storage_of_variables_is_not_tried(m: Patch) -> None:
    def wrong(self: Any, rules: Any) -> Any:
        return cures.Placement(self.graph, self.mesh, rules.layout, rules.storage, self.operations)

    m.setattr(cures.Placing, "placed", wrong)


def _begun_with(m: Patch, **fields: object) -> None:
    """Filters of notices that begin with other fields."""
    right = notices.Notices.__init__

    def wrong(self: notices.Notices, ranks: int) -> None:
        right(self, ranks)
        vars(self).update(fields)

    m.setattr(notices.Notices, "__init__", wrong)


@mutation(f"{NOTICES}test_without_a_report_of_that_rank_everything_stays(OPEN_MPI_5)")
def notices_about_other_ranks_are_left_out(m: Patch) -> None:
    class Everyone(list):
        def __contains__(self, rank: object) -> bool:
            return True

    _begun_with(m, _reported=Everyone())


@mutation(f"{NOTICES}test_a_first_cause_stays(KILLED, 75)")
def every_ruled_block_is_left_out(m: Patch) -> None:
    rule = (rb"-{74}\n", rb"(?:.*rank (\d+).*)\n", rb".*\n", rb"-{74}\n")
    m.setattr(notices, "_NOTICES", (*notices._NOTICES, rule))


@mutation(f"{NOTICES}test_lines_are_shown_at_once_before_any_report()")
def lines_are_held_back_before_any_report(m: Patch) -> None:
    m.setattr(notices.Notices, "_may_begin", lambda self, piece: True)


@mutation(f"{NOTICES}test_the_words_about_a_rank_that_reported_are_left_out(OPEN_MPI_5, 7)")
def a_report_is_not_noticed(m: Patch) -> None:
    _begun_with(m, _report=re.compile(rb"(?!)"))


@mutation(f"{MEANT}test_a_variable_read_in_two_types_has_one_gradient()")
def a_variable_stands_for_its_first_tensor(m: Patch) -> None:
    from meshmpi.graph import Variable

    right = Variable.reads.fget
    m.setattr(Variable, "reads", property(lambda self: right(self)[:1]))


@mutation(f"{MEANT}in_a_graph(test_lists_that_a_function_fills_are_the_callers_own)")
def lists_are_copied(m: Patch) -> None:
    m.setattr(annotations.operator, "is_", lambda a, b: False)


@mutation(f"{MEANT}in_a_graph(test_names_mean_the_dimensions_of_the_tensors_given)")
def names_mean_any_dimension_of_the_graph(m: Patch) -> None:
    def wrong(self: Any, name: str) -> Any:
        found = [d for d in self.graph.dims if d.name == name]
        return found[-1] if found else None

    m.setattr(rules.Call, "dimension", wrong)


@mutation(f"{MEANT}in_a_graph(test_data_types_of_numpy_and_python)")
def pythons_float_is_float64(m: Patch) -> None:
    from meshmpi.ir import scalar

    m.setitem(scalar._PYTHON_TYPES, float, "float64")


@mutation(f"{MEANT}test_a_blank_in_a_layout_is_pointed_at()")
def the_place_in_a_layout_is_counted_from_0(m: Patch) -> None:
    from meshmpi import dims

    right = dims.LayoutError

    def wrong(problem: str, remedy: str = "", where: str = "") -> Any:
        less = lambda found: f"character {int(found[1]) - 1}"  # noqa: E731
        return right(re.sub(r"character (\d+)", less, problem), remedy, where)

    m.setattr(dims, "LayoutError", wrong)
