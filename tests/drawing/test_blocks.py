"""Pictures of blocks say what programs do, for any number of dims and axes."""

from __future__ import annotations

import itertools
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

import meshmpi as mm
from apps.two_layer.draw import FIGURES, figure, main, pictures
from apps.two_layer.model import Sizes
from meshmpi.dims import MeshShape
from meshmpi.drawing import blocks_of, blocks_text, draw_blocks, type_in
from meshmpi.drawing.blocks import Block, ranks_text, shown
from meshmpi.drawing.picture import COLOURS, INK, PAGE, PLAIN, oklch, soft, strong
from meshmpi.ir.program import LocalType
from tests.drawing.seen import assert_legible, boxes, contrast, distance, words

SHAPES = [
    ("all:2", "a:5", "a:all"),
    ("rows:2;cols:3", "a:5;b:7", "b:cols;a:rows"),
    ("rows:2;cols:3", "a:5;b:7", "a:cols+rows"),
    ("rows:2;cols:3", "", ""),
    ("x:2;y:2;z:3", "a:4;b:3;c:5", "a:z;b:x;c:y"),
    ("x:2;y:2;z:2", "a:4;b:3;c:5;d:2", "d:z+x"),
    ("p:2;q:2;r:2;s:2", "a:3;b:3;c:3;d:3;e:3", "a:p;b:q;c:r;e:s"),
    ("all:5", "a:3", "a:all"),
]
SIX = "x:2;y:2;z:2;u:2;v:2;w:2"


@pytest.mark.parametrize("mesh, shape, layout", SHAPES)
def test_blocks_are_those_of_the_ranks(mesh: str, shape: str, layout: str):
    m = MeshShape(mesh)
    t = type_in(shape, m, layout)
    held = {rank: b.ranges for b in blocks_of(t, m) for rank in b.ranks}
    assert held == {r: t.block(m, m.coordinates(r)) for r in range(m.size)}
    covered = np.zeros(t.shape.sizes, int)
    for b in blocks_of(t, m):
        covered[tuple(slice(*r) for r in b.ranges)] += 1
    assert (covered == 1).all()


@pytest.mark.parametrize("mesh, shape, layout", SHAPES)
def test_every_block_is_drawn_once_and_nothing_overlaps(mesh: str, shape: str, layout: str):
    m = MeshShape(mesh)
    t = type_in(shape, m, layout)
    picture = draw_blocks(("t", t), m, "A title", 2000.0)
    drawn = boxes(picture)
    assert sorted(b.note for b in drawn) == sorted(note_of(b, t) for b in blocks_of(t, m))
    for a, b in itertools.combinations(drawn, 2):
        apart = a.x + a.w <= b.x or b.x + b.w <= a.x or a.y + a.h <= b.y or b.y + b.h <= a.y
        assert apart, (a, b)
    assert_legible(picture)


def note_of(b: Block, t: LocalType) -> str:
    ranges = [f"{d.name} {x}:{y}" for d, (x, y) in zip(t.shape, b.ranges, strict=True)]
    return f"{', '.join(ranges) or 'one number'}; ranks {', '.join(map(str, b.ranks))}"


def test_of_many_blocks_the_first_and_the_last_are_drawn():
    assert shown(6) == [0, 1, 2, 3, 4, 5]
    assert shown(32) == [0, 1, 2, 3, None, 31]
    m = MeshShape("rows:16;cols:32")
    t = type_in("batch:256;length:128;heads:64", m, "batch:rows;heads:cols")
    picture = draw_blocks([("act", t)], m)
    drawn = boxes(picture)
    assert len(drawn) == 25
    assert any("ranks 511" in b.note for b in drawn)
    assert_legible(picture)
    assert picture.width < 1200 and picture.height < 900


def test_ranks_without_elements_stand_in_parentheses():
    m = MeshShape("all:5")
    labels = [w.text for w in words(draw_blocks(type_in("a:3", m, "a:all"), m)) if "=" not in w.text]
    assert [s for s in labels if not s.startswith("mesh")] == ["0", "1", "2", "(3)", "(4)"]


def test_ranks_are_written_short():
    assert ranks_text([3], 8) == "3"
    assert ranks_text([0, 1, 2, 3], 8) == "0-3"
    assert ranks_text([0, 2], 8) == "0,2"
    assert ranks_text(range(0, 512, 32), 512) == "0,32,…,480"
    assert ranks_text(range(8), 8) == "all 8"


def test_text_is_a_table_of_ranges_and_ranks():
    m = MeshShape("rows:2;cols:2")
    text = blocks_text("h", type_in("batch:5;hidden:4", m, "batch:rows;hidden:cols"), m)
    assert [re.split(r"  +", line.strip()) for line in text.splitlines()[1:]] == [
        ["hidden 0:2", "hidden 2:4"],
        ["batch 0:3", "0", "1"],
        ["batch 3:5", "2", "3"],
    ]
    assert "4 blocks of up to 3x2, each on 1 of 4 ranks" in text


