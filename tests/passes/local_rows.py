"""Broken programs of segments and convolutions: rows for test_verify."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meshmpi.dims import Shape
from meshmpi.program import Instruction, LocalType
from meshmpi.scalar import call
from meshmpi.slides import Slide
from meshmpi.windows import Window
from tests.passes.hand import Hand, t

SLIDE, WINDOW = Slide("a", "k", "a"), Window(4, 1, 0, 1)
SQUARE = {"expr": call("square", 1, "float32")}


def _segment(h: Hand, *body: Instruction, inner: dict[int, LocalType], y: LocalType) -> None:
    x = h.feed("x", t("a b"))
    assert x == 0
    h.add("segment", [x], y, body=body, inner=inner, rows=Shape("a:4"))


def _conv(
    h: Hand, x: str = "a/rows b", w: str = "k b c", y: str = "a/rows c",
    slide: Slide = SLIDE, window: Window | None = WINDOW,
    partial: str = "", dtype: str = "float32",
) -> None:  # fmt: skip
    """x[a, b] * w[k, b, c] -> y[a, c]; by default a is held in the windows that taps 0, 1 need."""
    held = h.feed("x", t(x))
    if window is not None:
        type = replace(t(x), windows=(window, *(None,) * (len(t(x).shape) - 1)))
        attrs: dict[str, Any] = {"dim": "a", "axes": ("rows",), "stride": 1, "offsets": (0,)}
        held = h.add("shift", [held], type, wrap=False, value=0, **attrs)
    filter = h.feed("w", t(w, dtype=dtype))
    h.add("conv", [held, filter], t(y, partial), slides=(slide,))


ROWS: dict[str, tuple[Callable[[Hand], object], str]] = {
    "a segment with a product in it": (
        lambda h: _segment(h, Instruction("contract", (0, 0), (1,)), inner={}, y=t("a")),
        "has contract in its body",
    ),
    "a segment that uses what it has not": (
        lambda h: _segment(h, Instruction("map", (7,), (1,), SQUARE), inner={}, y=t("a b")),
        "uses an undefined value",
    ),
    "a segment that uses a sum over rows": (
        lambda h: _segment(
            h, Instruction("reduce", (0,), (9,), {"op": "sum"}),
            Instruction("map", (9,), (1,), SQUARE), inner={9: t("b")}, y=t("b"),
        ),
        "before the last row",
    ),
    "a segment that returns what it has not": (
        lambda h: _segment(
            h, Instruction("map", (0,), (9,), SQUARE), inner={9: t("a b")}, y=t("a b")
        ),
        "returns an undefined value",
    ),
    "a convolution of two types": (lambda h: _conv(h, dtype="int32"), "two data types"),
    "a convolution that keeps its sum to itself": (
        lambda h: _conv(h, x="a/rows b/cols", w="k b/cols c"), "pending over",
    ),
    "a convolution in the wrong windows": (
        lambda h: _conv(h, window=Window(4, 1, -1, 0)), "in a window that no block needs",
    ),
    "a convolution without its halo": (
        lambda h: _conv(h, window=None), "uses one axis for several dims",
    ),
    "a convolution with a dim of one operand summed": (
        lambda h: _conv(h, w="k c", y="a/rows c"), "must reduce ['b'] first",
    ),
    "a convolution over a finished sum": (
        lambda h: _conv(h, partial="cols"), "must leave a reduction pending",
    ),
}  # fmt: skip
