"""Names that are shared, updates that are left out, step numbers, and what survivors hold."""

from __future__ import annotations

from typing import Any

from meshmpi import api
from meshmpi.checkpoint import surviving
from meshmpi.compiler.passes import modes
from meshmpi.graph import scopes
from meshmpi.runtime import executor
from meshmpi.runtime.variables import VariableStore
from tests.mutations.registry import Patch, mutation

NAMES = "tests/nn/test_names.py::"
ATOMIC = "tests/passes/test_atomic.py::"
SURVIVING = "tests/checkpoint/test_surviving.py::"


@mutation(NAMES + "test_unnamed_layers_have_variables_of_their_own('dense')")
def an_unnamed_layer_always_gets_the_first_name(m: Patch) -> None:
    m.setattr(scopes.Scopes, "layer_name", lambda self, name, default: name or default)


@mutation(NAMES + "test_a_name_given_twice_is_refused_unless_sharing_is_asked_for('dense')")
def a_taken_name_is_shared_silently(m: Patch) -> None:
    m.setattr(scopes.Scopes, "reuse", property(lambda self: self._open[-1].reuse or "auto"))


@mutation(NAMES + "test_unnamed_layers_have_variables_of_their_own('conv2d')")
def what_is_to_be_shared_is_made_where_it_is_missing(m: Patch) -> None:
    m.setattr(scopes.Scopes, "reuse", property(lambda self: self._open[-1].reuse and "auto"))


@mutation(NAMES + "test_sharing_finds_layers_by_their_order_wherever_they_were_made()")
def unnamed_layers_are_counted_anew_in_each_inner_scope(m: Patch) -> None:
    right = scopes._Scope

    def wrong(prefix: str, reuse: Any, counts: dict[str, int]) -> Any:
        return right(prefix, reuse, {})

    m.setattr(scopes, "_Scope", wrong)


@mutation(NAMES + "test_turns_and_parts_share_what_the_first_one_makes()")
def later_turns_share_the_first_layers_of_the_graph(m: Patch) -> None:
    m.setattr(scopes.Scopes, "mark", lambda self: {})


@mutation("tests/test_default_fetches.py::test_updates_that_are_left_out_are_named_once_and_with_the_users_line()")
def nothing_is_said_of_updates_that_are_left_out(m: Patch) -> None:
    m.setattr(api, "warn_user", lambda text, kind: None)


@mutation(
    "tests/checkpoint/test_checkpoint.py::test_several_steps_get_their_numbers_back_in_order"
    "(__import__('pathlib').Path(__import__('tempfile').mkdtemp()))"
)
def step_numbers_are_not_restored(m: Patch) -> None:
    right = VariableStore.step_numbers
    m.setattr(VariableStore, "step_numbers", property(right.fget, lambda self, numbers: None))


@mutation(ATOMIC + "test_no_collective_follows_a_write_and_numbers_are_the_same('a:2', 'batch:a', None, {})")
def only_the_writes_themselves_come_last(m: Patch) -> None:
    right = modes._needed_by_collectives

    def wrong(program: Any) -> set[int]:
        made = {v for i in program.instructions for v in i.outputs}
        return right(program) | made

    m.setattr(modes, "_needed_by_collectives", wrong)


@mutation(ATOMIC + "test_a_step_that_failed_while_ranks_waited_can_be_ended()")
def a_step_that_is_ended_waits_for_ranks_that_are_gone(m: Patch) -> None:
    right = executor.Executor.finish

    def wrong(self: Any) -> None:
        self._committed -= 1
        right(self)

    m.setattr(executor.Executor, "finish", wrong)


@mutation(SURVIVING + "test_the_newest_step_of_which_all_is_there(held(BOTH, (0, 5), (2, 5)), None, None)")
def a_block_that_is_lost_is_not_missed(m: Patch) -> None:
    right = surviving.newest

    def wrong(held: Any) -> Any:
        return right([[h._replace(splits=()) for h in part] for part in held])

    m.setattr("tests.checkpoint.test_surviving.newest", wrong)


@mutation(SURVIVING + "test_the_newest_step_of_which_all_is_there(held(DATA, (0, 5), (1, 5.5)), 6, {1: 1})")
def ranks_that_cannot_end_a_step_count_as_if_they_could(m: Patch) -> None:
    right = surviving.newest

    def wrong(held: Any) -> Any:
        return right([[h._replace(ready=True) for h in part] for part in held])

    m.setattr("tests.checkpoint.test_surviving.newest", wrong)


@mutation(
    SURVIVING + "test_every_element_gets_to_the_new_mesh"
    "(Placed('rows:2;cols:2', 'hidden:cols'), Placed('rows:1;cols:2', 'hidden:cols'), [3])"
)
def any_survivor_is_asked_for_any_block(m: Patch) -> None:
    right = surviving._block
    m.setattr(surviving, "_block", lambda mesh, axes, rank: (0,) * len(right(mesh, axes, rank)))
