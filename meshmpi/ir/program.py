"""The SPMD intermediate representation: one flat list of instructions, the same on every rank.

Local instructions act on the block that a rank holds; dimensions are matched by name. The set of kinds is closed; its
table is `meshmpi.ir.kinds`. This module does not know any kind by name, nor arrays, kernels, MPI or ranks.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, cast

from meshmpi.dims import Axes, MeshShape
from meshmpi.errors import ProgramError
from meshmpi.hashes import sha256
from meshmpi.ir.bands import Band
from meshmpi.ir.collective_bytes import reduced_bytes
from meshmpi.ir.scalar import ITEM_BYTES
from meshmpi.ir.types import NOWHERE, ByFields, LocalType, Source

Extents = Mapping[str, int]
"""Dimension name -> number of elements of the block."""


class Violation(Exception):
    """A broken type rule; `verify` adds program, instruction and source."""


class Work(NamedTuple):
    """Arithmetic of a kind that is not a product, for predicting its time.

    Each element of the first input, or of the first output, costs the machine's ``operations``
    together, times ``weight``; None: times the width of the data type.
    """

    operations: tuple[str, ...]
    per: Literal["input", "output"]
    weight: float | None = None


@dataclass(frozen=True)
class Traits:
    """What holds for all instructions of a kind; passes, planner and runtime ask for nothing else."""

    meets_ranks: bool = False  # may have to wait for another rank: a collective, or the end of one
    free: bool = False  # takes no time: it names memory that holds the value already
    given: bool = False  # its value exists before the step begins
    kept: bool = False  # stays in a program even where nothing uses its results
    repeatable: bool = False  # may run twice, and gives the same again
    pointwise: bool = False  # an element of a result depends on the same place of the inputs only
    fusible: bool = False  # may stand in the body of a fused kernel
    tileable: bool = False  # may stand in the body of a tiled region
    scalar: bool = False  # makes the scalars that follow a fused kernel, as a loss, which may run behind it
    native: bool = False  # has generated C (some of its instructions may still run on NumPy)
    # Whose memory a result may take over: of "any" input with an equal block, or of the input of the "same" number.
    in_place: Literal["", "any", "same"] = ""
    hides_network: bool = False  # is work behind which a reduction in the background can hide
    product: bool = False  # multiplies by BLAS, whose rounding ranks must agree on
    same_memory: bool = False  # its result lies in the memory of its input
    carries_gradient: bool = False  # a gradient that goes in comes out as a gradient, not as a product
    takes_halos: bool = False  # its inputs may be held with halos
    makes_halos: bool = False  # its result may be held with halos
    by_place: bool = False  # FLOP, or what is sent, depend on where a block lies, not on its extents alone


class Alias(NamedTuple):
    """Memory that does not belong to the arena: the stored block of a variable, or a feed."""

    of: Literal["variable", "feed"]
    name: str

    def __str__(self) -> str:
        return f"{self.of} {self.name}"


Memory = int | Alias
"""Whose memory a value uses: that of another value, or an `Alias`."""


class Kind(ByFields):
    """One row of the table of kinds: the attributes of an instruction, and all that is known of it.

    A row is a frozen dataclass ``class Slice(Kind, kind="slice", traits=Traits(...))``; its fields
    are the attributes, hashable and printed in their order.  A field with a default is printed only where it
    differs.  The methods take the instruction that they are asked about, and its program.
    """

    kind: ClassVar[str] = ""
    traits: ClassVar[Traits] = Traits()
    band: Band | None = None
    """Pairs of indices outside it take no part; None: all do."""

    def __init_subclass__(cls, kind: str = "", traits: Traits | None = None) -> None:
        if kind:
            cls.kind, cls.traits = kind, traits or cls.traits
            there = KINDS.setdefault(kind, cls)
            if (there.__module__, there.__qualname__) != (cls.__module__, cls.__qualname__):
                known = f"{there.__qualname__} of {there.__module__}"
                raise ProgramError(f"{cls.__qualname__} is kind '{kind}', and so is {known}.", "Give another kind=.")
            KINDS[kind] = cls  # perhaps made anew, in a notebook

    # ---- meaning -----------------------------------------------------------------------------

    def check(self, program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
        """The type rule: raises `Violation` unless ``i`` may take the types ``xs``."""
        raise NotImplementedError(f"kind '{self.kind}' has no type rule")

    def linear_in(self, marks: Sequence[bool], axes: Axes) -> bool:
        """Whether the results are linear in the inputs marked, jointly, over ranks along ``axes``.

        If so, a sum pending over ``axes`` in those inputs may be taken after the instruction.
        """
        return False

    @property
    def label(self) -> str:
        """The name that a user gave to what it reads or writes."""
        return ""

    # ---- costs -------------------------------------------------------------------------------

    def flops(self, ins: Sequence[Extents], outs: Sequence[Extents]) -> int:
        """Floating-point operations on blocks of the given extents."""
        return 0

    def flops_at(self, program: Program, i: Instruction, at: Mapping[str, int]) -> dict[str, int] | None:
        """Kind -> FLOP on the rank at ``at``; None where `flops` says it, whichever rank that is."""
        return None

    @property
    def compared_dims(self) -> tuple[str, ...]:
        """Dims whose indices are compared, so that FLOP depend on where their blocks lie."""
        return ()

    @property
    def work(self) -> Work | None:
        """Its arithmetic; None where it only moves elements, and for products."""
        return None

    def touched(self, i: Instruction, sizes: Mapping[int, int], in_place: bool) -> dict[int, int]:
        """Value -> bytes of it that are read or written.

        Args:
            i: The instruction.
            sizes: Bytes of its values.
            in_place: Whether its first result has the memory of its first input.
        """
        return dict(sizes)

    # ---- memory ------------------------------------------------------------------------------

    def alias(self, program: Program, i: Instruction) -> Memory | None:
        """Whose memory the first result can use from the start; None: it needs its own."""
        return i.inputs[0] if self.traits.same_memory else None

    def workspace(self, program: Program, i: Instruction, at: Mapping[str, int]) -> int | None:
        """Scratch bytes on the rank at the coordinates ``at``; None: as many as its kernel asks for."""
        return 0 if self.traits.free or self.traits.same_memory else None

    def items(self) -> list[tuple[str, Any]]:
        """Names and values of the attributes, but for those that have their default."""
        found = ((name, getattr(self, name), usual) for name, usual in _defaults(type(self)))
        return [(name, value) for name, value, usual in found if usual is MISSING or value != usual]


@functools.cache
def _defaults(row: type[Kind]) -> list[tuple[str, Any]]:
    return [(f.name, f.default) for f in fields(cast(Any, row))]


KINDS: dict[str, type[Kind]] = {}
"""The table: name -> row.  Complete once `meshmpi.ir.kinds` is imported."""


class Collective(Kind):
    """The kinds that communicate, over the mesh axes ``axes``."""

    axes: Axes
    start: bool = False
    """Whether it runs while the next instructions do; a `Wait` then ends it."""
    reduces: ClassVar[bool] = False
    """Whether it computes with the elements."""
    joined: bool = False
    """Whether what it takes lies in one array already, so that nothing is sent."""

    @staticmethod
    def sent(nbytes: int, n: int) -> int:
        """Bytes that a rank sends which hands ``nbytes`` to a group of ``n`` > 1 ranks.

        By the formulas of the ring algorithms, optimal in bandwidth; an MPI library may send more.
        """
        return (n - 1) * nbytes // n

    @classmethod
    def wire_bytes(cls, dtype: object) -> int:
        """Bytes of one element on the wire."""
        return reduced_bytes(dtype) if cls.reduces else ITEM_BYTES[str(dtype)]

    def elements_handed(self, program: Program, i: Instruction, at: Mapping[str, int]) -> int:
        """Elements that the rank at ``at`` hands to the collective."""
        return sum(math.prod(program.types[v].local_sizes(program.mesh, at)) for v in i.inputs)


class Region(Kind):
    """The kinds that have instructions in their ``body``; ``inner``: types of what only it uses."""

    body: tuple[Instruction, ...]
    inner: Mapping[int, LocalType]


Row = TypeVar("Row", bound=Kind)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction; ``inputs`` and ``outputs`` are numbers of values of its program."""

    attrs: Kind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    source: Source = NOWHERE

    @property
    def kind(self) -> str:
        """Name of its kind."""
        return self.attrs.kind

    @property
    def traits(self) -> Traits:
        """The traits of its kind."""
        return self.attrs.traits

    def of(self, row: type[Row]) -> Row:
        """The attributes of an instruction that is known to be of this kind."""
        assert isinstance(self.attrs, row), f"{self.kind} is not {row.__name__}"
        return self.attrs

    @property
    def communicates(self) -> bool:
        """Whether it is a collective."""
        return isinstance(self.attrs, Collective)

    def replaced(
        self,
        *,
        attrs: Kind | None = None,
        inputs: tuple[int, ...] | None = None,
        outputs: tuple[int, ...] | None = None,
        **changes: Any,
    ) -> Instruction:
        """The same instruction with other fields, or with other values of its attributes."""
        new = self.attrs if attrs is None else attrs
        return Instruction(
            replace(cast(Any, new), **changes) if changes else new,
            self.inputs if inputs is None else inputs,
            self.outputs if outputs is None else outputs,
            self.source,
        )

    @property
    def in_background(self) -> bool:
        """Whether it starts a collective that a later `wait` ends."""
        return isinstance(self.attrs, Collective) and self.attrs.start

    @property
    def body(self) -> tuple[Instruction, ...]:
        """The instructions inside; most kinds have none."""
        return self.attrs.body if isinstance(self.attrs, Region) else ()

    def within(self) -> Iterator[Instruction]:
        """The instructions of its body, those of their bodies after each."""
        for i in self.body:
            yield i
            yield from i.within()

    def leaves(self) -> list[Instruction]:
        """What computes: itself, or all instructions in its body that have none of their own."""
        if not isinstance(self.attrs, Region):
            return [self]
        return [i for i in self.within() if not isinstance(i.attrs, Region)]

    def form(self, types: Mapping[int, LocalType]) -> tuple[Hashable, ...]:
        """Equal for instructions that differ in the numbers of their values only, as in equal layers.

        Rules, FLOP and workspace of equal forms are equal.  Results need not be: 0.0 and -0.0, 1 and True
        have the same form.  The type of a value that a broken program does not define is None.
        """
        a = self.attrs
        if not isinstance(a, Region):
            return (a, len(self.inputs), *map(types.get, (*self.inputs, *self.outputs)))
        number: dict[int, int] = {}

        def numbers(values: tuple[int, ...]) -> tuple[int, ...]:
            return tuple([number.setdefault(v, len(number)) for v in values])

        own = [getattr(a, name) for name, _ in _defaults(type(a)) if name not in ("body", "inner")]
        inside = {v: types[v] for v in (*self.inputs, *self.outputs) if v in types} | dict(a.inner)
        ends = numbers(self.inputs), numbers(self.outputs)
        return type(a), *own, *ends, *[(j.form(inside), numbers(j.inputs), numbers(j.outputs)) for j in a.body]

    def inner_types(self) -> dict[int, LocalType]:
        """Types of all values that are made and used within its body only."""
        regions = (i.attrs for i in (self, *self.within()) if isinstance(i.attrs, Region))
        return {v: t for region in regions for v, t in region.inner.items()}


