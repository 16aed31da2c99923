"""Arithmetic kinds: maps, reductions, products and convolutions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshmpi.dims import Axes, Range
from meshmpi.ir.bands import Band
from meshmpi.ir.convolutions import ConvDims
from meshmpi.ir.kinds.checks import check_pending, require, result_type, same_splits
from meshmpi.ir.program import Extents, Instruction, Kind, LocalType, Program, Traits, Work
from meshmpi.ir.scalar import SCALAR_FUNCTIONS, Expr
from meshmpi.ir.types import REDUCTIONS


@dataclass(frozen=True, eq=False, repr=False)
class Map(
    Kind,
    kind="map",
    traits=Traits(
        repeatable=True,
        pointwise=True,
        fusible=True,
        tileable=True,
        scalar=True,
        native=True,
        in_place="any",
        hides_network=True,
        carries_gradient=True,
    ),
):
    """``expr`` at every point; inputs broadcast by name to the dims of the results."""

    expr: Expr

    def check(self, program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
        expr = self.expr
        ys = [program.types[v] for v in i.outputs]
        require(len(expr.results) == len(ys) > 0, "has not one result per output")
        for y in ys:
            require((y.local_dims, y.partial) == (ys[0].local_dims, ys[0].partial), "mixes types")
            for x in xs:
                same_splits(x, y, x.shape.names)
        _check_expression(expr, len(xs))
        dtypes = {f"i{k}": x.dtype for k, x in enumerate(xs)}
        dtypes.update((f"t{k}", s.dtype) for k, s in enumerate(expr.steps))
        require([dtypes[r] for r in expr.results] == [y.dtype for y in ys], "makes another data type")
        partials = {x.partial for x in xs if x.partial}
        if partials or ys[0].partial:
            require(partials == {ys[0].partial}, f"mixes reductions pending over {partials}")
            require(linear_in(expr, [bool(x.partial) for x in xs]), "is not linear in the unfinished inputs")
            require(all(x.pending == "sum" for x in xs), "defers another reduction than a sum")

    def linear_in(self, marks: Sequence[bool], axes: Axes) -> bool:
        return linear_in(self.expr, marks)

    def flops(self, ins: Sequence[Extents], outs: Sequence[Extents]) -> int:
        return self.expr.flops * math.prod(outs[0].values())

    @property
    def work(self) -> Work:
        return Work(tuple(s.function for s in self.expr.steps), "output")


class PerInput(Kind):
    """Kinds with one simple operation for each element of the first input."""

    def flops(self, ins: Sequence[Extents], outs: Sequence[Extents]) -> int:
        return math.prod(ins[0].values())

    @property
    def work(self) -> Work:
        return Work(("simple",), "input")


@dataclass(frozen=True, eq=False, repr=False)
class Reduce(
    PerInput,
    kind="reduce",
    traits=Traits(repeatable=True, fusible=True, tileable=True, scalar=True, native=True, hides_network=True),
):
    """``op`` (sum, max, min, prod) over the dims that the result lacks.

    Pairs of indices outside the ``band`` are left out, whatever their values.
    """

    op: str
    band: Band | None = None

    def check(self, program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
        (x,), y, op = xs, result_type(program, i), self.op
        require(op in REDUCTIONS and x.dtype == y.dtype, "has an unknown op or changes the data type")
        require(op != "prod" or self.band is None, "has a band, which a product of elements lacks")
        _check_band(self.band, [x])
        same_splits(y, x, y.shape.names)
        gone = [a for n in x.shape.names if y.shape.find(n) < 0 for a in x.split(n)]
        require(not x.partial or x.pending == op == "sum", "reduces an unfinished reduction")
        check_pending(program.mesh, y, [*x.partial, *gone], op)

    def linear_in(self, marks: Sequence[bool], axes: Axes) -> bool:
        return self.op == "sum"


class Product(Kind):
    """Sums of products of two operands."""

    def linear_in(self, marks: Sequence[bool], axes: Axes) -> bool:
        return sum(marks) == 1

    def check_sum(
        self, program: Program, xs: Sequence[LocalType], y: LocalType, used: Sequence[str], gone: Sequence[str]
    ) -> None:
        """The rule of what is pending: dims are split over ``used``, those that are summed over ``gone``."""
        require(len(set(used)) == len(used), "uses one axis for several dims")
        pending = [a for x in xs for a in x.partial]
        require(not all(x.partial for x in xs), "multiplies two unfinished sums")
        require(not set(pending) & set(used), "sums twice over one axis")
        require(all(x.pending == "sum" for x in xs if x.partial), "defers another reduction than a sum")
        check_pending(program.mesh, y, [*pending, *gone], "sum")


@dataclass(frozen=True, eq=False, repr=False)
class Contract(
    Product, kind="contract", traits=Traits(repeatable=True, tileable=True, hides_network=True, product=True)
):
    """Sum of products over the dims that the result lacks.

    Pairs of indices outside the ``band`` are left out; where the result has both, it is 0 there.
    """

    band: Band | None = None

    def check(self, program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
        y = result_type(program, i)
        require(len(xs) == 2, "takes two operands")
        a, b = xs
        _check_band(self.band, [a, b, y])
        require(a.dtype == b.dtype, "multiplies two data types")
        same_splits(a, b, [n for n in a.shape.names if b.shape.find(n) >= 0])
        for n in y.shape.names:
            same_splits(y, a if a.shape.find(n) >= 0 else b, [n])
        splits = {n: x.split(n) for x in xs for n in x.shape.names}
        used = [ax for s in splits.values() for ax in s]
        gone = [ax for n, s in splits.items() if y.shape.find(n) < 0 for ax in s]
        for x, other in ((a, b), (b, a)):
            only = [n for n in x.shape.names if y.shape.find(n) < 0 and other.shape.find(n) < 0]
            require(not only, f"must reduce {only} first")
        self.check_sum(program, xs, y, used, gone)

    def flops(self, ins: Sequence[Extents], outs: Sequence[Extents]) -> int:
        return 2 * math.prod({**ins[0], **ins[1]}.values())


@dataclass(frozen=True, eq=False, repr=False)
class Conv(
    Product,
    kind="conv",
    traits=Traits(repeatable=True, hides_network=True, product=True, takes_halos=True, by_place=True),
):
    """Sum of products of what meets along the ``dims``, and over the other dims the result lacks.

    Along a convolved dim an operand may be held with the halo that the blocks of the result, or of
    the other operand, need.
    """

    dims: tuple[ConvDims, ...]

    def check(self, program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
        y, dims = result_type(program, i), self.dims
        require(len(xs) == 2, "takes two operands")
        a, b = xs
        require(a.dtype == b.dtype == y.dtype, "multiplies or makes two data types")
        convolved = ([s.x for s in dims], [s.w for s in dims], [s.y for s in dims])
        of_a, of_b, of_y = (t.shape.without(names).names for t, names in zip((a, b, y), convolved, strict=True))
        same_splits(a, b, [n for n in of_a if n in of_b])
        for n in of_y:
            same_splits(y, a if n in of_a else b, [n])
        only = [n for n in (*of_a, *of_b) if n not in of_y and not (n in of_a and n in of_b)]
        require(not only, f"must reduce {only} first")
        splits = {**{n: a.split(n) for n in of_a}, **{n: b.split(n) for n in of_b}}
        used = [ax for s in splits.values() for ax in s]
        gone = [ax for n, s in splits.items() if n not in of_y for ax in s]
        for s in dims:
            summed = _summed_axes(s, a, b, y)
            used += [*summed, *y.split(s.y)]
            gone += summed
        self.check_sum(program, xs, y, used, gone)

    def flops_at(self, program: Program, i: Instruction, at: Mapping[str, int]) -> dict[str, int]:
        """2 x products of elements that meet inside the borders, exactly.

        The extents of all other dims, times for each of ``dims`` the triples of indices that meet.
        """

        def ranges(v: int) -> dict[str, Range]:
            t = program.types[v]
            blocks = zip(t.shape, t.block(program.mesh, at), strict=True)
            return {d.name: (max(0, start), min(stop, d.size)) for d, (start, stop) in blocks}

        a, b, y = (ranges(v) for v in (*i.inputs, *i.outputs))
        products = 2
        for s in self.dims:
            products *= s.meetings(a.pop(s.x), b.pop(s.w), y[s.y])
        return {"conv": products * math.prod(stop - start for start, stop in {**a, **b}.values())}

    @property
    def compared_dims(self) -> tuple[str, ...]:
        return tuple(n for s in self.dims for n in (s.x, s.w, s.y))


def _check_expression(expr: Expr, n_inputs: int) -> None:
    known = {f"i{k}" for k in range(n_inputs)}
    for k, s in enumerate(expr.steps):
        require(s.function in SCALAR_FUNCTIONS, f"uses unknown function {s.function}")
        require(len(s.args) == SCALAR_FUNCTIONS[s.function].arity, f"miscounts arguments of {s.function}")
        require(all(a in known for a in s.args if isinstance(a, str)), "uses an undefined reference")
        known.add(f"t{k}")
    require(all(r in known for r in expr.results), "returns an undefined reference")


def linear_in(expr: Expr, pending: Sequence[bool]) -> bool:
    """Whether every result is a sum of terms each linear in exactly one pending input."""
    state: dict[str, bool] = {f"i{k}": p for k, p in enumerate(pending)}
    for k, s in enumerate(expr.steps):
        marks = [state[a] if isinstance(a, str) else False for a in s.args]
        state[f"t{k}"] = any(marks)
        if not any(marks):
            continue
        if s.function in ("add", "subtract"):
            ok = all(marks)
        elif s.function == "multiply":
            ok = sum(marks) == 1
        elif s.function == "divide":
            ok = marks == [True, False]
        else:
            ok = s.function in ("negative", "identity")
        if not ok:
            return False
    return all(state[r] for r in expr.results)


def _check_band(band: Band | None, types: Sequence[LocalType]) -> None:
    """A band is over two dims that one of the values has."""
    if band is None:
        return
    both = any({band.rows, band.columns} <= set(t.shape.names) for t in types)
    require(band.rows != band.columns and both, f"has a band {band} of no value's two dims")


def _summed_axes(s: ConvDims, a: LocalType, b: LocalType, y: LocalType) -> list[str]:
    """Axes over which each rank has other summands; halos hold what the own block meets."""
    n, k, m = (t.shape.dim(d).size for t, d in ((a, s.x), (b, s.w), (y, s.y)))
    turned, out = s.swapped(), list[str]()
    sides = (
        (a, s.x, b, s.w, s.halo(m, k), s.of_filter().halo(k, m)),
        (b, s.w, a, s.x, turned.halo(m, n), turned.of_filter().halo(n, m)),
    )
    for x, dim, other, other_dim, for_y, for_other in sides:
        halo, axes = x.halo(dim), x.split(dim)
        if halo is None:
            out += axes
            continue
        drivers = [(y.split(s.y), for_y)]
        if other.halo(other_dim) is None:
            drivers.append((other.split(other_dim), for_other))
        require((axes, halo) in drivers, f"holds {s} with a halo that no block needs")
    return out
