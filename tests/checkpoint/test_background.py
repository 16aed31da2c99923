"""Saving beside the training: the state of the step it was asked at, whole or not there."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from meshmpi import checkpoint
from meshmpi.checkpoint.folder import durable_folder
from meshmpi.checkpoint.saving import begin
from meshmpi.errors import CheckpointError
from meshmpi.files import disk
from tests.soak.stores import Placed, equal, store, values

PLACED = Placed("all:2", "model:all;vocab:all")


class Held:
    """`os` whose renames wait until they are let go."""

    def __init__(self):
        self.go, self.thread = threading.Event(), None

    def __getattr__(self, name):
        return getattr(os, name)

    def pwrite(self, *given):
        self.thread = threading.current_thread()
        assert self.go.wait(30)
        return os.pwrite(*given)


@pytest.fixture
def held(monkeypatch):
    found = Held()
    monkeypatch.setattr(disk, "os", found)
    yield found
    found.go.set()


def overwrite(made, given):
    for name, blocks in store(PLACED, given).blocks.items():
        for rank, block in blocks.items():
            made.blocks[name][rank][...] = block


def test_the_state_when_it_was_asked_for(tmp_path, held):
    first, later = values(0), values(1)
    made = store(PLACED, first)
    saver = checkpoint.BackgroundSaver(tmp_path, made)
    saver.start(3, {"note": "x"})
    overwrite(made, later)  # the next step writes variables before a byte is on disk
    assert saver.pending and saver.poll() is None and checkpoint.find(tmp_path) == []
    held.go.set()
    path = saver.wait()
    assert not saver.pending and held.thread is not threading.main_thread()
    found = store(PLACED)
    assert checkpoint.load(path, found).step == 3 and equal(found, first)
    saver.start(4, {})
    overwrite(made, first)
    assert checkpoint.load(saver.wait(), found).step == 4 and equal(found, later)


def test_memory_is_taken_once_and_said_before(tmp_path, monkeypatch):
    made = store(PLACED, values(0))
    saver = checkpoint.BackgroundSaver(tmp_path, made)
    said = saver.copy_bytes
    saver.start(1, {})
    saver.wait()
    first = {k: c.ctypes.data for k, c in saver._copies.items()}
    assert said == sum(c.nbytes for c in saver._copies.values()) == saver.copy_bytes
    saver.start(2, {})
    saver.wait()
    assert {k: c.ctypes.data for k, c in saver._copies.items()} == first
    monkeypatch.setattr(np, "empty_like", None)  # not even for a moment
    saver._copied(0)


def test_a_failure_comes_at_the_next_look(tmp_path, monkeypatch):
    made = store(PLACED, values(0))
    good = checkpoint.save(tmp_path, made, 1, {})
    saver = checkpoint.BackgroundSaver(tmp_path, made)

    class Full:
        def __getattr__(self, name):
            return getattr(os, name)

        def fsync(self, file):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "os", Full())
    saver.start(2, {})
    saver._thread.join()
    with pytest.raises(CheckpointError, match=r"rank 0 cannot write .*ENOSPC, errno 28"):
        saver.poll()
    monkeypatch.undo()
    assert checkpoint.find(tmp_path) == [good] and not saver.pending
    assert sorted(p.name for p in tmp_path.iterdir()) == [good.name]
    saver.start(3, {})  # it can be tried again
    assert saver.wait().name == "step-00000003"


def test_an_unknown_error_of_the_thread_is_not_lost(tmp_path, monkeypatch):
    saver = checkpoint.BackgroundSaver(tmp_path, store(PLACED, values(0)))
    monkeypatch.setattr("meshmpi.checkpoint.saving.make_shard", lambda *_: (_ for _ in ()).throw(MemoryError()))
    saver.start(1, {})
    with pytest.raises(CheckpointError, match="rank 0: MemoryError"):
        saver.wait()


def test_a_save_that_was_given_up_does_not_write_into_the_next(tmp_path, held, monkeypatch):
    """As after the loss of a rank: the survivors' new run saves the same step again."""
    old, new = values(0), values(1)
    lost = checkpoint.BackgroundSaver(tmp_path, store(PLACED, old))
    lost.start(3, {})
    monkeypatch.setattr(disk, "os", os)
    begun = durable_folder(tmp_path, begin(store(PLACED).mesh, tmp_path, 3, {}))
    held.go.set()
    lost._thread.join()
    assert list(begun.partial.iterdir()) == []
    assert lost._thread.error is not None or not any(tmp_path.rglob("rank-*"))
    path = checkpoint.save(tmp_path, store(PLACED, new), 3, {})
    found = store(PLACED)
    checkpoint.load(path, found)
    assert equal(found, new) and [p.name for p in tmp_path.iterdir()] == [path.name]
