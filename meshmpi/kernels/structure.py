"""Kinds that only move elements: transpose, view, slice, pad, concat, take_shard; iota and step.

Each is a few copies between views prepared at binding.  Nothing here computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from meshmpi.ir.kinds import Concat, Pad, Slice
from meshmpi.kernels.binding import Arrays, Call, Operand, Plan, Runtime, named_view
from meshmpi.kernels.steps import Bound, copying, run_all

Pair = tuple[np.ndarray, np.ndarray]
"""(destination, source) views of equal shape."""
Pairs = Callable[[Call, Arrays, np.ndarray], list[Pair]]


def plan_copies(call: Call, pairs: Pairs) -> Plan:
    """Copies between views; ``pairs`` makes them from the arrays at binding."""

    def bind(inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        found = pairs(call, inputs, outputs[0])
        return run_all([copying(to, source) for to, source in found if to.size and not _same_place(to, source)])

    return Plan(bind)


def _same_place(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether a view is one that the executor laid over its input."""
    return a.ctypes.data == b.ctypes.data and a.strides == b.strides


def _block(array: np.ndarray, operand: Operand, dim: str, cut: slice, order: Sequence[str]) -> np.ndarray:
    """A range of one dim, with the dims in ``order``."""
    whole = array[(slice(None),) * operand.names.index(dim) + (cut,)]
    return whole.transpose([operand.names.index(n) for n in order])


def transpose_pairs(call: Call, inputs: Arrays, out: np.ndarray) -> list[Pair]:
    """The input with its dims in the order of the output."""
    return [(out, named_view(inputs[0], call.inputs[0], call.outputs[0].names))]


def view_pairs(call: Call, inputs: Arrays, out: np.ndarray) -> list[Pair]:
    """The elements in their order."""
    if inputs[0].size != out.size:
        raise call.fail(f"blocks {call.inputs[0].sizes} and {call.outputs[0].sizes} differ in size.")
    return [(out.reshape(-1), inputs[0].reshape(-1))]


def slice_pairs(call: Call, inputs: Arrays, out: np.ndarray) -> list[Pair]:
    """A range of one dim, with a stride."""
    a = call.of(Slice)
    cut = slice(a.start, a.stop, a.stride)
    return [(out, _block(inputs[0], call.inputs[0], a.dim, cut, call.outputs[0].names))]


def pad_pairs(call: Call, inputs: Arrays, out: np.ndarray) -> list[Pair]:
    """The number in front, the part that is kept (negative widths crop), the number behind."""
    x, y, a = call.inputs[0], call.outputs[0], call.of(Pad)
    n_in, n_out = x.extents()[a.dim], y.extents()[a.dim]
    start, stop = max(a.before, 0), max(max(a.before, 0), n_out - max(a.after, 0))
    number = np.broadcast_to(np.asarray(a.value).astype(out.dtype), out.shape)

    def parts(cut: slice, source: np.ndarray, operand: Operand, source_cut: slice) -> Pair:
        return _block(out, y, a.dim, cut, y.names), _block(source, operand, a.dim, source_cut, y.names)

    front, middle, behind = slice(0, start), slice(start, stop), slice(stop, None)
    kept = slice(max(-a.before, 0), n_in - max(-a.after, 0))
    return [parts(front, number, y, front), parts(middle, inputs[0], x, kept), parts(behind, number, y, behind)]


def concat_pairs(call: Call, inputs: Arrays, out: np.ndarray) -> list[Pair]:
    """Each input into its part of the output."""
    y, dim = call.outputs[0], call.of(Concat).dim
    pairs, start = [], 0
    for array, x in zip(inputs, call.inputs, strict=True):
        stop = start + x.extents()[dim]
        pairs.append((_block(out, y, dim, slice(start, stop), y.names), named_view(array, x, y.names)))
        start = stop
    return pairs


def take_shard_pairs(call: Call, inputs: Arrays, out: np.ndarray) -> list[Pair]:
    """The own block, found from the global ranges of both blocks."""
    x, y = call.inputs[0], call.outputs[0]
    cuts = []
    for name, (have, end) in zip(x.names, x.block, strict=True):
        start, stop = y.block[y.names.index(name)]
        if stop > start and not have <= start <= stop <= end:
            raise call.fail(
                f"block [{start}, {stop}) of '{name}' is not inside the own block [{have}, {end}).",
                "Redistribute through the whole dimension.",
            )
        cuts.append(slice(start - have, stop - have))
    return [(out, inputs[0][tuple(cuts)].transpose([x.names.index(n) for n in y.names]))]


def plan_iota(call: Call) -> Plan:
    """The global index along the one dim of the output."""
    block = call.outputs[0].block[0]
    return Plan(lambda ins, outs, workspace, runtime: copying(outs[0], np.arange(*block, dtype=outs[0].dtype)))


def plan_step(call: Call) -> Plan:
    """The number of the running step."""

    def bind(inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        return lambda: outputs[0].fill(runtime.step)

    return Plan(bind)


PAIRS: dict[str, Pairs] = {
    "transpose": transpose_pairs,
    "view": view_pairs,
    "slice": slice_pairs,
    "pad": pad_pairs,
    "concat": concat_pairs,
    "take_shard": take_shard_pairs,
}
