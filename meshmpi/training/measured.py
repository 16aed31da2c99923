"""Compares the time, bytes sent and memory of a run with the prediction; records its trace.

*Measured* values come from a clock, the operating system or the network. *Accounted* values are counted by the
runtime with the formulas of the plan.
"""

from __future__ import annotations

import functools
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshmpi.errors import ConfigError
from meshmpi.planner.machine_file import find_machine
from meshmpi.planner.timing import predict_time
from meshmpi.runtime.compiled import CompiledStep
from meshmpi.runtime.cores import network_bytes_sent, peak_resident_bytes
from meshmpi.runtime.mesh import Mesh
from meshmpi.runtime.trace import Trace, Tracer, describe_trace, write_trace
from meshmpi.training.callback import Callback, Step
from meshmpi.training.compare import FACTS, WARMING
from meshmpi.training.metrics import write_document
from meshmpi.training.progress import Extras
from meshmpi.training.settings import LoopSettings


class Report(NamedTuple):
    """What one rank reports of its steps."""

    host: str
    seconds: float  # of a step, measured
    sent: int  # bytes in one step, accounted
    held: int  # bytes of variables, feeds, arena and workspace, accounted
    resident: int  # bytes of memory at the process's peak, measured
    network: int | None  # bytes that the host sends in a step, measured, if known


