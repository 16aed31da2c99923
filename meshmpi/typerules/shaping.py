"""Type rules of the instructions that reorder, rename, cut and join dims."""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshmpi.dims import Axes, Dimension, MeshShape, Shape
from meshmpi.program import Instruction, LocalType, Program
from meshmpi.typerules.basics import passes_partial, require, result_type, same_splits


def transpose_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    """The same dims, split alike, in another order."""
    (x,), y = xs, result_type(program, i)
    require(sorted(x.shape) == sorted(y.shape), "changes dims")
    same_splits(x, y, x.shape.names)
    passes_partial(x, y)


def view_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    """Only what `view_splits` calls local."""
    (x,), y = xs, result_type(program, i)
    passes_partial(x, y)
    for ins, outs in aligned_groups(x.shape, y.shape):
        a = [x.split(d.name) for d in ins]
        b = [y.split(d.name) for d in outs]
        require(view_splits(program.mesh, ins, a, outs) == b, f"is not local from {ins} to {outs}")


def aligned_groups(old: Shape, new: Shape) -> list[tuple[list[Dimension], list[Dimension]]]:
    """Smallest runs of old and new dims with equal products of sizes, each reshaped alone."""
    groups: list[tuple[list[Dimension], list[Dimension]]] = []
    i = j = 0
    while i < len(old) and j < len(new):
        ins, outs = [old[i]], [new[j]]
        i, j = i + 1, j + 1
        while (a := math.prod(d.size for d in ins)) != (b := math.prod(d.size for d in outs)):
            if a < b:
                ins.append(old[i])
                i += 1
            else:
                outs.append(new[j])
                j += 1
        groups.append((ins, outs))
    rest = (list(old[i:]), list(new[j:]))  # dims of size 1
    if any(rest):
        if groups:
            groups[-1] = (groups[-1][0] + rest[0], groups[-1][1] + rest[1])
        else:
            groups.append(rest)
    return groups


def view_splits(
    mesh: MeshShape, ins: Sequence[Dimension], splits: Sequence[Axes], outs: Sequence[Dimension]
) -> list[Axes] | None:
    """Splits of ``outs`` when ``ins`` with ``splits`` are reshaped locally; None when they cannot.

    Local is: nothing split; one dim renamed; or only the leading dim split, evenly on both sides.
    """
    if not any(splits):
        return [()] * len(outs)
    lead_in = next((k for k, d in enumerate(ins) if d.size > 1), 0)
    lead_out = next((k for k, d in enumerate(outs) if d.size > 1), 0)
    if not ins or not outs or any(s for k, s in enumerate(splits) if k != lead_in):
        return None
    axes, n, m = splits[lead_in], ins[lead_in].size, outs[lead_out].size
    k = mesh.count(axes)
    if n != m and (n % k or m % k):
        return None
    return [axes if j == lead_out else () for j in range(len(outs))]


def along_dim_rule(program: Program, i: Instruction, xs: Sequence[LocalType]) -> None:
    """slice, pad, concat: along a dim that is whole."""
    dim = i.attrs["dim"]
    y = result_type(program, i)
    total = 0
    for x in xs:
        require(not x.split(dim) and not y.split(dim), f"works along '{dim}', which is split")
        require(x.shape.names == y.shape.names, "changes the order of dims")
        same_splits(x, y, [n for n in x.shape.names if n != dim])
        passes_partial(x, y)
        total += x.shape.dim(dim).size
    if i.kind == "slice":
        total = len(range(i.attrs["start"], i.attrs["stop"], i.attrs["stride"]))
    if i.kind == "pad":
        total += i.attrs["before"] + i.attrs["after"]
        require(not xs[0].partial or not i.attrs["value"], "pads an unfinished sum with a number")
    require(y.shape.dim(dim).size == total, f"'{dim}' should have {total} elements")
