"""Which blocks of an attention need not be computed: columns behind all rows of a block.

Every value over (rows, columns) is judged in three regions: columns before the row, the one with
the row's own index, and columns behind.  Where a comparison of the two indices masks what is
behind, the weights there are 0 to the last bit, and a sum or product over them may leave them out.
This is proven from the instructions, whatever the mask is joined with, with one assumption:
numbers computed from data are finite and smaller than `ORDINARY`, so that a masked logit of
-1e9 never competes with one that is seen.  Nothing here knows blocks or attention.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from meshmpi.program import Instruction, Program
from meshmpi.scalar import Step

if TYPE_CHECKING:
    from meshmpi.passes.loops import Group
    from meshmpi.passes.wide import WideValues

ORDINARY = 1e8
"""Assumed bound of numbers computed from data, and of what is left of a masked logit."""


class Known(NamedTuple):
    """What is known of a value: a number, or one of the kinds below, smallest knowledge last."""

    kind: str
    number: float = 0.0


SOME = Known("ordinary")  # smaller than ORDINARY, or a truth value
LOW = Known("low")  # the same or any number below, not NaN
FINITE_LOW = Known("finite low")
FINITE = Known("finite")
ANY = Known("any")
BEFORE, SAME, BEHIND = range(3)
Regions = tuple[Known, Known, Known]


def causal_dims(
    program: Program, group: Group, wide: WideValues, products: Sequence[Instruction],
    dims: Sequence[str],
) -> tuple[str, str] | tuple[()]:  # fmt: skip
    """(rows, columns) such that members of the group may leave out columns behind the rows.

    Args:
        program: The whole program.
        group, wide: What a loop is formed from.
        products: Contracts of its body.
        dims: Those it may walk along.
    """
    for rows, columns in _compared(program, group, wide):
        if rows not in dims or columns in dims or len(products) == 0:
            continue
        if (rows, columns) not in wide.judged:
            wide.judged[rows, columns] = _Judge(program, rows, columns).known
        known = wide.judged[rows, columns]
        if all(_may_leave_out(program, i, known, rows, columns) for i in group.members.values()):
            return rows, columns
    return ()


def _compared(program: Program, group: Group, wide: WideValues) -> list[tuple[str, str]]:
    """Pairs of dims whose indices the group's wide values compare, as (row >= column)."""
    index = {i.outputs[0]: i.attrs["dim"] for i in program.instructions if i.kind == "iota"}
    pairs: dict[tuple[str, str], None] = {}
    for v in group.recipes:
        i = wide.makers[v]
        if i.kind != "map":
            continue
        names = {f"i{k}": index[x] for k, x in enumerate(i.inputs) if x in index}
        for s in i.attrs["expr"].steps:
            pair = [names.get(a, "") if isinstance(a, str) else "" for a in s.args]
            if s.function in ("greater_equal", "greater") and all(pair):
                pairs[pair[0], pair[1]] = None
            if s.function in ("less_equal", "less") and all(pair):
                pairs[pair[1], pair[0]] = None
    return list(pairs)


def _may_leave_out(
    program: Program, i: Instruction, known: Mapping[int, Regions], rows: str, columns: str
) -> bool:
    """Whether columns behind the rows contribute nothing to the results of a member."""
    for v in i.outputs:
        names = program.types[v].shape.names
        if rows in names and columns in names:
            return False
    both = [v for v in i.inputs if {rows, columns} <= set(program.types[v].shape.names)]
    if not any(columns in program.types[v].shape.names for v in i.inputs):
        return True
    behind = [known[v][BEHIND] for v in both]
    if i.kind == "contract":
        others = [known[v][BEHIND] for v in i.inputs if v not in both]
        return _ZERO in behind and ANY not in (*behind, *others)
    if i.kind == "reduce" and i.attrs["op"] == "sum":
        return behind == [_ZERO]
    if i.kind == "reduce" and i.attrs["op"] == "max" and both:
        before, same, at = known[both[0]]
        seen = same == SOME and before != ANY and _own_columns(program, both[0], rows, columns)
        return at.kind == "number" and at.number <= (-ORDINARY if seen else -math.inf)
    return False


def _own_columns(program: Program, v: int, rows: str, columns: str) -> bool:
    """Whether there is a column with the index of each row of v."""
    sizes = {d.name: d.size for d in program.types[v].shape}
    return rows in sizes and 0 < sizes[rows] <= sizes.get(columns, 0)


