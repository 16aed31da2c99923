"""Broken programs of loops: rows for test_verify."""

from __future__ import annotations

from collections.abc import Callable

from meshmpi.loops import LoopDim
from meshmpi.program import Instruction, LocalType
from meshmpi.scalar import call
from tests.passes.hand import Hand, t

Row = Callable[[Hand], object]
X, W = 0, 1  # values of the feeds
S, Y = 100, 2  # inside, and the result


def _loop(
    h: Hand, *body: Instruction, y: LocalType, over: tuple = (LoopDim("a", 1),),
    inner: LocalType | None = None, causal: tuple = (),
) -> None:  # fmt: skip
    x, w = h.feed("x", t("a/rows b")), h.feed("w", t("b c"))
    attrs = {"over": over, "causal": causal, "body": body, "inner": {S: inner or t("a/rows c")}}
    h.add("loop", [x, w], y, **attrs)


def _product(out: int = S) -> Instruction:
    return Instruction("contract", (X, W), (out,))


def _map(function: str, x: int, y: int) -> Instruction:
    return Instruction("map", (x,), (y,), {"expr": call(function, 1, "float32")})


ROWS: dict[str, tuple[Row, str]] = {
    "a loop with a transpose in it": (
        lambda h: _loop(h, Instruction("transpose", (X,), (Y,)), y=t("b a/rows")),
        "has transpose in its body",
    ),
    "a loop that uses what it has not": (
        lambda h: _loop(h, _map("square", S, Y), y=t("a/rows c")),
        "undefined value",
    ),
    "a loop that returns what it has not": (
        lambda h: _loop(h, _product(), y=t("a/rows c")),
        "returns what it has not",
    ),
    "a loop that breaks a rule of its body": (
        lambda h: _loop(h, _product(), _map("square", S, Y), y=t("a c")),
        "dimension 'a' is not the same",
    ),
    "a loop over a sum that it uses": (
        lambda h: _loop(
            h, _product(), _map("square", S, Y), y=t("a/rows c"), over=(LoopDim("b", 2),)
        ),
        "needs all of 'b'",
    ),
    "a loop that repeats a result": (
        lambda h: _loop(h, _map("square", W, Y), y=t("b c")),
        "needs all of 'a'",
    ),
    "a loop over no dim": (
        lambda h: _loop(h, _product(Y), y=t("a/rows c"), over=()),
        "runs over no dim",
    ),
    "a loop over empty blocks": (
        lambda h: _loop(h, _product(Y), y=t("a/rows c"), over=(LoopDim("a", 0),)),
        "empty blocks",
    ),
    "a loop that is causal along a dim it does not walk": (
        lambda h: _loop(h, _product(Y), y=t("a/rows c"), causal=("b", "c")),
        "is causal along other dims",
    ),
}
