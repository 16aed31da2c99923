"""Programs as graphs, memory over the step, the HTML page, also in a real browser."""

from __future__ import annotations

import html.parser
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import meshmpi as mm
from apps.two_layer.model import Sizes, build
from meshmpi.amounts import amount
from meshmpi.cli import main as command
from meshmpi.drawing import draw_memory, draw_program, report_page
from meshmpi.drawing.groups import folded, grouped, readable, repeats
from meshmpi.drawing.program import axis_colours
from meshmpi.ir.kinds import COLLECTIVES
from meshmpi.ir.program import Program
from meshmpi.planner.memory_use import KINDS, memory_use
from meshmpi.runtime.compiled import memory_plan
from tests.drawing.seen import arrows, assert_legible, boxes, words

ROOT = Path(__file__).parents[2]
SMALL = ["--set", "model.d_model=16", "--set", "model.length=16", "--set", "train.batch=4"]


def two_layers(layout: str = "batch:rows;hidden:cols"):
    b = build(Sizes())
    return mm.plan(b.graph, "rows:2;cols:2", layout, fetches=b.fetches, updates=b.updates)


def deep_program(layers: int = 12) -> Program:
    with mm.Graph() as graph:
        d = mm.Dimension("d", 16)
        x = mm.placeholder("x", [mm.Dimension("batch", 8), d])
        for n in range(layers):
            with mm.scope(f"layer_{n}"):
                w = mm.get_variable("w", [d, mm.Dimension("e", 32)])
                v = mm.get_variable("v", [mm.Dimension("e", 32), d])
                h = mm.tanh(mm.einsum([x, w], [x.shape[0], w.shape[1]]))
                x = x + mm.einsum([h, v], x.shape)
        updates = mm.optimize.Adam(0.1).minimize(mm.reduce_mean(mm.square(x)))
    return mm.plan(graph, "rows:2;cols:2", "batch:rows;e:cols", fetches=[], updates=updates).program


# -- graphs ----------------------------------------------------------------------------------------


def test_every_collective_is_drawn_in_the_colour_of_its_axes():
    program = two_layers().program
    picture, colours = draw_program(program, "two layers"), axis_colours(program)
    inside = {
        w.text: b.fill
        for w in words(picture)
        for b in boxes(picture)
        if b.x <= w.x <= b.x + b.w and b.y <= w.y <= b.y + b.h
    }
    drawn = {text: fill for text, fill in inside.items() if re.match(r"\w+ \S+: \S+ k?B", text)}
    wanted = [i for i in program.instructions if i.kind in COLLECTIVES]
    assert len(wanted) == 4
    for axes in ("rows", "cols"):
        of_axes = [t for t in drawn if f"all_reduce {axes}:" in t]
        assert of_axes and all(drawn[t] == colours.soft(axes) for t in of_axes)
    assert colours.soft("rows") != colours.soft("cols")
    assert sum(program.bytes_sent(i) for i in wanted) == two_layers().cost.bytes_sent


def test_boxes_stand_below_each_other_and_arrows_point_down():
    for program in (two_layers().program, deep_program(3)):
        picture = draw_program(program, "a title", depth=None)
        groups, drawn = grouped(program, None), boxes(picture)
        assert len(drawn) == len(groups)
        for a, b in itertools.pairwise(drawn):
            assert a.y + a.h < b.y
        found = set()
        for arrow in arrows(picture):
            (_, start), *_, (_, stop) = arrow._path_original.vertices
            p = max(k for k, b in enumerate(drawn) if b.y <= start)
            k = max(k for k, b in enumerate(drawn) if b.y <= stop + 0.01)
            assert start < stop
            found.add((p, k))
            assert arrow.get_path().get_extents().x0 > -0.5
        assert found == {(p, k) for k, g in enumerate(groups) for p in g.before}
        assert_legible(picture)


def test_edges_are_the_dependences_of_the_program():
    program = two_layers().program
    made = {v: n for n, i in enumerate(program.instructions) for v in i.outputs}
    for n, g in enumerate(grouped(program, None)):
        assert g.numbers == [n]
        assert g.before == sorted({made[v] for v in program.instructions[n].inputs})


