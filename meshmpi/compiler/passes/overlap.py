"""Reductions travel while other instructions compute.

An `all_reduce` becomes one that only starts (attribute ``start``) as soon as its inputs are made,
and a `wait` in front of the first instruction that uses its results.  In a training step these are
the gradients' reductions: each runs during the rest of the backward pass.  The values do not
change.  Whether this pays depends on the network, so the pass runs only when asked for.
"""

from __future__ import annotations

from meshmpi.compiler.passes.rewrite import fresh
from meshmpi.dims import Axes
from meshmpi.ir.collective_bytes import REDUCED_IN
from meshmpi.ir.kinds import AllReduce, Wait
from meshmpi.ir.program import Instruction, Program

SMALLEST_BYTES = 64 * 2**10
"""Shorter messages are not worth a second instruction.  Status: assumption."""
"""What a message can travel behind."""


def overlap(program: Program) -> Program:
    """Starts large all_reduces early and waits for them late.

    A reduction with nothing to compute between its inputs and its first use stays as it is; so do
    those of data types that are reduced in another one, whose messages need scratch memory.
    """
    split = _Split(program)
    number = fresh(program)
    for n, i in enumerate(program.instructions):
        if (
            isinstance(i.attrs, AllReduce)
            and _is_worth_it(program, i, i.attrs)
            and split.divide(n, i, i.attrs.axes, number)
        ):
            number += 1
    return program.with_instructions(split.instructions(), split.types)


def _is_worth_it(program: Program, i: Instruction, a: AllReduce) -> bool:
    if a.start or len(i.inputs) != 1:
        return False
    t = program.types[i.inputs[0]]
    return t.dtype not in REDUCED_IN and t.max_bytes(program.mesh) >= SMALLEST_BYTES


Place = tuple[int, ...]
"""Where an instruction comes to stand: places are sorted.  The n-th of the program stands at (n, 0),
what is put before it at (n, -1, ...), what follows on another at that one's place and more numbers."""


class _Split:
    """The reductions of a program as starts and waits."""

    def __init__(self, program: Program):
        self.types = dict(program.types)
        self._placed: dict[Place, Instruction] = {(n, 0): i for n, i in enumerate(program.instructions)}
        self._made: dict[int, Place] = {}
        self._first_use: dict[int, int] = {}
        self._end = len(program.instructions)
        self._computing = [0]  # how many instructions before the n-th compute
        for n, i in enumerate(program.instructions):
            self._made.update((v, (n, 0)) for v in i.outputs)
            for v in i.inputs:
                self._first_use.setdefault(v, n)
            self._computing.append(self._computing[-1] + i.traits.hides_network)
        self._writes = [n for n, i in enumerate(program.instructions) if not i.outputs]

    def divide(self, n: int, i: Instruction, axes: Axes, running: int) -> bool:
        """Replaces instruction n, the reduction i, by a start and a wait, if there is work between.

        The value ``running`` is the result that is not there yet.
        """
        (x,), (y,) = i.inputs, i.outputs
        made = self._made[x]
        last = self._first_use.get(y)
        if last is None:  # only fetched: before the writes
            last = next((w for w in self._writes if w > n), self._end)
        if self._computing[last] == self._computing[made[0] + (made[1] == 0)]:
            return False
        self.types[running] = self.types[y]
        del self._placed[(n, 0)]
        self._placed[(*made, 1, -n)] = i.replaced(outputs=(running,), start=True)
        self._made[y] = (last, -1, n)
        self._placed[self._made[y]] = Instruction(Wait(axes), (running,), (y,), i.source)
        return True

    def instructions(self) -> list[Instruction]:
        return [i for _, i in sorted(self._placed.items(), key=lambda item: item[0])]
