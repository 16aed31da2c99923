"""The C function of one instruction, and the scratch memory that it needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from meshmpi.dims import MeshShape
from meshmpi.ir.kinds import Map, Random, Reduce, ScatterAdd, TopK
from meshmpi.ir.program import Instruction, LocalType
from meshmpi.kernels.native.indexing import scatter_add_body, top_k_body
from meshmpi.kernels.native.nest import LoopNest, Unsupported
from meshmpi.kernels.native.source import Body, Writer


def function_body(
    i: Instruction,
    types: Mapping[int, LocalType],
    mesh: MeshShape,
    coordinates: Mapping[str, int],
    ranges: Mapping[str, tuple[int, int]] | None = None,
    counting: Collection[int] = (),
) -> Body:
    """The C function of one instruction of kind map, reduce, random, fused, scatter_add or
    top_k.

    Within a tiled region, ``ranges`` narrows the block.  Values in ``counting`` hold consecutive integers
    (`iota`): of them only the first is read.

    Raises:
        Unsupported: Nothing native is generated for it.
    """
    if isinstance(i.attrs, ScatterAdd):
        return Body(scatter_add_body(i, types, mesh, coordinates))
    if isinstance(i.attrs, TopK):
        return Body(top_k_body(i, types, mesh, coordinates))
    return _writer(i, types, mesh, coordinates, ranges, counting).body()


def _writer(
    i: Instruction,
    types: Mapping[int, LocalType],
    mesh: MeshShape,
    coordinates: Mapping[str, int],
    ranges: Mapping[str, tuple[int, int]] | None,
    counting: Collection[int],
) -> Writer:
    body = i.body or (i,)
    if i.body:
        types = {**{v: types[v] for v in (*i.inputs, *i.outputs)}, **i.inner_types()}
    for one in body:
        if isinstance(one.attrs, Random) and one.attrs.distribution != "uniform":
            raise Unsupported("a distribution other than uniform")
    if not i.inputs and isinstance(body[0].attrs, Map):
        raise Unsupported("no inputs")
    return Writer(LoopNest(body, i.inputs, i.outputs, types, mesh, coordinates, ranges), counting)


def scratch_bytes(
    i: Instruction,
    types: Mapping[int, LocalType],
    mesh: MeshShape,
    coordinates: Mapping[str, int],
    ranges: Mapping[str, tuple[int, int]] | None = None,
) -> int:
    """Bytes of the workspace that the C function of an instruction needs; 0 where it has none.

    Only what reduces needs any: maps keep their numbers in registers.
    """
    if not i.traits.native or not any(isinstance(j.attrs, Reduce) for j in i.leaves()):
        return 0
    try:
        return _writer(i, types, mesh, coordinates, ranges, ()).scratch_bytes
    except Unsupported:
        return 0