@dataclass(frozen=True)
class VariableType:
    """A variable of a program: how it is stored, and how its first value is made.

    ``initializer`` is opaque here: an ``mm.*_initializer`` or an array of the global shape.  Blocks of the first
    dimension over the axes ``joined``, the last of its split, lie in one array that their ranks share.
    """

    name: str
    type: LocalType
    initializer: Any
    trainable: bool = True
    joined: Axes = ()

    @property
    def whole(self) -> LocalType:
        """What lies in one array: the blocks of all ranks along ``joined``."""
        first = self.type.splits[0][: len(self.type.splits[0]) - len(self.joined)] if self.joined else ()
        return self.type.with_split(self.type.shape[0].name, first) if self.joined else self.type


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
        self,
        instructions: Iterable[Instruction],
        types: Mapping[int, LocalType] | None = None,
        fetches: Mapping[str, int] | None = None,
    ) -> Program:
        """A program with other instructions, keeping only the types of values that they make.

        Itself where nothing is different.
        """
        instructions = tuple(instructions)
        all_types = self.types if types is None else types
        kept = {v: all_types[v] for i in instructions for v in i.outputs}
        same = len(instructions) == len(self.instructions) and all(map(operator.is_, instructions, self.instructions))
        if same and fetches in (None, self.fetches) and kept == self.types:
            return self
        return replace(
            self, types=kept, instructions=instructions, fetches=self.fetches if fetches is None else fetches
        )

    def text(self, sources: bool = False) -> str:
        """The program as text; values are numbered in order of appearance."""
        number: dict[int, int] = {}
        lines = [f"program on mesh {self.mesh}, seed {self.seed}"]
        for v in self.variables.values():
            lines.append(f"variable {v.name}: {v.type}" + (f" in one array over {'+'.join(v.joined)}" * bool(v.joined)))
        for instruction in self.instructions:
            for i in (*instruction.within(), instruction):
                for v in i.outputs:
                    number.setdefault(v, len(number))
            lines.append(self._line(instruction, number, sources))
        for name, v in self.fetches.items():
            lines.append(f"fetch {name} = %{number[v]}")
        return "\n".join(lines)

    def _line(
        self, i: Instruction, number: Mapping[int, int], sources: bool, inside: Mapping[int, LocalType] | None = None
    ) -> str:
        args = [f"%{number[v]}" for v in i.inputs]
        args += [f"{k}={_attr_text(v)}" for k, v in i.attrs.items() if k not in ("body", "inner")]
        types = dict(inside or {})
        if isinstance(i.attrs, Region):
            types.update(i.attrs.inner)
        out = ", ".join(f"%{number[v]}: {types.get(v) or self.types[v]}" for v in i.outputs)
        line = (f"{out} = " if out else "") + f"{i.kind}({', '.join(args)})"
        if sources and i.source.name:
            line += f"  # {i.source.name} {i.source.short}"
        for inner in i.body:
            line += "\n  " + self._line(inner, number, sources, types).replace("\n", "\n  ")
        return line

    def __str__(self) -> str:
        return self.text(sources=True)

    def digest(self) -> str:
        """SHA-256 of the text (without source lines): equal on two ranks iff they run the same."""
        return sha256(self.text().encode()).hexdigest()

    @functools.cached_property
    def forms(self) -> list[tuple[Instruction, int]]:
        """One instruction of each form, and how many there are: those of equal layers are looked at once."""
        first: dict[object, Instruction] = {}
        counts = Counter[object]()
        for i in self.instructions:
            form = i.form(self.types)
            first.setdefault(form, i)
            counts[form] += 1
        return [(i, counts[form]) for form, i in first.items()]

    def counts(self) -> dict[str, int]:
        """Kind -> number of instructions; those in the body of a fused kernel or tiled region count too."""
        return dict(Counter(i.kind for one in self.instructions for i in (one, *one.within())))

    def bytes_sent(self, i: Instruction, at: Mapping[str, int] | None = None) -> int:
        """Bytes that the rank at ``at`` sends in collective ``i``; None: as for `elements_handed`."""
        row = cast(Collective, i.attrs)
        n, item = self.mesh.count(row.axes), row.wire_bytes(self.types[i.inputs[0]].dtype)
        return row.sent(self.elements_handed(i, at) * item, n) if n > 1 else 0

    def elements_handed(self, i: Instruction, at: Mapping[str, int] | None = None) -> int:
        """Elements that the rank at ``at`` hands to collective ``i``; of a `shift` those that it sends to others.

        None: as many as the largest block has, or the `busiest` rank hands over where places differ.
        """
        if at is None:
            at = self.busiest if i.traits.by_place else dict.fromkeys(self.mesh.names, 0)
        return cast(Collective, i.attrs).elements_handed(self, i, at)

    @functools.cached_property
    def busiest(self) -> dict[str, int]:
        """Coordinates of a rank that sends most in the `shift`s of the program.

        Of long axes only the first, second, middle and last places are looked at: at the walls,
        beside them and inside.
        """
        shifts = [(i, i.attrs) for i in self.instructions if i.traits.by_place and isinstance(i.attrs, Collective)]
        used = [axis for _, a in shifts for axis in a.axes]
        places = [
            (0,) if a not in used else range(n) if n <= 4 else (0, 1, n // 2, n - 1)
            for a, n in zip(self.mesh.names, self.mesh.sizes, strict=True)
        ]
        found = (dict(zip(self.mesh.names, at, strict=True)) for at in itertools.product(*places))

        def sent(at: Mapping[str, int]) -> int:
            return sum(self.elements_handed(i, at) * ITEM_BYTES[self.types[i.inputs[0]].dtype] for i, _ in shifts)

        return max(found, key=sent)

    def traffic(self, amount: Callable[[Instruction], int]) -> dict[str, AxesTable]:
        """Kind of collective -> mesh axes -> sum of the amounts of these collectives."""
        out: dict[str, AxesTable] = {}
        for i in self.instructions:
            if isinstance(i.attrs, Collective) and not i.attrs.joined:
                table, key = out.setdefault(i.kind, AxesTable()), "+".join(i.attrs.axes)
                table[key] = table.get(key, 0) + amount(i)
        return out

    def values(self) -> dict[str, AxesTable]:
        """Kind of collective -> mesh axes -> elements that one rank hands to it (largest block).

        Of a `shift` only what the `busiest` rank sends to others counts.
        """
        return self.traffic(self.elements_handed)


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
