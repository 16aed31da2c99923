"""contract: sums of products of two operands, mapped onto BLAS, or np.matmul where it cannot.

Dims are batch (in both operands and the result), K (in both, summed), M (of the first only) or N
(of the second only).  `choose` weighs every way to lay them out as a batch of matrix products:
groups of dims that memory steps through evenly are one matrix dim, others are looped over.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from meshmpi.ir.kinds import Map
from meshmpi.ir.scalar import Expr, Step
from meshmpi.kernels import blas
from meshmpi.kernels.binding import Arrays, Call, Plan, Runtime, Scratch, Slot
from meshmpi.kernels.expressions import plan_map
from meshmpi.kernels.reduction import chunked
from meshmpi.kernels.steps import Bound, copying, quiet, run_all, zeroing
from meshmpi.kernels.views import BFLOAT16, FLOAT32, collapse, contiguous, strided

SLAB_ELEMENTS = 1 << 22
"""Elements of a converted operand: 16 MB of float32.  assumption: above the cache, below an operand."""
FLOP_PER_NS, CALL_NS, COPY_NS, VECTOR_NS = 120.0, 300.0, 0.7, 0.1
"""Speed of a large matrix product; time of one BLAS call, of one copied element, and of one element of
a matrix times a vector.  Only the choice between alternatives depends on them (measured roughly on one machine)."""

Strides = Mapping[str, int]
"""Dim -> distance between neighbours, in elements."""
Sizes = Mapping[str, int]


class Run(NamedTuple):
    """Dims that two arrays step through evenly: one size, and each array's stride."""

    size: int
    first: int
    second: int


class Groups(NamedTuple):
    """Names of the dims of each role; dims of size 1 are left out."""

    batch: tuple[str, ...]
    k: tuple[str, ...]
    m: tuple[str, ...]
    n: tuple[str, ...]


class Choice(NamedTuple):
    """One way to do it: ``y[loops, m, n] = a[loops, m, k] @ b[loops, k, n]``.

    Attributes:
        cost_ns: Estimate.
        packed: For a, b, y: order of dims of a contiguous copy, or None where it is used in place.
        shape: (loop sizes, m, k, n).
        steps: For a, b, y its strides along (loops..., rows, columns).
    """

    cost_ns: float
    packed: tuple[tuple[str, ...] | None, ...]
    shape: tuple[tuple[int, ...], int, int, int]
    steps: tuple[tuple[int, ...], ...]


def runs(names: Sequence[str], sizes: Sizes, first: Strides, second: Strides) -> list[Run]:
    """Neighbouring dims merged where both arrays allow it; a stride is 0 where a dim is absent."""
    strides = [[steps.get(name, 0) for name in names] for steps in (first, second)]
    merged, (of_first, of_second) = collapse([sizes[name] for name in names], strides)
    return [Run(*run) for run in zip(merged, of_first, of_second, strict=True)]


def by_stride(names: Sequence[str], strides: Strides) -> tuple[str, ...]:
    """``names`` from the outermost to the innermost in memory."""
    return tuple(sorted(names, key=lambda n: -strides[n]))


def readable(rows: int, columns: int, row_step: int, column_step: int) -> bool:
    """Whether BLAS can read (or write) such a matrix in place."""
    if rows == 1 or columns == 1:
        return True
    return (column_step == 1 and row_step >= columns) or (row_step == 1 and column_step >= rows)


def choose(sizes: Sizes, groups: Groups, strides: Sequence[Strides], must_pack: Sequence[bool]) -> Choice:
    """The cheapest way; ``must_pack`` says which of a, b, y cannot be used in place at all."""
    best: Choice | None = None
    options = [(True,) if must else (False, True) for must in must_pack]
    for pack in itertools.product(*options):
        for choice in _candidates(sizes, groups, strides, pack):
            if best is None or choice.cost_ns < best.cost_ns:
                best = choice
    assert best is not None  # copying all three is always possible
    return best


