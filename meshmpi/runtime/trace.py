"""When each instruction of some steps began and ended, on every rank, by one clock.

A tracer stands in for the executor's loop while it records: one look at the clock per instruction
into memory that is there already.  Without one nothing is added to a step.  Clocks of ranks are
compared before and after by messages there and back; what they differ by is removed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshmpi.dims import MeshShape
from meshmpi.errors import ConfigError
from meshmpi.ir.flops import local_flops
from meshmpi.ir.kinds import COLLECTIVES, KINDS, Collective, Wait
from meshmpi.ir.program import Instruction, Program
from meshmpi.runtime.mesh_protocol import AnyMesh

_ROUND_TRIPS = 20  # to compare two clocks; the quickest one counts
_TAG = 7001


POLL = "advance"
"""Kind of the calls that carry out no instruction: they let MPI work on what runs in the background."""


class Call(NamedTuple):
    """What an event of a trace is about; the same on every rank.

    Attributes:
        kind: The instruction's kind, or `POLL`.
        axes: Mesh axes of a collective, else empty.
        name: Tensor that it makes.
        line: ``file:line`` of the user's code.
        bytes_sent: By the rank with the largest blocks.
        flops: FLOP on the rank with the largest blocks.
        ends: For a `wait`, the number of the call that started the reduction; else -1.
    """

    kind: str
    axes: tuple[str, ...]
    name: str
    line: str
    bytes_sent: int
    flops: int
    ends: int = -1

    @property
    def communicates(self) -> bool:
        return self.kind == POLL or KINDS[self.kind].traits.meets_ranks


class Trace(NamedTuple):
    """Events of all ranks, on rank 0.

    Attributes:
        mesh: Names and sizes of the axes.
        calls: What is called in a step, in order.
        times: float64 [ranks, steps, calls + 1], seconds of rank 0's clock: when each call began,
            and when the last one ended.
        first_step: Number of the first step recorded.
    """

    mesh: MeshShape
    calls: tuple[Call, ...]
    times: np.ndarray
    first_step: int


class Tracer:
    """Records steps of a compiled step on this rank.  Collective, as is every step.

    Args:
        step: A `CompiledStep` on a Mesh.
        steps: The most steps to record; later ones run without a tracer.

    Raises:
        ConfigError: The step runs on a simulated mesh, whose ranks take turns.
    """

    def __init__(self, step: Any, steps: int = 5):
        if steps < 1:
            raise ConfigError(f"a trace of {steps} steps.", "Give 1 or more.")
        if step.mesh.simulated:
            raise ConfigError(
                "a simulated mesh has no time of its own: one process plays all ranks.",
                "Trace on a mm.Mesh, under mpirun or of one rank.",
            )
        self.mesh, self._executor = step.mesh, step.executor
        bound = self._executor.calls
        self._calls = [call for call, _ in bound]
        self._about = _described(step.program, [i for _, i in bound])
        self._talks = np.array([c.communicates for c in self._about], bool)
        self._times = np.zeros((steps, len(bound) + 1))
        self.recorded, self.first_step = 0, step.step_number
        self._clocks = [_compared_clocks(self.mesh)]
        self._executor.tracer = self

    def run(self) -> float:
        """One step; returns its seconds in collectives.  Called by the executor."""
        clock = time.perf_counter
        row = self._times[self.recorded]
        begun = [0.0] * len(row)  # a list takes a number faster than an array
        k = 0
        for call in self._calls:
            begun[k] = clock()
            call()
            k += 1
        begun[k] = clock()
        row[:] = begun
        self.recorded += 1
        if self.recorded == len(self._times):
            self._executor.tracer = None
        return float(np.diff(row)[self._talks].sum())

    @property
    def done(self) -> bool:
        """Whether all steps have been recorded."""
        return self.recorded == len(self._times)

    def collect(self) -> Trace | None:
        """Ends the recording and brings all ranks' events to rank 0.  Collective.

        Returns:
            The trace on rank 0, None on others.
        """
        self._executor.tracer = None
        self._clocks.append(_compared_clocks(self.mesh))
        own = _aligned(self._times[: self.recorded], *self._clocks)
        gather = functools.partial(self.mesh.comm.gather, own, root=0)
        gathered = self.mesh.outside("trace", gather, "root 0")()
        if gathered is None:
            return None
        times = np.stack(gathered)
        return Trace(self.mesh.shape, tuple(self._about), times, self.first_step)


def _described(program: Program, instructions: Sequence[Instruction | None]) -> list[Call]:
    origin = dict.fromkeys(program.mesh.names, 0)
    busy, out, started = program.busiest(), list[Call](), dict[int, int]()
    for k, i in enumerate(instructions):
        if i is None:
            out.append(Call(POLL, (), "", "", 0, 0))
            continue
        axes, sent = (), 0
        if isinstance(i.attrs, Collective):
            axes, sent = i.attrs.axes, program.most_bytes_sent(i, busy)
        ends = -1
        if i.in_background:
            started[i.outputs[0]] = k
        elif isinstance(i.attrs, Wait):
            ends = started[i.inputs[0]]
            axes, sent = out[ends].axes, out[ends].bytes_sent
        line = f"{i.source.file}:{i.source.line}" if i.source.file else ""
        flops = local_flops(i, program, origin)
        out.append(Call(i.kind, axes, i.source.name, line, sent, flops, ends))
    return out


def _compared_clocks(mesh: AnyMesh) -> tuple[float, float]:
    """(Own time now, what to add to it for rank 0's).  Collective."""
    return mesh.outside("trace", functools.partial(_clock_offset, mesh.comm))()


def _clock_offset(comm: Any) -> tuple[float, float]:
    clock = time.perf_counter
    mark, answer = np.zeros(1), np.zeros(1)
    found = (clock(), 0.0)
    comm.Barrier()
    if comm.rank == 0:
        for other in range(1, comm.size):
            for _ in range(_ROUND_TRIPS):
                comm.Recv(mark, other, _TAG)
                answer[0] = clock()
                comm.Send(answer, other, _TAG)
    else:
        quickest = float("inf")
        for _ in range(_ROUND_TRIPS):
            began = clock()
            comm.Send(mark, 0, _TAG)
            comm.Recv(answer, 0, _TAG)
            ended = clock()
            if ended - began < quickest:
                quickest = ended - began
                middle = (began + ended) / 2
                found = (middle, float(answer[0]) - middle)
    comm.Barrier()
    return found


def _aligned(times: np.ndarray, before: tuple[float, float], after: tuple[float, float]) -> np.ndarray:
    """Times by rank 0's clock, taking the drift between two comparisons as even."""
    (t0, d0), (t1, d1) = before, after
    drift = (d1 - d0) / (t1 - t0) if t1 > t0 else 0.0
    return times + d0 + drift * (times - t0)


def waits(trace: Trace) -> Mapping[int, np.ndarray]:
    """Call -> seconds [ranks, steps] that each rank waited for the others of its group.

    A collective cannot begin before its last rank has arrived: up to then ranks wait, from then on
    data travel.  Ends of reductions in the background have no such moment.
    """
    out: dict[int, np.ndarray] = {}
    for k, call in enumerate(trace.calls):
        if call.kind not in COLLECTIVES or call.ends >= 0:
            continue
        begun, ended = trace.times[:, :, k], trace.times[:, :, k + 1]
        last = np.empty_like(begun)
        for group in trace.mesh.groups(call.axes):
            last[list(group)] = begun[list(group)].max(axis=0)
        out[k] = np.clip(last - begun, 0.0, ended - begun)
    return out
