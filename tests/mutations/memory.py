"""The memory plan and the executor."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshmpi.compiler.passes import memory
from meshmpi.ir.program import Alias
from meshmpi.runtime import arrays, compiled, executor
from tests.mutations.registry import Patch, mutation


@mutation("replace_dimensions")
def views_do_not_keep_memory_alive(m: Patch) -> None:
    right = memory.Sharing._extend

    def wrong(self: Any, v: int, until: int) -> None:
        is_view = self.program.instructions[self._made_at[v]].traits.same_memory
        right(self, v, -1 if is_view else until)

    m.setattr(memory.Sharing, "_extend", wrong)


@mutation("one_tensor_many_times")
def results_overwrite_inputs_still_needed(m: Patch) -> None:
    def wrong(self: Any, x: int, y: int, i: Any, n: int) -> bool:
        a, b = self.program.types[x], self.program.types[y]
        same = (a.shape, a.splits, a.dtype) == (b.shape, b.splits, b.dtype)
        return same and isinstance(self.root(x), int) and len(i.inputs) == 1

    m.setattr(memory.Sharing, "_ends_here", wrong)


@mutation("put_beside_the_old_value")
def a_put_overwrites_what_is_read_later(m: Patch) -> None:
    right = memory.Sharing._variable_to_overwrite

    def wrong(self: Any, i: Any, y: int, n: int) -> Any:
        names = self._written.get(y, [])
        return Alias("variable", names[0]) if i.kind == "put" and names else right(self, i, y, n)

    m.setattr(memory.Sharing, "_variable_to_overwrite", wrong)


@mutation("matmul_transposed")
def combined_values_come_back_in_reverse(m: Patch) -> None:
    right = executor._pack

    def wrong(*args: Any) -> tuple:
        message, rows = right(*args)
        outs = [y for _, _, y in rows][::-1]
        same = all(x.shape == y.shape for (x, _, _), y in zip(rows, outs, strict=True))
        return message, [(x, part, y) for (x, part, _), y in zip(rows, outs, strict=True)] if same else rows

    m.setattr(executor, "_pack", wrong)


@mutation("matmul_transposed")
def results_of_a_combined_all_reduce_stay_in_the_message(m: Patch) -> None:
    right = executor._pack

    def wrong(*args: Any) -> tuple:
        message, rows = right(*args)
        return message, [(x, part, y) for x, part, y in rows[:1]]

    m.setattr(executor, "_pack", wrong)


@mutation("one_tensor_many_times")
def memory_is_freed_one_instruction_too_early(m: Patch) -> None:
    right = memory.Sharing.__init__

    def wrong(self: Any, program: Any) -> None:
        right(self, program)
        self.ending = [*self.ending[1:], []] if self.ending else []

    m.setattr(memory.Sharing, "__init__", wrong)


@mutation("softmax_by_hand")
def a_gap_is_taken_whatever_its_size(m: Patch) -> None:
    right = memory._Arena.allocate

    def wrong(self: Any, size: int) -> int:
        if not self._gaps or not size:
            return right(self, size)
        self.used += size
        start, gap = self._remove(0)
        self.high = max(self.high, start + size)
        if gap > size:
            self.free(start + size, gap - size)
            self.used += gap - size
        return start

    m.setattr(memory._Arena, "allocate", wrong)


@mutation("updates_read_old_values")
def a_variable_is_overwritten_while_it_is_still_read(m: Patch) -> None:
    def wrong(self: Any, i: Any, y: int, n: int) -> Alias | None:
        names = self._written.get(y, [])
        return Alias("variable", names[0]) if len(names) == 1 else None

    m.setattr(memory.Sharing, "_variable_to_overwrite", wrong)


@mutation("updates_by_transposed_and_copied_variables")
def fetched_values_are_not_kept_to_the_end(m: Patch) -> None:
    right = memory.Sharing._extend

    def wrong(self: Any, v: int, until: int) -> None:
        if v in self.program.fetches.values():
            until = max((n for n, i in enumerate(self.program.instructions) if v in i.inputs), default=-1)
        right(self, v, until)

    m.setattr(memory.Sharing, "_extend", wrong)


@mutation("reduction_feeds_map_and_reduction")
def results_are_laid_over_inputs_of_another_size(m: Patch) -> None:
    """In place although the result has more points than the input."""

    def wrong(self: Any, x: int, y: int, i: Any, n: int) -> bool:
        root = self.root(x)
        a, b = self.program.types[x], self.program.types[y]
        return isinstance(root, int) and a.dtype == b.dtype and self.last[root] == n

    m.setattr(memory.Sharing, "_ends_here", wrong)


@mutation("swap_of_variables")
def writes_are_taken_for_done(m: Patch) -> None:
    """A write is skipped wherever its value has the shape of the variable."""
    m.setattr(executor, "_bind_write", lambda state, i, variable: [])


@mutation("step_number")
def the_step_number_stands_still_between_runs(m: Patch) -> None:
    def wrong(self: Any, feeds: Any = None, **named: Any) -> Any:
        self._executor.runtime.step = 0
        return right(self, feeds, **named)

    right = compiled.CompiledStep.__call__
    m.setattr(compiled.CompiledStep, "__call__", wrong)


@mutation("ranges")
def fetched_blocks_are_put_together_in_reverse(m: Patch) -> None:
    right = arrays._assemble

    def wrong(shape: Any, t: Any, blocks: dict) -> np.ndarray:
        ranks = list(blocks)
        mirrored = dict(zip(ranks, list(blocks.values())[::-1], strict=True))
        same = all(blocks[r].shape == mirrored[r].shape for r in ranks)
        return right(shape, t, mirrored if same else blocks)

    m.setattr(arrays, "_assemble", wrong)