def test_large_programs_are_drawn_by_scopes():
    program = deep_program()
    assert len(program.instructions) > 200
    depth = readable(program, 70)
    groups = folded(grouped(program, depth))
    assert depth == 1 and len(groups) <= 15
    heads = [g.head for g in groups]
    assert any(re.fullmatch(r"layer_#  \(\d+\)  x 12", h) for h in heads)
    assert any(re.fullmatch(r"layer_# \(gradient\)  \(\d+\)  x 11", h) for h in heads)
    left_out = sum(i.kind in ("read", "feed") for i in program.instructions)
    assert sum(len(g.numbers) for g in groups) == len(program.instructions) - left_out
    assert sum(n for g in groups for n, _ in g.sent.values()) == sum(
        i.kind in COLLECTIVES for i in program.instructions
    )
    assert all(p < k for k, g in enumerate(groups) for p in g.before)
    assert_legible(draw_program(program, "deep"))


@pytest.mark.parametrize(
    "keys, found",
    [
        ("", []),
        ("abc", [(0, 1, 1), (1, 1, 1), (2, 1, 1)]),
        ("xababababy", [(0, 1, 1), (1, 2, 4), (9, 1, 1)]),
        ("aabaab", [(0, 3, 2)]),
        ("aaaa", [(0, 1, 4)]),
        ("abcab", [(0, 1, 1), (1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 1, 1)]),
    ],
)
def test_repetitions_cover_every_key_once(keys: str, found: list):
    assert repeats(keys) == found
    again = "".join(keys[start : start + period] * count for start, period, count in found)
    assert again == keys


def test_folding_loses_no_instruction_and_no_byte():
    program = deep_program()
    plain = grouped(program, 1)
    groups = folded(plain)
    assert sorted(n for g in groups for n in g.numbers) == sorted(n for g in plain for n in g.numbers)
    assert sum(g.repeats for g in groups) == len(plain)
    assert sum(b for g in groups for _, b in g.sent.values()) == sum(b for g in plain for _, b in g.sent.values()) > 0
    firsts = [g.numbers[: g.once] for g in groups]
    assert firsts == [p.numbers for p in plain if p.numbers in firsts] and len({g.section for g in groups}) == 3


def test_without_collectives_it_says_so():
    with mm.Graph() as graph:
        mm.tanh(mm.placeholder("x", "a:4"))
    picture = draw_program(mm.plan(graph, "all:2", "a:all").program)
    assert any("nothing is sent" in w.text for w in words(picture))
    assert any("mesh all:2, 2 ranks; split a:all" in w.text for w in words(picture))


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: two_layers().program, deep_program])
def test_memory_kinds_add_up_to_the_plan(make):
    program = make()
    plan = memory_plan(program)
    use = memory_use(program, plan)
    for n, live in enumerate(plan.live_bytes):
        assert use.by_kind["gradients"][n] + use.by_kind["activations"][n] == live
        assert use.at(n) == live + plan.variable_bytes + plan.feed_bytes
    assert use.at(use.peak) == max(plan.live_bytes) + plan.variable_bytes + plan.feed_bytes
    assert use.limit + use.workspace == plan.total_bytes
    assert max(use.by_kind["gradients"]) > 0


def test_the_peak_is_marked_with_its_line():
    program = two_layers().program
    picture = draw_memory(program, memory_plan(program))
    use = memory_use(program, memory_plan(program))
    i = program.instructions[use.peak]
    where = f"at {use.peak}: {i.kind} of model.py:{i.source.line}"
    said = [w.text for w in words(picture)]
    assert where in picture.text and any(where in s for s in said)
    (axes,) = picture.figure().axes
    areas = [str(a.get_gid()).removeprefix("note:").split(":")[0] for a in axes.collections]
    assert areas == ["parameters", "slots", "feeds", "gradients", "activations"]
    assert {*areas, "workspace"} <= {*said}
    (band,) = axes.patches
    assert str(band.get_gid()).startswith("note:workspace: ")
    assert axes.lines[1].get_xdata()[0] == use.peak + 0.5
    total = memory_plan(program).total_bytes
    assert use.held == total == two_layers().cost.peak_memory
    assert axes.lines[0].get_ydata()[0] == total
    assert picture.text.endswith(f"({total:,} bytes)")
    held = next(s for s in said if s.startswith("held"))
    assert held == (
        f"held {amount(total, 'B')}: values {amount(use.limit, 'B')}, workspace {amount(use.workspace, 'B')}"
    )
    assert_legible(picture)


