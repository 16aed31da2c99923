"""Broken programs with tiled regions: rows for test_verify."""

from __future__ import annotations

from collections.abc import Callable

from meshmpi.ir.bands import Band
from meshmpi.ir.kinds import Contract, Map, Transpose
from meshmpi.ir.kinds.regions import TileDim
from meshmpi.ir.program import Instruction, LocalType
from meshmpi.ir.scalar import call
from tests.passes.hand import Hand, t

Row = Callable[[Hand], object]
X, W = 0, 1  # values of the feeds
S, Y = 100, 2  # inside, and the result


def _tiled(
    h: Hand,
    *body: Instruction,
    y: LocalType,
    over: tuple = (TileDim("a", 1),),
    inner: LocalType | None = None,
    band: Band | None = None,
) -> None:
    x, w = h.feed("x", t("a/rows b")), h.feed("w", t("b c"))
    attrs = {"over": over, "band": band, "body": body, "inner": {S: inner or t("a/rows c")}}
    h.add("tiled", [x, w], y, **attrs)


def _two_kinds(h: Hand, dims: str) -> None:
    """A product, and a square of a feed over other blocks of its dims; each of them is right."""
    x, w, v = (h.feed(n, t(d)) for n, d in (("x", "a/rows b"), ("w", "b c"), ("v", dims)))
    body = (Instruction(Contract(), (x, w), (3,)), _map("square", v, S))
    attrs = {"over": (TileDim("a", 1),), "body": body, "inner": {S: t(dims)}}
    h.add("tiled", [x, w, v], t("a/rows c"), **attrs)


def _product(out: int = S) -> Instruction:
    return Instruction(Contract(), (X, W), (out,))


def _map(function: str, x: int, y: int) -> Instruction:
    return Instruction(Map(call(function, 1, "float32")), (x,), (y,))


ROWS: dict[str, tuple[Row, str]] = {
    "a tiled region with a transpose in it": (
        lambda h: _tiled(h, Instruction(Transpose(), (X,), (Y,)), y=t("b a/rows")),
        "has transpose in its body",
    ),
    "a tiled region that uses what it has not": (
        lambda h: _tiled(h, _map("square", S, Y), y=t("a/rows c")),
        "undefined value",
    ),
    "a tiled region that returns what it has not": (
        lambda h: _tiled(h, _product(), y=t("a/rows c")),
        "returns an undefined value",
    ),
    "a tiled region that breaks a rule of its body": (
        lambda h: _tiled(h, _product(), _map("square", S, Y), y=t("a c")),
        "dimension 'a' is not the same",
    ),
    "a tiled region over a sum that it uses": (
        lambda h: _tiled(h, _product(), _map("square", S, Y), y=t("a/rows c"), over=(TileDim("b", 2),)),
        "needs all of 'b'",
    ),
    "a tiled region that repeats a result": (lambda h: _tiled(h, _map("square", W, Y), y=t("b c")), "needs all of 'a'"),
    "a tiled region over blocks in two splits": (
        lambda h: _two_kinds(h, "a/rows c/cols"),
        "mixes blocks of c=6 and of c=6/cols",
    ),
    "a tiled region over two sizes of a dim": (lambda h: _two_kinds(h, "a/rows c=5"), "mixes blocks of c=6 and of c=5"),
    "a tiled region over no dim": (lambda h: _tiled(h, _product(Y), y=t("a/rows c"), over=()), "runs over no dim"),
    "a tiled region over empty blocks": (
        lambda h: _tiled(h, _product(Y), y=t("a/rows c"), over=(TileDim("a", 0),)),
        "empty blocks",
    ),
    "a tiled region with a band of a dim it does not walk": (
        lambda h: _tiled(h, _product(Y), y=t("a/rows c"), band=Band("b", "c", 0)),
        "has a band along other dims",
    ),
    "a tiled region that gives away pairs outside its band": (
        lambda h: _tiled(h, _product(Y), y=t("a/rows c"), band=Band("a", "c", 0)),
        "uses pairs outside 0<=a-c",
    ),
    "a tiled region whose sum is over more pairs than its band": (
        lambda h: _tiled(h, _product(Y), y=t("a/rows c"), band=Band("a", "b", 0)),
        "uses pairs outside 0<=a-b",
    ),
    "a product with a band of no value's dims": (
        lambda h: h.add("contract", [h.feed("x", t("a b")), h.feed("w", t("b c"))], t("a c"), band=Band("a", "d", 0)),
        "has a band 0<=a-d of no value's two dims",
    ),
    "a product of elements with a band": (
        lambda h: h.add("reduce", [h.feed("x", t("a b"))], t("a"), op="prod", band=Band("a", "b")),
        "has a band, which a product of elements lacks",
    ),
}
