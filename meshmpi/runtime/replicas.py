"""Compares, bit by bit, variables and feeds that several ranks hold.

Ranks that hold the same block compare digests, 16 bytes per variable. If they differ, the differing elements are
found, and the rank that disagrees with the majority is named. Two copies have no majority: then the copy with a
number far from all others of the block is suspected, as a flipped exponent causes it; otherwise both are named.
"""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshmpi.dims import Axes
from meshmpi.hashes import blake2b
from meshmpi.ir.program import LocalType
from meshmpi.runtime.agreement import gathered
from meshmpi.runtime.variables import VariableStore

CHUNK_WORDS = 8192
"""Words of 8 bytes that are summed into one: a sum never overlooks one flipped bit."""
_FAR = 100.0
"""A number this many times as large as any other element of its block is taken to be damaged.
Status: assumption; a flipped exponent bit changes a number by a factor of 4 to 2**128."""


def chunk_sums(block: np.ndarray) -> np.ndarray:
    """Sums modulo 2**64 of the words of each 64 KB of a C-contiguous block."""
    raw = block.reshape(-1).view(np.uint8)
    whole = raw.size // 8 * 8
    words = raw[:whole].view(np.uint64)
    full = words.size // CHUNK_WORDS * CHUNK_WORDS
    sums = words[:full].reshape(-1, CHUNK_WORDS).sum(axis=1, dtype=np.uint64)
    rest = np.zeros(8, np.uint8)
    rest[: raw.size - whole] = raw[whole:]
    last = words[full:].sum(dtype=np.uint64) + rest.view(np.uint64)[0]
    return np.append(sums, last)


def digest(block: np.ndarray) -> int:
    """64 bits that a single changed bit of the block always changes, others nearly always."""
    sums = chunk_sums(block)
    if sums.size == 1:
        return int(sums[0])
    return int.from_bytes(blake2b(sums.tobytes(), digest_size=8).digest(), "little")


class Difference(NamedTuple):
    """A variable whose replicas differ."""

    name: str  # the variable's name
    type: LocalType  # its type
    ranks: tuple[int, ...]  # all that hold this block
    damaged: tuple[int, ...]  # those whose copy is wrong; empty where it cannot be told
    index: tuple[int, ...]  # global index of the first element that differs
    values: Mapping[int, float]  # Rank -> what it holds there
    hosts: Mapping[int, str]  # Rank -> its host

    def where(self, what: str) -> str:
        """The first element that differs, with the value of each rank; ``what`` comes first."""
        at = ", ".join(f"{d.name}={k}" for d, k in zip(self.type.shape, self.index, strict=True))
        first = f"{what} '{self.name}' {self.type}, of which ranks {_listed(self.ranks)} hold"
        groups: dict[str, list[int]] = {}
        for rank, value in self.values.items():
            groups.setdefault(repr(value), []).append(rank)
        values = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in groups.items())
        return f"{first} equal blocks, differs at [{at}]: {values}"

    def __str__(self) -> str:
        text = self.where("variable")
        if self.damaged:
            where = ", ".join(dict.fromkeys(self.hosts[r] for r in self.damaged))
            return f"{text}. Damaged: the copy of {_ranks(self.damaged)} (host {where})"
        return f"{text}. It is not known which copy is right"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_listed(ranks)}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


