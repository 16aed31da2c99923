"""A run beside its prediction: time, bytes and memory as measured and as planned; and its trace.

Watches the training step from outside; what is printed and written is rank 0's.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshmpi.errors import ConfigError
from meshmpi.measuring.machines import find_machine
from meshmpi.planner.timing import predict_time
from meshmpi.runtime.trace import Tracer
from meshmpi.runtime.trace_report import describe_trace, write_trace
from meshmpi.train.compare import write_facts
from meshmpi.train.settings import Settings

_WARMING = 2  # first steps, in which memory is touched for the first time, tell no speed


class Observer:
    """Watches the steps of a run.

    Args:
        step: The compiled training step.
        settings: Of the run; ``trace`` and ``mesh.machine`` are looked at.
        folder: Of the run.
        say: Takes lines, on rank 0 only.

    Raises:
        ConfigError: ``mesh.machine`` names no machine.
    """

    def __init__(
        self, step: Any, settings: Settings, folder: Path, say: Callable[[str], None]
    ) -> None:
        self._step, self._settings, self._folder, self._say = step, settings, folder, say
        self._machine = find_machine(settings.mesh.machine, step.mesh.shape)
        self._simulated = not hasattr(step.mesh, "comm")
        if settings.trace.steps and self._simulated:
            raise ConfigError(
                "a simulated mesh has no time of its own to trace.", "Set trace.steps to 0."
            )
        self._tracer: Tracer | None = None
        self._seconds: list[float] = []
        self._sent: int | None = None

    @property
    def fastest(self) -> float | None:
        """Seconds of a step if a rank did nothing but this machine's fastest matrix products.

        None where the machine was not measured.
        """
        if self._machine is None or self._simulated:
            return None
        model, products = self._settings.model, self._machine.products
        rates = products.get(model.activation_dtype or model.dtype) or products["float32"]
        return self._step.cost.flops / max(rates.rates.values())

    def introduce(self) -> None:
        """Says how to get what needs the description of this machine, where there is none."""
        if self._machine is None and not self._simulated:
            self._say(
                "this machine was not measured: after `meshmpi calibrate --ranks"
                f" {self._step.mesh.shape.size}` lines tell the share of its peak, and times are"
                " predicted"
            )

    def write_facts(self, **facts: Any) -> None:
        """Writes what the run is for `meshmpi compare`: these facts, mesh and predicted costs."""
        cost, mesh = self._step.cost, self._step.mesh
        write_facts(
            self._folder,
            {
                "mesh": str(mesh.shape), "ranks": mesh.shape.size, "simulated": self._simulated,
                "flops": cost.flops, "bytes_sent": cost.bytes_sent,
                "memory_bytes": cost.peak_memory, **facts,
            },
        )  # fmt: skip

    def before(self, number: int, last: int) -> None:
        """Called before each step of the run.  Collective where a trace begins.

        Args:
            number: Steps of this run so far.
            last: Steps that this run will have.
        """
        trace = self._settings.trace
        if trace.steps and number == min(trace.start, max(0, last - trace.steps)):
            self._tracer = Tracer(self._step, min(trace.steps, last - number))
        if self._sent is None and not self._simulated:
            self._sent = -_bytes(self._step.mesh)

    def after(self, seconds: float) -> None:
        """Called after each step.  Collective where a trace ends."""
        self._seconds.append(seconds)
        if self._sent is not None and self._sent <= 0 and len(self._seconds) == 1:
            self._sent += _bytes(self._step.mesh)
        if self._tracer is not None and self._tracer.done:
            found, self._tracer = self._tracer.collect(), None
            if found is not None:
                path = write_trace(found, self._folder / self._settings.trace.file)
                self._say(describe_trace(found))
                self._say(f"wrote {path}, for https://ui.perfetto.dev or chrome://tracing")

    def report(self) -> None:
        """Says what was measured beside what was predicted.  Collective."""
        if self._simulated or not self._seconds:
            return
        mesh, cost = self._step.mesh, self._step.cost
        steady = self._seconds[_WARMING:] or self._seconds
        mine = (statistics.median(steady), self._sent, self._step.held_bytes)
        gather = functools.partial(mesh.comm.gather, mine, root=0)
        found = mesh.outside("gather", gather, "root 0")()
        if found is None:
            return
        seconds, sent, held = (max(column) for column in zip(*found, strict=True))
        parts = [f"{1e3 * seconds:.4g} ms"]
        if self._machine is not None:
            predicted = predict_time(self._step.program, self._machine).seconds
            parts[0] += f" (predicted {1e3 * predicted:.4g}, {seconds / predicted - 1:+.0%})"
        parts.append(f"{sent:,} bytes sent (predicted {cost.bytes_sent:,})")
        parts.append(f"{held:,} bytes of memory (predicted {cost.peak_memory:,})")
        self._say("measured per rank and step: " + ", ".join(parts))


def _bytes(mesh: Any) -> int:
    """Bytes that this rank has sent in all its collectives."""
    return sum(row[2] for table in mesh.counters.values() for row in table.values())