class _Judge:
    """Judges every value of a program in the three regions of (rows, columns)."""

    def __init__(self, program: Program, rows: str, columns: str):
        self.program, self.pair = program, (rows, columns)
        self.known: dict[int, Regions] = {}
        self.largest_of: dict[int, int] = {}  # row maximum -> the value it bounds
        self.index = {
            i.outputs[0]: i.attrs["dim"] for i in program.instructions if i.kind == "iota"
        }  # fmt: skip
        for i in program.instructions:
            self._judge(i)

    def _judge(self, i: Instruction) -> None:
        types = self.program.types
        if i.attrs.get("op") == "max" and len(i.inputs) == 1:
            self.largest_of[i.outputs[0]] = self.largest_of.get(i.inputs[0], i.inputs[0])
        ins = [self.known[v] for v in i.inputs]
        if i.kind == "map":
            results = [self._map(i, [k[region] for k in ins], region) for region in range(3)]
            for n, v in enumerate(i.outputs):
                self.known[v] = (results[0][n], results[1][n], results[2][n])
            return
        flat = [k for regions in ins for k in regions]
        for v in i.outputs:
            if i.kind == "reduce" and self.pair[1] not in types[v].shape.names:
                self.known[v] = _everywhere(self._reduced(i, ins[0]))
            else:
                unknown = ANY in flat
                low = any(k not in (SOME,) and not _ordinary(k) for k in flat)
                self.known[v] = _everywhere(ANY if unknown else LOW if low else SOME)
                if i.kind == "contract" and not unknown:
                    self.known[v] = _everywhere(SOME if not low else ANY)
                elif i.kind not in _MOVES and low:
                    self.known[v] = _everywhere(ANY)

    def _reduced(self, i: Instruction, regions: Regions) -> Known:
        if ANY in regions:
            return ANY
        if all(_ordinary(k) for k in regions):
            return SOME
        if i.attrs["op"] != "max":
            return ANY
        seen = _ordinary(regions[SAME]) and _own_columns(self.program, i.inputs[0], *self.pair)
        return SOME if seen else LOW

    def _map(self, i: Instruction, ins: Sequence[Known], region: int) -> list[Known]:
        known: dict[str, Known] = {f"i{k}": x for k, x in enumerate(ins)}
        finite: dict[str, str] = {}  # reference of isfinite(x) -> x
        compared = {f"i{k}": self.index[v] for k, v in enumerate(i.inputs) if v in self.index}
        for k, s in enumerate(i.attrs["expr"].steps):
            args = [known[a] if isinstance(a, str) else Known("number", float(a)) for a in s.args]
            result = self._index_step(s, compared, region)
            if result is None and s.function == "where" and finite.get(str(s.args[0])) == s.args[1]:
                result = _joined(_finite(args[1]), args[2])
                if s.args[1] == "i0" and len(i.inputs) == 1 and i.inputs[0] in self.largest_of:
                    self.largest_of[i.outputs[0]] = self.largest_of[i.inputs[0]]
            if result is None and self._subtracts_largest(i, s) and not _infinite(args[1]):
                result = LOW if args[0] in (LOW, FINITE_LOW) else None
            if s.function == "isfinite" and isinstance(s.args[0], str):
                finite[f"t{k}"] = s.args[0]
            known[f"t{k}"] = _step(s.function, args) if result is None else result
        return [known[r] for r in i.attrs["expr"].results]

    def _subtracts_largest(self, i: Instruction, s: Step) -> bool:
        """Whether a step subtracts from a value its own row maximum: the result is not above 0."""
        if s.function != "subtract" or not all(str(a).startswith("i") for a in s.args):
            return False
        a, b = (i.inputs[int(str(ref)[1:])] for ref in s.args)
        return self.largest_of.get(b) == a

    def _index_step(self, s: Step, compared: Mapping[str, str], region: int) -> Known | None:
        """What a comparison of the two indices gives in a region."""
        if s.function not in _COMPARISONS or len(s.args) != 2:
            return None
        dims = tuple(compared.get(str(a), "") for a in s.args)
        if dims not in (self.pair, self.pair[::-1]):
            return None
        row, column = (1, {BEFORE: 0, SAME: 1, BEHIND: 2}[region])
        a, b = (row, column) if dims == self.pair else (column, row)
        return Known("number", float(_COMPARISONS[s.function](a, b)))


