"""Attention forward and backward by length, beside PyTorch's fused attention and jax.jit.

The number of tokens stays the same, so a cost that is linear in the length shows as such.  What the
passes of meshmpi do to attention, with and without, is in `apps.bench.attention`.
"""

from __future__ import annotations

from apps.bench import workers
from apps.bench.bench import Bench
from apps.bench.loops.data import ATTENTION_TOKENS, D_KV, HEADS
from apps.bench.tables import Cell, Table
from apps.bench.workers import BenchError

IMPLEMENTATIONS = {"meshmpi": "meshmpi", "torch": "PyTorch", "jax": "jax.jit"}
LENGTHS = (256, 512, 1024, 2048)
TOLERANCE = 1e-4
"""Relative difference of the size of a result that is put down to rounding."""


def measure(bench: Bench) -> list[Table]:
    """The tables of attention alone and of a layer."""
    toy = bench.effort.points == 1
    notes = bench.left_out("torch", "jax")
    names = [n for n in IMPLEMENTATIONS if n == "meshmpi" or bench.peers.has(n)]
    rows: list[list[Cell]] = []
    for length in (16,) if toy else LENGTHS[: bench.effort.points]:
        row: list[Cell] = [length]
        reference: list[float] = []
        for name in names:
            bench.say(f"attention: {name}, length {length}")
            python = workers.PYTHON if name == "meshmpi" else bench.peers.python
            asked = [name, "--length", str(length), "--seconds", str(bench.effort.seconds)]
            try:
                found = workers.alone(python, "loops.attention_worker", asked)
            except BenchError as error:
                notes.append(f"Failed: {name}: {' '.join(str(error).split())}")
                row += [None, None]
                continue
            row += [1e3 * found["seconds"], found["taken_bytes"] / 1e6]
            reference = reference or found["results"]
            off = max(abs(a / b - 1) for a, b in zip(found["results"], reference, strict=True))
            if not off <= TOLERANCE:
                notes.append(f"**{name} differs at length {length} by {off:.2g}.**")
        rows.append(row)
    columns = ["length", *(c for n in names for c in (f"{IMPLEMENTATIONS[n]}, ms", f"{IMPLEMENTATIONS[n]}, MB taken"))]
    title = f"Causal attention forward and backward, {ATTENTION_TOKENS} tokens, {HEADS} heads of {D_KV}, one core"
    return [Table("attention", title, columns, rows, notes), _layers(bench)]


def _layers(bench: Bench) -> Table:
    """A layer with projections, as `apps.bench.attention` measures it."""
    rows: list[list[Cell]] = []
    for length in (16,) if bench.effort.points == 1 else LENGTHS[: bench.effort.points]:
        bench.say(f"attention: a layer, length {length}")
        asked = ["layer", "--length", str(length)]
        found = workers.alone(workers.PYTHON, "loops.attention_worker", asked)
        (stored, blocked), held = found["seconds"], found["held"]
        rows.append([length, 1e3 * stored, 1e3 * blocked, blocked / stored, *(n / 1e6 for n in held)])
    columns = (
        "length",
        "scores stored, ms",
        "by blocks, ms",
        "by blocks / stored",
        "stored, MB held",
        "by blocks, MB held",
    )
    return Table("attention layer", "A layer of meshmpi, one core", columns, rows)
