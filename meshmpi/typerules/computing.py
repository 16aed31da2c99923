"""Type rules of sources, maps, reductions and products."""

from __future__ import annotations

from collections.abc import Sequence

from meshmpi.program import Instruction, LocalType, Program
from meshmpi.scalar import SCALAR_FUNCTIONS, Expr
from meshmpi.slides import Slide
from meshmpi.typerules.basics import REDUCTIONS, check_pending, require, result_type, same_splits


def source_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    """feed, read, step, iota, random: no inputs, and the type that was declared."""
    y = result_type(program, i)
    require(not xs and not y.partial, "has inputs or an unfinished result")
    if i.kind == "feed":
        require(program.feeds[i.attrs["name"]] == y, "differs from the type of the feed")
    if i.kind == "read":
        require(program.variables[i.attrs["variable"]].type == y, "differs from the stored type")
    if i.kind == "step":
        require(y.dtype == "int32" and not y.shape, "is no int32 without dims")
    if i.kind == "iota":
        require(y.shape.names == (i.attrs["dim"],) and y.dtype == "int32", "is no int32 of its dim")


def write_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    """One value of the stored type."""
    require(not i.outputs and len(xs) == 1, "takes one value and makes none")
    require(program.variables[i.attrs["variable"]].type == xs[0], "differs from the stored type")


def map_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    """Inputs broadcast to the outputs; unfinished sums only where the tape is linear in them."""
    expr = i.attrs["expr"]
    ys = [program.types[v] for v in i.outputs]
    require(len(expr.results) == len(ys) > 0, "has not one result per output")
    for y in ys:
        require(
            (y.shape, y.splits, y.partial) == (ys[0].shape, ys[0].splits, ys[0].partial),
            "mixes types",
        )
        for x in xs:
            same_splits(x, y, x.shape.names)
    _check_tape(expr, len(xs))
    dtypes = {f"i{k}": x.dtype for k, x in enumerate(xs)}
    dtypes.update((f"t{k}", s.dtype) for k, s in enumerate(expr.steps))
    require([dtypes[r] for r in expr.results] == [y.dtype for y in ys], "makes another data type")
    partials = {x.partial for x in xs if x.partial}
    if partials or ys[0].partial:
        require(partials == {ys[0].partial}, f"mixes reductions pending over {partials}")
        require(
            linear_in(expr, [bool(x.partial) for x in xs]), "is not linear in the unfinished inputs"
        )
        require(all(x.pending == "sum" for x in xs), "defers another reduction than a sum")


def _check_tape(expr: Expr, n_inputs: int) -> None:
    known = {f"i{k}" for k in range(n_inputs)}
    for k, s in enumerate(expr.steps):
        require(s.function in SCALAR_FUNCTIONS, f"uses unknown function {s.function}")
        require(
            len(s.args) == SCALAR_FUNCTIONS[s.function].arity,
            f"miscounts arguments of {s.function}",
        )
        require(
            all(a in known for a in s.args if isinstance(a, str)), "uses an undefined reference"
        )
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


def reduce_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    """Axes of reduced split dims are left pending."""
    (x,), y, op = xs, result_type(program, i), i.attrs["op"]
    require(op in REDUCTIONS and x.dtype == y.dtype, "has an unknown op or changes the data type")
    same_splits(y, x, y.shape.names)
    gone = [a for n in x.shape.names if y.shape.find(n) < 0 for a in x.split(n)]
    require(not x.partial or x.pending == op == "sum", "reduces an unfinished reduction")
    check_pending(program.mesh, y, [*x.partial, *gone], op)


def contract_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    """Operands agree in the dims both have; axes of summed split dims are left pending."""
    y = result_type(program, i)
    require(len(xs) == 2, "takes two operands")
    a, b = xs
    require(a.dtype == b.dtype, "multiplies two data types")
    same_splits(a, b, [n for n in a.shape.names if b.shape.find(n) >= 0])
    for n in y.shape.names:
        same_splits(y, a if a.shape.find(n) >= 0 else b, [n])
    splits = {n: x.split(n) for x in xs for n in x.shape.names}
    used = [ax for s in splits.values() for ax in s]
    require(len(set(used)) == len(used), "has operands split over one axis by different dims")
    gone = [ax for n, s in splits.items() if y.shape.find(n) < 0 for ax in s]
    require(not (a.partial and b.partial), "multiplies two unfinished sums")
    pending = [*a.partial, *b.partial]
    require(not set(pending) & set(used), "sums twice over one axis")
    require(all(x.pending == "sum" for x in xs if x.partial), "defers another reduction than a sum")
    for x, other in ((a, b), (b, a)):
        only = [n for n in x.shape.names if y.shape.find(n) < 0 and other.shape.find(n) < 0]
        require(not only, f"must reduce {only} first")
    check_pending(program.mesh, y, [*pending, *gone], "sum")


def conv_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    """As `contract_rule`; along sliding dims also windows, see `_slide_axes`."""
    y, slides = result_type(program, i), i.attrs["slides"]
    require(len(xs) == 2, "takes two operands")
    a, b = xs
    require(a.dtype == b.dtype == y.dtype, "multiplies or makes two data types")
    sliding = ([s.x for s in slides], [s.w for s in slides], [s.y for s in slides])
    of_a, of_b, of_y = (
        t.shape.without(names).names for t, names in zip((a, b, y), sliding, strict=True)
    )
    same_splits(a, b, [n for n in of_a if n in of_b])
    for n in of_y:
        same_splits(y, a if n in of_a else b, [n])
    only = [n for n in (*of_a, *of_b) if n not in of_y and not (n in of_a and n in of_b)]
    require(not only, f"must reduce {only} first")
    splits = {**{n: a.split(n) for n in of_a}, **{n: b.split(n) for n in of_b}}
    used = [ax for s in splits.values() for ax in s]
    gone = [ax for n, s in splits.items() if n not in of_y for ax in s]
    for s in slides:
        summed = _slide_axes(s, a, b, y)
        used += [*summed, *y.split(s.y)]
        gone += summed
    require(len(set(used)) == len(used), "uses one axis for several dims")
    require(not (a.partial and b.partial), "multiplies two unfinished sums")
    pending = [*a.partial, *b.partial]
    require(not set(pending) & set(used), "sums twice over one axis")
    require(all(x.pending == "sum" for x in xs if x.partial), "defers another reduction")
    check_pending(program.mesh, y, [*pending, *gone], "sum")


def _slide_axes(s: Slide, a: LocalType, b: LocalType, y: LocalType) -> list[str]:
    """Axes over which each rank has other summands; windows hold what the own block meets."""
    n, k, m = (t.shape.dim(d).size for t, d in ((a, s.x), (b, s.w), (y, s.y)))
    turned, out = s.swapped(), list[str]()
    sides = (
        (a, s.x, b, s.w, s.window(m, k), s.of_filter().window(k, m)),
        (b, s.w, a, s.x, turned.window(m, n), turned.of_filter().window(n, m)),
    )
    for x, dim, other, other_dim, for_y, for_other in sides:
        window, axes = x.window(dim), x.split(dim)
        if window is None:
            out += axes
            continue
        drivers = [(y.split(s.y), for_y)]
        if other.window(other_dim) is None:
            drivers.append((other.split(other_dim), for_other))
        require((axes, window) in drivers, f"holds {s} in a window that no block needs")
    return out
