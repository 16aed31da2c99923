"""Prints Table 1 of the paper with formula, predicted and accounted values, for every layout.

python -m apps.two_layer                                        8 simulated ranks
python -m meshmpi.launch -n 4 -m apps.two_layer         4 real ones
python -m apps.two_layer draw                                   draws the paper's Figures 2 to 5
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import meshmpi as mm
from apps.two_layer.formulas import TABLE_1
from apps.two_layer.measure import Measurement, measure
from apps.two_layer.model import Sizes
from meshmpi.runtime.world import world_size

ILLEGAL = ("batch:all;hidden:all", "io:all;hidden:all", "batch:al", "bach:all")
"""Two dimensions of one tensor on one axis (of h, of w), an unknown axis, an unknown dimension."""


def legal_layouts(ranks: int) -> list[tuple[str, str, str]]:
    """(row of Table 1, mesh, layout) of the layouts that ``ranks`` ranks can be put into."""
    found = [("none", f"all:{ranks}", "")]
    if ranks > 1:
        found += [("data", f"all:{ranks}", "batch:all"), ("model", f"all:{ranks}", "hidden:all")]
    if (two := _near_equal(ranks, 2)) is not None:
        found.append(("2-D", "rows:{};cols:{}".format(*two), "batch:rows;hidden:cols"))
    if (three := _near_equal(ranks, 3)) is not None:
        mesh = "rows:{};cols:{};planes:{}".format(*three)
        found.append(("3-D", mesh, "batch:rows;hidden:cols;io:planes"))
    return found


def _near_equal(n: int, parts: int) -> list[int] | None:
    """``n`` as a product of factors above 1, the first the largest and near equal, or None."""
    if parts == 1:
        return [n] if n > 1 else None
    for last in range(int(n ** (1 / parts) + 1e-9), 1, -1):
        if n % last == 0 and (rest := _near_equal(n // last, parts - 1)) is not None:
            return [*rest, last]
    return None


def table_1_text(row: str, m: Measurement) -> str:
    """A row of the paper's table: symbols, and their values for these sizes."""
    symbols, (computation, communication, memory) = TABLE_1[row], m.formulas.paper
    ratio = communication / computation
    return (
        f"{row:6} '{m.layout}' on {m.mesh}\n"
        f"  computation    {symbols.computation} = {computation:,}\n"
        f"  communication  {symbols.communication} = {communication:,}\n"
        f"  comm/comp      {symbols.ratio} = {ratio:.4g}\n"
        f"  memory         {symbols.memory} = {memory:,}"
    )


def comparison_text(m: Measurement) -> str:
    """Formula, prediction and account of each quantity, and the losses."""
    lines = [f"  {'per rank and step':37}{'formula':>12}{'predicted':>12}{'accounted':>12}"]
    for line in m.lines:
        formula = "" if line.formula is None else f"{line.formula:,}"
        verdict = "" if line.agrees else "   DIFFERS"
        lines.append(f"  {line.name:37}{formula:>12}{line.predicted:>12,}{line.counted:>12,}{verdict}")
    losses = "  ".join(f"{loss:.9g}" for loss in m.losses)
    return "\n".join([*lines, f"  losses: {losses}"])


def illegal_text(sizes: Sizes, mesh: Any) -> str:
    """The errors of the layouts that cannot be."""
    parts = []
    for layout in ILLEGAL:
        try:
            measure(sizes, mesh, layout)
            raise AssertionError(f"layout '{layout}' should have been refused")
        except mm.LayoutError as e:
            parts.append(f"'{layout}'\n  LayoutError: {str(e).replace(chr(10), chr(10) + '  ')}")
    return "\n".join(parts)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m apps.two_layer", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name, size in Sizes()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"elements (default {size})")
    parser.add_argument("--steps", type=int, default=3, help="training steps (default 3)")
    parser.add_argument("--ranks", type=int, default=8, help="simulated ranks (default 8)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--first-layers", action="store_true", help="the gradient with respect to x is not wanted")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; 0 when everything agrees and all layouts have the same losses."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["draw"]:
        from apps.two_layer.draw import main as draw

        return draw(given[1:])
    options = parsed(given)
    sizes = Sizes(options.batch, options.io, options.hidden)
    real = world_size() > 1
    ranks = world_size() if real else options.ranks
    make = mm.Mesh if real else mm.SimulatedMesh
    results = {}
    for row, mesh, layout in legal_layouts(ranks):
        results[row] = measure(
            sizes, make(mesh), layout, steps=options.steps, dtype=options.dtype, input_gradient=not options.first_layers
        )
    whole = make(f"all:{ranks}")
    refused = illegal_text(sizes, whole)
    reference = results["none"].losses
    apart = max(abs(a / b - 1) for m in results.values() for a, b in zip(m.losses, reference, strict=True))
    agree = all(line.agrees for m in results.values() for line in m.lines)
    same = apart < (1e-5 if options.dtype == "float32" else 1e-13)
    if whole.rank != 0:
        return 0  # rank 0 has the largest blocks, which formulas and predictions are about
    print(f"{sizes}, {ranks} {'real' if real else 'simulated'} ranks; b = batch, h = hidden\n")
    for row, m in results.items():
        print(table_1_text(row, m), comparison_text(m), sep="\n", end="\n\n")
    print("Illegal layouts:", refused, sep="\n", end="\n\n")
    print("Formulas, predictions and accounts", "agree exactly." if agree else "DIFFER.")
    print(f"Losses differ between layouts by at most {apart:.1e} of themselves.")
    return 0 if agree and same else 1


if __name__ == "__main__":
    sys.exit(main())
