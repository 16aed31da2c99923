"""Collectives as a step calls them, and through MPI, beside plain mpi4py and gloo: on two ranks, and two on a core.

Bytes are those of the vector that each rank hands in (of the result for all_gather).  Each time is
the median over calls of the slower rank, with a barrier before each call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from apps.bench import workers
from apps.bench.bench import Bench
from apps.bench.messages.timing import KINDS, RANKS, SIZES
from apps.bench.tables import Cell, Table
from apps.bench.workers import BenchError


def measure(bench: Bench) -> list[Table]:
    """The table of all kinds and sizes."""
    most = str(bench.effort.most_bytes)
    asked = ["--seconds", str(bench.effort.seconds), "--most", most]
    notes = [
        "mpi4py works in place where MPI allows it without copying (all_reduce); in pieces: of 16 MB.",
        "a copy: both ranks copy as many bytes from one array to another with NumPy.",
    ]
    gloo: dict[str, dict[str, float]] = {}
    if bench.peers.has("torch"):
        bench.say("collectives: gloo")
        try:
            gloo = workers.group(RANKS, bench.peers.python, "messages.gloo_collectives", asked)[0]["microseconds"]
        except BenchError as error:
            notes.append(f"gloo failed: {' '.join(str(error).split())}")
    else:
        notes.append(f"Left out: gloo: {bench.peers.missing['torch']}")
    return [_table(bench, RANKS, asked, gloo, notes), _table(bench, 2 * RANKS, asked, {}, notes[:2])]


def _table(
    bench: Bench, ranks: int, asked: Sequence[str], gloo: Mapping[str, Mapping[str, float]], notes: list[str]
) -> Table:
    bench.say(f"collectives: meshmpi and mpi4py on {ranks} ranks")
    found = workers.on_ranks(ranks, "messages.mesh_collectives", asked)[0]["microseconds"]
    columns = ("collective", "bytes", "meshmpi", "through MPI", "mpi4py", "in pieces", "gloo")
    columns = (*columns, "meshmpi / best mpi4py", "a copy")
    rows = [
        _row(kind, n, found[kind][str(n)], gloo.get(kind, {}).get(str(n)))
        for kind in KINDS
        for n in SIZES
        if str(n) in found[kind]
    ]
    name = "collectives" if ranks == RANKS else f"collectives of {ranks} ranks"
    return Table(name, f"Collectives on {ranks} ranks of this machine, microseconds", columns, rows, notes)


def _row(kind: str, n: int, of: Mapping[str, float], gloo: float | None) -> list[Cell]:
    plain = [of[name] for name in ("mpi4py", "pieces") if name in of]
    cells = of["meshmpi"], of["through MPI"], of["mpi4py"], of.get("pieces"), gloo
    return [kind, n, *cells, of["meshmpi"] / min(plain), of.get("copy")]
