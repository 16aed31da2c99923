"""Progress lines, the progress line of a terminal, and the metrics of every rank.

Every rank writes its own times; only rank 0 prints, and records what all ranks know.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.training.callback import Callback, Evaluation, Step
from meshmpi.training.metrics import EventWriter, MetricsWriter, drop_ranks, plot_losses, read_metrics
from meshmpi.training.settings import LoopSettings

T = TypeVar("T")
_FLUSH_SECONDS = 1.0  # for ranks other than 0, whose files nobody watches
_PERIOD = 0.2  # seconds between two drawings of the moving line
_CLEAR = "\r\x1b[K"
_LONGEST = 300  # characters of a line about a failure


class Extras:
    """Runs what a training can do without, such as a picture; ``say`` takes one line about a failure."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._failed: dict[str, None] = {}

    def __call__(self, what: str, do: Callable[[], T]) -> T | None:
        """The result of ``do``; None where it fails, or where ``what`` has failed before.

        It must not be collective, since it may fail on one rank alone.
        """
        if what in self._failed:
            return None
        try:
            return do()
        except Exception as error:
            self._failed[what] = None
            kind, text = type(error).__name__, " ".join(str(error).split())
            self._say(f"no {what}, the run continues without: {kind}: {text}"[:_LONGEST])
            return None


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal on which a line can be redrawn."""
    try:
        return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    except ValueError:  # closed
        return False


class LiveLine:
    """A moving line at the end of the output of a terminal; none of it gets into a log.

    It is drawn to ``stream`` (stderr) where ``mode`` is "on", or "auto" and that is a terminal.
    """

    def __init__(self, mode: str, say: Callable[[str], None], stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self.active = mode == "on" or (mode == "auto" and is_terminal(self._stream))
        self._say, self._drawn, self._next = say, False, 0.0

    def say(self, line: str) -> None:
        """Prints a line of progress in place of the moving line, which is drawn again later."""
        self.clear()
        self._say(line)

    def show(self, done: int, total: int, text: str) -> None:
        """Draws the line: a bar for ``done`` of ``total`` steps, and ``text`` as far as it fits."""
        now = time.monotonic()
        if self.active and now >= self._next:
            self._next = now + _PERIOD
            self._write(_CLEAR + bar(done, total, text, shutil.get_terminal_size().columns - 1))
            self._drawn = True

    def clear(self) -> None:
        if self._drawn:
            self._write(_CLEAR)
            self._drawn = False

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the terminal has gone: the run goes on without the line
            self.active = self._drawn = False


def bar(done: int, total: int, text: str, width: int) -> str:
    """``12/100 [##......]  12%  text``, at most ``width`` characters."""
    share = done / total if total else 1.0
    head, tail = f"{done}/{total} ", f" {share:4.0%}  {text}"
    cells = max(0, min(30, width - len(head) - len(tail) - 2))
    full = round(share * cells)
    drawn = f"[{'#' * full}{'.' * (cells - full)}]" if cells >= 5 else ""
    return f"{head}{drawn}{tail}"[:width]


class Progress(Callback):
    """Prints and records what a run does.

    Args:
        work: What one step does, and in which unit, such as 8192 "tokens".
        fastest: Seconds of one step if this machine did nothing but its fastest matrix products, if known.
    """

    def __init__(
        self,
        settings: LoopSettings,
        folder: Path,
        mesh: AnyMesh,
        live: LiveLine,
        work: tuple[float, str],
        extras: Extras,
        fastest: float | None = None,
    ) -> None:
        self._settings, self._folder, self._mesh, self._live = settings, folder, mesh, live
        (self._work, self._unit), self._extras, self._fastest = work, extras, fastest
        self._first, self._total = mesh.rank == 0, settings.train.steps
        self._writer: MetricsWriter | None = None
        self._events: EventWriter | None = None
        self._since = [0, 0.0, 0.0]  # steps, seconds and seconds communicating since the last line
        self._done, self._seconds, self._steps = 0, 0.0, 0

    def on_begin(self, done: int, last: Mapping[str, float]) -> None:
        """Opens the files; records of later steps are dropped, since the run writes them again."""
        self._done, folder, say = done, self._folder, self._live.say
        flush_seconds = 0.0 if self._first else _FLUSH_SECONDS
        self._writer = MetricsWriter(folder, self._mesh.rank, done + 1, flush_seconds, say)
        if not self._first:
            return
        drop_ranks(folder, 1 if self._mesh.simulated else self._mesh.shape.size, done + 1, say)
        if self._settings.train.tensorboard:
            self._events = self._extras("TensorBoard", lambda: EventWriter(folder, done + 1))
        # A rank that was lost may not have recorded the last step.
        if last and not any(r.get("step") == done and "loss" in r for r in read_metrics(self._writer.path)):
            self._record(**last)

    def on_step(self, step: Step) -> None:
        self._done = step.number
        compute = step.seconds - step.comm_seconds
        times = {"seconds": step.seconds, "comm_seconds": step.comm_seconds, "compute_seconds": compute}
        if not self._first:
            if self._writer is not None:
                self._writer.write(step=self._done, **times)
            return
        rate = {} if step.learning_rate is None else {"learning_rate": step.learning_rate}
        self._record(loss=step.loss, **rate, **times, **step.reports)
        self._since = [a + b for a, b in zip(self._since, (1, step.seconds, step.comm_seconds), strict=True)]
        self._seconds, self._steps = self._seconds + step.seconds, self._steps + 1
        left = clock((self._total - self._done) * self._seconds / self._steps)
        if self._done % self._settings.train.log_every == 0 or self._done == self._total or self._steps == 1:
            self._say_step(step, left)
        elif self._live.active:
            speed = _speed(self._work * self._steps / self._seconds, self._unit)
            self._live.show(self._done, self._total, f"loss {step.loss:.4f}  {speed}  {left} left")

    def _record(self, **values: Any) -> None:
        if self._writer is not None:
            self._writer.write(step=self._done, **values)
        if self._events is not None:
            self._extras("TensorBoard", partial(self._events.write, self._done, values))

    def _say_step(self, step: Step, left: str) -> None:
        steps, taken, communicating = self._since
        peak = "" if self._fastest is None else f"  {steps * self._fastest / taken:.0%} of peak"
        rate = "" if step.learning_rate is None else f"  rate {step.learning_rate:.2e}"
        self._live.say(
            f"step {self._done:>{len(str(self._total))}}/{self._total}  loss {step.loss:.4f}"
            f"{rate}  {_speed(steps * self._work / taken, self._unit)}{peak}"
            f"  {communicating / taken:.0%} communicating  {left} left"
            + "".join(f"  {name} {value:.3f}" for name, value in step.reports.items())
        )
        self._since = [0, 0.0, 0.0]

    def before_save(self, number: int) -> None:
        """A run that goes on from the checkpoint must find the records of all steps before."""
        if self._writer is not None:
            self._writer.flush()

    def on_evaluate(self, number: int, evaluation: Evaluation) -> None:
        if self._first:
            self._live.say(f"{evaluation.title} after step {number}: {evaluation}")
            self._record(**evaluation.numbers())

    def on_sample(self, measures: Mapping[str, float]) -> None:
        if self._first and measures:
            self._live.say(", ".join(f"{name} {value:.4g}" for name, value in measures.items()))
            self._record(**measures)

    def on_end(self, stopped_by: str) -> None:
        """Closes the files, and draws loss.png unless the run was stopped."""
        self.on_failure(None)
        if self._first and self._settings.train.plot and not stopped_by:
            self._extras("loss curve", self._draw)

    def on_failure(self, error: BaseException | None) -> None:
        self._live.clear()
        if self._writer is not None:
            self._writer.close()
        if self._events is not None:
            self._extras("TensorBoard", self._events.close)

    def _draw(self) -> None:
        s, path = self._settings, self._folder / "loss.png"
        unit = "nats per token" if self._unit == "tokens" else ""
        plot_losses(read_metrics(self._folder), path, title=s.title, baselines=s.baselines, unit=unit)
        self._live.say(f"drew {path}")


def _speed(per_second: float, unit: str) -> str:
    return f"{per_second:,.{0 if per_second >= 100 else 2}f} {unit}/s"


def clock(seconds: float) -> str:
    """Seconds as ``"1:02:03"`` or ``"2:03"``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
