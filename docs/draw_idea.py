"""Draws the picture of README and start page: a tensor, a layout, a mesh, and who holds which block.

python -m docs.draw_idea           writes docs/figures/idea_light.svg and idea_dark.svg
python -m docs.draw_idea --png     and the same as PNG, to look at

The blocks come from the same functions that the compiler and `meshmpi show` use.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from meshmpi.dims import Layout, MeshShape
from meshmpi.drawing.blocks import Block, blocks_of, type_in
from meshmpi.drawing.picture import (
    FAINT,
    INK,
    LINE,
    PAGE,
    PLAIN,
    Canvas,
    MatplotlibFigure,
    Picture,
    soft,
)

FOLDER = Path(__file__).parent / "figures"
MESH = MeshShape("rows:2;cols:2")
TENSOR, LAYOUT = "batch:8;hidden:6", "batch:rows;hidden:cols"
OTHERS = [
    ("batch:rows", "two ranks hold", "the same half"),
    ("hidden:rows+cols", "six columns on four", "ranks: 2, 2, 1, 1"),
    ("", "every rank holds", "the whole tensor"),
]
"""Layouts of the second line, smaller, and what is said of each."""
WIDTH, HEIGHT, TOP = 880.0, 560.0, 76.0
HEADS = [
    (30.0, "Tensors have named"),
    (250.0, "A layout is one line"),
    (508.0, "A mesh of MPI ranks has named axes"),
]
CELL = 24.0
"""Side of an element of the tensor on the left, in pixels."""


class Look(NamedTuple):
    """Colours of one background."""

    page: str
    ink: str
    faint: str
    line: str
    plain: str


LOOKS = {
    "light": Look(PAGE, INK, FAINT, LINE, PLAIN),
    "dark": Look("#131416", "#e9ecef", "#aab2ba", "#69727b", "#2a2e33"),
}


def held_by(blocks: list[Block], rank: int) -> tuple[int, Block]:
    """Number and block of a rank."""
    return next((n, b) for n, b in enumerate(blocks) if rank in b.ranks)


def tensor(c: Canvas, look: Look, x: float, y: float) -> None:
    """The whole tensor, element by element, coloured by block."""
    t = type_in(TENSOR, MESH, LAYOUT)
    rows, columns = (d.size for d in t.shape)
    for n, block in enumerate(blocks_of(t, MESH)):
        (top, bottom), (left, right) = block.ranges
        for i in range(top, bottom):
            for k in range(left, right):
                c.box(x + k * CELL, y + i * CELL, CELL, CELL, soft(n), look.page, 1.0)
    c.text(x + columns * CELL / 2, y - 14, f"hidden: {columns}", 13, look.ink, "center")
    c.text(x - 14, y + rows * CELL / 2, f"batch: {rows}", 13, look.ink, "center", turned=True)
    (top, middle), (left, centre) = blocks_of(t, MESH)[0].ranges
    at_x, at_y = x + (centre - left) * CELL, y + (middle - top) * CELL
    c.box(at_x - 1, y - 4, 2, rows * CELL + 8, look.ink, look.ink, 0)
    c.box(x - 4, at_y - 1, columns * CELL + 8, 2, look.ink, look.ink, 0)


def rank_box(
    c: Canvas, look: Look, rank: int, layout: str, x: float, y: float, scale: float
) -> None:
    """A rank, the outline of the tensor in it, and the block that it holds."""
    t = type_in(TENSOR, MESH, layout)
    blocks = blocks_of(t, MESH)
    n, block = held_by(blocks, rank)
    size, (rows, columns) = 12 * scale, (d.size for d in t.shape)
    wide, high = 168 * scale, 148 * scale
    c.box(x, y, wide, high, look.plain, look.line, 1.0, 6 * scale)
    name = f"rank {rank}" if scale == 1 else str(rank)
    c.text(
        x + wide / 2, y + 14 * scale + 1, name, max(10.0, 13 * scale), look.ink, "center", bold=True
    )
    left, top = x + (wide - columns * size) / 2, y + 31 * scale
    c.box(left, top, columns * size, rows * size, look.page, look.line, 0.8)
    (a, b), (p, q) = block.ranges
    fill = soft(n)
    c.box(left + p * size, top + a * size, (q - p) * size, (b - a) * size, fill, look.ink, 1.2)
    note = f"batch {a}:{b}, hidden {p}:{q}"
    if scale == 1:
        c.text(x + wide / 2, y + high - 9, note, 10, look.faint, "center")


def mesh(c: Canvas, look: Look, layout: str, x: float, y: float, scale: float) -> None:
    """Four ranks as an array, with the names of the axes."""
    wide, high = 180 * scale, 160 * scale
    for rank in range(MESH.size):
        at = MESH.coordinates(rank)
        rank_box(c, look, rank, layout, x + at["cols"] * wide, y + at["rows"] * high, scale)
    if scale == 1:
        for k in (0, 1):
            c.text(x + k * wide + wide / 2 - 6, y - 14, f"cols {k}", 13, look.ink, "center")
            c.text(
                x - 14,
                y + k * high + high / 2 - 6,
                f"rows {k}",
                13,
                look.ink,
                "center",
                turned=True,
            )


def rules(c: Canvas, look: Look, x: float, y: float) -> None:
    """The layout, and what it says."""
    c.box(x, y, 204, 38, look.plain, look.line, 1.0, 6)
    c.text(x + 102, y + 19, f'"{LAYOUT}"', 13, look.ink, "center", bold=True)
    for n, rule in enumerate(Layout(LAYOUT)):
        at = y + 68 + 40 * n
        c.text(x + 2, at, f"{rule.dim} is split", 12.5, look.ink)
        c.text(x + 2, at + 16, f"over mesh axis {'+'.join(rule.axes)}", 12.5, look.ink)
    c.arrow((x + 20, y + 160), (x + 184, y + 160), 0, look.ink)


def others(c: Canvas, look: Look, y: float) -> None:
    """The same tensor in other layouts."""
    c.text(30, y, "The same model in other layouts", 13, look.ink, bold=True)
    for n, (layout, *lines) in enumerate(OTHERS):
        x = 30 + 290.0 * n
        mesh(c, look, layout, x, y + 18, 0.36)
        c.text(x + 136, y + 52, f'"{layout}"', 12, look.ink, bold=True)
        for k, line in enumerate(lines):
            c.text(x + 136, y + 72 + 15 * k, line, 11, look.faint)


def picture(look: Look) -> Picture:
    """The picture on one background."""

    def paint(figure: MatplotlibFigure) -> None:
        c = Canvas(figure, WIDTH, HEIGHT)
        c.box(0, 0, WIDTH, HEIGHT, look.page, look.page, 0)
        c.text(30, 42, "dimensions", 13.5, look.ink, bold=True)
        for x, text in HEADS:
            c.text(x, 24, text, 13.5, look.ink, bold=True)
        tensor(c, look, 52, TOP + 44)
        rules(c, look, 250, TOP + 36)
        mesh(c, look, LAYOUT, 508, TOP, 1.0)
        others(c, look, 424)

    parts = [f"rank {r}: {b.ranges}" for r in range(MESH.size) for _, b in [held_by(_blocks(), r)]]
    text = "\n".join([f"[{TENSOR}] on a mesh {MESH}, layout {LAYOUT}", *parts])
    return Picture(
        WIDTH, HEIGHT, "A tensor, a layout, a mesh, and which rank holds which block", text, paint
    )


def _blocks() -> list[Block]:
    return blocks_of(type_in(TENSOR, MESH, LAYOUT), MESH)


def main() -> None:
    """Writes the files."""
    parser = argparse.ArgumentParser(prog="python -m docs.draw_idea", description=__doc__)
    parser.add_argument("--png", action="store_true", help="write PNG as well")
    png = parser.parse_args().png
    for name, look in LOOKS.items():
        for ending in ("svg", "png") if png else ("svg",):
            picture(look).save(FOLDER / f"idea_{name}.{ending}")


if __name__ == "__main__":
    main()
