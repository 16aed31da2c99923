"""Broken programs with instructions that exchange halos or run in the background."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meshmpi.ir.halos import HaloRegion
from meshmpi.ir.program import LocalType
from tests.passes.hand import Hand, t

HALO = HaloRegion(4, 1, -1, 1)


def _halo(type: LocalType, dim: str, halo: HaloRegion = HALO) -> LocalType:
    halos = tuple(halo if n == dim else None for n in type.shape.names)
    return replace(type, halos=halos)


def _x(h: Hand, dims: str = "a/rows b") -> int:
    return h.feed(f"x{len(h.types)}", t(dims))


def _shift(h: Hand, xs: list[int], type: LocalType, dim: str = "a", **attrs: Any) -> int:
    full = {"dim": dim, "axes": ("rows",), "stride": 1, "offsets": (0,) * len(xs), "wrap": False, "value": 0, **attrs}
    return h.add("shift", xs, type, **full)


def _with_halo(h: Hand) -> int:
    return _shift(h, [_x(h)], _halo(t("a/rows b"), "a"))


def _start(h: Hand) -> int:
    return h.add("all_reduce", [h.pending("a b", "cols")], t("a b"), axes=("cols",), op="sum", start=True)


ROWS: dict[str, tuple[Callable[[Hand], object], str]] = {
    "a shift with too few offsets": (
        lambda h: _shift(h, [_x(h), _x(h)], t("a/rows b"), offsets=(0,)),
        "one offset per input",
    ),
    "a shift along a whole dim": (lambda h: _shift(h, [_x(h, "a b/rows")], t("a b/rows")), "split otherwise"),
    "a shift of something whole": (lambda h: _shift(h, [_x(h, "a b")], t("a/rows b")), "no blocks of 'a'"),
    "a shift that changes another dim": (
        lambda h: _shift(h, [_x(h)], t("a/rows b/cols")),
        "dimension 'b' is not the same",
    ),
    "a shift that changes the type": (
        lambda h: _shift(h, [_x(h)], t("a/rows b", dtype="int32")),
        "changes dims or type",
    ),
    "a shift of an unfinished sum": (
        lambda h: _shift(h, [h.pending("a/rows b", "cols")], t("a/rows b", "cols")),
        "unfinished",
    ),
    "a ring of two inputs": (lambda h: _shift(h, [_x(h), _x(h)], t("a/rows b"), wrap=True), "ring of several"),
    "a halo with an offset": (lambda h: _shift(h, [_x(h)], _halo(t("a/rows b"), "a"), offsets=(1,)), "into a halo"),
    "a halo of a halo": (lambda h: _shift(h, [_with_halo(h)], _halo(t("a/rows b"), "a")), "no blocks of 'a'"),
    "a halo that disappears": (
        lambda h: _shift(
            h,
            [_shift(h, [_x(h, "a/rows b/cols")], _halo(t("a/rows b/cols"), "a"))],
            t("a/rows b/cols"),
            "b",
            axes=("cols",),
        ),
        "changes a halo of 'a'",
    ),
    "a halo that is used as a block": (lambda h: h.map("negative", [_with_halo(h)], t("a/rows b")), "held with halos"),
    "a halo made by something else": (lambda h: h.feed("x", _halo(t("a/rows"), "a")), "makes a value held with halos"),
    "a result used before its wait": (lambda h: h.map("negative", [_start(h)], t("a b")), "before its wait"),
    "a wait for nothing": (lambda h: h.add("wait", [_x(h)], t("a/rows b"), axes=("rows",)), "not started"),
    "two waits": (lambda h: [h.add("wait", [v], t("a b"), axes=("cols",)) for v in [_start(h)] * 2], "before its wait"),
    "a wait that changes its value": (
        lambda h: h.add("wait", [_start(h)], t("b a"), axes=("cols",)),
        "changes its value",
    ),
    "a reduction of two values that is started": (
        lambda h: h.add(
            "all_reduce",
            [h.pending("a", "cols"), h.pending("a", "cols")],
            t("a"),
            t("a"),
            axes=("cols",),
            op="sum",
            start=True,
        ),
        "cannot be started",
    ),
}