def _candidates(sizes: Sizes, groups: Groups, strides: Sequence[Strides], pack: Sequence[bool]) -> Iterator[Choice]:
    a, b, y = strides
    pack_a, pack_b, pack_y = pack
    batch, m = (by_stride(names, a if pack_y else y) for names in (groups.batch, groups.m))
    n = by_stride(groups.n, b if pack_y else y)
    k = by_stride(groups.k, b if pack_a and not pack_b else a)
    orders = (
        (*batch, *_as_held(m, k, a)) if pack_a else None,
        (*batch, *_as_held(k, n, b)) if pack_b else None,
        (*batch, *_as_held(m, n, y)) if pack_y else None,
    )
    a, b, y = (s if order is None else contiguous(order, sizes) for s, order in zip(strides, orders, strict=True))
    k_runs = runs(k, sizes, a, b)
    if len(k_runs) > 1:
        return
    copied = sum(math.prod(sizes[d] for d in order) for order in orders if order is not None)
    m_runs, n_runs = runs(m, sizes, a, y), runs(n, sizes, b, y)
    for i in range(max(1, len(m_runs))):
        for j in range(max(1, len(n_runs))):
            choice = _product(sizes, batch, (a, b, y), k_runs[0] if k_runs else Run(1, 1, 1), m_runs, n_runs, i, j)
            if choice is not None:
                yield choice._replace(packed=orders, cost_ns=choice.cost_ns + COPY_NS * copied)


def _as_held(rows: Sequence[str], columns: Sequence[str], strides: Strides) -> tuple[str, ...]:
    """The order in which a copy keeps the innermost dim innermost: BLAS reads either."""
    transposed = rows and columns and strides[rows[-1]] < strides[columns[-1]]
    return (*columns, *rows) if transposed else (*rows, *columns)


def _product(
    sizes: Sizes,
    batch: Sequence[str],
    strides: Sequence[Strides],
    k: Run,
    m_runs: Sequence[Run],
    n_runs: Sequence[Run],
    i: int,
    j: int,
) -> Choice | None:
    """The product with run i of M and run j of N as matrix dims, looping over all others."""
    a, b, y = strides
    m = m_runs[i] if m_runs else Run(1, k.size * k.first, 1)
    n = n_runs[j] if n_runs else Run(1, k.size * k.second, m.second)
    if not m_runs:
        m = Run(1, k.size * k.first, n.size * n.second)
    if not (
        readable(m.size, k.size, m.first, k.first)
        and readable(k.size, n.size, k.second, n.first)
        and readable(m.size, n.size, m.second, n.second)
    ):
        return None
    loops = [(sizes[d], a[d], b[d], y[d]) for d in batch]
    loops += [(r.size, r.first, 0, r.second) for p, r in enumerate(m_runs) if p != i]
    loops += [(r.size, 0, r.first, r.second) for p, r in enumerate(n_runs) if p != j]
    counts, *steps = zip(*loops, strict=True) if loops else ((),) * 4
    ends = ((m.first, k.first), (k.second, n.first), (m.second, n.second))
    return Choice(
        math.prod(counts) * _product_ns(m.size, k.size, n.size),
        (None, None, None),
        (tuple(counts), m.size, k.size, n.size),
        tuple((*outer, *inner) for outer, inner in zip(steps, ends, strict=True)),
    )


def _product_ns(m: int, k: int, n: int) -> float:
    if m == 1 or n == 1:
        return CALL_NS + VECTOR_NS * m * k * n
    small = (1 + 8 / m) * (1 + 8 / n) * (1 + 16 / k)
    return CALL_NS + 2 * m * k * n * small / FLOP_PER_NS


class _Slab(NamedTuple):
    """A part of the result: sizes of its dims and the element each array begins at."""

    sizes: dict[str, int]
    offsets: tuple[int, int, int]
    choice: Choice