def test_an_unknown_axis_is_refused():
    with pytest.raises(mm.LayoutError, match="Did you mean 'rows'"):
        type_in("a:4", MeshShape("rows:2"), "a:row")


# -- the paper's figures ---------------------------------------------------------------------------

HELD = {
    "data": {"x": ["0", "1"], "w": ["all 2"], "h": ["0", "1"], "v": ["all 2"], "y": ["0", "1"]},
    "model": {"x": ["all 2"], "w": ["0", "1"], "h": ["0", "1"], "v": ["0", "1"], "y": ["all 2"]},
    "both": {
        "x": ["0,1", "2,3"],
        "w": ["0,2", "1,3"],
        "h": ["0", "1", "2", "3"],
        "v": ["0,2", "1,3"],
        "y": ["0,1", "2,3"],
    },
    "three": {
        "x": ["0,2", "1,3", "4,6", "5,7"],
        "w": ["0,4", "2,6", "1,5", "3,7"],
        "h": ["0,1", "2,3", "4,5", "6,7"],
        "v": ["0,4", "1,5", "2,6", "3,7"],
        "y": ["0,2", "1,3", "4,6", "5,7"],
    },
}
"""By hand: which ranks hold the blocks of each matrix, row by row."""


@pytest.mark.parametrize("f", FIGURES, ids=lambda f: f.name)
def test_figures_of_the_paper(f):
    picture = figure(f, Sizes(64, 32, 128))
    found: dict[str, list[str]] = {}
    for w in words(picture):
        if w.bold and len(w.text) == 1:
            found[w.text] = cells = []
        elif re.fullmatch(r"all \d|\d(,\d)*", w.text):
            cells.append((round(w.y), w.x, w.text))
    assert {n: [t for *_, t in sorted(c)] for n, c in found.items()} == HELD[f.name]
    assert_legible(picture)


def test_equal_colours_are_equal_ranks():
    by_ranks: dict[str, set] = {}
    for box in boxes(figure(FIGURES[2], Sizes())):
        by_ranks.setdefault(box.note.split("; ranks ")[1], set()).add(box.fill)
    assert all(len(fills) == 1 for fills in by_ranks.values())
    assert len({next(iter(f)) for f in by_ranks.values()}) == len(by_ranks) == 8


@pytest.mark.parametrize(
    "mesh, shapes, sets",
    [
        ("x:2;y:4", ["a:4;b:4", "b:4"], 12),
        ("x:5;y:6", ["a:5;b:6", "b:6"], 36),
        (SIX, ["a:4;b:4;c:4;d:4;e:4;f:4"], 64),
        (SIX, ["a:4;b:4;c:4;d:4;e:4;f:4", "a:4;b:4"], 68),
        ("x:16;y:32", ["a:16;b:64", "b:64"], 30),
    ],
    ids=lambda x: str(x) if isinstance(x, int) else "",
)
def test_a_colour_is_one_set_of_ranks_as_far_as_there_are_colours(mesh, shapes, sets):
    m = MeshShape(mesh)
    layout = ";".join(f"{dim}:{axis}" for dim, axis in zip("abcdef", m.names, strict=False))
    picture = draw_blocks([(s, type_in(s, m, layout)) for s in shapes], m)
    found: dict = {}
    for b in boxes(picture):
        found.setdefault(b.fill, set()).add(b.note.split("; ranks ")[1])
    without = found.pop(PAGE, set())
    assert len(found) == min(sets, COLOURS) and all(len(ranks) == 1 for ranks in found.values())
    assert len(without) == max(sets - COLOURS, 0)
    said = [w.text for w in words(picture) if "without colour" in w.text]
    assert len(said) == bool(without) and all(f": {len(without)} more" in s for s in said)
    assert_legible(picture)


def test_the_caption_names_mesh_and_layout():
    def caption(items, **options):
        (found,) = (w.text for w in words(draw_blocks(items, m, "title", **options)) if "mesh " in w.text)
        return found

    m = MeshShape("rows:2;cols:2")
    kept, used = type_in("a:4;b:4", m, "a:rows;b:cols"), type_in("a:4;b:4", m, "a:rows")
    whole = type_in("a:4", m, "")
    assert caption(("t", kept)) == "mesh rows:2;cols:2, 4 ranks; layout a:rows;b:cols"
    assert caption(("t", whole)) == "mesh rows:2;cols:2, 4 ranks; layout none"
    assert caption([("t", kept), ("u", used)]) == "mesh rows:2;cols:2, 4 ranks"
    given = caption([("t", kept), ("u", used)], layout="a:rows")
    assert given == "mesh rows:2;cols:2, 4 ranks; layout a:rows"


