"""What accompanies a run: predictions, measurements, and what becomes of their failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshmpi.ir.program import Instruction
from meshmpi.planner import disturbance
from meshmpi.training.progress import Extras
from tests.mutations.registry import Patch, mutation


@mutation("tests/planner/test_timing.py::test_language_models_have_a_prediction({'rotary': True})")
def slices_count_as_collectives_in_the_background(m: Patch) -> None:
    wrong = property(lambda self: bool(getattr(self.attrs, "start", False)))
    m.setattr(Instruction, "in_background", wrong)


@mutation("tests/train/test_extras.py::test_a_failure_is_told_once_in_one_line()")
def what_failed_is_told_again_and_again(m: Patch) -> None:
    right = Extras.__call__

    def wrong(self: Any, what: str, do: Callable[[], Any]) -> Any:
        self._failed.clear()
        return right(self, what, do)

    m.setattr(Extras, "__call__", wrong)


@mutation("tests/planner/test_calibrate.py::test_what_disturbed_is_told()")
def ranks_count_as_other_processes(m: Patch) -> None:
    m.setattr(disturbance.Look, "own", property(lambda self: 0.0))


@mutation("tests/planner/test_calibrate.py::test_what_disturbed_is_told()")
def a_machine_is_never_busy(m: Patch) -> None:
    m.setattr(disturbance, "OTHERS", 1e9)
    m.setattr(disturbance, "STOLEN", 1e9)
