"""Multiplies two matrices in 1-D, 2-D and 3-D partitionings and compares what each sends.

python -m apps.matmul                                           8 simulated ranks, 2 x 2 x 2
python -m meshmpi.launch -n 8 -m apps.matmul            8 real ones
python -m apps.matmul --mesh "rows:2;cols:3" --i 7 --j 9 --k 11
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import meshmpi as mm
from apps.matmul.formulas import Sizes, Volume, partitionings
from apps.matmul.measure import Measurement, measure
from meshmpi.runtime.world import world_size

TOLERANCE = {"float64": 1e-13, "float32": 1e-5}
"""Largest difference allowed, relative to the largest element: sums are rounded in another order."""


def volume_text(v: Volume, layout: mm.Layout, mesh: mm.MeshShape) -> str:
    """One product: where its matrix is replicated, and its volume in symbols and numbers."""
    counts = {d: mesh.count(layout.axes(d)) for d in "ijk"}
    symbols = " ".join(d if counts[d] == 1 else f"{d}/{counts[d]}" for d in v.product.dims)
    name = f"{v.product.name} [{', '.join(v.product.dims)}]"
    if not v.over:
        return f"  {name:12} in one place: nothing is sent"
    return (
        f"  {name:12} replicated over {'+'.join(v.over)}: all_reduce of {symbols} ="
        f" {v.elements:,} elements, 2 ({v.ranks} - 1) / {v.ranks} of them sent"
    )


def comparison_text(m: Measurement) -> str:
    """Formula, prediction and account of each quantity."""
    lines = [f"  {'per rank and step':50}{'formula':>12}{'predicted':>12}{'accounted':>12}"]
    for line in m.lines:
        verdict = "" if line.agrees else "   DIFFERS"
        lines.append(f"  {line.name:50}{line.formula:>12,}{line.predicted:>12,}{line.counted:>12,}{verdict}")
    return "\n".join(lines)


def summary_text(results: dict[str, Measurement]) -> str:
    """Bytes of the forward product, of both gradients, and of all, by partitioning."""
    lines = [f"{'bytes sent per rank':22}{'C':>12}{'dA':>12}{'dB':>12}{'all':>12}"]
    for name, m in results.items():
        sent = [v.bytes_sent for v in m.formulas.volumes]
        lines.append(f"{name:22}" + "".join(f"{n:>12,}" for n in [*sent, sum(sent)]))
    return "\n".join(lines)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m apps.matmul", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name, size in Sizes()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"elements (default {size})")
    parser.add_argument("--mesh", default="rows:2;cols:2;planes:2", help="(default %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="times to multiply (default 2)")
    parser.add_argument("--dtype", default="float64", choices=tuple(TOLERANCE))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; 0 when everything agrees and all results are NumPy's."""
    options = parsed(arguments)
    sizes = Sizes(options.i, options.j, options.k)
    real = world_size() > 1
    shape = mm.MeshShape(options.mesh)
    make: Any = mm.Mesh if real else mm.SimulatedMesh
    results, rank = {}, 0
    for name, layout in partitionings(shape):
        mesh = make(shape)
        results[name] = measure(sizes, mesh, layout, steps=options.steps, dtype=options.dtype)
        rank = mesh.rank
    error = max(m.error for m in results.values())
    agree = all(line.agrees for m in results.values() for line in m.lines)
    right = error <= TOLERANCE[options.dtype]
    if rank != 0:
        return 0  # rank 0 has the largest blocks, which formulas and predictions are about
    kind = "real" if real else "simulated"
    print(f"{sizes}, mesh {shape}: {shape.size} {kind} ranks, {options.dtype}\n")
    for name, m in results.items():
        print(f"{name}: '{m.layout}'")
        print(*(volume_text(v, m.layout, shape) for v in m.formulas.volumes), sep="\n")
        print(comparison_text(m), end="\n\n")
    print(summary_text(results), end="\n\n")
    print("Formulas, predictions and accounts", "agree exactly." if agree else "DIFFER.")
    print(f"C, dA and dB differ from NumPy's by at most {error:.1e} of the largest element.")
    return 0 if agree and right else 1


if __name__ == "__main__":
    sys.exit(main())
