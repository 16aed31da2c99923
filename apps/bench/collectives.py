"""Collectives of a mesh of two ranks beside plain mpi4py on the same arrays, and gloo.

Bytes are those of the vector that each rank hands in (of the result for all_gather).  Each time is
the median over calls of the slower rank, with a barrier before each call.
"""

from __future__ import annotations

from collections.abc import Mapping

from apps.bench import workers
from apps.bench.bench import Bench
from apps.bench.messages.timing import KINDS, RANKS, SIZES
from apps.bench.tables import Cell, Table
from apps.bench.workers import BenchError


def measure(bench: Bench) -> list[Table]:
    """The table of all kinds and sizes."""
    bench.say("collectives: meshmpi and mpi4py")
    most = str(bench.effort.most_bytes)
    asked = ["--seconds", str(bench.effort.seconds), "--most", most]
    found = workers.on_ranks(RANKS, "messages.mesh_collectives", asked)[0]["microseconds"]
    notes = ["mpi4py works in place where MPI allows it without copying (all_reduce)."]
    gloo: dict[str, dict[str, float]] = {}
    if bench.peers.has("torch"):
        bench.say("collectives: gloo")
        try:
            gloo = workers.group(RANKS, bench.peers.python, "messages.gloo_collectives", asked)[0]["microseconds"]
        except BenchError as error:
            notes.append(f"gloo failed: {' '.join(str(error).split())}")
    else:
        notes.append(f"Left out: gloo: {bench.peers.missing['torch']}")
    columns = ("collective", "bytes", "meshmpi", "mpi4py", "mpi4py in pieces of 16 MB", "gloo", "meshmpi / best mpi4py")
    rows = [
        _row(kind, n, found[kind][str(n)], gloo.get(kind, {}).get(str(n)))
        for kind in KINDS
        for n in SIZES
        if str(n) in found[kind]
    ]
    title = f"Collectives on {RANKS} ranks of this machine, microseconds"
    return [Table("collectives", title, columns, rows, notes)]


def _row(kind: str, n: int, of: Mapping[str, float], gloo: float | None) -> list[Cell]:
    plain = [of[name] for name in ("mpi4py", "pieces") if name in of]
    return [kind, n, of["meshmpi"], of["mpi4py"], of.get("pieces"), gloo, of["meshmpi"] / min(plain)]
