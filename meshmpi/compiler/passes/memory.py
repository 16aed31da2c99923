"""The memory plan: one arena per rank, with a fixed offset for every value.

A value occupies bytes of the arena from the instruction that makes it to its last use. Views, updates in place and
the stored blocks of variables share memory with another value. The plan uses types and integers only.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from meshmpi.ir.kinds import Write
from meshmpi.ir.program import Alias, Instruction, LocalType, Memory, Program
from meshmpi.ir.scalar import ITEM_BYTES

ALIGNMENT = 64
"""Bytes: one cache line, and the widest vector of today's CPUs."""

Workspace = Callable[[Instruction, Program, Mapping[str, int]], int]
"""Scratch bytes that the kernel of an instruction needs on the rank at some coordinates."""


class Aliases(dict[int, Memory]):
    """Value -> the value, variable or feed whose memory it uses."""

    def __init__(self) -> None:
        super().__init__()
        self._roots: dict[int, Memory] = {}  # ends of chains as they were; they only grow

    def root(self, v: Memory) -> Memory:
        """The end of the chain that begins at v."""
        if v not in self:
            return v
        passed: list[int] = []
        while isinstance(v, int) and v in self:
            passed.append(v)
            v = self._roots[v] if v in self._roots else self[v]
        self._roots.update(dict.fromkeys(passed, v))
        return v


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of one rank.

    Attributes:
        offsets: Value -> first byte in the arena, for values that own bytes there.
        shares: Which values use the memory of others.
        arena_bytes, workspace_bytes, variable_bytes, feed_bytes: Sizes.
        live_bytes: Arena bytes in use during each instruction, for pictures.
    """

    offsets: Mapping[int, int]
    shares: Aliases
    arena_bytes: int
    workspace_bytes: int
    variable_bytes: int
    feed_bytes: int
    live_bytes: tuple[int, ...] = field(default=(), repr=False)

    def root(self, v: Memory) -> Memory:
        """The value, variable or feed whose memory value v uses in the end."""
        return self.shares.root(v)

    @property
    def total_bytes(self) -> int:
        return self.arena_bytes + self.workspace_bytes + self.variable_bytes + self.feed_bytes


def plan_memory(program: Program, coordinates: Mapping[str, int], workspace: Workspace | None = None) -> MemoryPlan:
    """Plans the memory of the rank at ``coordinates``; without ``workspace``, scratch memory is not counted."""
    sharing = Sharing(program)
    of_type = {t: aligned_bytes(t, program, coordinates) for t in dict.fromkeys(program.types.values())}
    sizes = {v: of_type[t] for v, t in program.types.items()}
    arena = _Arena()
    offsets: dict[int, int] = {}
    live: list[int] = []
    for n, i in enumerate(program.instructions):
        for v in i.outputs:
            if sharing.root(v) == v:
                offsets[v] = arena.allocate(sizes[v])
        live.append(arena.used)
        for v in sharing.ending[n]:
            if v in offsets:
                arena.free(offsets[v], sizes[v])
    scratch = [] if workspace is None else [workspace(i, program, coordinates) for i, _ in program.forms]
    return MemoryPlan(
        offsets,
        sharing.shares,
        arena.high,
        round_up(max(scratch, default=0)),
        sum(aligned_bytes(v.type, program, coordinates) for v in program.variables.values()),
        sum(aligned_bytes(t, program, coordinates) for t in program.feeds.values()),
        tuple(live),
    )


def round_up(n: int) -> int:
    """Bytes rounded up to whole cache lines."""
    return -(-n // ALIGNMENT) * ALIGNMENT


def aligned_bytes(t: LocalType, program: Program, coordinates: Mapping[str, int]) -> int:
    """Bytes of the block held at ``coordinates``, rounded up to whole cache lines."""
    return round_up(math.prod(t.local_sizes(program.mesh, coordinates)) * ITEM_BYTES[t.dtype])


class Sharing:
    """Which values share memory, and after which instruction each owner is no longer needed."""

    def __init__(self, program: Program):
        self.program = program
        self.shares = Aliases()
        self.last: dict[Memory, int] = {}
        end = len(program.instructions)
        last_use = dict.fromkeys(program.types, -1)
        for n, i in enumerate(program.instructions):
            for v in i.inputs:
                last_use[v] = n
        self._written: dict[int, list[str]] = {}
        self._fetched = frozenset(program.fetches.values())
        self._kept = set(self._fetched)
        for i in program.instructions:
            if isinstance(i.attrs, Write):
                self._written.setdefault(i.inputs[0], []).append(i.attrs.variable)
                self._kept.update(i.inputs)
            elif i.traits.same_memory:
                self._kept.update(i.inputs)
        for v in program.fetches.values():
            last_use[v] = end
        self._made_at = {v: n for n, i in enumerate(program.instructions) for v in i.outputs}
        for i in program.instructions:
            place = i.attrs.alias(program, i)
            if place is not None and self._may_share(i):
                self.shares[i.outputs[0]] = place
        for v in program.types:
            self._extend(v, last_use[v])
        self._share_in_place()
        self.ending: list[list[int]] = [[] for _ in range(end)]
        for v in program.types:
            root = self.root(v)
            if root == v and self.last[v] < end:
                self.ending[max(self.last[v], self._made_at[v])].append(v)

    def root(self, v: Memory) -> Memory:
        return self.shares.root(v)

    def _may_share(self, i: Instruction) -> bool:
        """Whether the result may be memory of another: no part that leaves the step, since a variable may change."""
        return i.traits.free or i.traits.same_memory or i.outputs[0] not in self._kept

    def _extend(self, v: int, until: int) -> None:
        root = self.root(v)
        self.last[root] = max(self.last.get(root, -1), until)

    def _share_in_place(self) -> None:
        """Lets results take over the memory of inputs, or of variables, that end there."""
        for n, i in enumerate(self.program.instructions):
            if not i.traits.in_place:
                continue
            taken: dict[Memory, None] = {}
            roots = Counter(map(self.root, i.inputs))
            for k, y in enumerate(i.outputs):
                candidates = i.inputs if i.traits.in_place == "any" else i.inputs[k : k + 1]
                place: Memory | None = None if i.communicates else self._variable_to_overwrite(i, y, n)
                for x in candidates if place is None else ():
                    if roots[self.root(x)] == 1 and self.root(x) not in taken and self._ends_here(x, y, i, n):
                        place = x
                        break
                if place is None or place in taken:
                    continue
                own = self.last.get(y, -1)  # of the result and all its views
                self.shares[y] = place
                taken[self.root(y)] = None
                self._extend(y, own)

    def _ends_here(self, x: int, y: int, i: Instruction, n: int) -> bool:
        """Whether i, instruction n, is the last to need the arena memory of x, and y fits there."""
        root = self.root(x)
        if not isinstance(root, int) or self.last[root] != n:
            return False
        a, b = self.program.types[x], self.program.types[y]
        return a.dtype == b.dtype and a.local_dims == b.local_dims

    def _variable_to_overwrite(self, i: Instruction, y: int, n: int) -> Alias | None:
        """The variable that only takes result y, when nothing reads its old value later."""
        names = self._written.get(y, ())
        if len(names) != 1 or y in self._fetched:
            return None
        place = Alias("variable", names[0])
        stored = self.program.variables[names[0]].type
        for k, x in enumerate(i.inputs):
            moves = i.traits.in_place == "same" and k > 0  # its elements go to other places
            if self.root(x) == place and (moves or self.program.types[x] != stored):
                return None
        return place if self.last.get(place, -1) <= n else None


class _Arena:
    """A best-fit allocator over integers, the first of equals; remembers the highest address used."""

    def __init__(self) -> None:
        self.high = 0
        self.used = 0
        self._gaps: list[tuple[int, int]] = []  # free (start, size) below `high`, ascending, never adjacent
        self._by_size: list[tuple[int, int]] = []  # the same as (size, start), ascending

    def allocate(self, size: int) -> int:
        self.used += size
        k = bisect.bisect_left(self._by_size, (size, -1))
        if k == len(self._by_size):
            return self._grow(size)
        gap, start = self._by_size[k]
        self._remove(bisect.bisect_left(self._gaps, (start, gap)))
        if gap > size:
            self._add(start + size, gap - size)
        return start

    def _grow(self, size: int) -> int:
        start = self.high
        if self._gaps and sum(self._gaps[-1]) == self.high:
            start = self._remove(-1)[0]
        self.high = start + size
        return start

    def free(self, start: int, size: int) -> None:
        self.used -= size
        if not size:
            return
        k = bisect.bisect_left(self._gaps, (start, 0))
        if k < len(self._gaps) and start + size == self._gaps[k][0]:
            size += self._remove(k)[1]
        if k and sum(self._gaps[k - 1]) == start:
            before = self._remove(k - 1)
            start, size = before[0], before[1] + size
        self._add(start, size)

    def _add(self, start: int, size: int) -> None:
        bisect.insort(self._gaps, (start, size))
        bisect.insort(self._by_size, (size, start))

    def _remove(self, k: int) -> tuple[int, int]:
        start, size = self._gaps.pop(k)
        del self._by_size[bisect.bisect_left(self._by_size, (size, start))]
        return start, size