class Measured(Callback):
    """Measures the steps of a run, records a trace, and reports; rank 0 alone prints and writes.

    Args:
        facts: Written for `meshmpi compare` together with mesh and predicted costs.
        machine: Name or file of the machine to predict times for; empty: this one, if it was measured.
        dtype: Of most products.
    """

    def __init__(
        self,
        step: CompiledStep,
        settings: LoopSettings,
        folder: Path,
        say: Callable[[str], None],
        extras: Extras,
        facts: Mapping[str, Any],
        machine: str = "",
        dtype: str = "float32",
    ) -> None:
        self._step, self._settings, self._folder, self._say = step, settings, folder, say
        self._extras, self._facts = extras, facts
        self._dtype, find = dtype, functools.partial(find_machine, machine, step.mesh.shape)
        # What a user names must be there.
        self._machine = find() if machine else extras("description", find)
        self._simulated = step.mesh.simulated
        if settings.trace.steps and self._simulated:
            raise ConfigError("a simulated mesh cannot be traced.", "Set trace.steps to 0.")
        self._tracer: Tracer | None = None
        self._before = 0
        self._seconds: list[float] = []
        self._sent: int | None = None
        self._on_network: int | None = None

    @property
    def fastest(self) -> float | None:
        """Seconds of a step if a rank did only this machine's fastest products; None where it was not measured."""
        return self._extras("share of the peak", self._fastest)

    def _fastest(self) -> float | None:
        if self._machine is None or self._simulated:
            return None
        products = self._machine.products
        rates = products.get(self._dtype) or products["float32"]
        return self._step.cost.flops / max(rates.rates.values())

    def introduce(self) -> None:
        """Says what is wrong with the description of this machine, or how to make one."""
        if self._machine is not None and self._machine.disturbed:
            self._say(
                f"this machine was busy when it was calibrated: {self._machine.disturbed};"
                " predicted times may be too long"
            )
        if self._machine is None and not self._simulated:
            self._say(
                "this machine was not measured: after `meshmpi calibrate --ranks"
                f" {self._step.mesh.shape.size}` the lines show the share of its peak"
                " and predicted times"
            )

    def on_begin(self, done: int, last: Mapping[str, float]) -> None:
        self._before = done
        cost, mesh = self._step.cost, self._step.mesh
        known = {
            "mesh": str(mesh.shape),
            "ranks": mesh.shape.size,
            "simulated": self._simulated,
            "flops": cost.flops,
            "bytes_sent": cost.bytes_sent,
            "memory_bytes": cost.peak_memory,
            **self._facts,
        }
        if mesh.rank == 0:
            self._extras("facts for `meshmpi compare`", lambda: write_document(self._folder / FACTS, known))

    def before_step(self, number: int) -> None:
        """Collective where a trace begins."""
        trace, made = self._settings.trace, number - 1 - self._before
        last = self._settings.train.steps - self._before
        if trace.steps and made == min(trace.start, max(0, last - trace.steps)):
            self._tracer = Tracer(self._step, min(trace.steps, last - made))
        if self._sent is None and isinstance(self._step.mesh, Mesh):
            self._sent = -_bytes(self._step.mesh)

    def on_step(self, step: Step) -> None:
        """Collective where a trace ends."""
        self._seconds.append(step.seconds)
        if self._sent is not None and len(self._seconds) == 1 and isinstance(self._step.mesh, Mesh):
            self._sent += _bytes(self._step.mesh)
        if len(self._seconds) == WARMING:
            self._on_network = self._extras("network figures", network_bytes_sent)
        if self._tracer is not None and self._tracer.done:
            found, self._tracer = self._tracer.collect(), None
            if found is not None:
                self._extras("trace", functools.partial(self._write_trace, found))

    def _write_trace(self, found: Trace) -> None:
        path = write_trace(found, self._folder / self._settings.trace.file)
        self._say(describe_trace(found))
        self._say(f"wrote {path}, for https://ui.perfetto.dev or chrome://tracing")

    def on_trained(self) -> None:
        """Reports what was measured, accounted and predicted.  Collective."""
        mesh = self._step.mesh
        if mesh.comm is None or not self._seconds:
            return
        mine = self._extras("report", self._of_this_rank)
        found = mesh.outside("gather", functools.partial(mesh.comm.gather, mine, root=0), "root 0")()
        known = [r for r in found or () if r is not None]
        if known:
            self._extras("report", lambda: self._report(known))

    def _of_this_rank(self) -> Report:
        host, typical = os.uname().nodename, statistics.median(self._seconds[WARMING:] or self._seconds)
        return Report(
            host, typical, self._sent or 0, self._step.held_bytes, peak_resident_bytes(), self._network_bytes_a_step()
        )

    def _network_bytes_a_step(self) -> int | None:
        """Bytes that this host has sent to others in each of the later steps."""
        now, steps = self._extras("network figures", network_bytes_sent), len(self._seconds) - WARMING
        if now is None or self._on_network is None or steps < 1:
            return None
        return (now - self._on_network) // steps

    def _report(self, found: Sequence[Report]) -> None:
        cost, seconds = self._step.cost, max(r.seconds for r in found)
        parts = [f"{1e3 * seconds:.4g} ms{self._predicted(seconds)}"]
        parts.append(f"{max(r.resident for r in found):,} bytes of resident memory at the peak")
        sent = [r.network for r in found if r.network is not None]
        if len({r.host for r in found}) > 1 and sent:
            parts.append(f"{max(sent):,} bytes sent by a host, all of its traffic")
        self._say("measured per rank and step: " + ", ".join(parts))
        self._say(
            f"accounted per rank and step: {max(r.sent for r in found):,} bytes sent"
            f" (predicted {cost.bytes_sent:,}), {max(r.held for r in found):,} bytes of memory"
            f" (predicted {cost.peak_memory:,})"
        )

    def _predicted(self, seconds: float) -> str:
        """The prediction of a time in parentheses; nothing where there is none."""
        machine = self._machine
        if machine is None:
            return ""
        found = self._extras("prediction", lambda: predict_time(self._step.program, machine))
        return "" if found is None else f" (predicted {1e3 * found.seconds:.4g}, {seconds / found.seconds - 1:+.0%})"


def _bytes(mesh: Mesh) -> int:
    """Bytes that this rank has sent in all its collectives, as accounted."""
    return sum(row[2] for table in mesh.counters.values() for row in table.values())
