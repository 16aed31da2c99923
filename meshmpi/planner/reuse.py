"""How many bytes ago each instruction's data were last touched: whether a cache still holds them.

A cache serves an access if it is larger than what was touched since the last one to the same
place.  Repeated touches in between are counted each time, so that distances are upper bounds.  A
step follows a step: what a variable's first use finds is what the end of the step before has left.
Source: Mattson et al., "Evaluation techniques for storage hierarchies", 1970.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshmpi.compiler.passes.memory import Sharing
from meshmpi.ir.program import Alias, Memory, Program

Touched = Sequence[tuple[int, int]]
"""Values that an instruction touches, and bytes of each."""


def reuse_distances(program: Program, sharing: Sharing, touched: Sequence[Touched]) -> list[Mapping[int, int]]:
    """Value -> bytes touched since its memory was touched before, of every instruction.

    A new value lies where others did that are no longer needed: it finds what was touched one
    length of the memory of such values ago.

    Args:
        program: In the order of its instructions.
        sharing: Which of its values share memory.
        touched: Of every instruction; distances count the instruction's own bytes.
    """
    fresh = _most_alive(program, sharing)
    last: dict[Memory, int] = {}
    passed, found = 0, list[Mapping[int, int]]()
    for _ in range(2):  # the second time around, variables have been touched before
        born: set[Memory] = set()
        found = []
        for one in touched:
            passed += sum(size for _, size in one)
            own: dict[int, int] = {}
            for v, _ in one:
                root = sharing.root(v)
                kept = isinstance(root, Alias) or root in born
                own[v] = passed - last.get(root, 0) if kept else min(fresh, passed)
                born.add(root)
            last.update((sharing.root(v), passed) for v, _ in one)
            found.append(own)
    return found


def _most_alive(program: Program, sharing: Sharing) -> int:
    """The most bytes of values needed at the same time that are neither variables nor feeds."""
    alive = most = 0
    for n, i in enumerate(program.instructions):
        for v in i.outputs:
            if sharing.root(v) == v:
                alive += program.types[v].max_bytes(program.mesh)
        most = max(most, alive)
        for v in sharing.ending[n]:
            alive -= program.types[v].max_bytes(program.mesh)
    return most
