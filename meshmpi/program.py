"""The SPMD intermediate representation: one flat list of instructions, the same on every rank.

Every value has a `LocalType`: its global named shape, how each dimension is split over mesh axes,
and over which axes a sum is still pending.  Local instructions mean what they say *on the block a
rank holds*; dimensions are matched by name.  The instruction set is closed:

| kind | inputs -> outputs | attributes and meaning |
|---|---|---|
| feed | -> x | ``name``: the block of a value given at each step |
| read | -> x | ``variable``: the stored block of a variable, as it was when the step began |
| write | x -> | ``variable``: its new block; takes effect after every read of the step |
| step | -> s | the number of the step, int32, no dimensions |
| map | x... -> y... | ``expr`` (scalar.Expr) at every point; inputs broadcast by name to y's dims |
| iota | -> y[d] | ``dim``: the *global* index along the one dimension of y |
| random | -> y | ``distribution`` (uniform in [0, 1) or normal), ``key`` [2] |
| reduce | x -> y | ``op`` sum, max, min, prod over the dims of x that y lacks |
| contract | a, b -> y | sum of products over the dims that y lacks |
| conv | a, b -> y | ``slides``: sum of products of what meets, see `slides.Slide` [6] |
| transpose | x -> y | the same dims in y's order |
| view | x -> y | the same elements in the same order under other dims [8] |
| slice | x -> y | ``dim, start, stop, stride`` along a whole dimension |
| pad | x -> y | ``dim, before, after, value`` along a whole dimension |
| concat | x... -> y | ``dim``: along a whole dimension |
| gather | table, index -> y | ``dim``: rows of the block of table that index hits, else 0 [7] |
| scatter_add | updates, index -> y | ``dim``: sums updates into the rows of y that index hits [7] |
| put | x, updates, index -> y | ``dim``: x but for the rows that index hits, where held [7] |
| block_sum | x -> y | ``dim, blocks``: sum of the own block; y has one element per block there |
| cumsum | x(, sums) -> y | ``dim, exclusive, reverse(, blocks)``: running sums; of all blocks |
| segment | x... -> y... | ``body``: instructions over the same ``rows`` as one loop nest [1] |
| loop | x... -> y... | ``body``, a block of the dims ``over`` at a time; see `loops` |
| top_k | x(, index) -> values, index | ``dim, k(, smallest)``: largest first, ties in order [9] |
| all_reduce | x... -> y... | ``axes, op``: finishes what is pending over axes, in one message [4] |
| wait | x -> y | the result of an all_reduce that was only started [4] |
| reduce_scatter | x -> y | ``dim, axes, op``: the same, and keeps only the own block of dim |
| all_gather | x -> y | ``dim, axes``: makes dim whole over its last axes |
| all_to_all | x -> y | ``split, concat, axes``: moves axes from dim ``concat`` to dim ``split`` |
| shift | x... -> y | y[o] = x_j[stride o + offset_j] along split dim, else ``value`` [3] |
| take_shard | x -> y | ``dim, axes``: keeps the own block of dim; no traffic |

[1] They are maps and reductions; ``inner`` has the types of the values that only they use.
[2] A number depends on the program's seed, the key, the step and the global index of its element.
[3] ``dim, axes, stride, offsets, wrap, value``: blocks exchange what others need of them.  Where y
    has a `Window` along dim, each rank gets that part of x instead of its block.
[4] With ``start`` it runs while the next instructions do; only `wait` may use its result.
[6] And over the other dims that y lacks, as contract does.  Along a sliding dim a or b may be held
    in the `Window` that the blocks of y, or of the other operand, need.
[7] Dims that index shares with table (or y) are batch dims, but for ``dim``.  ``checked``: an index
    outside raises `RangeError`; ``may_miss``: it is meant.
[8] With a ``barrier`` it is not one with an equal view, random numbers neither: what is computed
    from it is computed anew.
[9] Along a split dim the k largest of each block.  With an index, that of every element is given
    instead of its position.

This module knows no arrays, no kernels, no MPI and no rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

from meshmpi.dims import Axes, MeshShape, Shape, block_range
from meshmpi.errors import place
from meshmpi.scalar import ITEM_BYTES
from meshmpi.windows import Exchange, Window

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "shift")
"""Kinds that communicate.  `take_shard` redistributes too, without traffic."""
LOCAL_KINDS = (
    "feed", "read", "write", "step", "map", "iota", "random", "reduce", "contract", "transpose",
    "view", "slice", "pad", "concat", "gather", "scatter_add", "put", "top_k", "block_sum",
    "cumsum",
    "segment", "loop", "take_shard", "conv", "wait",
)  # fmt: skip
KINDS = (*LOCAL_KINDS, *COLLECTIVES)


class Source(NamedTuple):
    """Where a tensor was made: its name and the user's file and line."""

    name: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.name} made at {place(self.file, self.line)}"


