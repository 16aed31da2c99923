"""Draws the paper's Figures 2 to 5: which rank holds which block in four layouts of the two layers.

Two more show what the tutorial begins and ends with: no layout, and weights kept in blocks.

python -m apps.two_layer draw                         prints them as text
python -m apps.two_layer draw --out docs/figures      writes SVG (and PNG with --png)

Types are those of the lowered programs, so that the figures show what runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import meshmpi as mm
from apps.two_layer.model import Sizes, build
from meshmpi.drawing import Picture, draw_blocks, draw_memory, draw_program, draw_timeline, predicted
from meshmpi.runtime.compiled import memory_plan


class Figure(NamedTuple):
    """A figure of the paper: file name, caption, mesh, layout."""

    name: str
    caption: str
    mesh: str
    layout: str


FIGURES = (
    Figure("data", "Figure 2: data-parallel, 2 ranks", "all:2", "batch:all"),
    Figure("model", "Figure 3: model-parallel, 2 ranks", "all:2", "hidden:all"),
    Figure("both", "Figure 4: data- and model-parallel, 2 x 2 ranks", "rows:2;cols:2", "batch:rows;hidden:cols"),
    Figure(
        "three",
        "Figure 5: all three dimensions, 2 x 2 x 2 ranks",
        "rows:2;cols:2;planes:2",
        "batch:rows;hidden:cols;io:planes",
    ),
)
WHOLE = Figure("none", "No layout: every rank holds everything, 2 ranks", "all:2", "")
STORAGE = "io:all"
"""How the weights of the sixth figure are kept between steps."""
TENSORS = {"x": "x", "w": "read", "h": "maximum", "v": "read_2", "y": "einsum_1"}
"""Name in the paper -> tensor of the graph."""


def figure(f: Figure, sizes: Sizes) -> Picture:
    """x w -> h, h v -> y: the tensors of both layers with the ranks that hold their blocks."""
    two = build(sizes)
    found = {t.name: t for o in two.graph.operations for t in o.outputs}
    fetches = {name: found[tensor] for name, tensor in TENSORS.items()}
    program = mm.plan(two.graph, f.mesh, f.layout, fetches=fetches, updates=[], optimize=False).program
    x, w, h, v, y = ((n, program.types[program.fetches[n]]) for n in TENSORS)
    caption = f"{f.caption}, {f.layout}" if f.layout else f.caption
    return draw_blocks([x, "·", w, "→", h, "·", v, "→", y], f.mesh, caption, 1200.0)


def storage_figure(sizes: Sizes) -> Picture:
    """w as it is kept between steps, as it is used, and as its gradient arrives."""
    two, data = build(sizes), FIGURES[0]
    program = mm.plan(
        two.graph, data.mesh, data.layout, fetches=two.fetches, updates=two.updates, storage=STORAGE
    ).program
    kept = program.variables["w"].type
    (gather,) = (i for i in program.instructions if i.kind == "all_gather" and program.types[i.inputs[0]] == kept)
    (scatter,) = (i for i in program.instructions if i.kind == "reduce_scatter" and program.types[i.outputs[0]] == kept)
    used, gradient = (program.types[i.outputs[0]] for i in (gather, scatter))
    tensors = [("w kept", kept), "→", ("w used", used), "→", ("gradient of w", gradient)]
    caption = f"ZeRO: {data.layout}, weights stored as {STORAGE}, 2 ranks"
    return draw_blocks(tensors, data.mesh, caption, 1200.0)


def pictures(sizes: Sizes) -> dict[str, Picture]:
    """Name of the file -> picture: the figures, the program of Figure 4, its time line and its memory."""
    out = {f"two_layer_{f.name}": figure(f, sizes) for f in (WHOLE, *FIGURES)}
    out["two_layer_stored"] = storage_figure(sizes)
    two, both = build(sizes), FIGURES[2]
    program = mm.plan(two.graph, both.mesh, both.layout, fetches=two.fetches, updates=two.updates).program
    out["two_layer_program"] = draw_program(program, f"One training step, {both.layout}")
    out["two_layer_step"] = draw_timeline(program, predicted(program), f"One training step, {both.layout}")
    out["two_layer_memory"] = draw_memory(program, memory_plan(program))
    return out


def main(arguments: Sequence[str]) -> int:
    """Prints or writes all pictures."""
    parser = argparse.ArgumentParser(prog="python -m apps.two_layer draw", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write to")
    parser.add_argument("--png", action="store_true", help="write PNG as well")
    options = parser.parse_args(arguments)
    for name, scene in pictures(Sizes()).items():
        if options.out is None:
            print(scene, end="\n\n")
            continue
        options.out.mkdir(parents=True, exist_ok=True)
        for ending in ("svg", "png") if options.png else ("svg",):
            path = options.out / f"{name}.{ending}"
            scene.save(path)
            print(f"wrote {path}")
    return 0
