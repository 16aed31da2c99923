"""Convolution over named dimensions, any number of them: one primitive and its own gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshmpi.dims import Axes, Shape, ShapeLike
from meshmpi.errors import ShapeError, suggest
from meshmpi.graph import Operation, Tensor, only
from meshmpi.graph.ops.reductions import reduce_sum
from meshmpi.ir import kinds as ir
from meshmpi.ir.convolutions import ConvDims
from meshmpi.ir.halos import HaloRegion


class Conv(Operation):
    """y = sum of x * w over what meets: an einsum in which some dims slide over each other.

    For each `ConvDims` (dims xd of x, wd of w, yd of y) the sum runs over the indices with ``base * i == stride * o +
    dilation * k - before``; elements outside of x count as 0.  All other dims are those of an einsum: summed where y
    lacks them (input channels), kept where one operand has them (batch, output channels) or both (depthwise, groups).

    Gradient: again such convolutions, of x and dy (dims with w and y exchanged) and of dy and w
    (dims with x and y exchanged, whose base is the stride).

    Lowers: local `conv`.  Where two of the three dims of one ConvDims are split alike, the blocks of one
    get the elements of x (or w) that they meet from their neighbours by a `shift`; a third is
    gathered.  Where w is split along one, or a summed dim is, an all_reduce of the result.
    Where axes are in use by other dims, what slides is gathered.
    """

    def __init__(self, x: Tensor, w: Tensor, slides: Sequence[ConvDims], output_shape: Shape):
        self.slides = tuple(s.normalized() for s in slides)
        self.output_shape = output_shape
        super().__init__([x, w])

    def infer(self) -> Sequence[tuple[Shape, str]]:
        check(self, *self.inputs)
        return [(self.output_shape, self.inputs[0].dtype)]

    def grad(self, dys: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        (x, w), dy = self.inputs, only(dys)
        dx = Conv(dy, w, [s.of_input() for s in self.slides], x.shape).output
        dw = Conv(x, dy, [s.of_filter() for s in self.slides], w.shape).output
        return [dx, dw]

    def lower(self, lowering: Any) -> None:
        values, t = operands(self, lowering)
        lowering.define(self.output, lowering.emit(ir.Conv(self.slides), values, t))


def check(conv: Conv, x: Tensor, w: Tensor) -> None:
    """Raises ShapeError where dims, sizes or types do not fit."""
    y, slides = conv.output_shape, conv.slides
    shapes = f"x {x.shape}, w {w.shape} and the output {y}"
    if x.dtype != w.dtype or x.dtype == "bool":
        raise conv.fail(f"inputs have data types {x.dtype} and {w.dtype}.", "Convert with mm.cast(x, dtype).")
    for s in slides:
        if 0 in (s.stride, s.dilation, s.base):
            raise conv.fail(f"slide {s} has a stride, dilation or base of 0.", "Use 1 or more.")
        for role, shape, name in (("x", x.shape, s.x), ("w", w.shape, s.w), ("the output", y, s.y)):
            if shape.find(name) < 0:
                raise conv.fail(f"{role} {shape} has no dimension '{name}' to slide.", suggest(name, shape.names))
    plain = [shape.without([s[:3][k] for s in slides]) for k, shape in enumerate((x.shape, w.shape, y))]
    sliding = [name for s in slides for name in s[:3]]
    for d in (d for shape in plain for d in shape if d.name in sliding):
        raise conv.fail(
            f"dimension '{d.name}' slides in one place and not in another: {shapes}.",
            "Rename one of them with mm.rename_dimension().",
        )
    conv.sizes(plain)
    lost = [d.name for d in plain[2] if plain[0].find(d.name) < 0 and plain[1].find(d.name) < 0]
    if lost:
        raise conv.fail(f"output dimensions {lost} are in no input: {shapes}.", "Broadcast later.")


def operands(conv: Conv, lowering: Any) -> tuple[list[int], Any]:
    """The values of x and w as the local instruction takes them, and the type of its result."""
    x, w = conv.inputs
    y, slides = conv.output, conv.slides
    base = lowering.placement.base
    splits = [
        {n: axes for n, axes in zip(t.shape.names, base(t.shape), strict=True) if n not in [s[:3][k] for s in slides]}
        for k, t in enumerate((x, w, y))
    ]
    used = [a for s in {**splits[0], **splits[1]}.values() for a in s]
    gone = [a for n, s in {**splits[0], **splits[1]}.items() if n not in splits[2] for a in s]
    halos: list[tuple[int, str, HaloRegion]] = []
    for s in slides:
        held, halo = _split(conv, s, lowering, used)
        splits[0][s.x], splits[1][s.w], splits[2][s.y] = held["x"], held["w"], held["y"]
        axes = held["x"] or held["w"] or held["y"]
        used += axes
        gone += () if held["y"] else axes
        halos += halo
    values = [lowering.fit(t, s) for t, s in zip(conv.inputs, splits, strict=False)]
    for operand, dim, halo in halos:
        values[operand] = lowering.halo(values[operand], dim, halo)
    t = lowering.type_of(y)
    whole = type(t)(t.shape, t.dtype, tuple(splits[2][n] for n in t.shape.names))
    return values, lowering.pending(whole, gone)


def _split(
    conv: Conv, s: ConvDims, lowering: Any, used: Sequence[str]
) -> tuple[dict[str, Axes], list[tuple[int, str, HaloRegion]]]:
    """How the three dims of one ConvDims are split: two over the same axes, the third whole.

    And (operand, dim, halo) of the operand that is held with halos, if one is.
    """
    x, w, y = *conv.inputs, conv.output
    n, k, m = x.shape.dim(s.x).size, w.shape.dim(s.w).size, y.shape.dim(s.y).size
    wish = {
        "x": _free(lowering.types[lowering.value(x)].split(s.x), used),
        "w": _free(lowering.types[lowering.value(w)].split(s.w), used),
        "y": _free(lowering.type_of(y).split(s.y), used),
    }
    whole, driver, with_halo = _roles(wish, {"w": k, "y": m, "x": n})
    axes = wish[driver] or wish[with_halo]
    held = {whole: (), driver: axes, with_halo: ()}
    if not axes or wish[with_halo] != axes:
        return held, []
    held[with_halo] = axes
    turned = s if with_halo == "x" else s.swapped()
    if driver == "y":
        halo = turned.halo(m, {"x": k, "w": n}[with_halo])
    else:
        halo = turned.of_filter().halo({"w": k, "x": n}[driver], m)
    return held, [(0, s.x, halo) if with_halo == "x" else (1, s.w, halo)]


def _free(axes: Axes, used: Sequence[str]) -> Axes:
    """The axes, or none where one of them is in use."""
    return () if any(a in used for a in axes) else axes


def _roles(wish: dict[str, Axes], sizes: dict[str, int]) -> tuple[str, str, str]:
    """Which of x, w, y is whole, which gives the blocks, which is held with halos.

    Two that are split alike stay so; else the smallest dim is whole.
    """
    alike = [r for r in sizes if (others := [wish[o] for o in sizes if o != r])[0] == others[1] != ()]
    whole = min(alike or sizes, key=lambda r: sizes[r])
    driver = "w" if whole == "y" else "y"
    (with_halo,) = (r for r in sizes if r not in (whole, driver))
    return whole, driver, with_halo


def conv(x: Tensor, w: Tensor, slides: Sequence[ConvDims], output_shape: ShapeLike) -> Tensor:
    """Convolution of x with w along any number of dims, in one primitive.

    Args:
        x: Input.
        w: Filter, of the type of x.
        slides: Names of the dims that slide, and how: one `mm.ConvDims` for each.
        output_shape: Dims of the result with their sizes; any size is legal, since what lies outside of x counts as 0.

    Returns:
        A tensor of ``output_shape``.

    Raises:
        ShapeError: Dims are missing, have two sizes, or slide in one place and not in another.

    Lowers: halos by `shift` where x and the output are split alike; see `Conv`.

    Example:
        >>> y = mm.conv(image, filter, [mm.ConvDims("h", "kh", "h", before=1)], image.shape)
    """
    shape = Shape(output_shape)
    slides = list(slides)
    names = ([s.x for s in slides], [s.w for s in slides], [s.y for s in slides])
    for role, found in zip(("x", "w", "y"), names, strict=True):
        for n in found:
            if found.count(n) > 1:
                raise ShapeError(
                    f"conv: dimension '{n}' of {role} slides twice in {', '.join(map(str, slides))}.",
                    "Name it in one slide.",
                    str(x.source),
                )
    kept = [d.name for d in shape]
    x, w = (
        _sum_alone(t, [*sliding, *kept, *other.shape.names])
        for t, other, sliding in ((x, w, names[0]), (w, x, names[1]))
    )
    return Conv(x, w, slides, shape).output


def _sum_alone(x: Tensor, needed: Sequence[str]) -> Tensor:
    """x without the dims that neither the other operand nor the result has."""
    kept = Shape([d for d in x.shape if d.name in needed])
    return x if kept == x.shape else reduce_sum(x, output_shape=kept)