_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "less": operator.lt, "less_equal": operator.le, "greater": operator.gt,
    "greater_equal": operator.ge, "equal": operator.eq, "not_equal": operator.ne,
}  # fmt: skip
_BOOLS = (*_COMPARISONS, "logical_and", "logical_or", "logical_not", "isfinite")
_MOVES = ("all_reduce", "all_gather", "take_shard", "all_to_all", "transpose", "view", "slice")
_ZERO = Known("number", 0.0)


def _everywhere(k: Known) -> Regions:
    return k, k, k


def _ordinary(k: Known) -> bool:
    return k == SOME or (k.kind == "number" and abs(k.number) < ORDINARY)


def _infinite(k: Known) -> bool:
    return k in (LOW, ANY) or not math.isfinite(k.number)


def _finite(k: Known) -> Known:
    """k, where it is finite."""
    return FINITE_LOW if k == LOW else k


def _low(k: Known) -> bool:
    return k in (LOW, FINITE_LOW) or (k.kind == "number" and k.number <= -ORDINARY)


def _joined(a: Known, b: Known) -> Known:
    """What is known of a value that is one or the other."""
    if a == b:
        return a
    if _ordinary(a) and _ordinary(b):
        return SOME
    if all(_ordinary(k) or _low(k) for k in (a, b)):
        infinite = any(k == LOW or k.number == -math.inf for k in (a, b))
        return LOW if infinite else FINITE_LOW
    return ANY


def _step(function: str, args: Sequence[Known]) -> Known:
    """What is known of the result of a scalar function."""
    if function in ("identity", "cast"):
        return args[0]
    if function == "where":
        c, a, b = args
        return _joined(a, b) if c.kind != "number" else (a if c.number else b)
    if function in _BOOLS:
        return _truth(function, args)
    if function in ("add", "subtract"):
        return _sum(args[0], args[1] if function == "add" else _negative(args[1]))
    if function == "multiply":
        return _product(*args)
    if function == "exp":
        return _ZERO if args[0].kind == "number" and args[0].number <= -ORDINARY else (
            SOME if _ordinary(args[0]) or _low(args[0]) else ANY)  # fmt: skip
    if function == "negative":
        return _negative(args[0])
    if function == "maximum" and any(_ordinary(k) for k in args) and ANY not in args:
        return SOME
    return SOME if all(_ordinary(k) for k in args) else ANY


def _truth(function: str, args: Sequence[Known]) -> Known:
    numbers = [k.number for k in args if k.kind == "number"]
    if function == "logical_and" and 0.0 in numbers:
        return _ZERO
    if function == "logical_or" and any(numbers):
        return Known("number", 1.0)
    if len(numbers) == len(args) and function in ("logical_and", "logical_or"):
        return Known("number", float(function == "logical_and"))
    if len(numbers) == 1 == len(args) and function == "logical_not":
        return Known("number", float(not numbers[0]))
    return SOME


def _negative(k: Known) -> Known:
    if k.kind == "number":
        return Known("number", -k.number)
    return k if k == SOME else FINITE if k == FINITE_LOW else ANY


def _sum(a: Known, b: Known) -> Known:
    for x, y in ((a, b), (b, a)):
        if x.kind == "number" and x.number <= -ORDINARY:
            return _lowered(x, y)
    if _ordinary(a) and _ordinary(b):
        return SOME
    return LOW if all(_ordinary(k) or _low(k) for k in (a, b)) else ANY


def _lowered(x: Known, y: Known) -> Known:
    """A hugely negative number and another: it stays what it is beside ordinary numbers."""
    if x.number == -math.inf:
        finite = y == FINITE or _ordinary(y) or (_low(y) and y != LOW and y.number != -math.inf)
        return x if finite else LOW if _low(y) else ANY
    if _ordinary(y):
        return Known("number", x.number + ORDINARY) if x.number <= -2 * ORDINARY else LOW
    return LOW if _low(y) else ANY


def _product(a: Known, b: Known) -> Known:
    if a.kind == b.kind == "number":
        number = a.number * b.number
        return ANY if math.isnan(number) else Known("number", number)
    for x, y in ((a, b), (b, a)):
        if x == _ZERO:
            return _ZERO if _ordinary(y) or y == FINITE_LOW else ANY
        if x.kind == "number" and x.number > 0 and y in (LOW, FINITE_LOW):
            return y
    return SOME if _ordinary(a) and _ordinary(b) else ANY