class _Gemm:
    """Matrix products, whole or in slabs.

    Args:
        sizes: Sizes of the dims that have more than one element.
        dtypes: In which a, b and y are multiplied; an array of another type is converted.
    """

    def __init__(self, call: Call, groups: Groups, sizes: dict[str, int], dtypes: Sequence[np.dtype]):
        operands = (*call.inputs, call.outputs[0])
        self.strides = tuple({n: step for n, step in x.strides().items() if n in sizes} for x in operands)
        must_pack = [x.dtype != t for x, t in zip(operands, dtypes, strict=True)]
        self._sizes, self._cuts = sizes, self._cut(sizes, groups) if any(must_pack) else {}
        ends = [(min(n, sizes[d]), sizes[d] % n or n) for d, n in self._cuts.items()]
        forms = [{**sizes, **dict(zip(self._cuts, lengths, strict=True))} for lengths in itertools.product(*ends)]
        self._choices = {tuple(form.values()): (form, choose(form, groups, self.strides, must_pack)) for form in forms}
        scratch = Scratch()
        self.slots: list[Slot | None] = []
        for position, dtype in enumerate(dtypes):
            orders = [(form, choice.packed[position]) for form, choice in self._choices.values()]
            needed = [math.prod(n[d] for d in order) for n, order in orders if order is not None]
            self.slots.append(scratch.reserve((max(needed),), dtype) if needed else None)
        self.plan = Plan(self._bind, scratch.bytes, self._bind_adding)

    def _cut(self, sizes: dict[str, int], groups: Groups) -> dict[str, int]:
        """Dim -> elements of a part: where operands must be converted, along one dim of each side."""
        cuts: dict[str, int] = {}
        a_count, b_count, y_count = (-(-math.prod(sizes[d] for d in s) // SLAB_ELEMENTS) for s in self.strides)
        for names, count in (((*groups.batch, *groups.m), max(a_count, y_count)), (groups.n, b_count)):
            if names and count > 1:
                widest = max(names, key=lambda d: sizes[d])
                cuts[widest] = -(-sizes[widest] // min(count, sizes[widest]))
        return cuts

    def _slabs(self) -> Iterator[_Slab]:
        """The whole, or its parts."""
        for at in itertools.product(*(range(0, self._sizes[d], n) for d, n in self._cuts.items())):
            begin = dict(zip(self._cuts, at, strict=True))
            key = tuple([min(self._cuts.get(d, n), n - begin.get(d, 0)) for d, n in self._sizes.items()])
            form, choice = self._choices[key]
            a, b, y = (sum(s.get(d, 0) * k for d, k in begin.items()) for s in self.strides)
            yield _Slab(form, (a, b, y), choice)

    def is_worth_its_calls(self) -> bool:
        """Whether no slab falls into so many small products that np.matmul would be faster."""
        shapes = (choice.shape for _, choice in self._choices.values())
        return all(blas.few(math.prod(loops), m, n, k) for loops, m, k, n in shapes)

    def _bind(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        library, steps = blas.find(runtime.blas), list[Bound]()
        for slab in self._slabs():
            before, (a, b, y), after = self._operands(slab, [*inputs, outputs[0]], workspace)
            steps += [*before, library.gemm(a, b, y) or multiplying(a, b, y), *after]
        return run_all(steps)

    def _bind_adding(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound | None:
        library, steps = blas.find(runtime.blas), list[Bound]()
        for slab in self._slabs():
            before, (a, b, y), after = self._operands(slab, [*inputs, outputs[0]], workspace)
            product = None if after else library.gemm(a, b, y, accumulate=True)
            if product is None:
                return None
            steps += [*before, product]
        return run_all(steps)

    def _operands(
        self, slab: _Slab, arrays: Arrays, workspace: np.ndarray
    ) -> tuple[list[Bound], list[np.ndarray], list[Bound]]:
        """What copies operands, the operands as matrices, and what copies the result back."""
        before, after, operands = list[Bound](), list[Bound](), list[np.ndarray]()
        loops, m, k, n = slab.choice.shape
        for position, ends in enumerate(((m, k), (k, n), (m, n))):
            array = arrays[position].reshape(-1)[slab.offsets[position] :]
            order, slot = slab.choice.packed[position], self.slots[position]
            if order is not None and slot is not None:
                sizes = [slab.sizes[d] for d in order]
                own = strided(array, sizes, [self.strides[position][d] for d in order])
                array = slot._replace(shape=(math.prod(sizes),)).array(workspace)
                copy = array.reshape(sizes)
                if position < 2:
                    before.append(copying(copy, own))
                else:
                    after.append(copying(own, copy))
            operands.append(strided(array, (*loops, *ends), slab.choice.steps[position]))
        return before, operands, after


def multiplying(a: np.ndarray, b: np.ndarray, y: np.ndarray) -> Bound:
    """A product of matrices by NumPy."""
    return quiet(functools.partial(np.matmul, a, b, out=y))


def _plan_bfloat16(call: Call, groups: Groups, sizes: dict[str, int]) -> Plan:
    """Products of bfloat16: as they are, or converted to float32, as the library allows.

    The workspace suffices for both: what a program needs must not depend on the library.
    """
    direct = _Gemm(call, groups, sizes, (BFLOAT16, BFLOAT16, FLOAT32))
    converted = _Gemm(call, groups, sizes, (FLOAT32,) * 3)
    narrow = _Gemm(call, groups, sizes, (BFLOAT16,) * 3) if call.outputs[0].dtype == BFLOAT16 else None

    def bind(inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        library = blas.find(runtime.blas)
        for gemm, has_it in ((narrow, library.narrow), (direct, library.bfloat16)):
            if has_it and gemm is not None and gemm.is_worth_its_calls():
                return gemm.plan.bind(inputs, outputs, workspace, runtime)
        return converted.plan.bind(inputs, outputs, workspace, runtime)

    return Plan(bind, max(gemm.plan.workspace_bytes for gemm in (direct, converted, narrow) if gemm is not None))


def _plan_pointwise(call: Call, sizes: Sizes) -> Plan:
    """Both operands have the same dims and the innermost is kept: products, summed in chunks.

    Thirty times as fast as a strided dot product for every element of y (measured).
    """
    y = call.outputs[0]
    names = [d for d in call.inputs[0].names if d in sizes]
    strides = [[x.strides().get(d, 0) for d in names] for x in (*call.inputs, y)]
    merged, (*steps, out_steps) = collapse([sizes[d] for d in names], strides)
    scratch = Scratch()
    ufunc = np.logical_or if y.type.dtype == "bool" else np.add
    reduction = chunked(merged, out_steps, "sum", ufunc, y.dtype, scratch, np.multiply)

    def bind(inputs: Arrays, outputs: Arrays, workspace: np.ndarray, runtime: Runtime) -> Bound:
        sources = [strided(x, merged, s) for x, s in zip(inputs, steps, strict=True)]
        return reduction(sources, outputs[0], workspace)

    return Plan(bind, scratch.bytes)


def plan_contract(call: Call) -> Plan:
    """y = sum of a * b over the dims that y lacks, dims matched by name, any orders."""
    (a, b), y = call.inputs, call.outputs[0]
    sizes = {**a.extents(), **b.extents()}
    for x, other in ((a, b), (b, a)):
        alone = [d for d in x.names if d not in other.names and d not in y.names]
        if alone:
            raise call.fail(f"{alone} are summed over, but only one operand has them.", "Reduce first.")
    for x in (a, b, y):
        if any(sizes.get(d) != size for d, size in x.extents().items()):
            raise call.fail(f"block {x.extents()} does not fit to {sizes}.")
    if not a.elements or not b.elements:
        return Plan(lambda ins, outs, workspace, runtime: zeroing(outs[0]))
    sizes = {d: size for d, size in sizes.items() if size != 1}
    both = [d for d in sizes if d in a.names and d in b.names]
    groups = Groups(
        tuple(d for d in both if d in y.names),
        tuple(d for d in both if d not in y.names),
        tuple(d for d in sizes if d not in b.names),
        tuple(d for d in sizes if d not in a.names),
    )
    if not groups.k:  # products at every point of y, as a map; summed dims of size 1 drop out
        expr = Expr((Step("multiply", ("i0", "i1"), y.type.dtype),), ("t0",))
        squeezed = tuple(x.restricted(y.names) for x in call.inputs)
        return plan_map(Call(call.instruction.replaced(attrs=Map(expr)), squeezed, call.outputs, call.program))
    if a.dtype == BFLOAT16:
        return _plan_bfloat16(call, groups, sizes)
    innermost = next(d for d in reversed(a.names) if d in sizes)
    if not groups.m and not groups.n and innermost in groups.batch:
        return _plan_pointwise(call, sizes)
    return _Gemm(call, groups, sizes, (a.dtype,) * 3).plan
