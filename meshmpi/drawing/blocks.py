"""Which rank holds which block of which named dimension.

A matrix is drawn as one writes it.  A tensor of more dimensions becomes grids in a grid: its split
dimensions run across and down in turn, the last one across.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Union, cast

from meshmpi.dims import Layout, LayoutLike, MeshShape, ShapeLike, block_range
from meshmpi.dims import Shape as Dims
from meshmpi.drawing.picture import (
    COLOURS,
    FAINT,
    INK,
    PAGE,
    PLAIN,
    Canvas,
    Colours,
    MatplotlibFigure,
    Picture,
    mesh_text,
    text_width,
)
from meshmpi.ir.program import LocalType

MOST_BLOCKS, MOST_ALONG = 6, 10
"""Maximum number of blocks drawn for one dimension, and for all dimensions along one direction.  If there
are more, the first ones, an ellipsis and the last one are drawn."""
CELL_HEIGHT, SMALL, GAP = 34.0, 11.0, 5.0
Drawn = Union[tuple[str, LocalType], str]
"""A named tensor, or a sign between two, as ``"·"`` or ``"="``."""


class Block(NamedTuple):
    """A block: its number and its (start, stop) along each dimension, and the ranks that hold it, ascending."""

    index: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]

    @property
    def empty(self) -> bool:
        """Whether it has no elements, because there are more blocks than elements."""
        return any(a == b for a, b in self.ranges)


def type_in(shape: ShapeLike, mesh: MeshShape, layout: LayoutLike, dtype: str = "float32") -> LocalType:
    """The type of a tensor of ``shape`` in a layout."""
    dims, rules = Dims(shape), Layout(layout)
    rules.check(mesh)
    return LocalType(dims, dtype, tuple(rules.axes(d.name) for d in dims))


def blocks_of(t: LocalType, mesh: MeshShape) -> list[Block]:
    """Every block of a tensor, in row-major order, empty ones included."""
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        holders.setdefault(tuple(mesh.block_index(s, at) for s in t.splits), []).append(rank)
    counts = [mesh.count(s) for s in t.splits]
    return [
        Block(
            index,
            tuple(block_range(d.size, n, k) for d, n, k in zip(t.shape, counts, index, strict=True)),
            tuple(holders[index]),
        )
        for index in itertools.product(*map(range, counts))
    ]


def ranks_text(ranks: Sequence[int], size: int) -> str:
    """``0``, ``0-3``, ``0,2,4``, ``all 8``; even steps as ``0,2,...,14``."""
    if len(ranks) == size and size > 1:
        return f"all {size}"
    steps = {b - a for a, b in itertools.pairwise(ranks)}
    if len(ranks) > 2 and steps == {1}:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > 4:
        return f"{ranks[0]},{ranks[1]},…,{ranks[-1]}"
    return ",".join(map(str, ranks))


def shown(count: int, most: int = MOST_BLOCKS) -> list[int | None]:
    """Numbers of the blocks that are drawn; None stands for the ones left out."""
    if count <= most:
        return list(range(count))
    return [*range(most - 2), None, count - 1]


# -- text ------------------------------------------------------------------------------------------


def blocks_text(name: str, t: LocalType, mesh: MeshShape) -> str:
    """A table of the blocks: ranges of the last dimension across, those of the others down."""
    found = {b.index: b for b in blocks_of(t, mesh)}
    copies = mesh.size // len(found)
    sizes = "x".join(map(str, t.max_sizes(mesh))) or "1"
    head = f"{name} {t} on {mesh}: {len(found)} blocks of up to {sizes}, each on {copies} of {mesh.size} ranks"
    counts = [mesh.count(s) for s in t.splits]
    if not counts:
        return f"{head}\n  ranks {ranks_text(found[()].ranks, mesh.size)}"

    def span(d: int, k: int | None) -> str:
        if k is None:
            return "…"
        start, stop = block_range(t.shape[d].size, counts[d], k)
        return f"{t.shape[d].name} {start}:{stop}"

    columns = shown(counts[-1])
    table = [["", *(span(len(counts) - 1, k) for k in columns)]]
    for row in itertools.product(*(shown(n) for n in counts[:-1])):
        indices = [_known((*row, k)) for k in columns]
        cells = ["…" if index is None else ranks_text(found[index].ranks, mesh.size) for index in indices]
        table.append([" ".join(span(d, k) for d, k in enumerate(row)), *cells])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  " + "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in table]
    return "\n".join([head, *lines])


def _known(index: Sequence[int | None]) -> tuple[int, ...] | None:
    """The index of a block; None where an ellipsis stands for it."""
    known = tuple(k for k in index if k is not None)
    return known if len(known) == len(index) else None


# -- pictures --------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A tensor or a sign: its size, and what paints it with its upper left corner at (x, y)."""

    width: float
    height: float
    paint: Callable[[Canvas, float, float], None]


