"""Variables in the memory of survivors: which step they hold, and how they get to another mesh."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from meshmpi.checkpoint.surviving import Holding, Source, hand_over, newest, splits_of, types_of, wanted_by
from meshmpi.dims import MeshShape
from meshmpi.runtime.variables import VariableStore
from tests.soak.stores import Placed, store, values

DATA, MODEL, BOTH = (("all:4", ((),)), ("all:4", ((), ("all",))), ("r:2;c:2", ((), ("c",))))


def held(mesh, *ranks, attempt=1):
    """(rank, step or step + 0.5 where the rank can end one more alone) -> what survivors hold."""
    shape, splits = mesh
    return [[Holding(attempt, MeshShape(shape), rank, int(step), step != int(step), splits)] for rank, step in ranks]


@pytest.mark.parametrize(
    ("found", "step", "holders"),
    [
        (held(DATA, (0, 5), (1, 5), (3, 5)), 5, {0: 0, 1: 1, 3: 2}),
        (held(DATA, (2, 5)), 5, {2: 0}),
        # One got through: the others end the step, as far as they can.
        (held(DATA, (0, 6), (1, 5.5), (3, 5.5)), 6, {0: 0, 1: 1, 3: 2}),
        (held(DATA, (0, 5.5), (1, 5.5)), 6, {0: 0, 1: 1}),
        (held(DATA, (0, 5), (1, 5.5)), 6, {1: 1}),
        (held(DATA, (0, 5), (1, 6)), 6, {1: 1}),
        # Blocks that nobody else holds.
        (held(MODEL, (0, 5), (1, 5), (3, 5)), None, None),
        (held(MODEL, (0, 5), (1, 5), (2, 5), (3, 5)), 5, {0: 0, 1: 1, 2: 2, 3: 3}),
        (held(MODEL, (0, 5), (1, 5.5), (2, 6), (3, 5)), None, None),
        (held(MODEL, (0, 5.5), (1, 5.5), (2, 6), (3, 5.5)), 6, {0: 0, 1: 1, 2: 2, 3: 3}),
        # Of each column one.
        (held(BOTH, (0, 5), (3, 5)), 5, {0: 0, 3: 1}),
        (held(BOTH, (0, 5), (2, 5)), None, None),
        (held(BOTH, (0, 5.5), (1, 5), (2, 6)), 5, {0: 0, 1: 1}),
        (held(BOTH, (0, 5.5), (1, 5.5), (2, 6)), 6, {0: 0, 1: 1, 2: 2}),
        # One that was left half done, and ranks to spare, hold nothing.
        ([[], *held(DATA, (1, 5)), []], 5, {1: 1}),
        ([[], []], None, None),
        # The newer mesh counts, where all of it is there.
        ([*held(DATA, (0, 5)), *held(DATA, (1, 4), attempt=2)], 4, {1: 1}),
        ([*held(DATA, (0, 5)), *held(MODEL, (1, 7), attempt=2)], 5, {0: 0}),
    ],
)
def test_the_newest_step_of_which_all_is_there(found, step, holders):
    source = newest(found)
    assert (None if source is None else (source.step, dict(source.holders))) == (
        None if step is None else (step, holders)
    )


class Comm:
    """One rank's end of a communicator between threads, as far as `hand_over` needs one."""

    def __init__(self, rank: int, boxes: dict[tuple[int, int], Any]):
        self.rank, self._boxes = rank, boxes

    def Isend(self, data, to):
        self._boxes[self.rank, to].put(data.copy())
        return Done(lambda: None)

    def Irecv(self, data, source):
        def wait():
            data[...] = self._boxes[source, self.rank].get(timeout=10)

        return Done(wait)


class Done:
    def __init__(self, wait):
        self.Wait = wait


def of_rank(whole: VariableStore, rank: int) -> VariableStore:
    """What one rank of a simulated mesh holds, as under MPI."""
    part = VariableStore(whole.mesh, [rank])
    part.types = whole.types
    part.blocks = {name: {rank: blocks[rank].copy()} for name, blocks in whole.blocks.items()}
    return part


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        (Placed("all:4"), Placed("all:3"), [1]),
        (Placed("all:4"), Placed("all:1"), [0, 1, 3]),
        (Placed("rows:2;cols:2", "hidden:cols"), Placed("rows:1;cols:2", "hidden:cols"), [3]),
        (Placed("rows:2;cols:2", "vocab:cols"), Placed("rows:2;cols:1", "model:rows"), [0]),
        (Placed("rows:2;cols:3", "model:cols"), Placed("rows:2;cols:2", "heads:rows"), [4]),
        (Placed("rows:3;cols:2", "heads:cols"), Placed("all:4", "", "vocab:all"), [0, 3]),
    ],
)
def test_every_element_gets_to_the_new_mesh(before, after, lost):
    given = values(3)
    old, new, wanted = store(before, given), store(after, values(4)), store(after, given)
    alive = [r for r in range(old.mesh.shape.size) if r not in lost]
    splits = splits_of(of_rank(old, 0))
    source = newest([[Holding(1, old.mesh.shape, r, 7, False, splits)] for r in alive])
    assert isinstance(source, Source) and source.step == 7
    olds = [of_rank(old, r) for r in alive]
    news = [of_rank(new, k) if k < new.mesh.shape.size else None for k in range(len(alive))]
    wants = [None if n is None else wanted_by(n) for n in news]
    boxes = {(a, b): queue.Queue() for a in range(len(alive)) for b in range(len(alive))}
    types = types_of(olds[0])
    threads = [
        threading.Thread(target=hand_over, args=(Comm(k, boxes), source, types, olds[k], news[k], wants))
        for k in range(len(alive))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert all(box.empty() for box in boxes.values())
    for k, there in enumerate(news):
        for name in new.types if there is not None else ():
            assert there.blocks[name][k].tobytes() == wanted.blocks[name][k].tobytes(), name