def test_the_areas_are_the_bytes_of_the_kinds():
    program = two_layers().program
    use = memory_use(program, memory_plan(program))
    (axes,) = draw_memory(program, memory_plan(program)).figure().axes
    tops = [max(a.get_paths()[0].vertices[:, 1]) for a in axes.collections]
    sums = [max(map(sum, zip(*(use.by_kind[k] for k in KINDS[: n + 1]), strict=True))) for n in range(len(KINDS))]
    assert tops == sums


def test_memory_of_long_programs_and_of_none():
    program = deep_program(40)
    picture = draw_memory(program, memory_plan(program))
    assert len(picture.svg()) < 200_000
    assert_legible(picture)
    with mm.Graph() as graph:
        mm.get_variable("w", "a:4")
    empty = mm.plan(graph, "all:2", "", fetches=[], updates=[]).program
    assert "no instructions" in draw_memory(empty, memory_plan(empty)).svg()


# -- the page --------------------------------------------------------------------------------------


class _Parser(html.parser.HTMLParser):
    """Checks nesting and collects what a page refers to."""

    VOID = ("meta", "input", "br", "link", "img")

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.tags: dict[str, int] = {}

    def handle_starttag(self, tag, attrs):
        self.tags[tag] = self.tags.get(tag, 0) + 1
        found = dict(attrs)
        self.references += [found[k] for k in ("src", "href", "data", "action") if k in found]
        self.ids += [found["id"]] if "id" in found else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()


NAMES = r'(xmlns(:\w+)?|rdf:resource)="http[^"]*"'
"""Names of languages, which look like addresses; nothing is loaded from there."""


def page_of(program: Program, cost) -> str:
    return report_page(program, cost, memory_plan(program), "a <title>", "batch:rows;hidden:cols")


def test_the_page_is_whole_and_needs_nothing_else():
    found = two_layers()
    text = page_of(found.program, found.cost)
    parser = _Parser()
    parser.feed(text)
    assert not parser.open
    assert all(r.startswith("#") and r[1:] in parser.ids for r in parser.references)
    for word in ("http:", "https:", "url(", "@import", "fetch(", "<link", "<img"):
        assert word not in re.sub(NAMES, "", text).replace("url(#", ""), word
    assert parser.tags["svg"] == 4 and parser.tags["script"] == 1
    for line in found.program.text(sources=True).splitlines():
        assert line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in text
    assert f"{found.cost.peak_memory:,}" in text
    assert "prefers-color-scheme:dark" in text.replace(" ", "")


def test_layers_of_large_programs_unfold():
    program = deep_program()
    from meshmpi.runtime.compiled import predict_cost

    parser = _Parser()
    parser.feed(page_of(program, predict_cost(program)))
    boxes = [g for g in folded(grouped(program, readable(program, 70))) if len(g.numbers) > 1]
    assert parser.tags["details"] == len(boxes) + 1 > 4