class Replicas:
    """Compares the replicated blocks of a store of variables, or of feeds in the form of one."""

    def __init__(self, store: VariableStore) -> None:
        self._store, self._mesh = store, store.mesh
        self._simulated = store.mesh.simulated

    def _classes(self) -> dict[Axes, list[str]]:
        """Axes over which blocks are repeated -> the variables of which that is so."""
        found: dict[Axes, list[str]] = {}
        for name, variable in self._store.types.items():
            used = variable.type.used_axes
            axes = tuple(a for a, n in self._mesh.shape.axes if a not in used and n > 1)
            if axes:
                found.setdefault(axes, []).append(name)
        return found

    def differences(self) -> list[Difference]:
        """What differs, the same on every rank.  Collective."""
        suspects: list[tuple[Axes, str]] = []
        for axes, names in self._classes().items():
            suspects += [(axes, name) for name in self._unequal(axes, names)]
        everywhere = [s for part in gathered(self._mesh, suspects) for s in part]
        if not everywhere:
            return []
        mine = [
            d for axes, name in dict.fromkeys(suspects) for d in self._looked_up(axes, name)
        ]  # the order is that of the classes: equal on all ranks of a group
        all_of_them = [d for part in gathered(self._mesh, mine) for d in part]
        return list({(d.name, d.ranks): d for d in all_of_them}.values())

    def _unequal(self, axes: Axes, names: list[str]) -> list[str]:
        """Variables whose digests differ in a group of this process."""
        blocks = self._store.blocks
        mine = {rank: np.array([digest(blocks[n][rank]) for n in names], np.uint64) for rank in self._store.ranks}
        if self._simulated:
            groups = [[mine[r] for r in g] for g in self._mesh.shape.groups(axes)]
            different = np.any([np.any(np.array(g) != g[0], axis=0) for g in groups], axis=0)
        else:
            (found,) = mine.values()
            from mpi4py import MPI

            both = np.concatenate([found, ~found])
            greatest = np.empty_like(both)
            comm = self._mesh.communicator(axes)
            reduce = functools.partial(comm.Allreduce, both, greatest, MPI.MAX)
            self._mesh.outside("replicas", reduce, axes=axes)()
            high, low = greatest[: len(names)], ~greatest[len(names) :]
            different = high != low
        return [n for n, unequal in zip(names, different, strict=True) if unequal]

    def _looked_up(self, axes: Axes, name: str) -> Iterator[Difference]:
        """The differences of one variable in the groups of this process; collective in each."""
        blocks = self._store.blocks[name]
        every = self._mesh.shape.groups(axes)
        groups = every if self._simulated else [g for g in every if self._mesh.rank in g]
        for group in groups:
            sums = self._shared(axes, group, {r: chunk_sums(blocks[r]) for r in blocks})
            if len({s.tobytes() for s in sums.values()}) > 1:
                yield self._difference(axes, name, group, sums)

    def _shared(self, axes: Axes, group: tuple[int, ...], mine: dict[int, Any]) -> dict[int, Any]:
        """The values of all ranks of a group."""
        if self._simulated:
            return {r: mine[r] for r in group}
        (value,) = mine.values()
        gather = functools.partial(self._mesh.communicator(axes).allgather, value)
        return dict(zip(group, self._mesh.outside("replicas", gather, axes=axes)(), strict=True))

    def _difference(self, axes: Axes, name: str, group: tuple[int, ...], sums: Mapping[int, np.ndarray]) -> Difference:
        blocks = {r: b for r, b in self._store.blocks[name].items() if r in group}
        t = self._store.types[name].type
        table = np.array([sums[r] for r in group])
        chunk = int(np.argmax(np.any(table != table[0], axis=0)))
        size = next(iter(blocks.values())).dtype.itemsize
        begin = chunk * CHUNK_WORDS * 8 // size
        end = begin + CHUNK_WORDS * 8 // size
        parts = self._shared(axes, group, {r: b.reshape(-1)[begin:end].copy() for r, b in blocks.items()})
        raw = np.array([parts[r].view(np.uint8).reshape(-1, size) for r in group])
        element = int(np.argmax(np.any(raw != raw[0], axis=(0, 2))))
        values = {r: float(parts[r][element]) for r in group}
        shape = next(iter(blocks.values())).shape
        mesh = self._mesh.shape
        starts = [start for start, _ in t.block(mesh, mesh.coordinates(group[0]))]
        local = np.unravel_index(begin + element, shape)
        index = tuple(int(k) + start for k, start in zip(local, starts, strict=True))
        hosts = self._shared(axes, group, dict.fromkeys(blocks, platform.node()))
        damaged = _minority({r: s.tobytes() for r, s in sums.items()})
        if not damaged and len(group) == 2:
            others = self._shared(axes, group, {r: _largest_other(b, begin + element) for r, b in blocks.items()})
            far = [r for r in group if not abs(values[r]) <= _FAR * max(others.values())]
            damaged = tuple(far) if len(far) == 1 else ()
        return Difference(name, t, group, damaged, index, values, hosts)

    def repair(self, differences: list[Difference]) -> bool:
        """Copies what most ranks hold over what differs from it.  Collective.

        Returns:
            Whether that was possible; if not, nothing was changed.
        """
        if not all(d.damaged and 2 * len(d.damaged) < len(d.ranks) for d in differences):
            return False
        classes = {name: axes for axes, names in self._classes().items() for name in names}
        for d in differences:
            blocks = self._store.blocks[d.name]
            source = next(r for r in d.ranks if r not in d.damaged)
            if self._simulated:
                for rank in d.damaged:
                    blocks[rank][...] = blocks[source]
            elif self._mesh.rank in d.ranks:
                raw = blocks[self._mesh.rank].reshape(-1).view(np.uint8)
                axes, root = classes[d.name], d.ranks.index(source)
                give = functools.partial(self._mesh.communicator(axes).Bcast, raw, root=root)
                self._mesh.outside("replicas", give, f"root {root}", axes)()
        return True


def _minority(copies: Mapping[int, bytes]) -> tuple[int, ...]:
    """The ranks that do not hold what more than half of them hold; empty where none does."""
    held: dict[bytes, list[int]] = {}
    for rank, copy in copies.items():
        held.setdefault(copy, []).append(rank)
    most = max(held.values(), key=len)
    return tuple(r for r in copies if r not in most) if 2 * len(most) > len(copies) else ()


def _largest_other(block: np.ndarray, place: int) -> float:
    flat = np.abs(block.reshape(-1).astype(np.float64))
    rest = [part for part in (flat[:place], flat[place + 1 :]) if part.size]
    return max((float(part.max()) for part in rest), default=math.inf)


def compared(store: VariableStore, repairs: bool, say: Callable[[str], None]) -> str:
    """Compares all replicas of a store, and repairs them where asked for.  Collective.

    Returns:
        What is wrong and was not repaired, the same on every rank; empty: nothing.
    """
    replicas = Replicas(store)
    found = replicas.differences()
    if not found:
        return ""
    text = "; ".join(map(str, found[:4])) + ("; ..." if len(found) > 4 else "")
    if repairs and replicas.repair(found):
        say(f"replicas differed and were repaired: {text}")
        return ""
    return text
