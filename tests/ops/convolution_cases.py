"""Convolution rows of the table (`tests.ops.cases`): every way that dims may slide, and be split.

Dims h and w of a picture keep their names in the result, so that a layout splits both; their sizes
are those of a and b, or follow from them.  p and q are the dims of filters.
"""

from __future__ import annotations

from collections.abc import Sequence

import meshmpi as mm
from meshmpi.graph import Tensor
from tests.ops.build import Builder
from tests.ops.elementwise_cases import BFLOAT16, FLOAT32, case, row

ConvDims = mm.ConvDims


def picture(b: Builder, name: str, dims: str, dtype: str = "float64", kind: str = "signed"):
    """A fed tensor whose h has the size of a, and w that of b."""
    sizes = {"h": b.a.size, "w": b.b.size}
    shape = [mm.Dimension(d, sizes.get(d) or b.sizes[d]) for d in dims.split()]
    return b.feed(name, mm.Shape(shape), dtype, kind)


def _line(b: Builder, taps: int, slide: ConvDims, size: int, dtype: str = "float64") -> Tensor:
    """A 1-D convolution of x [c, h] with channels in and out."""
    x = picture(b, "x", "c h", dtype)
    w = b.feed("f", mm.Shape([("p", taps), b.c, b.e]), dtype)
    return mm.conv(x, w, [slide], [b.e, ("h", size)])