def test_command_show(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = "quickstart"
    options = [*SMALL, "--mesh", "rows:2;cols:2", "--layout", "batch:rows;heads:cols;d_ff:cols"]
    assert command(["show", config, *options]) == 0
    out = capsys.readouterr().out
    assert "each on 1 of 4 ranks" in out
    assert "all_reduce over cols" in out
    assert "peak" in out
    assert command(["show", config, *options, "--out", str(tmp_path / "a.html")]) == 0
    _Parser().feed((tmp_path / "a.html").read_text())
    timed = [*options, "--machine", "tpuv2"]
    assert command(["show", config, *timed, "--out", str(tmp_path / "b.html")]) == 0
    page = (tmp_path / "b.html").read_text()
    assert "predicted on TPUv2 core" in page and "most of the step waits for" in page
    assert command(["show", config, *timed]) == 0
    assert "predicted on TPUv2 core" in capsys.readouterr().out
    for name in ("a.pdf", "a", "a.txt"):
        assert command(["show", config, "--out", str(tmp_path / name)]) == 1
        assert "End it in .html, .svg or .png." in capsys.readouterr().err
        assert not (tmp_path / name).exists()


def test_command_show_writes_pictures(tmp_path, capsys, monkeypatch):
    (tmp_path / "my_shown.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    where = ["show", "my_shown:graph", "--mesh", "rows:2;cols:2", "--layout", "batch:rows;e:cols"]
    for ending, head in ((".svg", b"<svg"), (".png", b"\x89PNG")):
        path = tmp_path / "new" / f"a{ending}"
        assert command([*where, "--out", str(path)]) == 0
        assert path.read_bytes().startswith(head)
        assert f"({path.stat().st_size:,} bytes)" in capsys.readouterr().out
    drawn = (tmp_path / "new" / "a.svg").read_text()
    for said in (
        "Where the time of a step goes",
        "layout batch:rows;e:cols",
        "Program as a graph",
        "Memory of the rank",
        "held ",
    ):
        assert said in drawn


MODULE = """
import meshmpi as mm

def graph():
    with mm.Graph() as g:
        x = mm.placeholder("x", "batch:4;d:6")
        w = mm.get_variable("w", "d:6;e:5")
        y = mm.reduce_sum(mm.tanh(mm.einsum([x, w], "batch:4;e:5")))
        mm.optimize.SGD(0.1).minimize(y)
    return {"graph": g, "fetches": {"y": y}}

def needs(a):
    return a

def nothing():
    return 3
"""


def test_command_verify(tmp_path, capsys, monkeypatch):
    (tmp_path / "my_model.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    assert command(["verify", "my_model:graph", "--mesh", "rows:2;cols:3"]) == 0
    out = capsys.readouterr().out
    assert "layouts compute what one rank does, in float64" in out
    assert "my_model.py:7" in out
    some = ["verify", "my_model:graph", "--layouts", "batch:rows", "e:cols", "--own-types"]
    assert command(some) == 0
    assert "2 layouts compute what one rank does, in the types" in capsys.readouterr().out
    assert command(["verify", "my_model:nothing"]) == 1
    assert "returned int, not a graph" in capsys.readouterr().err
    assert command(["verify", "my_model:none"]) == 1
    assert "has no function 'none'" in capsys.readouterr().err
    assert command(["verify", "my_model:needs"]) == 1
    assert "needs(a) is called with 0 arguments" in capsys.readouterr().err


@pytest.mark.matrix
def test_command_verify_on_real_ranks(tmp_path):
    (tmp_path / "my_model.py").write_text(MODULE)
    done = subprocess.run(
        [*_meshmpi(), "verify", "my_model:graph", "--ranks", "2", "--mesh", "all:2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("layouts compute what one rank does") == 1


def _meshmpi() -> list[str]:
    import sys

    return [sys.executable, "-m", "meshmpi"]


# -- in a browser ----------------------------------------------------------------------------------

BROWSERS = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "chrome")
BROWSER = next((p for n in BROWSERS if (p := shutil.which(n))), None)

PROBE = """
<script>
box.value="all_reduce cols"; box.dispatchEvent(new Event("input"));
const shown=lines.filter(l=>!l.hidden).length;
const out=document.createElement("p"); out.id="probe";
const style=getComputedStyle(document.body);
const boxes=[...document.querySelectorAll("svg path")].filter(r=>r.getBoundingClientRect().width>0);
const wide=[...document.querySelectorAll("svg")].map(s=>{
  const own=s.getBoundingClientRect();
  return [...s.querySelectorAll("text")].filter(t=>{const b=t.getBoundingClientRect();
    return b.right>own.right+1||b.left<own.left-1||b.bottom>own.bottom+1||b.top<own.top-1})
    .length});
out.textContent=JSON.stringify({shown,background:style.backgroundColor,color:style.color,
  rects:boxes.length,outside:wide,beyond:document.documentElement.scrollWidth-innerWidth,resources:performance.getEntriesByType("resource").length});
document.body.append(out);
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium here: the page is not seen by a browser")
def test_a_real_browser_draws_the_page_and_its_search_works(tmp_path):
    import json

    found = two_layers()
    page = tmp_path / "page.html"
    page.write_text(page_of(found.program, found.cost).replace("</body>", PROBE + "</body>"))
    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--dump-dom",
            "--window-size=390,844",  # a phone
            f"--user-data-dir={tmp_path / 'profile'}",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    probe = re.search(r'<p id="probe">(.*?)</p>', done.stdout)
    assert probe, done.stderr[-2000:]
    seen = json.loads(probe[1].replace("&quot;", '"'))
    text = found.program.text(sources=True).splitlines()
    assert seen["shown"] == sum("all_reduce" in s and "cols" in s for s in text) > 0
    assert seen["rects"] > 30
    assert seen["outside"] == [0, 0, 0, 0]  # no text leaves its picture
    assert seen["beyond"] <= 0  # only pictures and tables scroll to the side, in their boxes
    assert seen["resources"] == 0  # nothing was loaded from elsewhere
    assert seen["background"] != seen["color"]
