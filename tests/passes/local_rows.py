"""Broken programs of fused kernels and convolutions: rows for test_verify."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meshmpi.dims import Shape
from meshmpi.ir.convolutions import ConvDims
from meshmpi.ir.halos import HaloRegion
from meshmpi.ir.kinds import Contract, Fused, Map, Reduce
from meshmpi.ir.program import Instruction, LocalType
from meshmpi.ir.scalar import call
from tests.passes.hand import Hand, t

SLIDE, HALO = ConvDims("a", "k", "a"), HaloRegion(4, 1, 0, 1)
SQUARE = Map(call("square", 1, "float32"))


def _fused(h: Hand, *body: Instruction, inner: dict[int, LocalType], y: LocalType) -> None:
    x = h.feed("x", t("a b"))
    assert x == 0
    h.add("fused", [x], y, body=body, inner=inner, rows=Shape("a:4"))


def _two_kinds(h: Hand, made: int) -> None:
    """Sums of whole rows with blocks of rows: each instruction is right, the nest is not."""
    x, w = h.feed("x", t("a b")), h.feed("w", t("a b/rows"))
    body = (Instruction(Reduce("sum"), (x,), (9,)), Instruction(SQUARE, (w,), (8,)), Instruction(SQUARE, (9,), (2,)))
    types = {2: t("a"), 8: t("a b/rows"), 9: t("a")}
    inner = {v: types.pop(v) for v in ((8, 9) if made == 1 else (9,))}
    outputs = tuple(types)
    h.types.update(types)
    h.instructions.append(Instruction(Fused(Shape("a:4"), body, inner), (x, w), outputs))


def _conv(
    h: Hand,
    x: str = "a/rows b",
    w: str = "k b c",
    y: str = "a/rows c",
    slide: ConvDims = SLIDE,
    halo: HaloRegion | None = HALO,
    partial: str = "",
    dtype: str = "float32",
) -> None:
    """x[a, b] * w[k, b, c] -> y[a, c]; by default a is held with the halos that taps 0, 1 need."""
    held = h.feed("x", t(x))
    if halo is not None:
        type = replace(t(x), halos=(halo, *(None,) * (len(t(x).shape) - 1)))
        attrs: dict[str, Any] = {"dim": "a", "axes": ("rows",), "stride": 1, "offsets": (0,)}
        held = h.add("shift", [held], type, wrap=False, value=0, **attrs)
    filter = h.feed("w", t(w, dtype=dtype))
    h.add("conv", [held, filter], t(y, partial), dims=(slide,))


ROWS: dict[str, tuple[Callable[[Hand], object], str]] = {
    "a fused kernel with a product in it": (
        lambda h: _fused(h, Instruction(Contract(), (0, 0), (1,)), inner={}, y=t("a")),
        "has contract in its body",
    ),
    "a fused kernel that uses what it has not": (
        lambda h: _fused(h, Instruction(SQUARE, (7,), (1,)), inner={}, y=t("a b")),
        "uses an undefined value",
    ),
    "a fused kernel that uses a sum over rows": (
        lambda h: _fused(
            h, Instruction(Reduce("sum"), (0,), (9,)), Instruction(SQUARE, (9,), (1,)), inner={9: t("b")}, y=t("b")
        ),
        "before the last row",
    ),
    "a fused kernel that returns what it has not": (
        lambda h: _fused(h, Instruction(SQUARE, (0,), (9,)), inner={9: t("a b")}, y=t("a b")),
        "returns an undefined value",
    ),
    "a fused kernel whose inner value is one of the program's": (
        lambda h: _fused(
            h, Instruction(SQUARE, (0,), (0,)), Instruction(SQUARE, (0,), (1,)), inner={0: t("a b")}, y=t("a b")
        ),
        "inside that the program has too",
    ),
    "a fused kernel over blocks of two kinds": (lambda h: _two_kinds(h, 2), "mixes blocks of b=8 and of b=8/rows"),
    "a fused kernel over blocks of two kinds, one of them inside": (
        lambda h: _two_kinds(h, 1),
        "mixes blocks of b=8 and of b=8/rows",
    ),
    "a convolution of two types": (lambda h: _conv(h, dtype="int32"), "two data types"),
    "a convolution that keeps its sum to itself": (
        lambda h: _conv(h, x="a/rows b/cols", w="k b/cols c"),
        "pending over",
    ),
    "a convolution with the wrong halos": (
        lambda h: _conv(h, halo=HaloRegion(4, 1, -1, 0)),
        "with a halo that no block needs",
    ),
    "a convolution without its halo": (lambda h: _conv(h, halo=None), "uses one axis for several dims"),
    "a convolution with a dim of one operand summed": (
        lambda h: _conv(h, w="k c", y="a/rows c"),
        "must reduce ['b'] first",
    ),
    "a convolution over a finished sum": (lambda h: _conv(h, partial="cols"), "must leave a reduction pending"),
}
