"""Guards against numbers that are not finite and against replicas that differ.

The training step itself leaves all variables unchanged if loss or gradients are not finite
(`Optimizer.apply_gradients` with ``watch``). The guard decides what follows, identically on every rank;
`meshmpi.checking.diagnose` finds where the first wrong number arose.
"""

from __future__ import annotations

import math

import numpy as np

from meshmpi.checking.diagnose import first_wrong, needed_bytes
from meshmpi.compiler.lowering import lower
from meshmpi.errors import TrainingError
from meshmpi.graph import Tensor
from meshmpi.runtime.agreement import Flag, gathered
from meshmpi.runtime.cores import free_memory
from meshmpi.runtime.replicas import compared
from meshmpi.training.callback import Callback, Step
from meshmpi.training.loop import Loop

_REMEDY = (
    "Continue with {0}; lower the learning rate, warm up longer or set clip_norm. If it comes again at once,"
    " continue from an older checkpoint."
)


class Guard(Callback):
    """Judges the numbers of each step and sets ``loop.healthy``.

    Args:
        loss: The loss of a step.
        finite: Whether loss and gradients are finite, so that the updates take effect; None: updates are always made.
    """

    def __init__(self, loop: Loop, loss: Tensor, finite: Tensor | None) -> None:
        self._loop, self._step, self._loss, self._finite = loop, loop.step, loss, finite
        self._settings, self._say = loop.settings, loop.say
        self._any_wrong = Flag(loop.mesh)
        self.skipped, self.in_a_row = 0, 0  # steps so far, and since the last finite one

    def on_step(self, step: Step) -> None:
        """Judges the step.  Raises TrainingError where the run must stop."""
        self._loop.healthy = False
        skipped = self._judged(step)
        self._loop.healthy = not skipped
        every = self._settings.guard.replica_every
        if every and step.number % every == 0:
            self._compare_replicas(step.number)

    def _judged(self, step: Step) -> bool:
        """Whether the update of a step was skipped."""
        if self._finite is None:
            if not math.isfinite(step.loss):
                raise TrainingError(
                    f"the training loss of step {step.number} is {step.loss}; its update was made, as"
                    " the step does not watch its numbers (guard.non_finite is off).",
                    _REMEDY.format(self._loop.resume_by),
                )
            return False
        wrong = self._wrong_here()
        if not self._any_wrong.agree(bool(wrong)):
            self.in_a_row = 0
            return False
        # The losses of ranks differ where only some are wrong; all ranks must say the same.
        found = gathered(self._loop.mesh, (wrong, step.loss))
        self.in_a_row, self.skipped = self.in_a_row + 1, self.skipped + 1
        loss = next(loss for ranks, loss in found if ranks)
        self._act(step.number, loss, sorted(r for ranks, _ in found for r in ranks))
        return True

    def reports(self) -> dict[str, float]:
        """``skipped`` where the last step updated nothing."""
        return {"skipped": 1.0} if self._wrong_here() else {}

    def _wrong_here(self) -> list[int]:
        """Ranks of this process on which the last step was not finite."""
        if self._finite is None:
            return []
        name = next(n for n, tensor in self._step.fetches.items() if tensor is self._finite)
        value = self._step.program.fetches[name]
        return [s.rank for s in self._step.executor.states if not s.arrays[value].item()]

    def _act(self, number: int, loss: float, ranks: list[int]) -> None:
        """Goes on without the update of a step, or raises TrainingError."""
        guard, size = self._settings.guard, self._loop.mesh.shape.size
        going_on = guard.non_finite == "skip" and len(ranks) == size and self.in_a_row < guard.max_skips
        cause = self._cause() if not going_on or self.in_a_row == 1 else ""
        what = f"step {number}: loss or gradients are not finite (loss {loss:g})"
        what += f". It began here: {cause}" if cause else ""
        if going_on:
            count = f"({self.in_a_row} in a row, {self.skipped} in this run)"
            self._say(f"{what}\nthe update of step {number} is skipped {count}")
            return
        if len(ranks) < size:
            some = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
            raise TrainingError(
                f"{what}. This happened only on ranks {some}, although all should hold equal"
                " values: the memory of a rank is damaged, or its replica has drifted.",
                f"Continue from the last checkpoint with {self._loop.resume_by}; if it recurs, leave out the"
                " host of that rank.",
            )
        if guard.non_finite == "skip":
            what += f"; {self.in_a_row} steps in a row were skipped (guard.max_skips)"
        raise TrainingError(
            f"{what}. Variables and checkpoints are as before this step.", _REMEDY.format(self._loop.resume_by)
        )

    def _cause(self) -> str:
        """Where the first wrong number arose, as text; the same on every rank."""
        step, mesh = self._step, self._loop.mesh
        number = step.step_number - 1
        layout, storage = step.layouts
        fetches = {"loss": self._loss, "finite": self._finite}
        how = {"seed": step.program.seed, "shared": mesh.shared_axes()}
        program = lower(self._loss.graph, mesh.shape, layout, fetches, [], storage, **how)
        ranks_here = -(-mesh.shape.size // mesh.hosts)  # about; a simulated mesh has all of them here
        found, note = None, ""
        if all(gathered(mesh, needed_bytes(program) * ranks_here < free_memory())):
            found = first_wrong(step, program, number)
        if found is None:
            found, note = first_wrong(step, None, number), " (looked for in the optimised program)"
        if found is None:
            return "it did not happen again when the step was repeated: a rank may have computed wrong"
        return f"{found}{note}"

    def before_save(self, number: int) -> None:
        """Raises TrainingError where variables are not finite or replicas differ: they must not be saved."""
        self._compare_replicas(number)
        if self._finite is not None:
            self._check_variables()

    def _compare_replicas(self, number: int) -> None:
        found = compared(self._step.variables, self._settings.guard.replicas == "repair", self._say)
        if found:
            raise TrainingError(
                f"after step {number} ranks that should hold equal numbers do not: {found}.",
                f"Continue from the last checkpoint with {self._loop.resume_by}; if it happens again on one host, its"
                " memory is damaged. guard.replicas=repair copies what most ranks hold.",
            )

    def _check_variables(self) -> None:
        store = self._step.variables
        wrong = (
            (name, rank, block)
            for name, blocks in store.blocks.items()
            for rank, block in blocks.items()
            if not _finite(block)
        )
        mine = next((self._described(*found) for found in wrong), "")
        problem = next((p for p in gathered(store.mesh, mine) if p), "")
        if problem:
            raise TrainingError(
                f"{problem}: no checkpoint is written, the last one stays.",
                f"Continue from it with {self._loop.resume_by}.",
            )

    def _described(self, name: str, rank: int, block: np.ndarray) -> str:
        """The first element of a block that is not finite, in words."""
        t, mesh = self._step.variables.types[name].type, self._loop.mesh.shape
        at = np.argwhere(~np.isfinite(block.astype(np.float64)))[0]
        places = zip(t.shape, t.block(mesh, mesh.coordinates(rank)), at, strict=True)
        index = ", ".join(f"{d.name}={begin + int(k)}" for d, (begin, _), k in places)
        return f"variable '{name}' {t} holds {float(block[tuple(at)]):g} at [{index}] on rank {rank}"


def _finite(block: np.ndarray) -> bool:
    """Whether a block is finite; only floats may not be."""
    if block.dtype.name == "bfloat16":
        block = block.astype(np.float32)
    if block.dtype.kind != "f" or not block.size:
        return True
    return math.isfinite(block.min()) and math.isfinite(block.max())
