"""Names and sizes: dimensions, shapes, mesh shapes, layouts, and which rank holds which block.

Pure Python over names and integers: no tensors, arrays or MPI.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Union, cast

from meshmpi.errors import LayoutError, MeshError, MeshmpiError, ShapeError, suggest

Axes = tuple[str, ...]
"""Mesh axes over which one dimension is split, major first; empty when it is whole."""
Range = tuple[int, int]
"""Global indices along a dimension: the first, and one behind the last."""
Ranges = Mapping[str, Range]
"""Dimension name -> range."""


class _NameAndSize(NamedTuple):
    name: str
    size: int


class Dimension(_NameAndSize):
    """A named, sized dimension of a tensor.  Two are equal when name and size are equal.

    Raises:
        ShapeError: The name is not one, or the size is not an integer of at least 1.
    """

    __slots__ = ()

    def __new__(cls, name: str, size: int) -> Dimension:
        if type(name) is not str or not name or _SIGNS.intersection(name):
            name = _checked_name(name)
        if type(size) is not int or size < 1:
            size = _checked_size(name, size)
        return super().__new__(cls, name, size)

    def __str__(self) -> str:
        return f"{self.name}={self.size}"

    __repr__ = __str__


def dim_name(dim: DimLike) -> str:
    """The name of a dimension given as such or by its name."""
    return dim if isinstance(dim, str) else dim.name


def dim_names(dims: DimsLike) -> list[str]:
    """The names of one dimension, or of several."""
    return [dim_name(d) for d in ([dims] if isinstance(dims, (str, Dimension)) else dims)]


DimensionLike = Union[Dimension, tuple[str, int]]
DimLike = Union[Dimension, str]
DimsLike = Union[DimLike, Sequence[DimLike]]
ShapeLike = Union["Shape", str, Sequence[DimensionLike], Dimension]
_SIGNS = frozenset(":;,+=? []")
"""Separators in the texts of shapes, meshes and layouts; names must not contain them."""


class _Words(NamedTuple):
    """What error messages call a list of named sizes and its items, and the class of the errors."""

    whole: str
    item: str
    error: type[MeshmpiError]
    once: str


_SHAPE = _Words("shape", "dimension", ShapeError, "Give each dimension of a tensor its own name.")
_MESH = _Words("mesh shape", "mesh axis", MeshError, "Give each mesh axis its own name.")
_LAYOUT = _Words("layout", "dimension", LayoutError, "")


def _is_name(name: object) -> bool:
    return isinstance(name, str) and bool(name) and not _SIGNS.intersection(name)


def _checked_name(name: object, words: _Words = _SHAPE) -> str:
    if _is_name(name):
        return str(name)
    raise words.error(
        f"{name!r} is not a name for a {words.item}.",
        "Use a non-empty string without blanks and without any of : ; , + = ? [ ].",
    )


def _checked_size(name: str, size: Any, words: _Words = _SHAPE) -> int:
    try:
        n = 0 if isinstance(size, bool) else operator.index(size)
    except TypeError:
        n = 0
    if n < 1:
        raise words.error(f"{words.item} '{name}' has size {size!r}.", "Give an integer of at least 1.")
    return n


def _repeated(names: Sequence[str]) -> tuple[str, int]:
    """The first name that occurs more than once, and how often; ("", 0) where there is none."""
    return next(((n, count) for n in names if (count := names.count(n)) > 1), ("", 0))


def _named_sizes(given: Iterable[object] | str, words: _Words) -> list[Dimension]:
    """The dimensions or mesh axes that a text or a list means; each name once."""
    items = _parse_sizes(given, words) if isinstance(given, str) else given
    dims = [d if type(d) is Dimension else _named_size(d, words) for d in items]
    if len({d.name for d in dims}) < len(dims):
        name, times = _repeated([d.name for d in dims])
        text = ", ".join(map(str, dims))
        raise words.error(f"{words.whole} [{text}] has {words.item} '{name}' {times} times.", words.once)
    return dims


def _named_size(item: object, words: _Words) -> Dimension:
    if not (isinstance(item, tuple) and len(cast("tuple[object, ...]", item)) == 2):
        raise words.error(f"{item!r} is not a {words.item}.", "Give mm.Dimension(name, size) or a (name, size) pair.")
    name, size = cast("tuple[Any, Any]", item)
    return Dimension(_checked_name(name, words), _checked_size(name, size, words))


def _parse_pairs(text: str, words: _Words) -> list[tuple[str, str]]:
    """``"a:1;b:2"`` (separators ; or ,) -> ``[("a", "1"), ("b", "2")]``.

    Sizes are also read as they are printed, ``"[a=1, b=2]"`` and ``"{rows: 2, cols: 2}"``.
    """
    pairs: list[tuple[str, str]] = []
    parts = text.strip()
    if words is not _LAYOUT:
        if parts[:1] + parts[-1:] in ("[]", "{}"):
            parts = parts[1:-1]
        parts = parts.replace("=", ":")
    for part in parts.replace(",", ";").split(";"):
        part = part.strip()
        if not part:
            continue
        name, colon, value = part.partition(":")
        if not colon:
            raise words.error(f"'{part}' in the {words.whole} '{text}' has no colon.", "Write name:value;name:value.")
        pairs.append((name.strip(), value.strip()))
    return pairs


def _parse_sizes(text: str, words: _Words) -> list[tuple[str, int]]:
    pairs = _parse_pairs(text, words)
    for name, size in pairs:
        if not size.isdigit():
            raise words.error(
                f"{words.item} '{name}' of the {words.whole} '{text}' has size '{size}'.",
                "Give an integer of at least 1.",
            )
    return [(name, int(size)) for name, size in pairs]


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
        if (
            not isinstance(cast("object", dims), Iterable)
            or isinstance(dims, (bytes, Mapping))
            or getattr(dims, "ndim", 1) == 0  # an array without dimensions
        ):
            raise ShapeError(
                f"{dims!r} is not a shape.",
                "Give dimensions with sizes, as 'batch:4;io:8' or [mm.Dimension(name, size)].",
            )
        return super().__new__(cls, _named_sizes(dims, _SHAPE))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple([d.name for d in self])  # a list: half the time of a generator

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple([d.size for d in self])

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def ndims(self) -> int:
        return len(self)

    def find(self, name: str) -> int:
        """Position of the dimension called ``name``, or -1."""
        for i, d in enumerate(self):  # a loop: quicker than next() of a generator
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


def block_sizes(n: int, blocks: int) -> list[int]:
    """Extents of all blocks of ``n`` elements cut into ``blocks``."""
    return [b - a for a, b in (block_range(n, blocks, i) for i in range(blocks))]


class MeshShape:
    """Names and sizes of the axes of a mesh, without any rank of a running job.

    Ranks are numbered row-major: the last axis varies fastest, as in ``MPI_Cart_create``.

    Args:
        axes: ``"rows:2;cols:2"``, a mapping, or a sequence of (name, size) pairs.
    """

    __slots__ = ("axes", "_sizes")

    def __init__(self, axes: MeshShapeLike):
        of_mesh = getattr(axes, "shape", axes)
        if isinstance(of_mesh, MeshShape):
            axes = of_mesh.axes
        elif isinstance(axes, Mapping):
            axes = list(axes.items())
        elif isinstance(axes, Dimension):
            axes = [axes]
        if not isinstance(axes, (str, tuple, list)):
            raise MeshError(f"{axes!r} is not the shape of a mesh.", "Give axes with sizes: 'rows:2;cols:2'.")
        self.axes = tuple((name, size) for name, size in _named_sizes(axes, _MESH))
        self._sizes = dict(self.axes)

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
        return self.block_index(self.names, coordinates)

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
        return tuple(dict.fromkeys(self.group(r, axes) for r in range(self.size)))

    def axes_between(self, host_of: Sequence[int]) -> Axes:
        """The axes along which some neighbours are on different hosts; ``host_of`` numbers the host of each rank."""
        return tuple(n for n in self.names if any(len({host_of[r] for r in g}) > 1 for g in self.groups((n,))))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeshShape) and self.axes == other.axes

    def __hash__(self) -> int:
        return hash(self.axes)

    def __str__(self) -> str:
        return "{" + ", ".join(f"{n}: {s}" for n, s in self.axes) + "}"

    def __repr__(self) -> str:
        return f"MeshShape('{';'.join(f'{n}:{s}' for n, s in self.axes)}')"


_A_LAYOUT = "Write dimension:axis;dimension:axis, as in 'batch:rows;heads:cols'."


def _axes_of(text: str) -> list[str]:
    return [a.strip() for a in text.split("+") if a.strip()]


def _check_place(text: str, dim: str, axes: str) -> None:
    """Raises LayoutError unless both sides of a rule ``dim:axes`` of the layout ``text`` are names."""
    found = [dim.removesuffix("?"), *_axes_of(axes)]
    wrong = next((name for name in found if not _is_name(name)), None)
    if wrong is None:
        return
    # Most often a blank where a semicolon should be.
    instead = ";".join(text.replace(",", ";").replace(";", " ").split())
    proposal = f" as '{instead}'" if instead.count(";") < instead.count(":") else ""
    at = text.index(wrong) + next((k for k, c in enumerate(wrong) if c in _SIGNS), 0) + 1
    raise LayoutError(
        f"layout '{text}' has {wrong!r} in place of a name, at character {at}.",
        f"Separate rules by semicolons{proposal}: {_A_LAYOUT[0].lower()}{_A_LAYOUT[1:]}",
    )


MeshShapeLike = Union[str, Mapping[str, int], Sequence[tuple[str, int]], MeshShape]


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
        name, times = _repeated([r.dim for r in self.rules])
        if times:
            axes = dict.fromkeys(a for r in self.rules if r.dim == name for a in r.axes)
            raise LayoutError(
                f"layout '{self}' has dimension '{name}' {times} times.",
                f"Write one rule for it; several axes as {name}:{'+'.join(axes)}.",
            )

    @staticmethod
    def _pairs(rules: LayoutLike) -> Sequence[tuple[str, str | Iterable[str]]]:
        if isinstance(rules, Layout):
            return [(r.dim + "?" * r.optional, r.axes) for r in rules.rules]
        if isinstance(rules, str):
            pairs = _parse_pairs(rules, _LAYOUT)
            for name, axes in pairs:
                _check_place(rules, name, axes)
            return pairs
        if isinstance(rules, Mapping):
            return list(rules.items())
        if not isinstance(rules, (list, tuple, type(None))):
            raise LayoutError(f"{rules!r} is not a layout.", _A_LAYOUT)
        for rule in rules or ():
            pair = cast("Any", rule)
            if not isinstance(pair, (list, tuple)) or len(cast("Sequence[Any]", pair)) != 2:
                raise LayoutError(f"layout: {rule!r} is not a rule.", _A_LAYOUT)
        return list(rules or ())

    @staticmethod
    def _rule(dim: str, axes: str | Iterable[str]) -> Rule:
        if isinstance(dim, Dimension):
            dim = dim.name
        if isinstance(axes, str):
            axes = _axes_of(axes)
        given = axes
        axes = tuple(axes) if isinstance(axes, (list, tuple)) else ()
        if not isinstance(given, (list, tuple)) or not all(_is_name(a) for a in axes):
            raise LayoutError(
                f"layout sends dimension {dim!r} to {given!r}, which is not the name of a mesh axis.", _A_LAYOUT
            )
        if not isinstance(cast("object", dim), str) or not _is_name(dim.removesuffix("?")):
            raise LayoutError(f"layout: {dim!r} is not the name of a dimension.", _A_LAYOUT)
        if _repeated(axes)[1]:
            raise LayoutError(
                f"layout sends dimension '{dim}' to mesh axis '{_repeated(axes)[0]}' twice.",
                f"Name each axis once: {dim}:{'+'.join(dict.fromkeys(axes))}.",
            )
        return Rule(dim.removesuffix("?"), axes, dim.endswith("?"))

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
                    turned = r.dim in mesh.names and a in (known or ())
                    near = f"Dimensions come first: write '{a}:{r.dim}'." if turned else suggest(a, mesh.names)
                    text = f"layout sends dimension '{r.dim}' to mesh axis '{a}', but the mesh is {mesh}."
                    error = LayoutError(text, near)
                    error.conflict = None if turned else ((r.dim,), a)
                    raise error
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
    str, Layout, Mapping[str, Union[str, Sequence[str]]], Sequence[tuple[str, Union[str, Sequence[str]]]], None
]
