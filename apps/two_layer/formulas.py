"""What one training step of the example costs per rank in a layout, by hand: the paper's Table 1.

Only sizes, a layout and a mesh shape enter; no program.  The paper drops constant factors, here
they are kept.  With B, I, H the sizes of the (largest) blocks of batch, io and hidden, g = 1 where
the gradient with respect to x is wanted and 0 where not:

- products of 2 B I H FLOP each: x w and h v forward, dy v', dy h, dh x backward, and dh w' for g;
- summing over a split ``hidden`` leaves partial sums of y [B, I], and of dx [B, I] for g;
- summing over a split ``batch`` leaves partial gradients of w [I, H], v [H, I] and bias [H];
- summing over a split ``io`` leaves partial sums of the input of relu [B, H] and of its gradient;
- the loss is one value, summed over the axes of batch and io together.
"""

from __future__ import annotations

from typing import NamedTuple

from apps.two_layer.model import Sizes
from meshmpi.dims import Layout, MeshShape


class Row(NamedTuple):
    """A row of the paper's Table 1 in symbols: n processors, or rows x cols x planes = r c p."""

    computation: str
    communication: str
    ratio: str
    memory: str


TABLE_1 = {
    "none": Row("b io h", "0", "0", "b io + b h + io h"),
    "data": Row("b io h / n", "io h", "n/b", "b/n io + b/n h + io h"),
    "model": Row("b io h / n", "b io", "n/h", "b io + b h/n + io h/n"),
    "2-D": Row("b io h / rc", "b/r io + io h/c", "c/h + r/b", "b/r io + b/r h/c + io h/c"),
    "3-D": Row("b io h / rcp", "b/r io/p + b/r h/c + io/p h/c", "c/h + p/io + r/b", "as communication"),
}
"""The name of a layout -> its row.  Constant factors are dropped, as in the paper."""


class Formulas(NamedTuple):
    """Costs of one step on the rank with the largest blocks.

    Attributes:
        product_flops: FLOP of the matrix products.
        values: Mesh axes, joined by + -> elements handed to all_reduces over them.
        kept_elements: Elements of x, t, w, v and bias.
        paper: (computation, communication, memory) of Table 1, constant factors dropped.
    """

    product_flops: int
    values: dict[str, int]
    kept_elements: tuple[int, ...]
    paper: tuple[int, int, int]


def formulas(sizes: Sizes, layout: Layout, mesh: MeshShape, input_gradient: bool) -> Formulas:
    """Evaluates the formulas of this module for one layout."""
    axes = {name: layout.axes(name) for name in Sizes._fields}
    b, i, h = (-(-n // mesh.count(axes[name])) for name, n in sizes._asdict().items())
    g = int(input_gradient)
    parts = [
        (axes["hidden"], b * i * (1 + g)),
        (axes["batch"], 2 * i * h + h),
        (axes["io"], 2 * b * h),
        ((*axes["batch"], *axes["io"]), 1),
    ]
    values: dict[str, int] = {}
    for over, n in parts:
        if over:
            key = "+".join(mesh.in_mesh_order(over))
            values[key] = values.get(key, 0) + n
    communication = sum(n for over, n in ((axes["hidden"], b * i), (axes["batch"], i * h), (axes["io"], b * h)) if over)
    return Formulas(
        product_flops=(5 + g) * 2 * b * i * h,
        values=values,
        kept_elements=(b * i, b * i, i * h, i * h, h),
        paper=(b * i * h, communication, b * i + b * h + i * h),
    )
