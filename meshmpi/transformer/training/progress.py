"""Progress lines and metrics records of a run.

Every rank writes its own times; rank 0 alone prints, and records what all ranks know.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.transformer.training.evaluation import Evaluation
from meshmpi.transformer.training.extras import Extras
from meshmpi.transformer.training.live import LiveLine
from meshmpi.transformer.training.metrics import MetricsWriter, drop_ranks, read_metrics
from meshmpi.transformer.training.settings import Settings
from meshmpi.transformer.training.tensorboard import EventWriter

_FLUSH_SECONDS = 1.0  # of ranks but 0, whose files nobody watches: one write for many steps


class Progress:
    """Prints and records what a run does.

    Args:
        settings: Settings of the run.
        folder: Folder of the run.
        done: Steps done before; records of later steps are dropped, they will come again.
        mesh: Mesh of the run; only its rank and its size are used.
        live: Prints the lines, and draws the moving one.
        tokens: Tokens that one step learns from.
        extras: Does what may fail: TensorBoard's files.
        fastest: Seconds of one step if this machine did nothing but its fastest matrix products;
            None: not known.

    Attributes:
        evaluation: The last one.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        done: int,
        mesh: AnyMesh,
        live: LiveLine,
        tokens: float,
        extras: Extras,
        fastest: float | None = None,
    ) -> None:
        self.evaluation: Evaluation | None = None
        self._live, self._done, self._first = live, done, mesh.rank == 0
        self._writer = MetricsWriter(folder, mesh.rank, done + 1, 0.0 if self._first else _FLUSH_SECONDS, live.say)
        self._events: EventWriter | None = None
        self._extras = extras
        if self._first:
            drop_ranks(folder, mesh.shape.size if not mesh.simulated else 1, done + 1, live.say)
            if settings.train.tensorboard:
                self._events = extras("TensorBoard", lambda: EventWriter(folder, done + 1))
        self._tokens, self._fastest = tokens, fastest
        self._every, self._total = settings.train.log_every, settings.train.steps
        self._since = [0, 0.0, 0.0]  # steps, seconds and seconds communicating since the last line
        self._seconds, self._steps = 0.0, 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._live.clear()
        self._writer.close()
        if self._events is not None:
            self._extras("TensorBoard", self._events.close)

    def step(self, loss: float, rate: float, seconds: float, comm_seconds: float, **reports: float) -> None:
        """Notes one step.

        Args:
            loss: Nats per token.
            rate: Learning rate.
            seconds: Time taken.
            comm_seconds: The part of it spent in collectives.
            reports: Other numbers of the step by name.
        """
        self._done += 1
        times = {"seconds": seconds, "comm_seconds": comm_seconds, "compute_seconds": seconds - comm_seconds}
        if not self._first:
            self._writer.write(step=self._done, **times)
            return
        self._record(loss=loss, learning_rate=rate, **times, **reports)
        self._since = [a + b for a, b in zip(self._since, (1, seconds, comm_seconds), strict=True)]
        self._seconds, self._steps = self._seconds + seconds, self._steps + 1
        if self._done % self._every == 0 or self._done == self._total or self._steps == 1:
            self._tell(loss, rate, reports)
        elif self._live.active:
            speed = self._tokens * self._steps / self._seconds
            self._live.show(
                self._done, self._total, f"loss {loss:.4f}  {speed:,.0f} tokens/s  {_clock(self._left())} left"
            )

    def complete(self, values: Mapping[str, float]) -> None:
        """Records the step before, unless the file has it: a rank that was lost may have owed it.

        Args:
            values: Loss, learning rate and other numbers of that step; empty: not known.
        """
        if values and not any(r.get("step") == self._done and "loss" in r for r in read_metrics(self._writer.path)):
            self._record(**values)

    def _record(self, **values: Any) -> None:
        self._writer.write(step=self._done, **values)
        if self._events is not None:
            self._extras("TensorBoard", partial(self._events.write, self._done, values))

    def _left(self) -> float:
        """Seconds to the end of the training, without evaluations and saves."""
        return (self._total - self._done) * self._seconds / self._steps

    def _tell(self, loss: float, rate: float, reports: Mapping[str, float]) -> None:
        steps, taken, communicating = self._since
        peak = "" if self._fastest is None else f"  {steps * self._fastest / taken:.0%} of peak"
        self._live.say(
            f"step {self._done:>{len(str(self._total))}}/{self._total}  loss {loss:.4f}"
            f"  rate {rate:.2e}  {steps * self._tokens / taken:,.0f} tokens/s{peak}"
            f"  {communicating / taken:.0%} communicating  {_clock(self._left())} left"
            + "".join(f"  {name} {value:.3f}" for name, value in reports.items())
        )
        self._since = [0, 0.0, 0.0]

    def flush(self) -> None:
        """Before a save: a run that goes on from it has the records of all steps before."""
        self._writer.flush()

    def evaluated(self, found: Evaluation) -> None:
        """Notes an evaluation."""
        self.evaluation = found
        if self._first:
            self._live.say(f"held-out loss after step {self._done}: {found}")
            bits = {} if found.bits_per_byte is None else {"bits_per_byte": found.bits_per_byte}
            self._record(
                held_out_loss=found.loss, seconds=found.seconds, **bits, held_out_tokens=found.tokens, **found.measures
            )

    def measured(self, measures: Mapping[str, float]) -> None:
        """Notes other numbers of the end of a run, by name."""
        if self._first and measures:
            self._live.say(", ".join(f"{name} {value:.4g}" for name, value in measures.items()))
            self._record(**measures)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
