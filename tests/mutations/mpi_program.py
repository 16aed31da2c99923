"""Under mpirun: mistakes in the collectives by MPI, each compared with the simulated mesh.

``python -m meshmpi.launch -n 4 -m tests.mutations.mpi_program`` prints for each mutation
which collective gives wrong values on some rank.  Only mistakes in values are put in here: all
ranks still make the same calls, so that nothing can hang.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from meshmpi.ir import collective_bytes
from meshmpi.runtime import collectives
from meshmpi.runtime.mesh import Mesh
from meshmpi.runtime.operands import AllReduce
from meshmpi.runtime.simulated_mesh import SimulatedMesh
from tests.runtime.mpi_programs.check_collectives import ALGORITHMS, PIECE_BYTES, simulate
from tests.runtime.mpi_programs.collective_cases import Case, call, cases, inputs, outputs

MESH = "rows:2;cols:2"
EVERY, TOGETHER = 3, 20
"""Every third case of the table is run; ranks compare results after twenty."""
Patch = pytest.MonkeyPatch
Table = list[tuple[Case, np.ndarray]]
MUTATIONS: dict[str, Callable[[Patch], None]] = {}


def mutation(put: Callable[[Patch], None]) -> Callable[[Patch], None]:
    MUTATIONS[put.__name__] = put
    return put


@mutation
def only_the_first_piece_is_reduced(m: Patch) -> None:
    right = collectives._bind_all_reduce

    def wrong(group: Any, call: AllReduce) -> Any:
        step = collectives.PIECE_BYTES // collectives._wire_dtype(call.x.dtype).itemsize
        return right(group, replace(call, x=call.x.reshape(-1)[:step]))

    m.setitem(collectives.BINDERS, "all_reduce", wrong)


@mutation
def products_are_sums(m: Patch) -> None:
    m.setitem(collectives._OPS, "prod", MPI.SUM)


@mutation
def any_of_bools_is_all_of_them(m: Patch) -> None:
    m.setitem(collectives._BOOL_OPS, "sum", MPI.MIN)


@mutation
def narrow_numbers_travel_as_they_are(m: Patch) -> None:
    """uint8 is summed as bool is: by the larger."""
    right = collectives._mpi_op
    m.setattr(collectives, "_mpi_op", lambda op, dtype: MPI.MAX if dtype == np.uint8 else right(op, dtype))


@mutation
def gathered_blocks_lie_in_the_order_of_ranks(m: Patch) -> None:
    """Those of a dim over cols+rows, too."""
    right = collectives.Group.by_rank

    def wrong(self: Any, sizes: Any, scale: int = 1) -> tuple[list[int], list[int]]:
        counts, begin = right(self, sizes, scale)
        return (counts, sorted(begin)) if len(set(sizes)) == 1 else (counts, begin)

    m.setattr(collectives.Group, "by_rank", wrong)


@mutation
def every_rank_keeps_the_first_block_of_a_sum(m: Patch) -> None:
    right = collectives._reduce_packed

    def wrong(group: Any, packed: np.ndarray, counts: Any, op: Any, algorithm: str, target: np.ndarray) -> Any:
        reduce, _ = right(group, packed, counts, op, algorithm, target)
        return [reduce, collectives._copy(target, packed[: target.size].reshape(target.shape))]

    m.setattr(collectives, "_reduce_packed", wrong)


@mutation
def the_last_part_of_a_sum_is_left_out(m: Patch) -> None:
    right = collectives._exchange_and_reduce

    def wrong(group: Any, sent: Any, target: np.ndarray, buffer: np.ndarray, combine: Any) -> Any:
        steps = right(group, sent, target, buffer, combine)
        last = group.n - 1  # the exchange, then one step for each rank but the first
        return [step for k, step in enumerate(steps) if group.n == 2 or k != last]

    m.setattr(collectives, "_exchange_and_reduce", wrong)


@mutation
def exchanged_blocks_are_joined_in_reverse(m: Patch) -> None:
    right = collectives._unpack

    def wrong(flat: np.ndarray, axis: int, sizes: Any, out: np.ndarray) -> Any:
        if len(set(sizes)) > 1:
            return right(flat, axis, sizes, out)
        return right(flat, axis, sizes, np.flip(out, axis))

    m.setattr(collectives, "_unpack", wrong)


@mutation
def blocks_are_packed_from_the_start_of_each_row(m: Patch) -> None:
    def wrong(x: np.ndarray, axis: int, sizes: Any, flat: np.ndarray) -> Any:
        at, steps = 0, []
        for size in sizes:
            part = x[(slice(None),) * axis + (slice(0, size),)]
            steps.append(collectives._copy(flat[at : at + part.size].reshape(part.shape), part))
            at += part.size
        return steps

    m.setattr(collectives, "_pack", wrong)


def _shift(m: Patch, spoil: Callable[[Any], None]) -> None:
    right = collectives.BoundShift.__init__

    def wrong(self: Any, *args: Any) -> None:
        right(self, *args)
        spoil(self)

    m.setattr(collectives.BoundShift, "__init__", wrong)


@mutation
def what_no_rank_has_is_left_as_it_was(m: Patch) -> None:
    _shift(m, lambda shift: shift.fills.clear())


@mutation
def what_stays_on_a_rank_is_not_moved(m: Patch) -> None:
    _shift(m, lambda shift: shift.copies.clear())


@mutation
def what_arrives_is_not_unpacked(m: Patch) -> None:
    _shift(m, lambda shift: shift.unpacks.clear())


@mutation
def what_leaves_is_packed_in_reverse(m: Patch) -> None:
    def spoil(shift: Any) -> None:
        shift.packs = [(to, source[::-1, ::-1]) for to, source in shift.packs]

    _shift(m, spoil)


def _differs(case: Case, mesh: Mesh, wanted: np.ndarray) -> bool:
    """Whether the case gives something else here than the simulated mesh does."""
    x, out = inputs(case)[mesh.rank], outputs(case)[mesh.rank]
    call(case, mesh, x, out)
    got = x if case.kind == "all_reduce" else out
    return got.tobytes() != wanted.tobytes()


def _settings(m: Patch, case: Case):
    """All lengths of pieces, and all algorithms of reduce_scatter."""
    for piece in PIECE_BYTES:
        for algorithm in ALGORITHMS if case.kind == "reduce_scatter" else ALGORITHMS[:1]:
            m.setattr(collective_bytes, "PIECE_BYTES", piece)
            m.setattr(collectives, "PIECE_BYTES", piece)
            chosen = {MPI.get_vendor()[0]: ((0, algorithm),)}
            m.setattr(collectives, "REDUCE_SCATTER_ALGORITHMS", chosen)
            yield


def caught_by(put: Callable[[Patch], None], mesh: Mesh, table: Table) -> str:
    """The kind of a case that is wrong on some rank; empty where all are right.

    Ranks compare notes after each run of cases, so that all go on or all stop.
    """
    with Patch.context() as m:
        put(m)
        for start in range(0, len(table), TOGETHER):
            wrong = ""
            for case, wanted in table[start : start + TOGETHER]:
                for _ in _settings(m, case):
                    wrong = case.kind if _differs(case, mesh, wanted) else wrong
            found = MPI.COMM_WORLD.allgather(wrong)
            if any(found):
                return max(found)
    return ""


def main() -> int:
    mesh, simulated = Mesh(MESH), SimulatedMesh(MESH)
    table = [(case, simulate(case, simulated)[mesh.rank]) for case in cases(MESH)[::EVERY]]
    survivors = []
    for name, put in {"nothing": lambda m: None, **MUTATIONS}.items():
        kind = caught_by(put, mesh, table)
        if not kind and name != "nothing":
            survivors.append(name)
        assert name != "nothing" or not kind, f"{kind} is wrong without a mutation"
        if mesh.rank == 0:
            print(f"{name}: {kind or 'SURVIVES' if name != 'nothing' else 'nothing is wrong'}")
    return len(survivors)


if __name__ == "__main__":
    sys.exit(main())
