"""What a trace says: a file for Chrome's or Perfetto's viewer, and tables in words.

Works on the events that `trace.Tracer` collected; needs neither MPI nor the ranks.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from meshmpi.runtime.trace import POLL, Call, Trace, waits

LOCAL, TALK, BACKGROUND = 0, 1, 2
"""Tracks of a rank in the viewer."""
_TRACKS = {LOCAL: "compute", TALK: "collectives", BACKGROUND: "in the background"}
_COLORS = {"wait": "terrible", "transfer": "thread_state_runnable"}  # names of Chrome's palette
_MICROSECONDS = 1e6


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
        waiting = _event("wait for others", rank, TALK, begun, begun + wait, about)
        yield {**waiting, "cname": _COLORS["wait"]}
    name = _communication(call)
    yield {**_event(name, rank, TALK, begun + wait, ended, about), "cname": _COLORS["transfer"]}
    if call.ends >= 0:
        started = float(row[call.ends])
        yield _event(f"all_reduce over {'+'.join(call.axes)}", rank, BACKGROUND, started, ended, about)


def _communication(call: Call) -> str:
    if call.kind == POLL:
        return "work on reductions in the background"
    return f"{call.kind} over {'+'.join(call.axes)}"


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


# ---- tables ----------------------------------------------------------------------------------


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
