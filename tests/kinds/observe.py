"""What is seen of a kind by running its samples: compared with what its row says.

Each function takes the samples of one row and looks at results only, never at its traits.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from unittest.mock import patch

import numpy as np

from meshmpi.compiler.passes.rematerialise import renamed_values
from meshmpi.ir.flops import local_flops
from meshmpi.ir.kinds import Collective, Fused, Map, Tiled, TileDim
from meshmpi.ir.kinds.regions import walkable
from meshmpi.ir.program import Instruction, Program
from meshmpi.ir.scalar import call
from meshmpi.kernels import blas
from meshmpi.kernels.native import Site, Unsupported, function_body
from tests.kinds.samples import MESH, RANKS, Blocks, Sample, executor, run

Samples = Sequence[Sample]
ELSEWHERE = "depth"
"""An axis that no sample uses."""


def _equal(a: Blocks, b: Blocks) -> bool:
    pairs = zip(itertools.chain(*a), itertools.chain(*b), strict=True)
    return all(np.array_equal(x, y, equal_nan=x.dtype.kind == "f") for x, y in pairs)


def is_float(x: np.ndarray) -> bool:
    return x.dtype.kind == "f"


def meets_ranks(samples: Samples) -> bool:
    """What one rank holds changes results of another."""
    for s in samples:
        if any(t.dtype == "int32" for t in s.ins):
            continue
        blocks = s.blocks(s.whole())
        before = s.run(blocks)
        blocks[0] = [x + 1 for x in blocks[0]]
        if not _equal(before[1:], s.run(blocks)[1:]):
            return True
    return False


def given(samples: Samples) -> bool:
    """The results are there before anything is called, and are what was handed in."""
    s = samples[0]
    if s.ins or len(samples) > 1:
        return False
    outside = [x for state in s.executor.states for x in (*state.feeds.values(), *state.variables.values())]
    for k, x in enumerate(outside):
        x[...] = k
    return bool(outside) and all((state.arrays[100] == k).all() for k, state in enumerate(s.executor.states))


def same_memory(samples: Samples) -> bool:
    """The results are the bytes of the input."""
    return all(len(s.outs) == 1 and _is_prefix(s, whole=True) for s in samples)


def _is_prefix(s: Sample, whole: bool = False) -> bool:
    """Whether the first result has the bytes with which the first input begins, on every rank."""
    if not s.instruction.inputs or not s.outs or s.ins[0].dtype != s.outs[0].dtype:
        return False
    s.run(s.blocks(s.whole()))
    for state in s.executor.states:
        x, y = (state.arrays[v].tobytes() for v in (s.instruction.inputs[0], 100))
        if x[: len(y)] != y or (whole and len(x) != len(y)):
            return False
    return True


def free(samples: Samples) -> bool:
    return given(samples) or (same_memory(samples) and not meets_ranks(samples))


def kept(samples: Samples) -> bool:
    """Without it the step would do something else, or take other feeds, though nobody reads a result."""
    return any(not s.outs or (s.attrs.label and s.attrs.label in s.program.feeds) for s in samples)


def repeatable(samples: Samples) -> bool:
    """A second run finds its inputs as they were and gives the same, without waiting for a rank."""
    for s in samples:
        blocks = s.blocks(s.whole())
        first = s.run(blocks)
        if not s.outs or any(len(s.executor.states[0].variables) and s.ins for _ in first):
            return False
        s.executor.run()
        again = [[state.arrays[v] for v in s.makes] for state in s.executor.states]
        held = [[state.arrays[v] for v in s.reads] for state in s.executor.states]
        if not _equal(first, again) or not _equal(blocks, held):
            return False
    return not meets_ranks(samples)


def pointwise(samples: Samples) -> bool:
    """A change of one element changes results at the same place only, on the ranks that hold it."""
    return not meets_ranks(samples) and all(map(_is_pointwise, samples))


def _is_pointwise(s: Sample) -> bool:
    whole = s.whole()
    before = s.run(s.blocks(whole)) if s.outs else []
    for k, t in enumerate(s.ins):
        if any(set(t.shape.names) - set(y.shape.names) for y in s.outs) or not s.outs:
            return False
        for n in range(max(t.shape.sizes, default=1)):
            place = tuple(min(n, size - 1) for size in t.shape.sizes)
            changed = [[x.copy() for x in xs] for xs in whole]
            for xs in changed:
                xs[k][place] += 1
            after = s.run(s.blocks(changed))
            wanted = dict(zip(t.shape.names, place, strict=True))
            if any(found != wanted for found in _changed(s, before, after, t.shape.names)):
                return False
    return True


def _changed(s: Sample, before: Blocks, after: Blocks, names: Sequence[str]) -> Iterator[dict[str, int]]:
    """Where results differ: the index along each of ``names``."""
    for at, olds, news in zip(RANKS, before, after, strict=True):
        for t, old, new in zip(s.outs, olds, news, strict=True):
            for place in np.argwhere(old != new):
                start = (b[0] for b in t.block(MESH, at))
                found = {n: int(p) + o for n, p, o in zip(t.shape.names, place, start, strict=True)}
                yield {n: found[n] for n in names}


def native(samples: Samples) -> bool:
    """There is C for one of the samples."""
    return any(_has_c(s.instruction, s.program) for s in samples)


def fusible(samples: Samples) -> bool:
    """There is C for a fused kernel with nothing else in it."""
    return any(
        _has_c(replace(s.instruction, attrs=Fused(s.outs[0].shape, (s.instruction,), {})), s.program)
        for s in samples
        if s.outs
    )


def _has_c(i: Instruction, program: Program) -> bool:
    try:
        return bool(function_body(Site(i, program.types, program.mesh, RANKS[0])).text)
    except (Unsupported, AssertionError, LookupError):
        return False


def tileable(samples: Samples) -> bool:
    """Block by block along some dim it makes the same."""
    return any(_same_in_tiles(s, n) for s in samples for t in (*s.ins, *s.outs) for n in t.shape.names)


def _same_in_tiles(s: Sample, dim: str) -> bool:
    i = s.instruction
    if not walkable([i], s.program.types, i.outputs, dim):
        return False
    types = s.program.types
    tiled = replace(i, attrs=Tiled((TileDim(dim, 2),), i.attrs.band and None, (i,), i.inner_types()))
    program = replace(s.program, instructions=(*s.program.instructions[:-1], tiled), types=types)
    blocks = s.blocks(s.whole())
    with contextlib.suppress(Exception):
        return _equal(s.run(blocks), run(executor(program), blocks, s.makes))
    return False


def in_place(samples: Samples) -> str:
    """The inputs whose memory a result can take over: "any", "same" or none of equal block."""
    found = ""
    for mode in ("same", "any"):
        placed = [one for s in samples for k in s.reads for one in _in_place_of(s, k, mode)]
        crossed = any(k != o for k, o, _ in placed)
        if placed and (mode == "same" or crossed) and all(right for _, _, right in placed):
            found = mode
    return found


def _in_place_of(s: Sample, k: int, mode: str) -> Iterator[tuple[int, int, bool]]:
    """(k, result that took the memory of a copy of input k, whether all results are right)."""
    if s.start is not None or s.attrs.alias(s.program, s.instruction) is not None:
        return
    copy = Instruction(Map(call("identity", 1, s.ins[k].dtype)), (k,), (60,))
    i = renamed_values(s.instruction, {k: 60})
    types = {**dict(zip(s.reads, s.ins, strict=True)), 60: s.ins[k], **dict(zip(s.makes, s.outs, strict=True))}
    program = replace(s.program, instructions=(*s.program.instructions[:-1], copy, i), types=types)
    row = type(s.attrs)
    with patch.object(row, "traits", replace(row.traits, in_place=mode)):
        placed = executor(program)
    taken = [o for o, v in enumerate(s.makes) if placed.plan.shares.get(v) == 60]
    if taken:
        blocks = s.blocks(s.whole())
        yield k, taken[0], _equal(s.run(blocks), run(placed, blocks, s.makes))


def product(samples: Samples) -> bool:
    """A library of matrix products is asked for when it is bound."""
    asked: list[object] = []
    right = blas.find

    def find(name: str = "") -> blas.Blas:
        asked.append(name)
        return right(name)

    with patch.object(blas, "find", find):
        for s in samples:
            executor(s.program)
    return bool(asked)


def takes_halos(samples: Samples) -> bool:
    return any(t.halos for s in samples for t in s.ins)


def makes_halos(samples: Samples) -> bool:
    return any(t.halos for s in samples for t in s.outs)


def by_place(samples: Samples) -> bool:
    """FLOP, or elements sent, differ between ranks whose blocks have equal extents."""
    for s in samples:
        found: dict[object, set[int]] = defaultdict(set)
        for at in RANKS:
            extents = tuple(t.local_sizes(s.program.mesh, at) for t in (*s.ins, *s.outs))
            work = local_flops(s.instruction, s.program, at)
            if isinstance(s.attrs, Collective):
                work = s.attrs.elements_handed(s.program, s.instruction, at)
            found[extents].add(work)
        if any(len(works) > 1 for works in found.values()):
            return True
    return False


def aliases(samples: Samples) -> list[bool]:
    """For each sample whether its result can lie in memory that holds it already."""
    return [given([s]) or _is_prefix(s) for s in samples]


def linear(samples: Samples) -> list[bool]:
    """For each sample and each choice of its inputs whether results are additive in those, jointly."""
    return [_is_additive(s, marks) for s in samples for marks in choices(s)]


def choices(s: Sample) -> Iterator[tuple[bool, ...]]:
    """All non-empty choices of inputs."""
    return (marks for marks in itertools.product((False, True), repeat=len(s.ins)) if any(marks))


def _is_additive(s: Sample, marks: Sequence[bool]) -> bool:
    if not s.outs:
        return False
    one, two = s.blocks(s.whole(0)), s.blocks(s.whole(1))
    two = [
        [y if mark else x for x, y, mark in zip(xs, ys, marks, strict=True)] for xs, ys in zip(one, two, strict=True)
    ]
    both = [
        [x + y if mark else x for x, y, mark in zip(xs, ys, marks, strict=True)]
        for xs, ys in zip(one, two, strict=True)
    ]
    results = (s.run(blocks) for blocks in (one, two, both))
    with np.errstate(all="ignore"):
        return all(
            np.allclose(a.astype(float) + b, c, rtol=1e-12, atol=1e-12)
            for a, b, c in zip(*(itertools.chain(*r) for r in results), strict=True)
        )


OBSERVED: dict[str, Callable[[Samples], object]] = {
    f.__name__: f
    for f in (
        meets_ranks,
        free,
        given,
        kept,
        repeatable,
        pointwise,
        fusible,
        tileable,
        native,
        in_place,
        product,
        same_memory,
        takes_halos,
        makes_halos,
        by_place,
    )
}
"""Trait -> how it is seen."""