NOWHERE = Source("", "", 0)


@dataclass(frozen=True, slots=True)
class LocalType:
    """What every rank knows about a value.

    Attributes:
        shape: The *global* shape.
        dtype: One of scalar.DTYPES.
        splits: For each dimension the mesh axes it is split over, major first.
        partial: Axes over which a reduction is still pending, in mesh order.
        pending: Which reduction: sum, max, min or prod.
        windows: Empty, or for each dimension a Window where a rank holds not its block but the
            elements that the blocks of another dimension need; these overlap.  Only `shift` makes
            such values, only `conv` and `shift` along another dimension take them.
    """

    shape: Shape
    dtype: str
    splits: tuple[Axes, ...]
    partial: Axes = ()
    pending: str = "sum"
    windows: tuple[Window | None, ...] = ()

    def window(self, dim: str) -> Window | None:
        """The window in which a rank holds the dimension called ``dim``, if it does."""
        i = self.shape.find(dim)
        return self.windows[i] if self.windows and i >= 0 else None

    def split(self, dim: str) -> Axes:
        """Axes of the dimension called ``dim``; empty when there is no such dimension."""
        i = self.shape.find(dim)
        return self.splits[i] if i >= 0 else ()

    @property
    def used_axes(self) -> Axes:
        return tuple(a for s in self.splits for a in s)

    def with_split(self, dim: str, axes: Axes) -> LocalType:
        i = self.shape.position(dim)
        splits = (*self.splits[:i], tuple(axes), *self.splits[i + 1 :])
        return LocalType(self.shape, self.dtype, splits, self.partial, self.pending)

    def finished(self, axes: Iterable[str] | None = None) -> LocalType:
        """The same without the reduction pending over ``axes`` (default: over any)."""
        left = () if axes is None else tuple(a for a in self.partial if a not in tuple(axes))
        return LocalType(self.shape, self.dtype, self.splits, left, self.pending if left else "sum")

    def block(self, mesh: MeshShape, coordinates: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each dimension of the block held at ``coordinates``.

        A window may begin before 0 and end behind the last element.
        """
        blocks = tuple(
            block_range(d.size, mesh.count(s), mesh.block_index(s, coordinates))
            if s
            else (0, d.size)
            for d, s in zip(self.shape, self.splits, strict=True)
        )
        if not self.windows:
            return blocks
        return tuple(
            b if w is None
            else w.range(*block_range(w.of, mesh.count(s), mesh.block_index(s, coordinates)))
            for b, w, s in zip(blocks, self.windows, self.splits, strict=True)
        )  # fmt: skip

    def local_sizes(self, mesh: MeshShape, coordinates: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.block(mesh, coordinates))

    def max_sizes(self, mesh: MeshShape) -> tuple[int, ...]:
        """Sizes of the largest block: that of the rank whose coordinates are all 0."""
        if self.windows:
            return self.local_sizes(mesh, dict.fromkeys(mesh.names, 0))
        return tuple(
            -(-d.size // mesh.count(s)) if s else d.size
            for d, s in zip(self.shape, self.splits, strict=True)
        )

    def max_elements(self, mesh: MeshShape) -> int:
        n = 1
        for size in self.max_sizes(mesh):
            n *= size
        return n

    def max_bytes(self, mesh: MeshShape) -> int:
        return self.max_elements(mesh) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        dims = ", ".join(
            (f"{d}/{'+'.join(s)}" if s else str(d)) + (str(w) if w else "")
            for d, s, w in zip(
                self.shape, self.splits, self.windows or (None,) * len(self.shape), strict=True
            )
        )
        pending = (
            f"{{{self.pending} pending over {'+'.join(self.partial)}}}" if self.partial else ""
        )
        return f"{self.dtype}[{dims}]{pending}"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction; ``inputs`` and ``outputs`` are numbers of values of its program."""

    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    source: Source = NOWHERE

    def replaced(self, **changes: Any) -> Instruction:
        """The same instruction with other fields."""
        return replace(self, **changes)

    def within(self) -> Iterator[Instruction]:
        """The instructions of its body, those of their bodies after each."""
        for i in self.attrs.get("body", ()):
            yield i
            yield from i.within()

    def leaves(self) -> list[Instruction]:
        """What computes: itself, or all instructions in its body that have none of their own."""
        if "body" not in self.attrs:
            return [self]
        return [i for i in self.within() if "body" not in i.attrs]

    def inner_types(self) -> dict[int, LocalType]:
        """Types of all values that are made and used within its body only."""
        out: dict[int, LocalType] = {}
        for i in (self, *self.within()):
            out.update(i.attrs.get("inner", {}))
        return out


@dataclass(frozen=True)
class VariableType:
    """A variable of a program: how it is stored, and how its first value is made.

    ``initializer`` is opaque here: an ``mm.*_initializer`` or an array of the global shape.
    """

    name: str
    type: LocalType
    initializer: Any
    trainable: bool = True


@dataclass(frozen=True)
class Program:
    """A straight-line SPMD program in static single assignment form.

    Attributes:
        mesh: Names and sizes of the mesh axes it was lowered for.
        types: Value number -> LocalType.
        instructions: In execution order.
        variables: Name -> VariableType, for every variable read or written.
        feeds: Placeholder name -> LocalType.
        fetches: Fetch name -> value number, in the order asked for.
        seed: Of all random instructions.
    """

    mesh: MeshShape
    types: Mapping[int, LocalType]
    instructions: tuple[Instruction, ...]
    variables: Mapping[str, VariableType]
    feeds: Mapping[str, LocalType]
    fetches: Mapping[str, int]
    seed: int = 0

    def __repr__(self) -> str:
        return f"<Program of {len(self.instructions)} instructions on mesh {self.mesh}; print it>"

    def with_instructions(
        self, instructions: Iterable[Instruction], types: Mapping[int, LocalType] | None = None,
        fetches: Mapping[str, int] | None = None,
    ) -> Program:  # fmt: skip
        """A program with other instructions, keeping only the types of values that they make."""
        instructions = tuple(instructions)
        all_types = self.types if types is None else types
        kept = {v: all_types[v] for i in instructions for v in i.outputs}
        return Program(
            self.mesh, kept, instructions, self.variables, self.feeds,
            self.fetches if fetches is None else fetches, self.seed,
        )  # fmt: skip

    def text(self, sources: bool = False) -> str:
        """The program as text; values are numbered in order of appearance."""
        number: dict[int, int] = {}
        lines = [f"program on mesh {self.mesh}, seed {self.seed}"]
        for v in self.variables.values():
            lines.append(f"variable {v.name}: {v.type}")
        for instruction in self.instructions:
            for i in (*instruction.within(), instruction):
                for v in i.outputs:
                    number.setdefault(v, len(number))
            lines.append(self._line(instruction, number, sources))
        for name, v in self.fetches.items():
            lines.append(f"fetch {name} = %{number[v]}")
        return "\n".join(lines)

    def _line(self, i: Instruction, number: Mapping[int, int], sources: bool) -> str:
        args = [f"%{number[v]}" for v in i.inputs]
        args += [f"{k}={_attr_text(v)}" for k, v in i.attrs.items() if k not in ("body", "inner")]
        types = {**i.attrs.get("inner", {})}
        out = ", ".join(f"%{number[v]}: {types.get(v) or self.types[v]}" for v in i.outputs)
        line = (f"{out} = " if out else "") + f"{i.kind}({', '.join(args)})"
        if sources and i.source.name:
            line += f"  # {i.source.name} {i.source.file.rsplit('/', 1)[-1]}:{i.source.line}"
        for inner in i.attrs.get("body", ()):
            known = {**types, **inner.attrs.get("inner", {})}
            whole = inner.replaced(attrs={**inner.attrs, "inner": known})
            line += "\n  " + self._line(whole, number, sources).replace("\n", "\n  ")
        return line

    def __str__(self) -> str:
        return self.text(sources=True)

    def digest(self) -> str:
        """SHA-256 of the text (without source lines): equal on two ranks iff they run the same."""
        import hashlib  # late: it loads a library of ciphers, which `import meshmpi` can do without

        return hashlib.sha256(self.text().encode()).hexdigest()

    def counts(self) -> dict[str, int]:
        """Kind -> number of instructions; those in the body of a segment or loop count too."""
        out: dict[str, int] = {}
        for instruction in self.instructions:
            for i in (instruction, *instruction.within()):
                out[i.kind] = out.get(i.kind, 0) + 1
        return out

    def exchange(self, i: Instruction) -> Exchange:
        """What a `shift` moves between the blocks of its dimension."""
        a, y = i.attrs, self.types[i.outputs[0]]
        sizes = tuple(self.types[v].shape.dim(a["dim"]).size for v in i.inputs)
        return Exchange(
            self.mesh.count(a["axes"]), sizes, a["offsets"], y.shape.dim(a["dim"]).size,
            a["stride"], a["wrap"], y.window(a["dim"]),
        )  # fmt: skip

    def elements_handed(self, i: Instruction, coordinates: Mapping[str, int]) -> int:
        """Elements that the rank at ``coordinates`` hands to collective ``i``.

        Of a `shift` those that it sends to others.
        """
        sizes = [self.types[v].local_sizes(self.mesh, coordinates) for v in i.inputs]
        if i.kind != "shift":
            return sum(map(math.prod, sizes))
        e, dim = self.exchange(i), self.types[i.inputs[0]].shape.position(i.attrs["dim"])
        others = math.prod(n for k, n in enumerate(sizes[0]) if k != dim)
        return others * e.rows_sent(self.mesh.block_index(i.attrs["axes"], coordinates))

    def busiest(self) -> dict[str, int]:
        """Coordinates of a rank that sends most in the `shift`s of the program.

        Of long axes only the first, second, middle and last places are looked at: at the walls,
        beside them and inside.
        """
        shifts = [i for i in self.instructions if i.kind == "shift"]
        used = [a for i in shifts for a in i.attrs["axes"]]
        places = [
            (0,) if a not in used else range(n) if n <= 4 else (0, 1, n // 2, n - 1)
            for a, n in zip(self.mesh.names, self.mesh.sizes, strict=True)
        ]
        found = (dict(zip(self.mesh.names, at, strict=True)) for at in itertools.product(*places))

        def sent(at: Mapping[str, int]) -> int:
            return sum(
                self.elements_handed(i, at) * ITEM_BYTES[self.types[i.inputs[0]].dtype]
                for i in shifts
            )

        return max(found, key=sent)

    def values(self) -> dict[str, AxesTable]:
        """Kind of collective -> mesh axes -> elements that one rank hands to it (largest block).

        Of a `shift` only what the `busiest` rank sends to others counts.
        """
        out: dict[str, AxesTable] = {}
        largest, busy = dict.fromkeys(self.mesh.names, 0), self.busiest()
        for i in self.instructions:
            if i.kind in COLLECTIVES:
                table = out.setdefault(i.kind, AxesTable())
                n = self.elements_handed(i, busy if i.kind == "shift" else largest)
                key = "+".join(i.attrs["axes"])
                table[key] = table.get(key, 0) + n
        return out


class AxesTable(dict[str, int]):
    """A table by mesh axes; the key of several axes is ``"rows+cols"``, or the tuple of names."""

    def __missing__(self, key: object) -> int:
        if isinstance(key, tuple):
            return self["+".join(cast("tuple[str, ...]", key))]
        raise KeyError(key)


def _attr_text(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    parts = cast("tuple[object, ...]", value)
    if not hasattr(parts, "_fields"):
        if any(isinstance(p, int) for p in parts):
            return "[" + ", ".join(map(str, parts)) + "]"
        return "+".join(map(str, parts))
    return str(parts)
