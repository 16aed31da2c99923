"""verify(): checks every rule of the instruction set on a whole program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshmpi.errors import ProgramError
from meshmpi.ir.kinds import KINDS, AllReduce, Read, Region, Wait, Write
from meshmpi.ir.kinds.checks import require
from meshmpi.ir.program import Instruction, LocalType, Program, Violation
from meshmpi.ir.types import REDUCTIONS


class Proven:
    """Instructions whose rules hold, so that a pass is checked in what it changed.

    A rule sees the form of an instruction, and mesh, variables and feeds of the program, nothing
    else.  What concerns several instructions, their order and use of memory, is never taken from here.
    """

    def __init__(self) -> None:
        self._about: tuple[Any, ...] = ()
        self._types: dict[int, LocalType] = {}
        self._known: dict[tuple[int, ...], Instruction] = {}
        self._forms: set[object] = set()

    def begin(self, program: Program) -> None:
        """Forgets what passed in programs on another mesh, with other variables or feeds, or values of other types."""
        about = (program.mesh, program.variables, program.feeds)
        if not self._about or any(x is not y for x, y in zip(about, self._about, strict=True)):
            self._about, self._known, self._forms = about, {}, set()
        types = self._types
        if any(types.get(v, t) is not t and types[v] != t for v, t in program.types.items()):
            self._known = {}
        types.update(program.types)

    def holds(self, i: Instruction) -> bool:
        """Whether this instruction passed, on values of the same types."""
        return self._known.get(i.outputs or (-1, *i.inputs)) is i

    def check(self, program: Program, i: Instruction) -> None:
        """Checks the rules of ``i`` alone, unless one like it passed."""
        attrs, types = i.attrs, program.types
        if KINDS.get(attrs.kind) is not type(attrs):
            raise Violation("this kind is not in the instruction set")
        xs, ys = [types[v] for v in i.inputs], [types[v] for v in i.outputs]
        form = i.form(types)
        if form not in self._forms:
            _check_types(program, i, xs, ys)
            attrs.check(program, i, xs)
            self._forms.add(form)
        self._known[i.outputs or (-1, *i.inputs)] = i


def verify(program: Program, proven: Proven | None = None) -> None:
    """Checks every rule of the instruction set.

    Args:
        proven: What passed before, by the same caller; takes what passes now.

    Raises:
        ProgramError: Naming the instruction, its types, the rule and the source line.
    """
    proven = Proven() if proven is None else proven
    proven.begin(program)
    defined: set[int] = set()
    memory, running = _StoredValues(), _Running()
    for n, i in enumerate(program.instructions):
        attrs, traits = i.attrs, i.attrs.traits
        try:
            if not defined.issuperset(i.inputs):
                raise Violation(f"value {next(v for v in i.inputs if v not in defined)} is used before it is made")
            if not defined.isdisjoint(i.outputs):
                raise Violation(f"value {next(v for v in i.outputs if v in defined)} is made twice")
            if not proven.holds(i):
                proven.check(program, i)
            if isinstance(attrs, Region):
                hidden = i.inner_types().keys() & program.types.keys()
                require(not hidden, f"has values {sorted(hidden)} inside that the program has too")
            if memory.written or traits.same_memory or traits.given or traits.kept:
                memory.follow(i)
            if running.started or traits.meets_ranks:
                running.follow(i)
        except (Violation, KeyError) as e:
            inputs = ", ".join(str(program.types.get(v)) for v in i.inputs)
            outputs = ", ".join(str(program.types.get(v)) for v in i.outputs)
            raise ProgramError(
                f"instruction {n}, {i.kind}({inputs}) -> {outputs} with {dict(attrs.items())}: {e}.",
                "This is a bug in lowering or in a pass.",
                str(i.source),
            ) from None
        defined.update(i.outputs)
    if running.left:
        raise ProgramError(
            f"all_reduces of values {running.left} are started and never waited for.", "This is a bug in a pass."
        )
    if not defined <= program.types.keys():
        raise ProgramError(f"values {sorted(defined - program.types.keys())} have no type.", "This is a bug in a pass.")
    for name, v in program.fetches.items():
        if v not in defined or program.types[v].partial or memory.is_overwritten(v):
            raise ProgramError(f"fetch '{name}' is undefined, unfinished or overwritten.", "This is a bug in a pass.")


class _Running:
    """Results of collectives that were started: exactly one `wait` each, and no other use."""

    def __init__(self) -> None:
        self.started: dict[int, bool] = {}

    def follow(self, i: Instruction) -> None:
        waits = isinstance(i.attrs, Wait)
        for v in i.inputs:
            if v in self.started:
                require(waits and self.started[v], "uses a result before its wait")
                self.started[v] = False
            else:
                require(not waits, "waits for what was not started")
        if i.in_background:
            require(isinstance(i.attrs, AllReduce) and len(i.outputs) == 1, "cannot be started")
            self.started[i.outputs[0]] = True

    @property
    def left(self) -> list[int]:
        return [v for v, running in self.started.items() if running]


class _StoredValues:
    """Values that are the memory of a variable (a read makes no copy), and which variables have been written."""

    def __init__(self) -> None:
        self._variable: dict[int, str] = {}
        self.written: set[str] = set()

    def is_overwritten(self, v: int) -> bool:
        return self._variable.get(v) in self.written

    def follow(self, i: Instruction) -> None:
        if self.written:
            for v in i.inputs:
                if self.is_overwritten(v):
                    raise Violation(f"uses '{self._variable[v]}' after its write")
        attrs = i.attrs
        if isinstance(attrs, Read):
            require(attrs.variable not in self.written, "reads what the step has written")
            self._variable[i.outputs[0]] = attrs.variable
        elif attrs.traits.same_memory and i.inputs[0] in self._variable:
            self._variable[i.outputs[0]] = self._variable[i.inputs[0]]
        elif isinstance(attrs, Write):
            require(attrs.variable not in self.written, "writes a variable twice")
            self.written.add(attrs.variable)


def _check_types(program: Program, i: Instruction, xs: Sequence[LocalType], ys: Sequence[LocalType]) -> None:
    """What holds for the types of every value, whatever makes it."""
    if any(x.halos for x in xs):
        require(i.traits.takes_halos, "uses a value that is held with halos")
    for t in ys:
        if t.halos:
            require(i.traits.makes_halos, "makes a value held with halos")
        used = t.used_axes
        if not used and not t.partial and t.pending == "sum":
            continue
        if len(set(used)) < len(used) or set(used) & set(t.partial):
            raise Violation(f"{t} uses a mesh axis twice")
        if t.partial != program.mesh.in_mesh_order(t.partial) or t.pending not in REDUCTIONS:
            raise Violation(f"{t} has a malformed pending reduction")
        program.mesh.count(used)
