"""What a model would take on a mesh, from its program alone: nothing of it is allocated."""

from __future__ import annotations

import math
import resource
import time
from typing import NamedTuple

import meshmpi as mm
from apps.esm2.inference import Build, residue_losses, residue_vectors
from apps.esm2.layouts import Splits
from apps.esm2.models import weight_count
from meshmpi.api import Plan
from meshmpi.ir.program import Program
from meshmpi.ir.scalar import ITEM_BYTES
from meshmpi.transformer.models import TransformerConfig

BUILDS: dict[str, Build] = {"score": residue_losses, "embed": residue_vectors}


class Weights(NamedTuple):
    """Bytes of variables.

    Attributes:
        total: Of the model.
        by_rank: Of each rank.
        split: Of those variables of the model that are split over all mesh axes.
        split_held: Of the same, on all ranks together: as many where there is one copy.
    """

    total: int
    by_rank: list[int]
    split: int
    split_held: int


def planned(config: TransformerConfig, splits: Splits, batch: int, length: int, what: str) -> Plan:
    """The program of one batch on a mesh that need not exist.

    Args:
        config: The model.
        splits: How it lies on the mesh.
        batch: Rows of all ranks together.
        length: Tokens of a row.
        what: Key of `BUILDS`.
    """
    with mm.Graph() as graph:
        shape = mm.Shape([("batch", batch), ("length", length)])
        fetched = BUILDS[what](splits.config(config), shape)
    return mm.plan(graph, splits.mesh, splits.layout, fetches=[fetched], storage=splits.storage)


def weights(program: Program) -> Weights:
    """Bytes of the variables of a program, rank by rank."""
    mesh = program.mesh
    total, split, held = 0, 0, 0
    by_rank = [0] * mesh.size
    for variable in program.variables.values():
        t = variable.type
        item = ITEM_BYTES[t.dtype]
        blocks = [math.prod(t.local_sizes(mesh, mesh.coordinates(r))) * item for r in range(mesh.size)]
        by_rank = [a + b for a, b in zip(by_rank, blocks, strict=True)]
        total += t.shape.size * item
        if sorted(a for axes in t.splits for a in axes) == sorted(mesh.names):
            split, held = split + t.shape.size * item, held + sum(blocks)
    return Weights(total, by_rank, split, held)


def report(config: TransformerConfig, splits: Splits, batch: int, length: int, what: str) -> str:
    """Weights, FLOP, bytes by collective and memory of a rank, for people."""
    began = time.perf_counter()
    plan = planned(config, splits, batch, length, what)
    seconds = time.perf_counter() - began
    found, cost = weights(plan.program), plan.cost
    most, ranks = max(found.by_rank), plan.program.mesh.size
    values = plan.program.values()
    lines = [
        f"{weight_count(config):,} parameters by formula; {found.total // 4:,} in the program of '{what}'",
        f"mesh {plan.program.mesh} ({ranks} ranks), layout '{splits.layout}', storage"
        f" '{splits.storage or ''}', residual '{splits.residual}'",
        f"weights: {found.total:,} bytes, on a rank {most:,} ({most * ranks / found.total - 1:+.2%}"
        f" against an equal share), on all ranks {sum(found.by_rank):,}",
        f"one batch of {batch} x {length} tokens, per rank: {cost.flops:.4g} FLOP,"
        f" {cost.bytes_sent:,} bytes sent, {cost.peak_memory:,} bytes of memory",
        "memory of a rank: " + ", ".join(f"{k} {n:,}" for k, n in cost.memory.items()),
    ]
    for kind, table in cost.bytes_by.items():
        for axes, n in table.items():
            calls = sum(i.kind == kind and "+".join(i.attrs.axes) == axes for i in plan.program.instructions)
            lines.append(f"  {kind} over {axes}: {calls} calls, {values[kind][axes]:,} elements, {n:,} bytes sent")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines.append(
        f"{len(plan.program.instructions)} instructions, planned in {seconds:.1f} s; this process"
        f" took {peak / 1024:.0f} MB of memory"
    )
    return "\n".join(lines)
