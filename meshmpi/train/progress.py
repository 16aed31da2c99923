"""Progress lines and metrics records of a run, by rank 0 alone; the other ranks do nothing here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from meshmpi.train.evaluation import Evaluation
from meshmpi.train.metrics import MetricsWriter
from meshmpi.train.settings import Settings


class Progress:
    """Tells and records what a run does.

    Args:
        settings: Of the run.
        folder: Of the run.
        done: Steps done before; records of later steps are dropped, they will come again.
        first: Whether this is rank 0.
        say: Takes lines.
        tokens: Learnt from in one step.

    Attributes:
        evaluation: The last one.
    """

    def __init__(
        self, settings: Settings, folder: Path, done: int, first: bool, say: Callable[[str], None],
        tokens: float,
    ) -> None:  # fmt: skip
        self.evaluation: Evaluation | None = None
        self._say, self._done = say, done
        self._writer = MetricsWriter(folder, 0, done + 1) if first else None
        self._tokens = tokens
        self._every, self._total = settings.train.log_every, settings.train.steps
        self._since = [0, 0.0, 0.0]  # steps, seconds and seconds communicating since the last line
        self._seconds, self._steps = 0.0, 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def step(
        self, loss: float, rate: float, seconds: float, comm_seconds: float, **reports: float
    ) -> None:
        """Notes one step.

        Args:
            loss: Nats per token.
            rate: Learning rate.
            seconds: Time taken.
            comm_seconds: The part of it spent in collectives.
            reports: Other numbers of the step by name.
        """
        if self._writer is None:
            return
        self._done += 1
        self._writer.write(
            step=self._done, loss=loss, learning_rate=rate, seconds=seconds,
            comm_seconds=comm_seconds, **reports,
        )  # fmt: skip
        self._since = [a + b for a, b in zip(self._since, (1, seconds, comm_seconds), strict=True)]
        self._seconds, self._steps = self._seconds + seconds, self._steps + 1
        if self._done % self._every == 0 or self._done == self._total or self._steps == 1:
            self._tell(loss, rate, reports)

    def _tell(self, loss: float, rate: float, reports: Mapping[str, float]) -> None:
        steps, taken, communicating = self._since
        left = (self._total - self._done) * self._seconds / self._steps
        self._say(
            f"step {self._done:>{len(str(self._total))}}/{self._total}  loss {loss:.4f}"
            f"  rate {rate:.2e}  {steps * self._tokens / taken:,.0f} tokens/s"
            f"  {communicating / taken:.0%} communicating  {_clock(left)} left"
            + "".join(f"  {name} {value:.3f}" for name, value in reports.items())
        )
        self._since = [0, 0.0, 0.0]

    def evaluated(self, found: Evaluation) -> None:
        """Notes an evaluation."""
        self.evaluation = found
        if self._writer is not None:
            self._say(f"held-out loss after step {self._done}: {found}")
            bits = {} if found.bits_per_byte is None else {"bits_per_byte": found.bits_per_byte}
            self._writer.write(
                step=self._done, held_out_loss=found.loss, seconds=found.seconds, **bits,
                held_out_tokens=found.tokens, **found.measures,
            )  # fmt: skip

    def measured(self, measures: Mapping[str, float]) -> None:
        """Notes other numbers of the end of a run, by name."""
        if self._writer is not None and measures:
            self._say(", ".join(f"{name} {value:.4g}" for name, value in measures.items()))
            self._writer.write(step=self._done, **measures)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
