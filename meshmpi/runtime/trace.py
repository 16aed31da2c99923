"""Records when each instruction of some steps began and ended, on every rank, on one clock; files and tables of it.

A tracer replaces the executor's loop while it records, and reads the clock once per instruction. The clocks of ranks
are compared before and after by round trips; their differences are removed.
"""

from __future__ import annotations

import functools
import gzip
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshmpi.dims import MeshShape
from meshmpi.errors import ConfigError
from meshmpi.files import plain
from meshmpi.ir.flops import local_flops
from meshmpi.ir.kinds import COLLECTIVES, KINDS, Collective, Wait
from meshmpi.ir.program import Instruction, Program
from meshmpi.runtime.mesh_protocol import AnyMesh

if TYPE_CHECKING:
    from mpi4py import MPI

_ROUND_TRIPS = 20  # to compare two clocks; the quickest one counts
_TAG = 7001
_LONGEST = 1e6  # seconds of a call that a file may tell


POLL = "advance"
"""Kind of the calls that carry out no instruction: they let MPI work on what runs in the background."""


class Call(NamedTuple):
    """What an event of a trace is about; the same on every rank."""

    kind: str  # the instruction's kind, or `POLL`
    axes: tuple[str, ...]  # mesh axes of a collective, else empty
    name: str  # tensor that it makes
    line: str  # ``file:line`` of the user's code
    bytes_sent: int  # by the rank with the largest blocks
    flops: int  # FLOP on the rank with the largest blocks
    ends: int = -1  # for a `wait`, the number of the call that started the reduction; else -1

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
    """Records steps of a compiled step on this rank.  Collective, as is every step."""

    def __init__(self, step: Any, steps: int = 5):
        if steps < 1:
            raise ConfigError(f"the number of steps to trace is {steps}.", "Give 1 or more.")
        if step.mesh.simulated:
            raise ConfigError(
                "a simulated mesh cannot be traced: one process runs all ranks.",
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
    out, started = list[Call](), dict[int, int]()
    for k, i in enumerate(instructions):
        if i is None:
            out.append(Call(POLL, (), "", "", 0, 0))
            continue
        axes, sent = (), 0
        if isinstance(i.attrs, Collective):
            axes, sent = i.attrs.axes, program.bytes_sent(i)
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
    assert mesh.comm is not None  # refused for simulated meshes
    return mesh.outside("trace", functools.partial(_clock_offset, mesh.comm))()


def _clock_offset(comm: MPI.Intracomm) -> tuple[float, float]:
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


# ---- a file for Chrome's or Perfetto's viewer, and tables in words ------------------------------

LOCAL, TALK, BACKGROUND = 0, 1, 2
"""Tracks of a rank in the viewer."""
_TRACKS = {LOCAL: "compute", TALK: "collectives", BACKGROUND: "in the background"}
_COLORS = {"wait": "terrible", "transfer": "thread_state_runnable"}  # names of Chrome's palette
_MICROSECONDS = 1e6
_PART = 1 << 20
_MOST_BYTES = 1 << 27  # of a trace that is read, also once it is decompressed
_WAIT, _POLL_NAME = "wait for others", "work on reductions in the background"


def write_trace(trace: Trace, path: str | Path) -> Path:
    """Writes a trace for ``chrome://tracing`` or https://ui.perfetto.dev; ``.gz`` compresses.

    Each rank is a process with a track for local work and one for collectives, in which waiting for
    other ranks is apart from the transfer; arguments of an event tell tensor, line, bytes and axes.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"traceEvents": list(_events(trace)), "displayTimeUnit": "ms"})
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    ranks, steps, _ = trace.times.shape
    zero, waited = trace.times.min() if trace.times.size else 0.0, waits(trace)
    background = any(c.ends >= 0 for c in trace.calls)
    for rank in range(ranks):
        at = ", ".join(f"{a} {n}" for a, n in trace.mesh.coordinates(rank).items())
        yield _name("process_name", rank, 0, f"rank {rank}" + (f" ({at})" if at else ""))
        for track, name in _TRACKS.items():
            if track != BACKGROUND or background:
                yield _name("thread_name", rank, track, name)
        for step in range(steps):
            row = trace.times[rank, step] - zero
            for k, call in enumerate(trace.calls):
                wait = float(waited[k][rank, step]) if k in waited else 0.0
                yield from _of_call(trace, call, k, rank, row, wait, trace.first_step + step)


def _of_call(
    trace: Trace, call: Call, k: int, rank: int, row: np.ndarray, wait: float, step: int
) -> Iterator[dict[str, Any]]:
    begun, ended = float(row[k]), float(row[k + 1])
    about = {"step": step, "tensor": call.name, "line": call.line}
    if not call.communicates:
        if call.flops:
            about["GFLOP/s"] = round(call.flops / max(ended - begun, 1e-9) / 1e9, 2)
        yield _event(call.kind, rank, LOCAL, begun, ended, about)
        return
    about |= {"axes": "+".join(call.axes), "bytes sent": call.bytes_sent}
    if wait > 0.0:
        waiting = _event(_WAIT, rank, TALK, begun, begun + wait, about)
        yield {**waiting, "cname": _COLORS["wait"]}
    name = _communication(call)
    yield {**_event(name, rank, TALK, begun + wait, ended, about), "cname": _COLORS["transfer"]}
    if call.ends >= 0:
        started = float(row[call.ends])
        yield _event(f"all_reduce over {'+'.join(call.axes)}", rank, BACKGROUND, started, ended, about)


def _communication(call: Call) -> str:
    if call.kind == POLL:
        return _POLL_NAME
    return f"{call.kind} over {'+'.join(call.axes)}"


class Recorded(NamedTuple):
    """A call of a recorded step."""

    kind: str  # of the instruction; empty for `POLL`
    name: str  # tensor that it makes
    seconds: float  # mean over steps and ranks
    waited: float  # seconds of them in which it waited for other ranks


def _unpacked(data: bytes) -> bytes:
    """What a gzip file holds; ValueError where that is too much."""
    unpacking, parts = zlib.decompressobj(31), list[bytes]()
    while data and len(parts) * _PART <= _MOST_BYTES:
        parts.append(unpacking.decompress(data, _PART))
        data = unpacking.unconsumed_tail
    if data:
        raise ValueError(f"it unpacks to more than {_MOST_BYTES:,} bytes; record fewer steps")
    if not unpacking.eof:
        raise ValueError("it ends early")
    return b"".join(parts)


def read_trace(path: str | Path) -> tuple[list[Recorded], int, int]:
    """The calls of a step from a file of `write_trace`, in order; the numbers of its steps and ranks.

    Raises:
        ConfigError: The file cannot be read, or is not such a file.
    """
    try:
        data = plain.contents(path, _MOST_BYTES)
        if data[:2] == b"\x1f\x8b":
            data = _unpacked(data)
        events = plain.parse_json(data)["traceEvents"]
        timed = [e for e in events if e["ph"] == "X" and e["tid"] != BACKGROUND]
        calls, waits = dict[tuple[int, str, str], float](), dict[tuple[int, str, str], float]()
        runs = dict[tuple[int, int], None]()
        waited, n, last = 0.0, 0, None
        for e in timed:
            about, seconds = e["args"], float(e["dur"]) / _MICROSECONDS
            if not 0 <= seconds < _LONGEST:
                raise ValueError(f"a call took {seconds} s")
            run = int(e["pid"]), int(about["step"])
            if run != last:
                runs[run] = None
                n, last = 0, run
            if e["name"] == _WAIT:
                waited = seconds
                continue
            kind = "" if e["name"] == _POLL_NAME else str(e["name"]).split(" over ")[0]
            key = (n, kind, str(about["tensor"]))
            calls[key] = calls.get(key, 0.0) + seconds + waited
            waits[key] = waits.get(key, 0.0) + waited
            n, waited = n + 1, 0.0
        if len({k for k, *_ in calls}) < len(calls):
            raise ValueError("its steps or ranks did not make the same calls")
    except (OSError, EOFError, ValueError, KeyError, TypeError, OverflowError, zlib.error) as error:
        raise ConfigError(
            f"'{path}' is not a trace: {getattr(error, 'strerror', None) or error}.",
            "Give the trace.json.gz that `meshmpi train --trace` wrote.",
        ) from error
    if not calls:
        raise ConfigError(f"'{path}' has no steps.", "Record some: `meshmpi train CONFIG --trace`.")
    count = len(runs)
    found = [Recorded(kind, name, s / count, waits[n, kind, name] / count) for (n, kind, name), s in calls.items()]
    return found, len({step for _, step in runs}), len({rank for rank, _ in runs})


def _event(name: str, rank: int, track: int, begun: float, ended: float, about: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "pid": rank,
        "tid": track,
        "args": about,
        "ts": round(begun * _MICROSECONDS, 3),
        "dur": round((ended - begun) * _MICROSECONDS, 3),
    }


def _name(what: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}


def describe_trace(trace: Trace) -> str:
    """Time of a step by kind of instruction and by mesh axes, and the rank that is slow itself.

    Milliseconds are means over steps, and over ranks where no rank is named.
    """
    ranks, steps, _ = trace.times.shape
    if not steps:
        return "no step was recorded"
    taken = np.diff(trace.times, axis=2).mean(axis=1) * 1e3  # [ranks, calls]
    waited = np.zeros_like(taken)
    for k, seconds in waits(trace).items():
        waited[:, k] = seconds.mean(axis=1) * 1e3
    whole = taken.sum(axis=1)
    talks = np.array([c.communicates for c in trace.calls], bool)
    lines = [f"{steps} steps on {ranks} ranks, {whole.mean():.3f} ms each"]
    lines += _by(trace, taken, lambda c: "" if c.communicates else c.kind, "compute", whole.mean())
    lines += _by_axes(trace, taken, waited, whole.mean())
    own = taken[:, ~talks].sum(axis=1)
    lines += _by_rank(trace, own, taken[:, talks].sum(axis=1), waited.sum(axis=1))
    return "\n".join(lines)


def _by(trace: Trace, taken: np.ndarray, key: Callable[[Call], str], title: str, whole: float) -> list[str]:
    table: dict[str, tuple[int, float]] = {}
    for k, call in enumerate(trace.calls):
        if name := key(call):
            count, ms = table.get(name, (0, 0.0))
            table[name] = (count + 1, ms + float(taken[:, k].mean()))
    rows = sorted(table.items(), key=lambda item: -item[1][1])
    return [f"  {title} {name}: {ms:.3f} ms ({ms / whole:.0%}), {n} calls" for name, (n, ms) in rows]


def _by_axes(trace: Trace, taken: np.ndarray, waited: np.ndarray, whole: float) -> list[str]:
    table: dict[str, list[float]] = {}
    for k, call in enumerate(trace.calls):
        if call.communicates:
            row = table.setdefault(_communication(call), [0, 0, 0.0, 0.0])
            row[0] += 1
            row[1] += 0 if call.ends >= 0 else call.bytes_sent
            row[2] += float(taken[:, k].mean() - waited[:, k].mean())
            row[3] += float(waited[:, k].mean())
    return [
        f"  {name}: {transfer:.3f} ms of transfer, {wait:.3f} ms of waiting for others"
        f" ({(transfer + wait) / whole:.0%}), {n:.0f} calls, {sent:,.0f} bytes sent"
        for name, (n, sent, transfer, wait) in sorted(table.items(), key=lambda r: -sum(r[1][2:]))
    ]


def _by_rank(trace: Trace, own: np.ndarray, talking: np.ndarray, waiting: np.ndarray) -> list[str]:
    lines = [
        f"  rank {rank}: {own[rank]:.3f} ms of its own compute,"
        f" {talking[rank] - waiting[rank]:.3f} ms of transfer, {waiting[rank]:.3f} ms of waiting"
        for rank in range(len(own))
    ]
    slowest, middle = straggler(own), float(np.median(own))
    if len(own) > 1:
        lines.append(
            f"  slowest by its own compute: rank {slowest}, {own[slowest] / middle - 1:.1%} above the median rank"
        )
    return lines


def straggler(own: np.ndarray) -> int:
    """The rank with most time in its own compute: the next collective hides it in others' waits."""
    return int(np.argmax(own))
