"""The guard against numbers that are not finite: what happened, where, and whether to go on.

The training step itself leaves all variables as they were when loss or gradients are not finite
(`Optimizer.apply_gradients` with ``watch``).  What is done about it is decided here, alike on every
rank; where it began is looked up in `meshmpi.checking.diagnose`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from meshmpi.checking.diagnose import first_wrong, needed_bytes
from meshmpi.compiler.lowering import lower
from meshmpi.dims import Layout
from meshmpi.errors import MeshmpiError
from meshmpi.runtime.agreement import gathered
from meshmpi.runtime.cores import free_memory
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.runtime.replicas import compared
from meshmpi.transformer.training.model import TrainingGraph
from meshmpi.transformer.training.settings import Settings


class TrainingError(MeshmpiError):
    """A training that cannot go on."""


class Guard:
    """Looks at the numbers of each step.

    Args:
        settings: Settings of the run; ``guard``, ``mesh.storage`` and ``train.seed`` are used.
        step: The compiled training step.
        built: Its graph.
        layout: Its layout.
        say: Takes lines, on rank 0 only.

    Attributes:
        skipped: Steps skipped so far.
        in_a_row: How many of them followed the last finite step.
        finite: Whether the last step was finite; not before the first.
    """

    def __init__(
        self, settings: Settings, step: Any, built: TrainingGraph, layout: str, say: Callable[[str], None]
    ) -> None:
        self._settings, self._step, self._built = settings, step, built
        self._layout, self._say = layout, say
        self._comm = step.mesh.comm
        self._mine, self._sum = np.zeros(1, np.int32), np.zeros(1, np.int32)
        if self._comm is not None:
            reduce = functools.partial(self._comm.Allreduce, self._mine, self._sum)
            self._reduce = step.mesh.outside("agree", reduce)
        self.skipped, self.in_a_row, self.finite = 0, 0, False

    def after(self, number: int, loss: float) -> bool:
        """Judges the step that has just run.  Collective.

        Args:
            number: Number of the step, as users see it.
            loss: Loss of the step, nats per token.

        Returns:
            Whether its update was skipped.

        Raises:
            TrainingError: The run must stop; the same on every rank.
        """
        self.finite = False
        skipped = self._judged(number, loss)
        self.finite = not skipped
        every = self._settings.guard.replica_every
        if every and number % every == 0:
            self._compare_replicas(number)
        return skipped

    def _judged(self, number: int, loss: float) -> bool:
        if self._built.finite is None:
            if not math.isfinite(loss):
                raise TrainingError(
                    f"the training loss of step {number} is {loss}; its update was made, as guard.non_finite is off.",
                    "Go on with --resume; " + _REMEDY,
                )
            return False
        wrong = self._wrong_here()
        count = self._total(len(wrong))
        if not count:
            self.in_a_row = 0
            return False
        # The losses of ranks differ where only some are wrong; all ranks must tell the same.
        told = gathered(self._step.mesh, (wrong, loss))
        ranks = sorted(r for part, _ in told for r in part)
        loss = next(found for part, found in told if part)
        self.in_a_row, self.skipped = self.in_a_row + 1, self.skipped + 1
        self._judge(number, loss, ranks)
        return True

    @property
    def reports(self) -> dict[str, float]:
        """What the metrics say of the last step: ``skipped`` where it updated nothing."""
        return {"skipped": 1.0} if self._wrong_here() else {}

    def _wrong_here(self) -> list[int]:
        """Ranks of this process on which the last step was not finite."""
        if self._built.finite is None:
            return []
        value = self._step.program.fetches[self._built.finite.name]
        return [s.rank for s in self._step.executor.states if not s.arrays[value].item()]

    def _total(self, mine: int) -> int:
        if self._comm is None:
            return mine
        self._mine[0] = mine
        self._reduce()
        return int(self._sum[0])

    def _judge(self, number: int, loss: float, ranks: list[int]) -> None:
        guard, size = self._settings.guard, self._step.mesh.shape.size
        going_on = guard.non_finite == "skip" and len(ranks) == size
        stops = not going_on or self.in_a_row >= guard.max_skips
        cause = self._cause() if stops or self.in_a_row == 1 else ""
        what = f"step {number}: loss or gradients are not finite (loss {loss:g})" + (
            f". It began here: {cause}" if cause else ""
        )
        if not stops:
            self._say(
                f"{what}\nthe update of step {number} is left out ({self.in_a_row} in a row,"
                f" {self.skipped} in this run)"
            )
            return
        if len(ranks) < size:
            raise TrainingError(
                f"{what}. This is so on ranks {_listed(ranks)} only, though all should hold equal"
                " numbers: the memory of a rank is damaged, or its replica has drifted.",
                "Go on from the last checkpoint with --resume, if it happens again without the host of that rank.",
            )
        if guard.non_finite == "skip":
            what += f"; {self.in_a_row} steps in a row were skipped (guard.max_skips)"
        raise TrainingError(
            f"{what}. Variables and checkpoints are as before this step.", "Go on with --resume; " + _REMEDY
        )

    def _cause(self) -> str:
        """Where the first wrong number arose, as text; the same on every rank."""
        s, step, number = self._settings, self._step, self._step.step_number - 1
        fetches = {"loss": self._built.loss, "finite": self._built.finite}
        program = lower(
            self._built.graph,
            step.mesh.shape,
            Layout(self._layout),
            fetches,
            [],
            Layout(s.mesh.storage or None),
            s.train.seed,
        )
        needed, free = needed_bytes(program), free_memory()
        fits = needed * _ranks_here(step.mesh) < free
        if all(gathered(step.mesh, fits)):
            found = first_wrong(step, program, number)
            if found is not None:
                return str(found)
        found = first_wrong(step, None, number)
        if found is not None:
            return f"{found} (looked for in the optimised program)"
        return "it did not happen again when the step was repeated: a rank may have computed wrong"

    def before_save(self, number: int) -> None:
        """Refuses to save variables that are not finite, or whose replicas differ.  Collective.

        Args:
            number: Steps done.

        Raises:
            TrainingError: The same on every rank.
        """
        self._compare_replicas(number)
        if self._built.finite is not None:
            self._check_variables()

    def _compare_replicas(self, number: int) -> None:
        found = compared(self._step.variables, self._settings.guard.replicas == "repair", self._say)
        if found:
            raise TrainingError(
                f"after step {number} ranks that should hold equal numbers do not: {found}.",
                "Go on from the last checkpoint with --resume; if it happens again on one host, its"
                " memory is damaged. guard.replicas=repair copies what most ranks hold.",
            )

    def _check_variables(self) -> None:
        store, mine = self._step.variables, ""
        for name, blocks in store.blocks.items():
            for rank, block in blocks.items():
                if not mine and not _finite(block):
                    at = np.argwhere(~np.isfinite(block.astype(np.float64)))[0]
                    t = store.types[name].type
                    ranges = t.block(store.mesh.shape, store.mesh.shape.coordinates(rank))
                    index = ", ".join(
                        f"{d.name}={begin + int(k)}" for d, (begin, _), k in zip(t.shape, ranges, at, strict=True)
                    )
                    value = float(block[tuple(at)])
                    mine = f"variable '{name}' {t} holds {value:g} at [{index}] on rank {rank}"
        problem = next((p for p in gathered(store.mesh, mine) if p), "")
        if problem:
            raise TrainingError(
                f"{problem}: no checkpoint is written, the last one stays.", "Go on from it with --resume."
            )


_REMEDY = (
    "lower the learning rate, warm up longer or set optimizer.clip_norm. If it comes again at once,"
    " go on from an older checkpoint with --resume FOLDER."
)


def _finite(block: np.ndarray) -> bool:
    """Whether a block of floats is finite; others are."""
    if block.dtype.kind != "f" and block.dtype.name != "bfloat16":
        return True
    if block.dtype.name == "bfloat16":
        block = block.astype(np.float32)
    return block.size == 0 or (math.isfinite(block.min()) and math.isfinite(block.max()))


def _ranks_here(mesh: AnyMesh) -> int:
    """Ranks on this host, about; a simulated mesh has all of them here."""
    return -(-mesh.shape.size // mesh.hosts)


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
