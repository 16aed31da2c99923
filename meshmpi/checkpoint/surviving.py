"""Moves variables from the memory of surviving ranks to the ranks of another mesh, if no block was lost.

Ranks are numbers of a given communicator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshmpi.checkpoint.buddies import messages
from meshmpi.checkpoint.pieces import Piece, Ranges, pieces
from meshmpi.dims import Axes, MeshShape
from meshmpi.ir.program import LocalType
from meshmpi.runtime.variables import VariableStore

if TYPE_CHECKING:
    from meshmpi.runtime.mpi import MPI

Wanted = Mapping[str, Ranges]
"""Variable -> (start, stop) along each dim of the block that a rank needs."""


class Holding(NamedTuple):
    """What one rank holds of one mesh's variables."""

    attempt: int  # which mesh: the n-th that the job made
    mesh: MeshShape  # its shape
    rank: int  # in that mesh
    step: int  # training steps that the variables have seen
    ready: bool  # whether this rank can end one more step alone
    splits: tuple[Axes, ...]  # the sets of mesh axes over which variables are split


class Source(NamedTuple):
    """Where all variables of one step are."""

    attempt: int  # the mesh that they belong to
    mesh: MeshShape  # its shape
    step: int  # the step
    holders: Mapping[int, int]  # rank of that mesh -> rank of the survivors


def splits_of(store: VariableStore) -> tuple[Axes, ...]:
    """The sets of mesh axes over which the variables of a store are split."""
    return tuple(sorted({_axes(v.type, store.mesh.shape) for v in store.types.values()}))


def _axes(t: LocalType, mesh: MeshShape) -> Axes:
    return tuple(a for a in mesh.names if a in t.used_axes)


def newest(held: Sequence[Sequence[Holding]]) -> Source | None:
    """The newest step of which the survivors together hold every block of every variable; None if there is none."""
    everything = [(holding, rank) for rank, part in enumerate(held) for holding in part]
    choices = {(h.attempt, h.step + ready) for h, _ in everything for ready in range(h.ready + 1)}
    for attempt, step in sorted(choices, reverse=True):
        here = [
            (h, rank)
            for h, rank in everything
            if h.attempt == attempt and (h.step == step or (h.ready and h.step + 1 == step))
        ]
        mesh, splits = here[0][0].mesh, here[0][0].splits
        holders = {h.rank: rank for h, rank in here}
        if all(len({_block(mesh, axes, rank) for rank in holders}) == mesh.count(axes) for axes in splits):
            return Source(attempt, mesh, step, holders)
    return None


def _block(mesh: MeshShape, axes: Axes, rank: int) -> tuple[int, ...]:
    coordinates = mesh.coordinates(rank)
    return tuple(coordinates[a] for a in axes)


def wanted_by(store: VariableStore) -> Wanted:
    """What the rank of this process needs of every variable."""
    (rank,), shape = store.ranks, store.mesh.shape
    return {n: v.type.block(shape, shape.coordinates(rank)) for n, v in store.types.items()}


def types_of(store: VariableStore) -> dict[str, LocalType]:
    """How the variables of a store are held, equal on all its ranks."""
    return {n: v.type for n, v in store.types.items()}


def hand_over(
    comm: MPI.Intracomm,
    source: Source,
    types: Mapping[str, LocalType],
    old: VariableStore | None,
    new: VariableStore | None,
    wants: Sequence[Wanted | None],
) -> None:
    """Fills new stores from those of the survivors.  Collective in ``comm``.

    One variable after the other, so that few copies are under way at once.
    """
    for name, t in types.items():
        arriving: list[tuple[np.ndarray, np.ndarray]] = []
        requests: list[Any] = []
        kept: list[np.ndarray] = []  # until they are sent
        for receiver, wanted in enumerate(wants):
            for sender, piece in _pieces(source, t, wanted[name], receiver) if wanted else ():
                if sender == comm.rank:
                    part = _block_of(old, name)[(..., *(slice(*r) for r in piece.source))]
                if receiver == comm.rank:
                    target = _block_of(new, name)[(..., *piece.target)]
                if receiver == sender == comm.rank:
                    target[...] = part
                elif receiver == comm.rank:
                    arriving.append((target, np.empty(target.shape, target.dtype)))
                    parts = messages(arriving[-1][1])
                    requests += [comm.Irecv(m, sender) for m in parts]
                elif sender == comm.rank:
                    kept.append(np.array(part, order="C"))
                    requests += [comm.Isend(m, receiver) for m in messages(kept[-1])]
        for request in requests:
            request.Wait()
        for target, data in arriving:
            target[...] = data


def _block_of(store: VariableStore | None, name: str) -> np.ndarray:
    assert store is not None
    return store.blocks[name][store.ranks[0]]


def _pieces(source: Source, t: LocalType, wanted: Ranges, receiver: int) -> Iterator[tuple[int, Piece]]:
    """What makes up a wanted block and who sends it: the receiver itself where it has a copy."""
    axes = _axes(t, source.mesh)
    senders: dict[tuple[int, ...], int] = {}
    for rank, survivor in sorted(source.holders.items()):
        block = _block(source.mesh, axes, rank)
        if survivor == receiver or block not in senders:
            senders[block] = survivor
    for piece in pieces(t, source.mesh, wanted):
        yield senders[tuple(piece.holder[a] for a in axes)], piece