def test_pictures_in_docs_are_those_of_the_program(capsys):
    folder = Path(__file__).parents[2] / "docs/figures"
    for name, picture in pictures(Sizes()).items():
        there, here = (sorted(seen_in(svg)) for svg in ((folder / f"{name}.svg").read_text(), picture.svg()))
        assert there == here, f"{name}.svg is old: python -m apps.two_layer draw --out docs/figures"
    assert main([]) == 0
    assert "h float32[batch=64/rows, hidden=128/cols]" in capsys.readouterr().out


def seen_in(svg: str) -> list[str]:
    """The texts and notes of a picture, and its colours; places differ between versions of matplotlib."""
    texts = [t.strip() for e in ET.fromstring(svg).iter() if (t := e.text) and not e.tag.endswith("style")]
    return [*filter(None, texts), *re.findall(r"fill: #\w{6}", svg)]


# -- files and colours -----------------------------------------------------------------------------


def test_svg_is_well_formed_and_refers_to_nothing_else(tmp_path):
    m = MeshShape("rows:2;cols:2")
    picture = draw_blocks(("a<b>&c", type_in("a:4;b:6", m, "a:rows")), m, "<title> of $x$")
    svg = picture.svg()
    root = ET.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert {"<title> of $x$", "a<b>&c", "a 0:2, b 0:6; ranks 0, 1"} <= set(seen_in(svg))
    assert "href=" not in svg and "url(" not in svg
    assert svg == picture.svg()
    picture.save(tmp_path / "a.svg")
    picture.save(tmp_path / "a.txt")
    assert (tmp_path / "a.svg").read_text() == svg
    assert "4 ranks" in (tmp_path / "a.txt").read_text()
    with pytest.raises(mm.ConfigError, match=r"End it in .svg, .png or .txt"):
        picture.save(tmp_path / "a.jpg")


def test_png_has_the_size_of_the_picture(tmp_path):
    m = MeshShape("rows:2;cols:2")
    picture = draw_blocks(("t", type_in("a:4;b:6", m, "a:rows")), m, "title")
    picture.save(tmp_path / "a.png")
    head = (tmp_path / "a.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(head[k : k + 4], "big") for k in (16, 20))
    assert abs(width - 2 * picture.width) <= 2 and abs(height - 2 * picture.height) <= 2


def test_without_matplotlib_there_is_text_and_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    m = MeshShape("rows:2")
    picture = draw_blocks(("t", type_in("a:4", m, "a:rows")), m)
    assert "each on 1 of 2 ranks" in str(picture)
    picture.save(tmp_path / "a.txt")
    for name in ("a.svg", "a.png"):
        with pytest.raises(mm.ConfigError, match=r"pip install 'meshmpi\[plot\]'"):
            picture.save(tmp_path / name)
        assert not (tmp_path / name).exists()


GROUNDS = [soft(n) for n in range(COLOURS)]


def test_a_colour_looks_as_it_is_asked_for():
    assert (oklch(1.0, 0.0, 0.0), oklch(0.0, 0.0, 0.0)) == ("#ffffff", "#000000")
    assert distance(oklch(0.8, 0.05, 30.0), oklch(0.8, 0.05, 210.0)) == pytest.approx(0.1, abs=0.005)
    assert distance(oklch(0.8, 0.05, 30.0), oklch(0.6, 0.05, 30.0)) == pytest.approx(0.2, abs=0.005)


def test_text_can_be_read_on_every_ground():
    for ground in [PAGE, PLAIN, *GROUNDS]:
        assert contrast(INK, ground) > 4.5, ground
    assert min(contrast("#e8eaed", soft(n, dark=True)) for n in range(COLOURS)) > 4.5
    assert min(contrast(strong(n), PAGE) for n in range(12)) > 2.4


@pytest.mark.parametrize("dark", [False, True])
def test_all_grounds_differ(dark: bool):
    grounds = [soft(n, dark) for n in range(COLOURS)]
    grounds += [] if dark else [PLAIN, PAGE]
    assert len(set(grounds)) == len(grounds) and soft(COLOURS) == PAGE
    for a, b in itertools.combinations(grounds, 2):
        assert distance(a, b) > 0.025, (a, b)
    for a, b in itertools.pairwise(grounds[:COLOURS]):  # neighbours, more often than not
        assert distance(a, b) > 0.1, (a, b)


def test_strong_colours_differ_for_colour_blind_readers():
    """Distances after simulating deuteranopia and protanopia (Vienot, Brettel and Mollon 1999)."""
    for matrix in (DEUTERANOPIA, PROTANOPIA):
        seen = [matrix @ (np.array(rgb(strong(n))) ** 2.2) for n in range(6)]
        for (i, a), (j, b) in itertools.combinations(enumerate(seen), 2):
            apart = np.linalg.norm(np.clip(a, 0, 1) ** (1 / 2.2) - np.clip(b, 0, 1) ** (1 / 2.2))
            assert apart > 0.1, (i, j)


def rgb(colour: str) -> list[float]:
    return [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]


DEUTERANOPIA = np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]])
PROTANOPIA = np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]])
