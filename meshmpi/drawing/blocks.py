"""Which rank holds which block of which named dimension.

For any number of dims and mesh axes: a matrix is drawn as one writes it; of more dims those that
are split take turns between across and down, the last one across, so that a block of an outer dim
is a grid of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, Union, cast

from meshmpi.dims import Layout, LayoutLike, MeshShape, ShapeLike, block_range
from meshmpi.dims import Shape as Dims
from meshmpi.drawing.palette import FAINT, GROUNDS, INK, PAGE, PLAIN, Colour, soft
from meshmpi.drawing.scene import Line, Rect, Scene, Text, text_width
from meshmpi.program import LocalType

MOST_BLOCKS, MOST_ALONG = 6, 10
"""Blocks of a dim that are drawn, and of all dims along one direction; of more, the first ones, an
ellipsis and the last."""
CELL_HEIGHT, SMALL, GAP = 34.0, 11.0, 5.0
Drawn = Union[tuple[str, LocalType], str]
"""A named tensor, or a sign between two, as ``"·"`` or ``"="``."""


class Block(NamedTuple):
    """A block of a tensor and who holds it.

    Attributes:
        index: Number of the block along each dim.
        ranges: (start, stop) along each dim.
        ranks: All ranks that hold it, ascending.
    """

    index: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]


def type_in(shape: ShapeLike, mesh: MeshShape, layout: LayoutLike, dtype: str = "float32"):
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
            tuple(block_range(d.size, n, k)
                  for d, n, k in zip(t.shape, counts, index, strict=True)),
            tuple(holders[index]),
        )
        for index in itertools.product(*map(range, counts))
    ]  # fmt: skip


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
    """Numbers of the blocks that are drawn; None stands for those left out."""
    if count <= most:
        return list(range(count))
    return [*range(most - 2), None, count - 1]


# -- text ------------------------------------------------------------------------------------------


def blocks_text(name: str, t: LocalType, mesh: MeshShape) -> str:
    """A table of the blocks: ranges of the last dim across, those of the others down."""
    found = {b.index: b for b in blocks_of(t, mesh)}
    copies = mesh.size // len(found)
    sizes = "x".join(map(str, t.max_sizes(mesh))) or "1"
    head = (
        f"{name} {t} on {mesh}: {len(found)} blocks of up to {sizes},"
        f" each on {copies} of {mesh.size} ranks"
    )
    counts = [mesh.count(s) for s in t.splits]
    if not counts:
        return f"{head}\n  ranks {ranks_text(found[()].ranks, mesh.size)}"
    columns = shown(counts[-1])
    rows = list(itertools.product(*(shown(n) for n in counts[:-1])))
    top = ["", *(_range_text(t, mesh, len(counts) - 1, k) for k in columns)]
    table = [top]
    for row in rows:
        label = " ".join(_range_text(t, mesh, d, k) for d, k in enumerate(row))
        cells = [
            "…" if k is None or None in row
            else ranks_text(found[(*_known(row), k)].ranks, mesh.size)
            for k in columns
        ]  # fmt: skip
        table.append([label, *cells])
    widths = [max(len(line[k]) for line in table) for k in range(len(top))]
    lines = ["  " + "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
             for line in table]  # fmt: skip
    return "\n".join([head, *lines])


def _known(row: Sequence[int | None]) -> list[int]:
    return [k for k in row if k is not None]


def _range_text(t: LocalType, mesh: MeshShape, d: int, k: int | None) -> str:
    if k is None:
        return "…"
    dim, axes = t.shape[d], t.splits[d]
    start, stop = block_range(dim.size, mesh.count(axes), k)
    return f"{dim.name} {start}:{stop}"


# -- pictures --------------------------------------------------------------------------------------


class Key:
    """One colour for each set of ranks, in all tensors of a picture, as far as there are any."""

    def __init__(self, mesh: MeshShape):
        self.mesh = mesh
        self.sets: dict[tuple[int, ...], int] = {}

    def colour(self, ranks: tuple[int, ...]) -> Colour:
        if len(ranks) == self.mesh.size:
            return PLAIN
        return soft(self.sets.setdefault(ranks, len(self.sets)))

    def note(self) -> str:
        """What a reader must know of the colours; empty where they say all."""
        if len(self.sets) <= GROUNDS:
            return ""
        return (
            f"without colour: {len(self.sets) - GROUNDS} more sets of ranks than can be told apart"
        )


def draw_blocks(
    tensors: Drawn | LocalType | Sequence[Drawn], mesh: MeshShape | str, title: str = "",
    width: float = 860.0, layout: LayoutLike = None,
) -> Scene:  # fmt: skip
    """Tensors as grids of blocks, with the ranks that hold each.

    Args:
        tensors: (name, type) pairs and signs between them, drawn from left to right in rows; types
            are those of a program (``step.program.variables["w"].type``) or of `type_in`.
        mesh: The mesh shape.
        title: Above the picture.
        width: Where a new row begins.
        layout: What the caption says beside the mesh.  Default: what the types tell, where no dim
            is split in two ways.

    Returns:
        A picture; equal colours are equal sets of ranks, gray is what every rank holds, ranks in
        parentheses hold an empty block.  Of more than 64 sets of ranks the further ones have no
        colour, and the caption says so.
    """
    mesh, items = MeshShape(mesh), _items(tensors)
    key, scene = Key(mesh), Scene(title=title)
    parts = [_sign(i) if isinstance(i, str) else _tensor(i[0], i[1], mesh, key) for i in items]
    x, y, row_height = 14.0, 12.0, 0.0
    for words, size, fill in _heading(title, _caption(items, mesh, layout), key.note()):
        scene.add(Text(14, y + 8, words, size, fill, bold=fill is INK))
        scene.width = max(scene.width, text_width(words, size + 0.5) + 28)
        y += size + 8
    y += 6
    for line in _rows(parts, width):
        row_height = max(p.height for p in line)
        for p in line:
            scene.put(p, x, y + (row_height - p.height) / 2)
            x += p.width + 12
        scene.width, x, y = max(scene.width, x + 2), 14.0, y + row_height + 18
    scene.height = y - 6
    scene.text = "\n\n".join(blocks_text(i[0], i[1], mesh) for i in items if not isinstance(i, str))
    if title:
        scene.text = f"{title}\n\n{scene.text}"
    return scene


def _heading(title: str, caption: str, note: str) -> list[tuple[str, float, Colour]]:
    """Lines above the blocks: text, size, colour."""
    words = [w for w in (caption, note) if w]
    return [(title, 14.0, INK)] * bool(title) + [(w, SMALL, FAINT) for w in words]


def _caption(items: Sequence[Drawn], mesh: MeshShape, layout: LayoutLike) -> str:
    """The mesh, and the layout where one is given or the types agree on one."""
    axes = ";".join(f"{name}:{size}" for name, size in mesh.axes)
    ranks = f"{mesh.size} rank{'s' * (mesh.size != 1)}"
    found = _common_layout(items) if layout is None else str(Layout(layout))
    return f"mesh {axes}, {ranks}" + ("" if found is None else f"; layout {found or 'none'}")


def _common_layout(items: Sequence[Drawn]) -> str | None:
    """The rules that all types follow; None where a dim is split in two ways, or only at times."""
    splits: dict[str, Sequence[str]] = {}
    for item in items:
        if isinstance(item, str):
            continue
        for d, axes in zip(item[1].shape, item[1].splits, strict=True):
            if splits.setdefault(d.name, axes) != axes:
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


def _rows(parts: Sequence[Scene], width: float) -> list[list[Scene]]:
    rows: list[list[Scene]] = [[]]
    for p in parts:
        if rows[-1] and sum(q.width + 12 for q in rows[-1]) + p.width > width:
            rows.append([])
        rows[-1].append(p)
    return rows


def _sign(text: str) -> Scene:
    scene = Scene(text_width(text, 18) + 4, 30)
    scene.add(Text(scene.width / 2, 15, text, 18, INK, "middle"))
    return scene


class _Dim(NamedTuple):
    """A dim in one direction: which, its blocks drawn, and the length of each."""

    number: int
    blocks: list[int | None]
    length: float


def _tensor(name: str, t: LocalType, mesh: MeshShape, key: Key) -> Scene:
    """One tensor: its name, the names of its dims, its blocks."""
    found = {b.index: b for b in blocks_of(t, mesh)}
    labels = [ranks_text(b.ranks, mesh.size) for b in found.values()]
    cell = max(46.0, max(text_width(s, SMALL) for s in labels) + 14)
    counts = [mesh.count(s) for s in t.splits]
    horizontal, vertical = _directions(t)
    down_room = max((text_width(_dim_text(t, d), SMALL) for d in vertical), default=0.0)
    across = _lengths(horizontal, counts, t, cell, 0.0)
    down = _lengths(vertical, counts, t, CELL_HEIGHT, down_room)
    w, h = (sides[0].length * len(sides[0].blocks) if sides else one
            for sides, one in ((across, cell), (down, CELL_HEIGHT)))  # fmt: skip
    notes = [_dim_text(t, a.number) for a in across], [_dim_text(t, b.number) for b in down]
    left, top = 16.0 * len(down), 20.0 + 16.0 * len(across)
    scene = Scene(left + max(w, *(text_width(s, SMALL) for s in notes[0] or [""]),
                             text_width(name, 13)), top + h)  # fmt: skip
    scene.add(Text(left, 9, name, 13, INK, bold=True))
    for k, s in enumerate(notes[0]):
        scene.add(Text(left, 25 + 16.0 * k, s, SMALL, FAINT))
    for k, s in enumerate(notes[1]):
        scene.add(Text(8 + 16.0 * k, top + h, s, SMALL, FAINT, turned=True))
    for y, rows in _places(down, top):
        for x, columns in _places(across, left):
            at = {**rows, **columns}
            scene.add(*_cell(t, mesh, found, at, key,
                             (x, y, (across[-1].length if across else w) - 1,
                              (down[-1].length if down else h) - 1)))  # fmt: skip
    return scene


def _dim_text(t: LocalType, d: int) -> str:
    split = f" / {'+'.join(t.splits[d])}" if t.splits[d] else ""
    return f"{t.shape[d]}{split}"


def _directions(t: LocalType) -> tuple[list[int], list[int]]:
    """Dims drawn across, and those drawn down, outer ones first."""
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


def _lengths(
    numbers: Sequence[int], counts: Sequence[int], t: LocalType, cell: float, room: float
) -> list[_Dim]:
    """The dims of one direction, outer first, with the length of a block of each.

    ``room`` is the least that all of it takes.
    """
    crowded = math.prod(min(counts[d], MOST_BLOCKS) for d in numbers) > MOST_ALONG
    out: list[_Dim] = []
    inner = cell
    for place, d in enumerate(reversed(numbers)):
        blocks = shown(counts[d], 3 if crowded else MOST_BLOCKS)
        if place == 0:  # long dims look longer, however they are cut
            whole = cell + 14 * math.log2(max(t.shape[d].size, 1)) * cell / 80
            drawn = math.prod(len(shown(counts[k], 3 if crowded else MOST_BLOCKS)) for k in numbers)
            inner = max(cell, whole / drawn, room / drawn)
        out.append(_Dim(d, blocks, inner))
        inner = inner * len(blocks) + (GAP if len(blocks) > 1 else 0)
    return out[::-1]


def _places(sides: Sequence[_Dim], start: float) -> list[tuple[float, dict[int, int | None]]]:
    """(where it begins, dim -> its block) of every step along one direction."""
    found: list[tuple[float, dict[int, int | None]]] = [(start, {})]
    for side in sides:
        found = [
            (at + k * side.length, {**known, side.number: block})
            for at, known in found
            for k, block in enumerate(side.blocks)
        ]
    return found


def _cell(
    t: LocalType, mesh: MeshShape, found: dict, at: dict[int, int | None], key: Key,
    box: tuple[float, float, float, float],
) -> list[Rect | Text | Line]:  # fmt: skip
    x, y, w, h = box
    if None in at.values():
        return [Text(x + w / 2, y + h / 2, "…", 13, FAINT, "middle")]
    block = found[tuple(at[d] for d in range(len(t.shape)))]
    where = ", ".join(f"{d.name} {a}:{b}" for d, (a, b) in zip(t.shape, block.ranges, strict=True))
    many = f"ranks {', '.join(map(str, block.ranks[:64]))}" + (", …" if block.ranks[64:] else "")
    note = f"{where or 'one number'}; {many}"
    label = ranks_text(block.ranks, mesh.size)
    if any(a == b for a, b in block.ranges):  # fewer elements than blocks: these ranks hold nothing
        return [
            Rect(x, y, w, h, PAGE, note=note),
            Text(x + w / 2, y + h / 2, f"({label})", SMALL, FAINT, "middle"),
        ]
    return [
        Rect(x, y, w, h, key.colour(block.ranks), note=note),
        Text(x + w / 2, y + h / 2, label, SMALL, INK, "middle"),
    ]
