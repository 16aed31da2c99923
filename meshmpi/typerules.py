"""The type rules of the instruction set: what each instruction may take and what it makes.

`redistributed` gives the result type of an instruction that redistributes; `verify` checks a whole
program.  Lowering uses the first to build, every pass is followed by the second.  Nothing here
knows arrays, MPI or the graph.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, cast

from meshmpi.dims import Axes, Dimension, MeshShape, Shape
from meshmpi.errors import ProgramError
from meshmpi.loops import LOOP_KINDS, broken_loop_rules
from meshmpi.program import COLLECTIVES, KINDS, Instruction, LocalType, Program
from meshmpi.scalar import SCALAR_FUNCTIONS, Expr
from meshmpi.slides import Slide

REDUCTIONS = ("sum", "max", "min", "prod")


class Violation(Exception):
    """A broken rule; `verify` adds program, instruction and source."""


def redistributed(mesh: MeshShape, x: LocalType, kind: str, attrs: Mapping[str, Any]) -> LocalType:
    """Type of the result of ``kind`` applied to x; raises Violation where a rule is broken."""
    axes: Axes = tuple(attrs["axes"])
    if kind == "all_reduce":
        return _reduced(x, axes, attrs["op"])
    if kind == "reduce_scatter":
        return _split_more(mesh, _reduced(x, axes, attrs["op"]), attrs["dim"], axes)
    if kind == "take_shard":
        if set(x.partial) & set(axes):
            raise Violation(
                f"takes blocks over {axes} of a value with a sum pending over {x.partial}"
            )
        return _split_more(mesh, x, attrs["dim"], axes)
    if kind == "all_gather":
        return _split_less(mesh, x, attrs["dim"], axes)
    if kind == "all_to_all":
        return _split_more(mesh, _split_less(mesh, x, attrs["concat"], axes), attrs["split"], axes)
    raise Violation(f"{kind} does not redistribute")


def _reduced(x: LocalType, axes: Axes, op: str) -> LocalType:
    if not axes or any(a not in x.partial for a in axes):
        raise Violation(f"reduces over {axes}, but the reduction is pending over {x.partial}")
    if op != x.pending:
        raise Violation(f"reduces with {op} what is pending as {x.pending}")
    return x.finished(axes)


def _split_more(mesh: MeshShape, x: LocalType, dim: str, axes: Axes) -> LocalType:
    taken = set(axes) & set(x.used_axes)
    if taken or not axes:
        raise Violation(f"splits '{dim}' over {axes} of {x}")
    _check_nested(mesh, x, dim, x.split(dim), axes)
    return x.with_split(dim, (*x.split(dim), *axes))


def _split_less(mesh: MeshShape, x: LocalType, dim: str, axes: Axes) -> LocalType:
    old = x.split(dim)
    if not axes or old[len(old) - len(axes) :] != axes:
        raise Violation(f"joins '{dim}' over {axes}, but it is split over {old}")
    _check_nested(mesh, x, dim, old[: len(old) - len(axes)], axes)
    return x.with_split(dim, old[: len(old) - len(axes)])


def nests(mesh: MeshShape, size: int, outer: Axes, inner: Axes) -> bool:
    """Whether cutting blocks over ``outer`` further over ``inner`` gives the blocks over both."""
    return not outer or not inner or size % mesh.count((*outer, *inner)) == 0


def _check_nested(mesh: MeshShape, x: LocalType, dim: str, outer: Axes, inner: Axes) -> None:
    size = x.shape.dim(dim).size
    if not nests(mesh, size, outer, inner):
        raise Violation(
            f"blocks of '{dim}' ({size}) over {outer} do not hold whole blocks over {inner}"
        )


def verify(program: Program) -> None:
    """Checks every rule of the instruction set.

    Raises:
        ProgramError: Naming the instruction, its types, the rule and the source line.
    """
    defined: set[int] = set()
    memory, running = _StoredValues(), _Running()
    for n, i in enumerate(program.instructions):
        try:
            _check_wiring(program, i, defined)
            memory.follow(i)
            running.follow(i)
            _RULES[i.kind](program, i, [program.types[v] for v in i.inputs])
        except (Violation, KeyError) as e:
            inputs = ", ".join(str(program.types.get(v)) for v in i.inputs)
            outputs = ", ".join(str(program.types.get(v)) for v in i.outputs)
            raise ProgramError(
                f"instruction {n}, {i.kind}({inputs}) -> {outputs} with {dict(i.attrs)}: {e}.",
                "This is a bug in lowering or in a pass.", str(i.source),
            ) from None  # fmt: skip
        defined.update(i.outputs)
    if running.left:
        raise ProgramError(
            f"all_reduces of values {running.left} are started and never waited for.",
            "This is a bug in a pass.",
        )
    for name, v in program.fetches.items():
        if v not in defined or program.types[v].partial or memory.is_overwritten(v):
            raise ProgramError(
                f"fetch '{name}' is undefined, unfinished or overwritten.",
                "This is a bug in a pass.",
            )


class _Running:
    """Results of collectives that were started: exactly one `wait` each, and no other use."""

    def __init__(self) -> None:
        self._started: dict[int, bool] = {}

    def follow(self, i: Instruction) -> None:
        for v in i.inputs:
            if v in self._started:
                _require(i.kind == "wait" and self._started[v], "uses a result before its wait")
                self._started[v] = False
            else:
                _require(i.kind != "wait", "waits for what was not started")
        if i.kind in COLLECTIVES and i.attrs.get("start"):
            _require(i.kind == "all_reduce" and len(i.outputs) == 1, "cannot be started")
            self._started[i.outputs[0]] = True

    @property
    def left(self) -> list[int]:
        return [v for v, running in self._started.items() if running]


class _StoredValues:
    """Which values are the memory of a variable, and which variables have been written.

    A read makes no copy, so what it gave must not be used once its variable is written.
    """

    def __init__(self) -> None:
        self._variable: dict[int, str] = {}
        self._written: set[str] = set()

    def is_overwritten(self, v: int) -> bool:
        return self._variable.get(v) in self._written

    def follow(self, i: Instruction) -> None:
        for v in i.inputs:
            _require(not self.is_overwritten(v), f"uses '{self._variable.get(v)}' after its write")
        if i.kind == "read":
            _require(i.attrs["variable"] not in self._written, "reads what the step has written")
            self._variable[i.outputs[0]] = i.attrs["variable"]
        elif i.kind == "view" and i.inputs[0] in self._variable:
            self._variable[i.outputs[0]] = self._variable[i.inputs[0]]
        elif i.kind == "write":
            _require(i.attrs["variable"] not in self._written, "writes a variable twice")
            self._written.add(i.attrs["variable"])


def _check_wiring(program: Program, i: Instruction, defined: set[int]) -> None:
    if i.kind not in KINDS:
        raise Violation("this kind is not in the instruction set")
    for v in i.inputs:
        if v not in defined:
            raise Violation(f"value {v} is used before it is made")
        if program.types[v].windows and i.kind not in ("conv", "shift"):
            raise Violation("uses a value that is held in windows")
    for v in i.outputs:
        if v in defined:
            raise Violation(f"value {v} is made twice")
        t = program.types[v]
        if t.windows:
            _require(i.kind == "shift", "makes a value held in windows")
        used = t.used_axes
        if not used and not t.partial and t.pending == "sum":
            continue
        if len(set(used)) < len(used) or set(used) & set(t.partial):
            raise Violation(f"{t} uses a mesh axis twice")
        if t.partial != program.mesh.in_mesh_order(t.partial) or t.pending not in REDUCTIONS:
            raise Violation(f"{t} has a malformed pending reduction")
        program.mesh.count(used)


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise Violation(rule)


def _out(program: Program, i: Instruction) -> LocalType:
    _require(len(i.outputs) == 1, "has not exactly one result")
    return program.types[i.outputs[0]]


def _same_splits(x: LocalType, y: LocalType, names: Sequence[str]) -> None:
    for name in names:
        i, j = x.shape.find(name), y.shape.find(name)
        if i < 0 or j < 0 or x.shape[i] != y.shape[j] or x.splits[i] != y.splits[j]:
            raise Violation(f"dimension '{name}' is not the same in {x} and {y}")


def _source_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    y = _out(program, i)
    _require(not xs and not y.partial, "has inputs or an unfinished result")
    if i.kind == "feed":
        _require(program.feeds[i.attrs["name"]] == y, "differs from the type of the feed")
    if i.kind == "read":
        _require(program.variables[i.attrs["variable"]].type == y, "differs from the stored type")
    if i.kind == "step":
        _require(y.dtype == "int32" and not y.shape, "is no int32 without dims")
    if i.kind == "iota":
        _require(
            y.shape.names == (i.attrs["dim"],) and y.dtype == "int32", "is no int32 of its dim"
        )


def _write_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    _require(not i.outputs and len(xs) == 1, "takes one value and makes none")
    _require(program.variables[i.attrs["variable"]].type == xs[0], "differs from the stored type")


def _map_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    expr = i.attrs["expr"]
    ys = [program.types[v] for v in i.outputs]
    _require(len(expr.results) == len(ys) > 0, "has not one result per output")
    for y in ys:
        _require(
            (y.shape, y.splits, y.partial) == (ys[0].shape, ys[0].splits, ys[0].partial),
            "mixes types",
        )
        for x in xs:
            _same_splits(x, y, x.shape.names)
    _check_tape(expr, len(xs))
    dtypes = {f"i{k}": x.dtype for k, x in enumerate(xs)}
    dtypes.update((f"t{k}", s.dtype) for k, s in enumerate(expr.steps))
    _require([dtypes[r] for r in expr.results] == [y.dtype for y in ys], "makes another data type")
    partials = {x.partial for x in xs if x.partial}
    if partials or ys[0].partial:
        _require(partials == {ys[0].partial}, f"mixes reductions pending over {partials}")
        _require(
            linear_in(expr, [bool(x.partial) for x in xs]), "is not linear in the unfinished inputs"
        )
        _require(all(x.pending == "sum" for x in xs), "defers another reduction than a sum")


def _check_tape(expr: Expr, n_inputs: int) -> None:
    known = {f"i{k}" for k in range(n_inputs)}
    for k, s in enumerate(expr.steps):
        _require(s.function in SCALAR_FUNCTIONS, f"uses unknown function {s.function}")
        _require(
            len(s.args) == SCALAR_FUNCTIONS[s.function].arity,
            f"miscounts arguments of {s.function}",
        )
        _require(
            all(a in known for a in s.args if isinstance(a, str)), "uses an undefined reference"
        )
        known.add(f"t{k}")
    _require(all(r in known for r in expr.results), "returns an undefined reference")


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


def _reduce_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    (x,), y, op = xs, _out(program, i), i.attrs["op"]
    _require(op in REDUCTIONS and x.dtype == y.dtype, "has an unknown op or changes the data type")
    _same_splits(y, x, y.shape.names)
    gone = [a for n in x.shape.names if y.shape.find(n) < 0 for a in x.split(n)]
    _require(not x.partial or x.pending == op == "sum", "reduces an unfinished reduction")
    _check_pending(program.mesh, y, [*x.partial, *gone], op)


def _check_pending(mesh: MeshShape, y: LocalType, axes: Sequence[str], op: str) -> None:
    _require(y.partial == mesh.in_mesh_order(axes), f"must leave a reduction pending over {axes}")
    _require(not y.partial or y.pending == op, f"must leave {op} pending")


def _contract_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    y = _out(program, i)
    _require(len(xs) == 2, "takes two operands")
    a, b = xs
    _require(a.dtype == b.dtype, "multiplies two data types")
    _same_splits(a, b, [n for n in a.shape.names if b.shape.find(n) >= 0])
    for n in y.shape.names:
        _same_splits(y, a if a.shape.find(n) >= 0 else b, [n])
    splits = {n: x.split(n) for x in xs for n in x.shape.names}
    used = [ax for s in splits.values() for ax in s]
    _require(len(set(used)) == len(used), "has operands split over one axis by different dims")
    gone = [ax for n, s in splits.items() if y.shape.find(n) < 0 for ax in s]
    _require(not (a.partial and b.partial), "multiplies two unfinished sums")
    pending = [*a.partial, *b.partial]
    _require(not set(pending) & set(used), "sums twice over one axis")
    _require(
        all(x.pending == "sum" for x in xs if x.partial), "defers another reduction than a sum"
    )
    for x, other in ((a, b), (b, a)):
        only = [n for n in x.shape.names if y.shape.find(n) < 0 and other.shape.find(n) < 0]
        _require(not only, f"must reduce {only} first")
    _check_pending(program.mesh, y, [*pending, *gone], "sum")


def _conv_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    y, slides = _out(program, i), i.attrs["slides"]
    _require(len(xs) == 2, "takes two operands")
    a, b = xs
    _require(a.dtype == b.dtype == y.dtype, "multiplies or makes two data types")
    sliding = ([s.x for s in slides], [s.w for s in slides], [s.y for s in slides])
    of_a, of_b, of_y = (
        t.shape.without(names).names for t, names in zip((a, b, y), sliding, strict=True)
    )
    _same_splits(a, b, [n for n in of_a if n in of_b])
    for n in of_y:
        _same_splits(y, a if n in of_a else b, [n])
    only = [n for n in (*of_a, *of_b) if n not in of_y and not (n in of_a and n in of_b)]
    _require(not only, f"must reduce {only} first")
    splits = {**{n: a.split(n) for n in of_a}, **{n: b.split(n) for n in of_b}}
    used = [ax for s in splits.values() for ax in s]
    gone = [ax for n, s in splits.items() if n not in of_y for ax in s]
    for s in slides:
        summed = _slide_axes(s, a, b, y)
        used += [*summed, *y.split(s.y)]
        gone += summed
    _require(len(set(used)) == len(used), "uses one axis for several dims")
    _require(not (a.partial and b.partial), "multiplies two unfinished sums")
    pending = [*a.partial, *b.partial]
    _require(not set(pending) & set(used), "sums twice over one axis")
    _require(all(x.pending == "sum" for x in xs if x.partial), "defers another reduction")
    _check_pending(program.mesh, y, [*pending, *gone], "sum")


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
        _require((axes, window) in drivers, f"holds {s} in a window that no block needs")
    return out


def _passes_partial(x: LocalType, y: LocalType) -> None:
    _require(
        (x.partial, x.pending, x.dtype) == (y.partial, y.pending, y.dtype),
        "changes what is pending",
    )


def _transpose_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    (x,), y = xs, _out(program, i)
    _require(sorted(x.shape) == sorted(y.shape), "changes dims")
    _same_splits(x, y, x.shape.names)
    _passes_partial(x, y)


def _view_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    (x,), y = xs, _out(program, i)
    _passes_partial(x, y)
    for ins, outs in aligned_groups(x.shape, y.shape):
        a = [x.split(d.name) for d in ins]
        b = [y.split(d.name) for d in outs]
        _require(view_splits(program.mesh, ins, a, outs) == b, f"is not local from {ins} to {outs}")


def aligned_groups(old: Shape, new: Shape) -> list[tuple[list[Dimension], list[Dimension]]]:
    """Smallest runs of old and new dims with equal products of sizes, each reshaped alone."""
    groups: list[tuple[list[Dimension], list[Dimension]]] = []
    i = j = 0
    while i < len(old) and j < len(new):
        ins, outs = [old[i]], [new[j]]
        i, j = i + 1, j + 1
        while (a := math.prod(d.size for d in ins)) != (b := math.prod(d.size for d in outs)):
            if a < b:
                ins.append(old[i])
                i += 1
            else:
                outs.append(new[j])
                j += 1
        groups.append((ins, outs))
    rest = (list(old[i:]), list(new[j:]))  # dims of size 1
    if any(rest):
        if groups:
            groups[-1] = (groups[-1][0] + rest[0], groups[-1][1] + rest[1])
        else:
            groups.append(rest)
    return groups


def view_splits(
    mesh: MeshShape, ins: Sequence[Dimension], splits: Sequence[Axes], outs: Sequence[Dimension]
) -> list[Axes] | None:
    """Splits of ``outs`` when ``ins`` with ``splits`` are reshaped locally; None when they cannot.

    Local is: nothing split; one dim renamed; or only the leading dim split, evenly on both sides.
    """
    if not any(splits):
        return [()] * len(outs)
    lead_in = next((k for k, d in enumerate(ins) if d.size > 1), 0)
    lead_out = next((k for k, d in enumerate(outs) if d.size > 1), 0)
    if not ins or not outs or any(s for k, s in enumerate(splits) if k != lead_in):
        return None
    axes, n, m = splits[lead_in], ins[lead_in].size, outs[lead_out].size
    k = mesh.count(axes)
    if n != m and (n % k or m % k):
        return None
    return [axes if j == lead_out else () for j in range(len(outs))]


def _along_dim_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    dim = i.attrs["dim"]
    y = _out(program, i)
    total = 0
    for x in xs:
        _require(not x.split(dim) and not y.split(dim), f"works along '{dim}', which is split")
        _require(x.shape.names == y.shape.names, "changes the order of dims")
        _same_splits(x, y, [n for n in x.shape.names if n != dim])
        _passes_partial(x, y)
        total += x.shape.dim(dim).size
    if i.kind == "slice":
        total = len(range(i.attrs["start"], i.attrs["stop"], i.attrs["stride"]))
    if i.kind == "pad":
        total += i.attrs["before"] + i.attrs["after"]
        _require(not xs[0].partial or not i.attrs["value"], "pads an unfinished sum with a number")
    _require(y.shape.dim(dim).size == total, f"'{dim}' should have {total} elements")


def _shift_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    a, y, dim = i.attrs, _out(program, i), i.attrs["dim"]
    _require(len(xs) == len(a["offsets"]) > 0 and a["stride"] >= 1, "has not one offset per input")
    _require(bool(a["axes"]) and y.split(dim) == a["axes"], f"has '{dim}' split otherwise")
    for x in xs:
        _require(x.shape.names == y.shape.names and x.dtype == y.dtype, "changes dims or type")
        _require(x.split(dim) == a["axes"] and x.window(dim) is None, f"has no blocks of '{dim}'")
        _require(not x.partial and not y.partial, "moves an unfinished sum")
        for d in x.shape:
            if d.name != dim:
                _same_splits(x, y, [d.name])
                _require(x.window(d.name) == y.window(d.name), f"changes a window of '{d.name}'")
    _require(not a["wrap"] or len(xs) == 1, "makes a ring of several inputs")
    if y.window(dim) is not None:
        plain = len(xs) == 1 and (a["stride"], a["offsets"]) == (1, (0,))
        _require(plain and xs[0].shape == y.shape, "moves elements into a window")


def _gather_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    (table, index), y, dim = xs, _out(program, i), i.attrs["dim"]
    _same_splits(y, index, index.shape.names)
    _same_splits(y, table, [n for n in table.shape.names if n != dim])
    _require(
        not index.partial and table.dtype == y.dtype, "has an unfinished index or changes type"
    )
    axes = table.split(dim)
    _require(not set(axes) & set(y.used_axes), f"splits its result like its dimension '{dim}'")
    _check_pending(program.mesh, y, [*table.partial, *axes], "sum")


def _scatter_add_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    (updates, index), y, dim = xs, _out(program, i), i.attrs["dim"]
    _same_splits(updates, index, index.shape.names)
    _same_splits(y, updates, [n for n in y.shape.names if n != dim])
    _require(
        not index.partial and updates.dtype == y.dtype, "has an unfinished index or changes type"
    )
    _require(not set(y.split(dim)) & set(updates.used_axes), "has updates split like its dimension")
    summed = [n for n in index.shape.names if n == dim or y.shape.find(n) < 0]
    gone = [a for n in summed for a in index.split(n)]
    _check_pending(program.mesh, y, [*updates.partial, *gone], "sum")


def _top_k_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    x, ys, dim, k = xs[0], [program.types[v] for v in i.outputs], i.attrs["dim"], i.attrs["k"]
    _require(len(ys) == 2 and not x.partial, "needs one finished dim")
    for y in ys:
        _same_splits(x, y, [n for n in x.shape.names if n != dim])
        _require(y.split(k) == x.split(dim) and not y.partial, "splits its result in another way")
    ranks = program.mesh.count(x.split(dim))
    most = x.shape.dim(dim).size // ranks
    fits = ys[0].shape.dim(k).size % ranks == 0 and ys[0].shape.dim(k).size // ranks <= most
    _require(fits, f"takes not one number of elements of every block, or more than {most}")
    if len(xs) > 1:
        index = LocalType(x.shape, "int32", x.splits)
        _require(xs[1] == index and ranks == 1, "has an index that is not one of a whole dim")


def _block_sum_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    (x,), y = xs, _out(program, i)
    _require(bool(x.split(i.attrs["dim"])), "sums blocks of a whole dimension")
    _require(y == _block_sums(program.mesh, x, i) and not x.partial, "is no sum of each block")


def _block_sums(mesh: MeshShape, x: LocalType, i: Instruction) -> LocalType:
    """Type of the sums of the blocks of x: one element per block in place of ``dim``."""
    at = x.shape.position(i.attrs["dim"])
    blocks = Dimension(i.attrs["blocks"], mesh.count(x.splits[at]))
    shape = Shape([*x.shape[:at], blocks, *x.shape[at + 1 :]])
    return LocalType(shape, "float32" if x.dtype == "bfloat16" else x.dtype, x.splits)


def _cumsum_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    x, *sums = xs
    _require(_out(program, i) == x and not x.partial, "changes the type of its input")
    wanted: list[LocalType] = []
    if x.split(i.attrs["dim"]):
        blocks = _block_sums(program.mesh, x, i)
        wanted = [blocks.with_split(i.attrs["blocks"], ())]
    _require(sums == wanted, "has not the sums of all blocks of a split dimension")


def _segment_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    types = ChainMap(i.attrs["inner"], cast("MutableMapping[int, LocalType]", program.types))
    inside = replace(program, types=types)
    known = set(i.inputs)
    for one in i.attrs["body"]:
        _require(one.kind in ("map", "reduce", "random"), f"has {one.kind} in its body")
        _require(all(v in known for v in one.inputs), "has a body that uses an undefined value")
        _RULES[one.kind](inside, one, [types[v] for v in one.inputs])
        known.update(one.outputs)
    _require(all(v in known for v in i.outputs), "returns an undefined value")


def _loop_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    types = ChainMap(i.attrs["inner"], cast("MutableMapping[int, LocalType]", program.types))
    inside = replace(program, types=types)
    known = set(i.inputs)
    for one in i.attrs["body"]:
        _require(one.kind in LOOP_KINDS, f"has {one.kind} in its body")
        _require(all(v in known for v in one.inputs), "has a body that uses an undefined value")
        _RULES[one.kind](inside, one, [types[v] for v in one.inputs])
        known.update(one.outputs)
    _require(all(v in known and v not in i.inputs for v in i.outputs), "returns what it has not")
    for problem in broken_loop_rules(i, {**types, **i.inner_types()}):
        raise Violation(problem)


def _redistribution_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    _require(len(xs) == len(i.outputs) > 0, "has not one result per input")
    _require(len(xs) == 1 or i.kind == "all_reduce", "combines several values")
    _require(len({x.dtype for x in xs}) == 1, "combines several data types")
    for x, v in zip(xs, i.outputs, strict=True):
        if i.kind in COLLECTIVES and i.kind not in ("all_reduce", "reduce_scatter"):
            _require(not x.partial, "moves an unfinished sum")
        expected = redistributed(program.mesh, x, i.kind, i.attrs)
        _require(expected == program.types[v], f"should make {expected}")


def _wait_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    _require(len(xs) == 1 and xs[0] == _out(program, i), "changes its value")


_RULES: dict[str, Callable[[Program, Instruction, Sequence[LocalType]], None]] = {
    "feed": _source_rule, "read": _source_rule, "step": _source_rule, "iota": _source_rule,
    "random": _source_rule, "write": _write_rule, "map": _map_rule, "reduce": _reduce_rule,
    "conv": _conv_rule, "contract": _contract_rule, "transpose": _transpose_rule, "view": _view_rule,
    "slice": _along_dim_rule, "pad": _along_dim_rule, "concat": _along_dim_rule,
    "gather": _gather_rule, "scatter_add": _scatter_add_rule, "top_k": _top_k_rule,
    "block_sum": _block_sum_rule, "cumsum": _cumsum_rule,
    "segment": _segment_rule, "loop": _loop_rule,
    "all_reduce": _redistribution_rule, "reduce_scatter": _redistribution_rule,
    "all_gather": _redistribution_rule, "all_to_all": _redistribution_rule,
    "take_shard": _redistribution_rule, "shift": _shift_rule,
    "wait": _wait_rule,
}  # fmt: skip
