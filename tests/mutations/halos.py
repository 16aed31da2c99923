"""Shifts, halos and convolutions: which elements neighbours exchange, and what meets."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import meshmpi as mm
from meshmpi.graph.ops import convolution
from meshmpi.graph.ops import structure as ops_structure
from meshmpi.ir import convolutions as slides
from meshmpi.ir import halos
from meshmpi.ir.halos import HaloExchange, Piece
from meshmpi.runtime import simulated_mesh
from tests.mutations.registry import Patch, mutation

lowering = sys.modules["meshmpi.compiler.lowering.lower"]


def _pieces(m: Patch, wrong: Callable[[HaloExchange, int], list[Piece]]) -> None:
    """Replaces what blocks receive; without the caches, which would outlive the mutation."""

    def by_target(e: HaloExchange) -> tuple[tuple[Piece, ...], ...]:
        return tuple(tuple(wrong(e, b)) for b in range(e.blocks))

    m.setattr(halos, "_by_target", by_target)
    m.setattr(halos, "_by_source", halos._by_source.__wrapped__)


@mutation("shift")
def halos_do_not_wrap_around(m: Patch) -> None:
    right = halos._pieces_to
    _pieces(m, lambda e, b: right(e._replace(wrap=False), b))


@mutation("shift")
def halos_go_the_other_way(m: Patch) -> None:
    right = halos._pieces_to
    _pieces(m, lambda e, b: right(e._replace(offsets=tuple(-o for o in e.offsets)), b))


@mutation("shift")
def halos_come_from_the_next_block_only(m: Patch) -> None:
    """Halos wider than a block are cut off."""
    right = halos._pieces_to

    def wrong(e: HaloExchange, block: int) -> list[Piece]:
        near = (-1, 0, 1, e.blocks - 1, 1 - e.blocks)
        return [p for p in right(e, block) if p.source - p.target in near]

    _pieces(m, wrong)


@mutation("slice_with_stride")
def strides_are_forgotten_along_split_dims(m: Patch) -> None:
    right = halos._pieces_to
    _pieces(m, lambda e, b: right(e._replace(stride=1), b))


@mutation("concat")
def only_the_first_tensor_reaches_other_blocks(m: Patch) -> None:
    right = halos._pieces_to

    def wrong(e: HaloExchange, block: int) -> list[Piece]:
        return [p for p in right(e, block) if p.operand == 0 or p.source == p.target]

    _pieces(m, wrong)


@mutation("pad")
def what_lies_outside_is_zero_whatever_the_number(m: Patch) -> None:
    right = simulated_mesh.MEANINGS["shift"]

    def wrong(group: Any, by_rank: Any) -> None:
        right([replace(c, value=0) for c in group], by_rank)

    m.setitem(simulated_mesh.MEANINGS, "shift", wrong)


@mutation("shift")
def the_gradient_of_shift_goes_the_same_way(m: Patch) -> None:
    def wrong(self: Any, dys: Any) -> list:
        return [ops_structure.shift(dys[0], self.offset, self.dim, self.wrap)]

    m.setattr(ops_structure.Shift, "grad", wrong)


@mutation("shift")
def the_gradient_of_shift_always_wraps(m: Patch) -> None:
    def wrong(self: Any, dys: Any) -> list:
        return [ops_structure.shift(dys[0], -self.offset, self.dim, True)]

    m.setattr(ops_structure.Shift, "grad", wrong)


@mutation("conv_of_pictures")
def halos_are_blocks(m: Patch) -> None:
    """A convolution of blocks without halos: each rank pads its own."""
    m.setattr(lowering.Lowering, "halo", lambda self, value, dim, halo, wrap=False: value)


@mutation("conv_of_pictures")
def halos_lack_the_last_tap(m: Patch) -> None:
    right = slides.ConvDims.halo

    def wrong(self: Any, of: int, taps: int) -> Any:
        return right(self, of, max(1, taps - 1))

    m.setattr(slides.ConvDims, "halo", wrong)


@mutation("conv_of_pictures_strided")
def the_gradient_of_a_filter_keeps_stride_and_dilation(m: Patch) -> None:
    right = slides.ConvDims.of_filter

    def wrong(self: Any) -> Any:
        return right(self)._replace(stride=self.stride, dilation=self.dilation)

    m.setattr(slides.ConvDims, "of_filter", wrong)


@mutation("conv_of_pictures_strided")
def the_gradient_of_a_picture_forgets_the_stride(m: Patch) -> None:
    right = slides.ConvDims.of_input
    m.setattr(slides.ConvDims, "of_input", lambda self: right(self)._replace(base=1))


@mutation("conv_of_pictures")
def the_gradient_of_a_picture_is_padded_like_the_picture(m: Patch) -> None:
    right = slides.ConvDims.of_input
    m.setattr(slides.ConvDims, "of_input", lambda self: right(self)._replace(before=self.before))


@mutation("conv_of_pictures")
def a_filter_is_not_turned_around_for_the_picture(m: Patch) -> None:
    right = slides.ConvDims.of_input

    def wrong(self: Any) -> Any:
        return right(self)._replace(dilation=self.dilation)

    m.setattr(slides.ConvDims, "of_input", wrong)


@mutation("conv_of_pictures")
def split_channels_are_not_summed(m: Patch) -> None:
    right = convolution.operands

    def wrong(conv: Any, lower: Any) -> Any:
        values, t = right(conv, lower)
        return values, t.finished()

    m.setattr(convolution, "operands", wrong)


@mutation("max_pools")
def halos_at_the_edge_hold_zeros(m: Patch) -> None:
    """The largest of negative numbers is then 0."""
    from meshmpi.nn import pooling

    right = pooling.pad

    def wrong(x: Any, paddings: Any, dim: Any, value: Any = 0) -> Any:
        return right(x, paddings, dim, 0)

    m.setattr(pooling, "pad", wrong)


@mutation("avg_pools")
def averages_count_the_padding(m: Patch) -> None:
    from meshmpi.nn import pooling

    def wrong(g: Any, dtype: str) -> Any:
        return mm.ones(mm.Shape([g.dim._replace(size=g.size)]), dtype) * float(g.taps)

    m.setattr(pooling, "_inside", wrong)
