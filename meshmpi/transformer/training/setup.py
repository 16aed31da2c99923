"""Prepares a run: its mesh, layout and data."""

from __future__ import annotations

from collections.abc import Callable

from meshmpi.dims import MeshShape
from meshmpi.errors import DataError
from meshmpi.runtime.agreement import from_first, gathered
from meshmpi.runtime.mesh import Mesh
from meshmpi.runtime.mesh_protocol import AnyMesh
from meshmpi.runtime.world import world_size
from meshmpi.transformer.training.corpora import NAMED
from meshmpi.transformer.training.data import Dataset, prepare
from meshmpi.transformer.training.settings import DataSettings, MeshSettings


def mesh_shape(settings: MeshSettings, ranks: int) -> MeshShape:
    """The mesh asked for; by default all ranks on one axis."""
    return MeshShape(settings.shape or f"all:{ranks}")


def chosen_layout(settings: MeshSettings, mesh: MeshShape) -> str:
    """The layout asked for; data-parallel when neither mesh nor layout is given."""
    return settings.layout if settings.shape or settings.layout else f"batch:{'+'.join(mesh.names)}"


def make_mesh(settings: MeshSettings) -> Mesh:
    """The mesh of all ranks of this job; starts MPI."""
    return Mesh(mesh_shape(settings, world_size()))


def prepare_data(settings: DataSettings, mesh: AnyMesh, say: Callable[[str], None]) -> Dataset:
    """The tokens of the corpus, or of the fallback where a named corpus is not available.  Collective.

    Raises:
        DataError: Neither is available, or the ranks see different texts.
    """
    corpus, note = from_first(mesh, lambda: available_data(settings)[1:])
    if note:
        say(note)
    dataset = _prepare(settings, corpus)
    check_equal(mesh, dataset.digest, f"texts for corpus '{corpus}'")
    return dataset


def check_equal(mesh: AnyMesh, digest: str, what: str) -> None:
    """Raises DataError where ranks have read different data.  Collective."""
    digests = gathered(mesh, digest)
    if other := next((r for r, d in enumerate(digests) if d != digests[0]), 0):
        raise DataError(
            f"rank 0 and rank {other} read different {what}.",
            "Give every node the same files, or empty the cache of the node that differs.",
        )


def available_data(settings: DataSettings) -> tuple[Dataset, str, str]:
    """The data of the corpus or of the fallback, its name, and a note if it is the fallback.

    Raises:
        DataError: Neither is available.
    """
    try:
        return _prepare(settings, settings.corpus), settings.corpus, ""
    except DataError as error:
        if not settings.fallback or settings.corpus not in NAMED:
            raise  # a mistyped name or path must not train on something else
        note = f"{error.problem} Using '{settings.fallback}' instead."
        return _prepare(settings, settings.fallback), settings.fallback, note


def _prepare(settings: DataSettings, corpus: str) -> Dataset:
    return prepare(corpus, settings.vocabulary, held_out_fraction=settings.held_out_fraction)
