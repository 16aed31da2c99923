"""A run and its prediction: what was measured, what was accounted, what was planned; its trace.

Measured is what a clock, the operating system or the network tells; accounted is what the runtime's
own tallies say, which follow from the same formulas as the plan.  Watches the training step from
outside; rank 0 alone prints and writes.
"""

from __future__ import annotations

import functools
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshmpi.errors import ConfigError
from meshmpi.planner.machines import find_machine
from meshmpi.planner.timing import predict_time
from meshmpi.runtime.cores import network_bytes_sent, peak_resident_bytes
from meshmpi.runtime.mesh import Mesh
from meshmpi.runtime.trace import Trace, Tracer, describe_trace, write_trace
from meshmpi.transformer.training.compare import write_facts
from meshmpi.transformer.training.extras import Extras
from meshmpi.transformer.training.settings import Settings

_WARMING = 2  # the first steps touch memory for the first time: their times are left out


class Observer:
    """Watches the steps of a run.

    Args:
        step: The compiled training step.
        settings: Settings of the run; ``trace`` and ``mesh.machine`` are used.
        folder: Folder of the run.
        say: Takes lines, on rank 0 only.
        extras: Does what may fail.

    Raises:
        ConfigError: ``mesh.machine`` names no machine.
    """

    def __init__(self, step: Any, settings: Settings, folder: Path, say: Callable[[str], None], extras: Extras) -> None:
        self._step, self._settings, self._folder, self._say = step, settings, folder, say
        self._extras = extras
        if settings.mesh.machine:  # what a user names must be there
            self._machine = find_machine(settings.mesh.machine, step.mesh.shape)
        else:
            self._machine = extras("description", lambda: find_machine("", step.mesh.shape))
        self._simulated = step.mesh.simulated
        if settings.trace.steps and self._simulated:
            raise ConfigError("a simulated mesh has no time of its own to trace.", "Set trace.steps to 0.")
        self._tracer: Tracer | None = None
        self._seconds: list[float] = []
        self._sent: int | None = None
        self._on_network: int | None = None

    @property
    def fastest(self) -> float | None:
        """Seconds of a step if a rank did nothing but this machine's fastest matrix products.

        None where the machine was not measured.
        """
        return self._extras("share of the peak", self._fastest)

    def _fastest(self) -> float | None:
        if self._machine is None or self._simulated:
            return None
        model, products = self._settings.model, self._machine.products
        rates = products.get(model.activation_dtype or model.dtype) or products["float32"]
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
                f" {self._step.mesh.shape.size}` lines tell the share of its peak, and times are"
                " predicted"
            )

    def write_facts(self, **facts: Any) -> None:
        """Writes what the run is for `meshmpi compare`: these facts, mesh and predicted costs."""
        cost, mesh = self._step.cost, self._step.mesh
        known = {
            "mesh": str(mesh.shape),
            "ranks": mesh.shape.size,
            "simulated": self._simulated,
            "flops": cost.flops,
            "bytes_sent": cost.bytes_sent,
            "memory_bytes": cost.peak_memory,
            **facts,
        }
        self._extras("facts for `meshmpi compare`", lambda: write_facts(self._folder, known))

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
        if len(self._seconds) == _WARMING:
            self._on_network = self._extras("network figures", network_bytes_sent)
        if self._tracer is not None and self._tracer.done:
            found, self._tracer = self._tracer.collect(), None
            if found is not None:
                self._extras("trace", functools.partial(self._write_trace, found))

    def _write_trace(self, found: Trace) -> None:
        path = write_trace(found, self._folder / self._settings.trace.file)
        self._say(describe_trace(found))
        self._say(f"wrote {path}, for https://ui.perfetto.dev or chrome://tracing")

    def report(self) -> None:
        """Says what was measured and accounted, and what was predicted.  Collective."""
        if self._simulated or not self._seconds:
            return
        mesh, mine = self._step.mesh, self._extras("report", self._of_this_rank)
        gather = functools.partial(mesh.comm.gather, mine, root=0)
        found = mesh.outside("gather", gather, "root 0")()
        known = [r for r in found or () if r is not None]
        if known:
            self._extras("report", lambda: self._tell(known))

    def _of_this_rank(self) -> Report:
        steady = self._seconds[_WARMING:] or self._seconds
        return Report(
            os.uname().nodename,
            statistics.median(steady),
            self._sent or 0,
            self._step.held_bytes,
            peak_resident_bytes(),
            self._network_bytes_a_step(),
        )

    def _network_bytes_a_step(self) -> int | None:
        """Bytes that this host has sent to others in each of the later steps."""
        now = self._extras("network figures", network_bytes_sent)
        steps = len(self._seconds) - _WARMING
        if now is None or self._on_network is None or steps < 1:
            return None
        return (now - self._on_network) // steps

    def _tell(self, found: Sequence[Report]) -> None:
        cost, seconds = self._step.cost, max(r.seconds for r in found)
        parts = [f"{1e3 * seconds:.4g} ms{self._beside_predicted(seconds)}"]
        parts.append(f"{max(r.resident for r in found):,} bytes of resident memory at the peak")
        hosts = {r.host: r.network for r in found if r.network is not None}
        if len({r.host for r in found}) > 1 and hosts:
            parts.append(f"{max(hosts.values()):,} bytes sent by a host, all of its traffic")
        self._say("measured per rank and step: " + ", ".join(parts))
        self._say(
            f"accounted per rank and step: {max(r.sent for r in found):,} bytes sent"
            f" (predicted {cost.bytes_sent:,}), {max(r.held for r in found):,} bytes of memory"
            f" (predicted {cost.peak_memory:,})"
        )

    def _beside_predicted(self, seconds: float) -> str:
        """The prediction of a time in brackets; nothing where there is none."""
        machine = self._machine
        if machine is None:
            return ""
        found = self._extras("prediction", lambda: predict_time(self._step.program, machine))
        if found is None:
            return ""
        return f" (predicted {1e3 * found.seconds:.4g}, {seconds / found.seconds - 1:+.0%})"


class Report(NamedTuple):
    """What one rank has to say of its steps.

    Attributes:
        host: Its name.
        seconds: Time of a step, measured.
        sent: Bytes in one step, accounted.
        held: Bytes of variables, feeds, arena and workspace, accounted.
        resident: Bytes of memory at the process's peak, measured.
        network: Bytes that the host sends in a step, measured; None where it does not tell.
    """

    host: str
    seconds: float
    sent: int
    held: int
    resident: int
    network: int | None


def _bytes(mesh: Mesh) -> int:
    """Bytes that this rank has sent in all its collectives, as accounted."""
    return sum(row[2] for table in mesh.counters.values() for row in table.values())
