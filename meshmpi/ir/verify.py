"""verify(): every rule of the instruction set, checked on a whole program."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from meshmpi.errors import ProgramError
from meshmpi.ir.kinds import KINDS, AllReduce, Read, Wait, Write
from meshmpi.ir.kinds.checks import require
from meshmpi.ir.program import Instruction, LocalType, Program, Violation
from meshmpi.ir.types import REDUCTIONS


class Proven:
    """Instructions whose rules hold, so that a pass is checked in what it changed.

    A rule sees the instruction, the types of its inputs and outputs, and mesh, variables and feeds
    of the program, nothing else.  What concerns several instructions, their order and use of
    memory, is never taken from here.
    """

    def __init__(self) -> None:
        self._about: tuple[Any, ...] = ()
        self._known: dict[tuple[Any, ...], tuple[Instruction, list[LocalType]]] = {}

    def begin(self, program: Program) -> None:
        """Forgets what passed in programs on another mesh or with other variables or feeds."""
        about = (program.mesh, program.variables, program.feeds)
        if not self._about or any(x is not y for x, y in zip(about, self._about, strict=True)):
            self._about, self._known = about, {}

    def check(self, program: Program, i: Instruction) -> None:
        """Checks the rule of ``i``, unless this very instruction passed with the same types."""
        types = program.types
        seen = [types[v] for v in i.inputs]
        seen += [types[v] for v in i.outputs]
        place = (i.kind, i.inputs, i.outputs)
        known = self._known.get(place)
        if known is not None and known[0] is i and known[1] == seen:
            return
        n = len(i.inputs)
        _check_types(program, i, seen[:n], seen[n:])
        i.attrs.check(program, i, seen[:n])
        self._known[place] = i, seen


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
        try:
            _check_order(i, defined)
            hidden = i.inner_types().keys() & program.types.keys()
            require(not hidden, f"has values {sorted(hidden)} inside that the program has too")
            proven.check(program, i)
            memory.follow(i)
            running.follow(i)
        except (Violation, KeyError) as e:
            inputs = ", ".join(str(program.types.get(v)) for v in i.inputs)
            outputs = ", ".join(str(program.types.get(v)) for v in i.outputs)
            raise ProgramError(
                f"instruction {n}, {i.kind}({inputs}) -> {outputs} with {dict(i.attrs.items())}: {e}.",
                "This is a bug in lowering or in a pass.",
                str(i.source),
            ) from None
        defined.update(i.outputs)
    if running.left:
        raise ProgramError(
            f"all_reduces of values {running.left} are started and never waited for.", "This is a bug in a pass."
        )
    for name, v in program.fetches.items():
        if v not in defined or program.types[v].partial or memory.is_overwritten(v):
            raise ProgramError(f"fetch '{name}' is undefined, unfinished or overwritten.", "This is a bug in a pass.")


class _Running:
    """Results of collectives that were started: exactly one `wait` each, and no other use."""

    def __init__(self) -> None:
        self._started: dict[int, bool] = {}

    def follow(self, i: Instruction) -> None:
        waits = isinstance(i.attrs, Wait)
        for v in i.inputs:
            if v in self._started:
                require(waits and self._started[v], "uses a result before its wait")
                self._started[v] = False
            else:
                require(not waits, "waits for what was not started")
        if i.in_background:
            require(isinstance(i.attrs, AllReduce) and len(i.outputs) == 1, "cannot be started")
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
        if self._written:
            for v in i.inputs:
                if self.is_overwritten(v):
                    raise Violation(f"uses '{self._variable[v]}' after its write")
        if isinstance(i.attrs, Read):
            require(i.attrs.variable not in self._written, "reads what the step has written")
            self._variable[i.outputs[0]] = i.attrs.variable
        elif i.traits.same_memory and i.inputs[0] in self._variable:
            self._variable[i.outputs[0]] = self._variable[i.inputs[0]]
        elif isinstance(i.attrs, Write):
            require(i.attrs.variable not in self._written, "writes a variable twice")
            self._written.add(i.attrs.variable)


def _check_order(i: Instruction, defined: Container[int]) -> None:
    """Every value is made once, before it is used."""
    if KINDS.get(i.kind) is not type(i.attrs):
        raise Violation("this kind is not in the instruction set")
    for v in i.inputs:
        if v not in defined:
            raise Violation(f"value {v} is used before it is made")
    for v in i.outputs:
        if v in defined:
            raise Violation(f"value {v} is made twice")


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
