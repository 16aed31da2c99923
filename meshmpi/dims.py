"""Names and sizes: dimensions, shapes, mesh shapes, layouts, and who holds which block.

Pure Python over names and integers.  Nothing here knows of tensors, arrays, ranks of a running
job or MPI.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Union, cast

from meshmpi.errors import LayoutError, MeshError, ShapeError, suggest

Axes = tuple[str, ...]
"""Mesh axes over which one dimension is split, major first; empty when it is whole."""


class Dimension(NamedTuple):
    """A named, sized dimension of a tensor.  Two are equal when name and size are equal."""

    name: str
    size: int

    def __str__(self) -> str:
        return f"{self.name}={self.size}"

    __repr__ = __str__


DimensionLike = Union[Dimension, tuple[str, int]]
ShapeLike = Union["Shape", str, Sequence[DimensionLike], Dimension]


def _as_dimension(item: object) -> Dimension:
    if not (isinstance(item, tuple) and len(cast("tuple[object, ...]", item)) == 2):
        raise ShapeError(
            f"{item!r} is not a dimension.", "Give mm.Dimension(name, size) or a (name, size) pair."
        )
    name, size = cast("tuple[object, Any]", item)
    if not isinstance(name, str) or not name or any(c in name for c in ":;,+=? []"):
        raise ShapeError(
            f"{name!r} is not a name for a dimension.",
            "Use a non-empty string without blanks and without any of : ; , + = ? [ ].",
        )
    if isinstance(size, bool) or not hasattr(size, "__index__") or int(size) < 1:
        raise ShapeError(f"dimension '{name}' has size {size!r}.", "Give an integer of at least 1.")
    return Dimension(name, int(size))


def _parse_pairs(text: str, what: str) -> list[tuple[str, str]]:
    """``"a:1;b:2"`` (separators ; or ,) -> ``[("a", "1"), ("b", "2")]``."""
    pairs: list[tuple[str, str]] = []
    for part in text.replace(",", ";").split(";"):
        part = part.strip()
        if not part:
            continue
        name, colon, value = part.partition(":")
        if not colon:
            raise (LayoutError if what == "layout" else ShapeError)(
                f"'{part}' in the {what} '{text}' has no colon.", "Write name:value;name:value."
            )
        pairs.append((name.strip(), value.strip()))
    return pairs


class Shape(tuple[Dimension, ...]):
    """An ordered list of dimensions with distinct names.  ``mm.Shape("batch:4;io:8")``.

    Accepts a Shape, a string, one Dimension, or a sequence of Dimensions and (name, size) pairs.

    Raises:
        ShapeError: A name occurs twice, or an item is not a dimension.
    """

    __slots__ = ()

    def __new__(cls, dims: ShapeLike = ()) -> Shape:
        if type(dims) is Shape:
            return dims
        if isinstance(dims, Dimension):
            dims = (dims,)
        if isinstance(dims, str):
            pairs = _parse_pairs(dims, "shape")
            for name, size in pairs:
                if not size.isdigit():
                    raise ShapeError(
                        f"dimension '{name}' of the shape '{dims}' has size '{size}'.",
                        "Give an integer of at least 1.",
                    )
            dims = [(name, int(size)) for name, size in pairs]
        self = super().__new__(cls, (_as_dimension(d) for d in dims))
        names = [d.name for d in self]
        for d in self:
            if names.count(d.name) > 1:
                raise ShapeError(
                    f"shape {self} has dimension '{d.name}' {names.count(d.name)} times.",
                    "Give each dimension of a tensor its own name.",
                )
        return self

    @property
    def names(self) -> tuple[str, ...]:
        return tuple([d.name for d in self])  # a list: half the time of a generator

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple([d.size for d in self])

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(d.size for d in self)

    @property
    def ndims(self) -> int:
        return len(self)

    def find(self, name: str) -> int:
        """Position of the dimension called ``name``, or -1."""
        for i, d in enumerate(self):
            if d.name == name:
                return i
        return -1

    def position(self, name: str) -> int:
        """Position of the dimension called ``name``; ShapeError when there is none."""
        i = self.find(name)
        if i < 0:
            raise ShapeError(f"shape {self} has no dimension '{name}'.", suggest(name, self.names))
        return i

    def dim(self, name: str) -> Dimension:
        return self[self.position(name)]

    def without(self, names: Iterable[str]) -> Shape:
        names = tuple(names)
        return Shape([d for d in self if d.name not in names])

    def renamed(self, old: str, new: str) -> Shape:
        self.position(old)
        return Shape([Dimension(new, d.size) if d.name == old else d for d in self])

    def __add__(self, other: object) -> Shape:
        return Shape([*self, *Shape(other)])  # type: ignore[arg-type]

    def __str__(self) -> str:
        return "[" + ", ".join(str(d) for d in self) + "]"

    __repr__ = __str__


def block_range(n: int, blocks: int, index: int) -> tuple[int, int]:
    """Start and stop of block ``index`` of ``n`` elements cut into ``blocks``.

    The first ``n mod blocks`` blocks have one element more; blocks may be empty.
    """
    base, extra = divmod(n, blocks)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)


class MeshShape:
    """Names and sizes of the axes of a mesh, without any rank of a running job.

    Ranks are numbered row-major: the last axis varies fastest, as in ``MPI_Cart_create``.

    Args:
        axes: ``"rows:2;cols:2"``, a mapping, or a sequence of (name, size) pairs.
    """

    __slots__ = ("axes", "_sizes")

    def __init__(self, axes: str | Mapping[str, int] | Sequence[tuple[str, int]] | MeshShape):
        if isinstance(axes, MeshShape):
            axes = axes.axes
        elif isinstance(axes, Mapping):
            axes = list(axes.items())
        self.axes: tuple[tuple[str, int], ...] = tuple((d.name, d.size) for d in self._dims(axes))
        self._sizes = dict(self.axes)

    @staticmethod
    def _dims(axes: object) -> Shape:
        try:
            return Shape(axes)  # type: ignore[arg-type]
        except ShapeError as e:
            text = e.problem.replace("dimension", "mesh axis").replace("shape", "mesh shape")
            remedy = e.remedy.replace("dimension of a tensor", "mesh axis")
            raise MeshError(text, remedy.replace("dimension", "mesh axis")) from None

    @property
    def names(self) -> Axes:
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    def axis_size(self, name: str) -> int:
        if name not in self._sizes:
            raise MeshError(f"mesh {self} has no axis '{name}'.", suggest(name, self.names))
        return self._sizes[name]

    def count(self, axes: Iterable[str]) -> int:
        """Number of ranks in one group over ``axes``."""
        return math.prod(self.axis_size(a) for a in axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis name -> coordinate of ``rank``."""
        out = {}
        for name, size in reversed(self.axes):
            rank, out[name] = divmod(rank, size)
        return {name: out[name] for name in self.names}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Rank at ``coordinates`` (axis name -> coordinate)."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinates[name]
        return rank

    def block_index(self, axes: Iterable[str], coordinates: Mapping[str, int]) -> int:
        """Which block of a dimension split over ``axes`` is held at ``coordinates``."""
        index = 0
        for a in axes:
            index = index * self.axis_size(a) + coordinates[a]
        return index

    def in_mesh_order(self, axes: Iterable[str]) -> Axes:
        """The given axes without repetition, in the order of the mesh."""
        wanted = tuple(axes)
        for a in wanted:
            self.axis_size(a)
        return tuple(a for a in self.names if a in wanted)

    def group(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """Ranks that differ from ``rank`` only in ``axes``, ascending: the paper's section 2."""
        here = self.coordinates(rank)
        ranks = [here]
        for a in self.in_mesh_order(axes):
            ranks = [{**c, a: i} for c in ranks for i in range(self.axis_size(a))]
        return tuple(self.rank(c) for c in ranks)

    def groups(self, axes: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """All groups over ``axes``; each rank is in exactly one."""
        axes = tuple(axes)
        first = {self.group(r, axes): None for r in range(self.size)}
        return tuple(first)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeshShape) and self.axes == other.axes

    def __hash__(self) -> int:
        return hash(self.axes)

    def __str__(self) -> str:
        return "{" + ", ".join(f"{n}: {s}" for n, s in self.axes) + "}"

    def __repr__(self) -> str:
        return f"MeshShape('{';'.join(f'{n}:{s}' for n, s in self.axes)}')"


@dataclass(frozen=True)
class Rule:
    """One rule of a layout: dimension ``dim`` is split over ``axes``, in that order."""

    dim: str
    axes: Axes
    optional: bool = False


class Layout:
    """A partial map from dimension names to mesh axes, for a whole graph.

    Args:
        rules: ``"batch:rows;heads:cols"``; several axes as ``"batch:rows+planes"``;
            ``"d_ff?:cols"`` is ignored where no tensor has ``d_ff``; an empty right side
            (``"length:"``) means whole.  Or a mapping, or a sequence of (dim, axes) pairs.

    Raises:
        LayoutError: A dimension occurs twice, or one rule names an axis twice.
    """

    __slots__ = ("rules", "_axes")

    def __init__(self, rules: LayoutLike = ""):
        self.rules: tuple[Rule, ...] = tuple(self._rule(d, a) for d, a in self._pairs(rules))
        self._axes = {r.dim: r.axes for r in self.rules}
        names = [r.dim for r in self.rules]
        for name in names:
            if names.count(name) > 1:
                axes = dict.fromkeys(a for r in self.rules if r.dim == name for a in r.axes)
                raise LayoutError(
                    f"layout '{self}' has dimension '{name}' {names.count(name)} times.",
                    f"Write one rule for it; several axes as {name}:{'+'.join(axes)}.",
                )

    @staticmethod
    def _pairs(rules: LayoutLike) -> Sequence[tuple[str, str | Iterable[str]]]:
        if isinstance(rules, Layout):
            return [(r.dim + "?" * r.optional, r.axes) for r in rules.rules]
        if isinstance(rules, str):
            return _parse_pairs(rules, "layout")
        if isinstance(rules, Mapping):
            return list(rules.items())
        return list(rules or ())

    @staticmethod
    def _rule(dim: str, axes: str | Iterable[str]) -> Rule:
        if isinstance(axes, str):
            axes = [a.strip() for a in axes.split("+") if a.strip()]
        axes = tuple(axes)
        for a in axes:
            if axes.count(a) > 1:
                raise LayoutError(
                    f"layout sends dimension '{dim}' to mesh axis '{a}' twice.",
                    f"Name each axis once: {dim}:{'+'.join(dict.fromkeys(axes))}.",
                )
        return Rule(dim.rstrip("?"), axes, dim.endswith("?"))

    def axes(self, dim: str) -> Axes:
        """Mesh axes of the dimension called ``dim``; empty when it is whole."""
        return self._axes.get(dim, ())

    def __contains__(self, dim: str) -> bool:
        return dim in self._axes

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)

    def check(self, mesh: MeshShape, known_dims: Iterable[str] | None = None) -> None:
        """Raises LayoutError for an unknown mesh axis or (when given) an unknown dimension."""
        known = None if known_dims is None else list(known_dims)
        for r in self.rules:
            for a in r.axes:
                if a not in mesh.names:
                    raise LayoutError(
                        f"layout sends dimension '{r.dim}' to mesh axis '{a}', but the mesh is"
                        f" {mesh}.",
                        suggest(a, mesh.names),
                    )
            if known is not None and r.dim not in known and not r.optional:
                raise LayoutError(
                    f"layout sends dimension '{r.dim}' to mesh axis '{'+'.join(r.axes)}', but no"
                    f" tensor has a dimension '{r.dim}'.",
                    f"{suggest(r.dim, known)} Write '{r.dim}?' for a rule that may find no tensor.",
                )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.rules == other.rules

    def __hash__(self) -> int:
        return hash(self.rules)

    def __str__(self) -> str:
        return ";".join(f"{r.dim}{'?' * r.optional}:{'+'.join(r.axes)}" for r in self.rules)

    def __repr__(self) -> str:
        return f"Layout('{self}')"


LayoutLike = Union[
    str, Layout, Mapping[str, Union[str, Sequence[str]]],
    Sequence[tuple[str, Union[str, Sequence[str]]]], None,
]  # fmt: skip