def draw_blocks(
    tensors: Drawn | LocalType | Sequence[Drawn],
    mesh: MeshShape | str,
    title: str = "",
    width: float = 860.0,
    layout: LayoutLike = None,
) -> Picture:
    """Tensors as grids of blocks, with the ranks that hold each.

    Args:
        tensors: (name, type) pairs and signs between them, drawn from left to right in rows; types
            are those of a program (``step.program.variables["w"].type``) or of `type_in`.
        mesh: The mesh shape.
        title: Above the picture.
        width: Where a new row begins, in pixels.
        layout: The layout named in the caption.  Default: the one that all types follow, if no
            dimension is split in two ways.

    Returns:
        A picture.  Blocks of one colour are held by the same ranks, gray ones by every rank; ranks in
        parentheses hold an empty block.  When there are more sets of ranks than colours (36), the
        blocks of the last sets have no colour, and the caption says so.
    """
    mesh, items = MeshShape(mesh), _items(tensors)
    key = Colours()
    parts = [_sign(i) if isinstance(i, str) else _tensor(i[0], i[1], mesh, key) for i in items]
    heading = [(title, 14.0, INK)] if title else []
    heading.append((_caption(items, mesh, layout), SMALL, FAINT))
    if (more := len(key.numbers) - COLOURS) > 0:
        heading.append((f"without colour: {more} more sets of ranks than can be told apart", SMALL, FAINT))
    placed: list[tuple[_Part, float, float]] = []
    full, y = 0.0, 18.0 + sum(size + 8 for _, size, _ in heading)
    for line in _rows(parts, width):
        x, height = 14.0, max(p.height for p in line)
        for p in line:
            placed.append((p, x, y + (height - p.height) / 2))
            x += p.width + 12
        full, y = max(full, x + 2), y + height + 18
    full, height = max(full, *(text_width(words, size + 0.5) + 28 for words, size, _ in heading)), y - 6

    def paint(figure: MatplotlibFigure) -> None:
        canvas, top = Canvas(figure, full, height), 12.0
        for words, size, colour in heading:
            canvas.text(14, top + 8, words, size, colour, bold=colour is INK)
            top += size + 8
        for p, x, y in placed:
            p.paint(canvas, x, y)

    tables = [blocks_text(i[0], i[1], mesh) for i in items if not isinstance(i, str)]
    return Picture(full, height, title, "\n\n".join([title, *tables] if title else tables), paint)


def _caption(items: Sequence[Drawn], mesh: MeshShape, layout: LayoutLike) -> str:
    """The mesh, and the layout where one is given or the types agree on one."""
    found = _common_layout(items) if layout is None else str(Layout(layout))
    return f"{mesh_text(mesh)}{'s' * (mesh.size != 1)}" + ("" if found is None else f"; layout {found or 'none'}")


def _common_layout(items: Sequence[Drawn]) -> str | None:
    """The rules that all types follow; None where a dimension is split in two ways, or only sometimes."""
    splits: dict[str, Sequence[str]] = {}
    for t in (item[1] for item in items if not isinstance(item, str)):
        if any(splits.setdefault(d.name, axes) != axes for d, axes in zip(t.shape, t.splits, strict=True)):
            return None
    return ";".join(f"{name}:{'+'.join(axes)}" for name, axes in splits.items() if axes)


def _items(tensors: Drawn | LocalType | Sequence[Drawn]) -> list[Drawn]:
    if isinstance(tensors, LocalType):
        return [("", tensors)]
    if isinstance(tensors, str):
        return [tensors]
    if len(tensors) == 2 and isinstance(tensors[0], str) and isinstance(tensors[1], LocalType):
        return [(tensors[0], tensors[1])]
    return list(cast("Sequence[Drawn]", tensors))


def _rows(parts: Sequence[_Part], width: float) -> list[list[_Part]]:
    rows: list[list[_Part]] = [[]]
    for p in parts:
        if rows[-1] and sum(q.width + 12 for q in rows[-1]) + p.width > width:
            rows.append([])
        rows[-1].append(p)
    return rows


def _sign(text: str) -> _Part:
    width = text_width(text, 18) + 4
    return _Part(width, 30.0, lambda canvas, x, y: canvas.text(x + width / 2, y + 15, text, 18, where="center"))


class _Dim(NamedTuple):
    """A dimension in one direction: its number, its blocks that are drawn, and the length of each."""

    number: int
    blocks: list[int | None]
    length: float