for _name, _taps, _slide, _size in (
    ("same", 3, ConvDims("h", "p", "h", before=1), lambda n: n),
    ("even_filter", 4, ConvDims("h", "p", "h", before=1), lambda n: n),
    ("valid", 3, ConvDims("h", "p", "h"), lambda n: n - 2),
    ("full", 3, ConvDims("h", "p", "h", before=2), lambda n: n + 2),
    ("strided", 3, ConvDims("h", "p", "h", stride=2, before=1), lambda n: (n + 1) // 2),
    ("stride_beyond_filter", 2, ConvDims("h", "p", "h", stride=3), lambda n: -(-n // 3)),
    ("dilated", 3, ConvDims("h", "p", "h", dilation=2, before=2), lambda n: n),
    ("strided_and_dilated", 2, ConvDims("h", "p", "h", 2, 3, 2), lambda n: (n + 1) // 2),
    ("backwards", 3, ConvDims("h", "p", "h", dilation=-1, before=-1), lambda n: n),
    ("transposed", 3, ConvDims("h", "p", "h", base=2, dilation=-1, before=-1), lambda n: 2 * n),
    ("transposed_by_more", 2, ConvDims("h", "p", "h", base=3, dilation=-1), lambda n: 3 * n),
    ("rational_stride", 3, ConvDims("h", "p", "h", stride=3, base=2, before=1), lambda n: n),
    ("wide_filter", 9, ConvDims("h", "p", "h", before=4), lambda n: n),
    ("asymmetric_padding", 3, ConvDims("h", "p", "h", before=4), lambda n: n + 3),
    ("into_another_dim", 3, ConvDims("h", "p", "o", before=1), lambda n: n),
):
    row(
        f"conv_{_name}",
        lambda b, t=_taps, s=_slide, n=_size: [
            mm.conv(picture(b, "x", "c h"), b.feed("f", mm.Shape([("p", t), b.c, b.e])), [s], [b.e, (s.y, n(b.a.size))])
        ],
        limit=40,
    )


@case(tolerance=FLOAT32, limit=20)
def conv_float32(b: Builder) -> Sequence[Tensor]:
    return [_line(b, 3, ConvDims("h", "p", "h", before=1), b.a.size, "float32")]


@case(tolerance=BFLOAT16, limit=20)
def conv_bfloat16(b: Builder) -> Sequence[Tensor]:
    return [_line(b, 3, ConvDims("h", "p", "h", before=1), b.a.size, "bfloat16")]


@case(limit=20)
def conv_int32(b: Builder) -> Sequence[Tensor]:
    x, f = picture(b, "x", "h", "int32", "whole"), b.feed("f", mm.Shape("p:3"), "int32", "whole")
    return [mm.conv(x, f, [ConvDims("h", "p", "h", before=1)], x.shape)]


@case(limit=60)
def conv_of_pictures(b: Builder) -> Sequence[Tensor]:
    # Both dims slide, each may be split over an axis of its own or over two.
    x, f = picture(b, "x", "h w c"), b.feed("f", mm.Shape([("p", 3), ("q", 2), b.c, b.e]))
    slides = [ConvDims("h", "p", "h", before=1), ConvDims("w", "q", "w", before=1)]
    return [mm.conv(x, f, slides, [x.shape[0], x.shape[1], b.e])]


@case(limit=60)
def conv_of_pictures_strided(b: Builder) -> Sequence[Tensor]:
    # Channels first; the strides differ, and so do the parts of the padding.
    x, f = picture(b, "x", "c h w"), b.feed("f", mm.Shape([b.e, ("p", 3), ("q", 3), b.c]))
    slides = [ConvDims("h", "p", "h", stride=2, before=1), ConvDims("w", "q", "w", stride=3)]
    sizes = [("h", -(-b.a.size // 2)), ("w", -(-b.b.size // 3))]
    return [mm.conv(x, f, slides, [b.e, *sizes])]


@case(limit=30)
def conv_of_a_batch(b: Builder) -> Sequence[Tensor]:
    x, f = picture(b, "x", "k h w c"), b.feed("f", mm.Shape([("p", 3), ("q", 3), b.c, b.e]))
    slides = [ConvDims("h", "p", "h", before=1), ConvDims("w", "q", "w", before=1)]
    return [mm.conv(x, f, slides, x.shape.without("c") + [b.e])]


@case(limit=40)
def conv_of_volumes(b: Builder) -> Sequence[Tensor]:
    x = picture(b, "x", "h w c")
    f = b.feed("f", mm.Shape("p:2;q:3;r:2"))
    slides = [
        ConvDims("h", "p", "h", before=1),
        ConvDims("w", "q", "w", dilation=2, before=2),
        ConvDims("c", "r", "c", stride=2),
    ]
    return [mm.conv(x, f, slides, [*x.shape[:2], ("c", -(-b.c.size // 2))])]


@case(limit=60)
def conv_depthwise(b: Builder) -> Sequence[Tensor]:
    x, f = picture(b, "x", "h w c"), b.feed("f", mm.Shape([("p", 3), ("q", 3), b.c]))
    slides = [ConvDims("h", "p", "h", before=1), ConvDims("w", "q", "w", stride=2, before=1)]
    return [mm.conv(x, f, slides, [x.shape[0], ("w", -(-b.b.size // 2)), b.c])]


@case(limit=40)
def conv_in_groups(b: Builder) -> Sequence[Tensor]:
    x, f = picture(b, "x", "k c h"), b.feed("f", mm.Shape([("p", 3), b.c, b.k, ("o", 9)]))
    return [mm.conv(x, f, [ConvDims("h", "p", "h", before=1)], [b.k, ("o", 9), ("h", b.a.size)])]


@case(limit=40)
def conv_depthwise_with_multiplier(b: Builder) -> Sequence[Tensor]:
    x, f = picture(b, "x", "h c"), b.feed("f", mm.Shape([("p", 2), b.c, b.k]))
    return [mm.conv(x, f, [ConvDims("h", "p", "h")], [("h", b.a.size - 1), b.c, b.k])]


@case(limit=40)
def conv_of_single_elements(b: Builder) -> Sequence[Tensor]:
    # A filter of one element is a matrix product; a filter as large as the picture is one, too.
    x = picture(b, "x", "h c")
    one, all_of_it = b.feed("f", mm.Shape([("p", 1), b.c, b.e])), b.feed("g", x.shape + [b.e])
    return [
        mm.conv(x, one, [ConvDims("h", "p", "h")], [x.shape[0], b.e]),
        mm.conv(x, mm.rename(all_of_it, {"h": "p"}), [ConvDims("h", "p", "h")], [("h", 1), b.e]),
        mm.conv(x, one, [ConvDims("h", "p", "h", stride=2)], [("h", -(-b.a.size // 2)), b.e]),
    ]


@case(limit=40)
def conv_as_correlation(b: Builder) -> Sequence[Tensor]:
    # As the gradient of a filter: both operands are long, the result is short.
    x, y = picture(b, "x", "h c"), picture(b, "y", "h e")
    return [mm.conv(x, y, [ConvDims("h", "h", "p", before=1)], [("p", 3), b.c, b.e])]


@case(limit=30)
def conv_with_lonely_dims(b: Builder) -> Sequence[Tensor]:
    x, f = picture(b, "x", "h e"), b.feed("f", mm.Shape([("p", 3), b.c, b.k]))
    return [mm.conv(x, f, [ConvDims("h", "p", "h", before=1)], [("h", b.a.size), b.k])]


@case(limit=30)
def conv_second_derivatives(b: Builder) -> Sequence[Tensor]:
    x, f = picture(b, "x", "c h"), b.feed("f", mm.Shape([("p", 3), b.c]))
    y = mm.conv(x, f, [ConvDims("h", "p", "h", stride=2, before=1)], [("h", -(-b.a.size // 2))])
    gx, gf = mm.gradients([mm.reduce_sum(mm.tanh(y))], [x, f])
    return [mm.square(gx), mm.square(gf)]


@case(limit=30, refuses=True)
def conv_of_a_constrained_value(b: Builder) -> Sequence[Tensor]:
    # The input is split otherwise than the layout says, and goes on to a second convolution.
    x, f = picture(b, "x", "h w"), b.feed("f", mm.Shape("p:3"))
    slide = [ConvDims("h", "p", "h", before=1)]
    y = mm.conv(mm.constrain(x * 2.0, "h:cols"), f, slide, x.shape)
    return [mm.conv(mm.tanh(y), f, slide, x.shape)]


# -- pooling ---------------------------------------------------------------------------------------


@case(limit=40)
def max_pools(b: Builder) -> Sequence[Tensor]:
    x = picture(b, "x", "h w c")
    return [
        mm.max_pool1d(x, 2, spatial_dims=["h"]),
        mm.max_pool2d(x, (2, 3), strides=(1, 2), padding="SAME"),
        mm.max_pool1d(x, 4, strides=3, padding=[(1, 2)], spatial_dims=["w"]),
    ]


@case(limit=30, smooth=False)
def max_pool_shares_ties(b: Builder) -> Sequence[Tensor]:
    x = picture(b, "x", "h w", kind="ties")
    return [mm.max_pool1d(x, size, strides=1, spatial_dims=["h"], channels="w") for size in (2, 3)]


@case(limit=30)
def max_pool_of_integers(b: Builder) -> Sequence[Tensor]:
    x = picture(b, "x", "h w", "int32", "whole")
    return [mm.max_pool1d(x, 3, strides=2, padding="SAME", spatial_dims=["h"], channels="w")]


@case(limit=40)
def avg_pools(b: Builder) -> Sequence[Tensor]:
    x = picture(b, "x", "h w c")
    return [mm.avg_pool1d(x, 2, spatial_dims=["h"]), mm.avg_pool2d(x, (2, 3), strides=(1, 2), padding="SAME")]


@case(limit=30)
def conv_of_a_pending_sum(b: Builder) -> Sequence[Tensor]:
    # The sum over split channels may stay pending through the pool, which is linear.
    x, f = picture(b, "x", "h c"), b.feed("f", mm.Shape([("p", 3), b.c, b.e]))
    y = mm.conv(x, f, [ConvDims("h", "p", "h", before=1)], [("h", b.a.size), b.e])
    return [mm.square(mm.avg_pool1d(y, 4))]


@case(limit=30)
def conv_of_a_tensor_with_itself(b: Builder) -> Sequence[Tensor]:
    # Autocorrelation: both operands are one value, split alike, and its gradients meet.
    x = picture(b, "x", "h c")
    return [mm.conv(x, x, [ConvDims("h", "h", "p", before=2)], [("p", 5), b.c])]
