"""Kinds that only move elements: transpose, view, slice, pad, concat, take_shard; iota and step.

Each is a few copies between views prepared at binding.  Nothing here computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from meshmpi.ir.kinds import Concat, Pad, Slice
from meshmpi.kernels.binding import Arrays, Bound, Call, Operand, Plan, Runtime, named_view, nothing, run_all

Pair = tuple[np.ndarray, np.ndarray]
"""(destination, source) views of equal shape."""


class CopyPlan(Plan):
    """Copies between views; ``pairs`` makes them from the arrays at binding."""

    def __init__(self, call: Call, pairs: Callable[[Call, Arrays, np.ndarray], list[Pair]]):
        self.call = call
        self.pairs = pairs

    def bind(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        steps = [
            _copy(to, source)
            for to, source in self.pairs(self.call, inputs, outputs[0])
            if to.size and not _same_place(to, source)
        ]
        return run_all(steps) if steps else nothing


def _same_place(a: np.ndarray, b: np.ndarray) -> bool:
    """A view that the executor laid over its input."""
    return a.ctypes.data == b.ctypes.data and a.strides == b.strides


def _copy(to: np.ndarray, source: np.ndarray) -> Bound:
    copyto = np.copyto

    def run() -> None:
        copyto(to, source)

    return run


def _block(array: np.ndarray, operand: Operand, dim: str, cut: slice, order: Sequence[str]) -> np.ndarray:
    """A range of one dim, with the dims in ``order``."""
    position = operand.type.shape.position(dim)
    whole = array[(slice(None),) * position + (cut,)]
    return whole.transpose([operand.type.shape.position(n) for n in order])


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
    dim, before, after = a.dim, a.before, a.after
    n_in, n_out = x.extents()[dim], y.extents()[dim]
    start, stop = max(before, 0), max(max(before, 0), n_out - max(after, 0))
    number = np.broadcast_to(np.asarray(a.value).astype(out.dtype), out.shape)
    kept = slice(max(-before, 0), n_in - max(-after, 0))
    order = y.names
    return [
        (_block(out, y, dim, slice(0, start), order), _block(number, y, dim, slice(0, start), order)),
        (_block(out, y, dim, slice(start, stop), order), _block(inputs[0], x, dim, kept, order)),
        (_block(out, y, dim, slice(stop, None), order), _block(number, y, dim, slice(stop, None), order)),
    ]


def concat_pairs(call: Call, inputs: Arrays, out: np.ndarray) -> list[Pair]:
    """Each input into its part of the output."""
    y, dim = call.outputs[0], call.of(Concat).dim
    pairs, start = [], 0
    for array, x in zip(inputs, call.inputs, strict=True):
        stop = start + x.extents()[dim]
        part = _block(out, y, dim, slice(start, stop), y.names)
        pairs.append((part, named_view(array, x, y.names)))
        start = stop
    return pairs


def take_shard_pairs(call: Call, inputs: Arrays, out: np.ndarray) -> list[Pair]:
    """The own block, found from the global ranges of both blocks."""
    x, y = call.inputs[0], call.outputs[0]
    cuts = []
    for name, (have, end) in zip(x.names, x.block, strict=True):
        start, stop = y.block[y.type.shape.position(name)]
        if stop > start and not have <= start <= stop <= end:
            raise call.fail(
                f"block [{start}, {stop}) of '{name}' is not inside the own block [{have}, {end}).",
                "Redistribute through the whole dimension.",
            )
        cuts.append(slice(start - have, stop - have) if stop > start else slice(0, 0))
    order = [x.type.shape.position(n) for n in y.names]
    return [(out, inputs[0][tuple(cuts)].transpose(order))]


class IotaPlan(Plan):
    """The global index along the one dim of the output."""

    def __init__(self, call: Call):
        self.start, self.stop = call.outputs[0].block[0]

    def bind(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        if self.start == self.stop:
            return nothing
        return _copy(outputs[0], np.arange(self.start, self.stop, dtype=outputs[0].dtype))


class StepPlan(Plan):
    """The number of the running step."""

    def __init__(self, call: Call):
        self.call = call

    def bind(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        out = outputs[0]

        def run() -> None:
            out[...] = runtime.step

        return run


PAIRS: dict[str, Callable[[Call, Arrays, np.ndarray], list[Pair]]] = {
    "transpose": transpose_pairs,
    "view": view_pairs,
    "slice": slice_pairs,
    "pad": pad_pairs,
    "concat": concat_pairs,
    "take_shard": take_shard_pairs,
}