def _tensor(name: str, t: LocalType, mesh: MeshShape, key: Colours) -> _Part:
    """One tensor: its name, the names of its dimensions, its blocks."""
    found = {b.index: b for b in blocks_of(t, mesh)}
    labels = [ranks_text(b.ranks, mesh.size) for b in found.values()]
    cell = max(46.0, max(text_width(s, SMALL) for s in labels) + 14)
    counts = [mesh.count(s) for s in t.splits]
    horizontal, vertical = _directions(t)
    down_room = max((text_width(_dim_text(t, d), SMALL) for d in vertical), default=0.0)
    across, down = _lengths(horizontal, counts, t, cell, 0.0), _lengths(vertical, counts, t, CELL_HEIGHT, down_room)
    w = across[0].length * len(across[0].blocks) if across else cell
    h = down[0].length * len(down[0].blocks) if down else CELL_HEIGHT
    size = (across[-1].length if across else w) - 1, (down[-1].length if down else h) - 1
    names = [_dim_text(t, a.number) for a in across]
    left, top = 16.0 * len(down), 20.0 + 16.0 * len(across)
    cells: list[tuple[float, float, Block | None, str]] = []
    for dy, rows in _places(down, top):
        for dx, columns in _places(across, left):
            at = {**rows, **columns}
            index = [at[d] for d in range(len(t.shape))]
            block = None if (known := _known(index)) is None else found[known]
            whole = block is not None and len(block.ranks) == mesh.size
            fill = PAGE if block is None or block.empty else PLAIN if whole else key.soft(block.ranks)
            cells.append((dx, dy, block, fill))

    def paint(canvas: Canvas, x: float, y: float) -> None:
        canvas.text(x + left, y + 9, name, 13, bold=True)
        for k, words in enumerate(names):
            canvas.text(x + left, y + 25 + 16.0 * k, words, SMALL, FAINT)
        for k, b in enumerate(down):
            canvas.text(x + 8 + 16.0 * k, y + top + h, _dim_text(t, b.number), SMALL, FAINT, turned=True)
        for dx, dy, block, fill in cells:
            _cell(canvas, block, t, mesh, fill, (x + dx, y + dy, *size))

    width = max(w, *(text_width(s, SMALL) for s in names or [""]), text_width(name, 13))
    return _Part(left + width, top + h, paint)


def _dim_text(t: LocalType, d: int) -> str:
    split = f" / {'+'.join(t.splits[d])}" if t.splits[d] else ""
    return f"{t.shape[d]}{split}"


def _directions(t: LocalType) -> tuple[list[int], list[int]]:
    """The dimensions drawn across, and those drawn down, outer ones first."""
    n = len(t.shape)
    if n <= 2:
        return list(range(n))[-1:], list(range(n))[:-1]
    order = [d for d in range(n) if t.splits[d]] + [d for d in range(n) if not t.splits[d]]
    split = sum(bool(s) for s in t.splits)
    sides: tuple[list[int], list[int]] = [], []
    first = int(split == 1 and order[0] < n / 2)  # one alone goes the way its place suggests
    for place, d in enumerate(reversed(order[:split])):
        sides[(place + first) % 2].append(d)
    for d in reversed(order[split:]):
        sides[len(sides[1]) < len(sides[0])].append(d)
    return sorted(sides[0]), sorted(sides[1])


def _lengths(numbers: Sequence[int], counts: Sequence[int], t: LocalType, cell: float, room: float) -> list[_Dim]:
    """The dimensions of one direction, outer first, with the length of their blocks; together at least ``room``."""
    crowded = math.prod(min(counts[d], MOST_BLOCKS) for d in numbers) > MOST_ALONG
    out: list[_Dim] = []
    inner = cell
    for place, d in enumerate(reversed(numbers)):
        blocks = shown(counts[d], 3 if crowded else MOST_BLOCKS)
        if place == 0:  # long dimensions look longer, however they are split
            whole = cell + 14 * math.log2(max(t.shape[d].size, 1)) * cell / 80
            drawn = math.prod(len(shown(counts[k], 3 if crowded else MOST_BLOCKS)) for k in numbers)
            inner = max(cell, whole / drawn, room / drawn)
        out.append(_Dim(d, blocks, inner))
        inner = inner * len(blocks) + (GAP if len(blocks) > 1 else 0)
    return out[::-1]


def _places(sides: Sequence[_Dim], start: float) -> list[tuple[float, dict[int, int | None]]]:
    """(where it begins, dimension -> its block) of every step along one direction."""
    found: list[tuple[float, dict[int, int | None]]] = [(start, {})]
    for side in sides:
        found = [
            (at + k * side.length, {**known, side.number: block})
            for at, known in found
            for k, block in enumerate(side.blocks)
        ]
    return found


def _cell(
    canvas: Canvas,
    block: Block | None,
    t: LocalType,
    mesh: MeshShape,
    fill: str,
    box: tuple[float, float, float, float],
) -> None:
    """A block with its ranks; None is drawn as an ellipsis."""
    x, y, w, h = box
    middle = x + w / 2, y + h / 2
    if block is None:
        canvas.text(*middle, "…", 13, FAINT, "center")
        return
    where = ", ".join(f"{d.name} {a}:{b}" for d, (a, b) in zip(t.shape, block.ranges, strict=True))
    ranks = ", ".join(map(str, block.ranks[:64])) + (", …" if block.ranks[64:] else "")
    label = ranks_text(block.ranks, mesh.size)
    canvas.box(*box, fill, note=f"{where or 'one number'}; ranks {ranks}")
    canvas.text(*middle, f"({label})" if block.empty else label, SMALL, FAINT if block.empty else INK, "center")
