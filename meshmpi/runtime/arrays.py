"""Array inputs and results of a step: blocks given by one rank, results split over the mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshmpi.compiler.lowering.redistribute import moves
from meshmpi.dims import MeshShape, Shape, block_sizes
from meshmpi.errors import MeshError, MissingNameError, suggest
from meshmpi.graph.arguments import checked
from meshmpi.ir.kinds import AllGather
from meshmpi.ir.program import LocalType
from meshmpi.kernels.views import numpy_dtype
from meshmpi.runtime import operands
from meshmpi.runtime.mesh_protocol import AnyMesh


class LocalBlock(NamedTuple):
    """A feed of which this rank gives its own block only; see `local`."""

    block: Any


@checked
def local(block: Any) -> LocalBlock:
    """Marks an array as this rank's own block of a feed: ``step(x=mm.local(block))``.

    ``step.feed_block("x")`` tells which index ranges the block covers.
    """
    return LocalBlock(block)


def block_of(array: np.ndarray, t: LocalType, mesh: MeshShape, coordinates: dict) -> np.ndarray:
    """The view of a global array that the rank at ``coordinates`` holds."""
    return array[(*(slice(a, b) for a, b in t.block(mesh, coordinates)), ...)]


class ShardedArray(np.lib.mixins.NDArrayOperatorsMixin):
    """A result split over the ranks of a mesh.

    Only `numpy` communicates.  Printing, `local`, sizes and names tell what this process knows, so
    that one rank may ask alone.  ``np.asarray(x)``, ``x[index]``, ``x + 1`` and other functions of
    NumPy work where this process holds the whole array: on one rank, on a simulated mesh, and of
    what is not split.  They give NumPy arrays.

    Attributes:
        type: Global shape, data type and splits.
        local: This rank's block (on a simulated mesh: that of rank 0).
        blocks: The blocks held in this process, by rank.
    """

    def __init__(self, mesh: AnyMesh, t: LocalType, blocks: dict[int, np.ndarray]):
        self.mesh, self.type, self.blocks = mesh, t, blocks

    @property
    def local(self) -> np.ndarray:
        return next(iter(self.blocks.values()))

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) along each dimension of the block `local` in the whole array."""
        rank = next(iter(self.blocks))
        return self.type.block(self.mesh.shape, self.mesh.shape.coordinates(rank))

    @property
    def dims(self) -> Shape:
        """Names and global sizes."""
        return self.type.shape

    @property
    def shape(self) -> tuple[int, ...]:
        """Global sizes."""
        return self.type.shape.sizes

    @property
    def ndim(self) -> int:
        return len(self.type.shape)

    @property
    def size(self) -> int:
        """Number of elements of the whole array."""
        return self.type.shape.size

    @property
    def dtype(self) -> str:
        return self.type.dtype

    def numpy(self) -> np.ndarray:
        """The whole array, on every rank.  Collective: every rank of the mesh must call it.

        A rank that calls it alone waits for the others, as in any collective of MPI; a job whose
        ranks all wait so is ended with a report of who waits where.
        """
        return gather_whole(self.mesh, self.type, self.blocks)

    def _here(self, what: str) -> np.ndarray:
        """The whole array where no other rank is needed for it."""
        if not self.mesh.simulated and self.local.shape != self.shape:
            raise MeshError(
                f"{what} needs the whole array {self.type}, and rank {self.mesh.rank} of mesh"
                f" {self.mesh.shape} holds the block {self.local.shape} of {self.shape}.",
                "Call x.numpy() first, on every rank of the mesh, or use x.local, the block.",
            )
        return self.numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = self._here("a conversion to a NumPy array")
        return whole if dtype is None else whole.astype(dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        what = f"np.{ufunc.__name__}"
        whole = [x._here(what) if isinstance(x, ShardedArray) else x for x in inputs]
        return getattr(ufunc, method)(*whole, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python's own questions
            raise AttributeError(f"'ShardedArray' object has no attribute '{name}'")
        if not hasattr(np.ndarray, name):
            known = [n for n in dir(type(self)) if not n.startswith("_")]
            raise MissingNameError(f"a ShardedArray has no '{name}'.", suggest(name, known))
        raise MissingNameError(
            f"a ShardedArray has no '{name}', which NumPy's arrays have.",
            f"Write x.numpy().{name}, on every rank of the mesh.",
        )

    def __bool__(self) -> bool:
        return bool(self._here("a truth value"))

    def __float__(self) -> float:
        return float(self._here("a number"))

    def __int__(self) -> int:
        return int(self._here("a number"))

    def __getitem__(self, index: Any) -> Any:
        return self._here("an index")[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._here("a loop over its rows"))

    def __repr__(self) -> str:
        # Tells what this rank knows, so that printing on one rank cannot hang.
        held = ""
        if len(self.blocks) == 1 and self.local.shape != self.shape:
            where = ", ".join(f"{a}:{b}" for a, b in self.ranges)
            held = f", block [{where}] of rank {next(iter(self.blocks))}"
        return f"<ShardedArray {self.type} on mesh {self.mesh.shape}{held}>"

    def __str__(self) -> str:
        simulated = self.mesh.simulated
        return f"{self!r}\n{self._here('print') if simulated else self.local}"


def gather_whole(mesh: AnyMesh, t: LocalType, blocks: dict[int, np.ndarray]) -> np.ndarray:
    """The global array from the blocks of all ranks; collective over the mesh."""
    if mesh.simulated:  # a simulated mesh holds all blocks
        return _assemble(mesh.shape, t, blocks)
    (x,), at = blocks.values(), mesh.shape.coordinates(mesh.rank)
    whole = tuple(() for _ in t.shape)
    for move in moves(mesh.shape, t, whole):
        assert isinstance(move, AllGather)  # nothing else makes dims whole
        t_next = move.result(mesh.shape, t)
        out = np.empty(t_next.local_sizes(mesh.shape, at), x.dtype)
        axis = t.shape.position(move.dim)
        sizes = block_sizes(out.shape[axis], mesh.shape.count(move.axes))
        mesh.bind(operands.AllGather(np.ascontiguousarray(x), out, axis, sizes, move.axes))()
        t, x = t_next, out
    return x.copy() if x is next(iter(blocks.values())) else x


def _assemble(shape: MeshShape, t: LocalType, blocks: dict[int, np.ndarray]) -> np.ndarray:
    out = np.empty(t.shape.sizes, numpy_dtype(t.dtype))
    for rank, block in blocks.items():
        block_of(out, t, shape, shape.coordinates(rank))[...] = block
    return out


def view_of(buffer: np.ndarray, offset: int, sizes: Sequence[int], dtype: str) -> np.ndarray:
    """A C-contiguous array of ``sizes`` at ``offset`` bytes in ``buffer``, an empty one too (a slice would lose it)."""
    return np.ndarray(sizes, numpy_dtype(dtype), buffer, offset)
