"""Going back to an older checkpoint: what is saved last is the newest, and nothing gets lost."""

from __future__ import annotations

import os
import shutil

import pytest

from meshmpi import checkpoint
from meshmpi.checkpoint.tools import convert
from meshmpi.dims import Layout, MeshShape
from meshmpi.errors import ArgumentError, CheckpointError
from meshmpi.files import disk
from tests.soak.stores import Placed, equal, store, values

PLACED = Placed("all:2", "model:all;vocab:all")


def save(folder, step, seed=None, **options):
    made = store(PLACED, values(step if seed is None else seed))
    return checkpoint.save(folder, made, step, {}, **options)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def seeds(folder):
    """Step -> the seed of its values, of every checkpoint below a folder."""
    found = []
    for path in sorted({p.parent for p in folder.rglob("manifest.json")}):
        there = store(PLACED)
        step = checkpoint.load(path, there).step
        found.append((step, next(s for s in (*range(1, 50), 102, 103) if equal(there, values(s)))))
    return sorted(found)


def test_what_was_saved_last_is_the_newest_and_is_kept(tmp_path):
    said = []
    for step in (100, 50, 1):
        path = save(tmp_path, step, 1, keep=2, say=said.append)
        assert checkpoint.find(tmp_path)[0] == path and path.exists()
    assert [p.name for p in checkpoint.find(tmp_path)] == ["step-00000001"]
    assert len(said) == 2 and "set aside in" in said[0] and "step-00000100" in said[0]
    for step in (2, 3):
        save(tmp_path, step, keep=2)
    assert [p.name for p in checkpoint.find(tmp_path)] == ["step-00000003", "step-00000002"]
    aside = [p for p in tmp_path.iterdir() if p.name.startswith("abandoned-after-")]
    assert sorted(p.name for a in aside for p in checkpoint.find(a)) == ["step-00000050", "step-00000100"]
    assert len(names(tmp_path)) == 4


@pytest.mark.parametrize("background", [False, True])
def test_after_the_step_that_was_gone_back_to(tmp_path, background):
    for step in (1, 2, 3):
        save(tmp_path, step)
    said, made = [], store(PLACED, values(12))
    if background:
        saver = checkpoint.BackgroundSaver(tmp_path, made, 2, say=said.append)
        saver.start(2, {}, after=1)
        saver.wait()
    else:
        checkpoint.save(tmp_path, made, 2, {}, keep=2, say=said.append, after=1)
    assert [p.name for p in checkpoint.find(tmp_path)] == ["step-00000002", "step-00000001"]
    assert seeds(tmp_path) == [(1, 1), (2, 2), (2, 12), (3, 3)]
    (line,) = said
    assert "step-00000002, step-00000003" in line and "after going back to step 1" in line


class Killed(BaseException):
    """As SIGKILL: nothing that comes after the call is done."""


class Dying:
    """`os` of which one call, counted from the first, fails; all later ones too if it is a kill."""

    def __init__(self, at, error):
        self.left, self.error = at, error

    def __getattr__(self, name):
        call = getattr(os, name)
        if not callable(call):
            return call

        def counted(*given):
            self.left -= 1
            if self.left == 0 or (self.left < 0 and self.error is Killed):
                raise self.error if self.error is Killed else OSError(5, "Input/output error")
            return call(*given)

        return counted


@pytest.mark.parametrize("error", [Killed, OSError])
def test_at_any_time_the_last_saved_timeline_counts_and_all_can_be_read(tmp_path, monkeypatch, error):
    """The old training has saved 1, 2, 3; it is gone back to 1, and 2 is saved again."""
    old, started = [(1, 1), (2, 2), (3, 3)], tmp_path / "started"
    for step, _ in old:
        save(started, step)
    outcomes, at = [], 0
    while not outcomes or outcomes[-1] != "done":
        at, folder, said = at + 1, tmp_path / "run", []
        shutil.copytree(started, folder)
        monkeypatch.setattr(disk, "os", Dying(at, error))
        try:
            save(folder, 2, 12, after=1, say=said.append)
            outcomes.append("stays" if any("stays" in s for s in said) else "done")
        except (Killed, CheckpointError):
            outcomes.append("failed")
        monkeypatch.undo()
        before = checkpoint.find(folder)
        found = store(PLACED)
        manifest, _ = checkpoint.load_newest(folder, found)
        assert manifest.step == int(before[0].name.split("step-")[1][:8])
        new = equal(found, values(12))
        assert new or equal(found, values(3)), at
        assert new or error is Killed or outcomes[-1] == "failed"
        assert set(old) <= set(seeds(folder)), at
        if new:
            assert [p.name for p in checkpoint.find(folder)] == ["step-00000002", "step-00000001"]
        else:
            assert [p.name[-1] for p in checkpoint.find(folder)] == ["3", "2", "1"]
        assert not list(folder.glob(".*"))
        save(folder, 4, keep=2)  # whichever it is, it goes on
        assert checkpoint.find(folder)[0].name == "step-00000004"
        shutil.rmtree(folder)
    assert outcomes.count("failed") > 10


def test_a_good_one_is_not_dropped_for_a_newer_damaged_one(tmp_path):
    save(tmp_path, 10)
    damaged = save(tmp_path, 20) / "rank-00000.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    there, said = store(PLACED), []
    assert checkpoint.load_newest(tmp_path, there)[0].step == 10
    save(tmp_path, 15, keep=1, after=10, say=said.append)
    assert [p.name for p in checkpoint.find(tmp_path)] == ["step-00000015"]
    assert checkpoint.load_newest(tmp_path, there)[1] == []


def test_converting_sets_nothing_aside(tmp_path):
    save(tmp_path / "to", 5)
    manifest = checkpoint.read_manifest(save(tmp_path / "from", 4))
    convert(manifest, tmp_path / "to", MeshShape([("all", 1)]), Layout(""), Layout(""))
    assert names(tmp_path / "to") == ["step-00000004", "step-00000005"]


def test_all_damaged_ones_are_named(tmp_path):
    for step in (1, 2):
        (save(tmp_path, step) / "rank-00000.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_newest(tmp_path, store(PLACED))
    text = str(caught.value)
    assert "are damaged: shard rank-00000 of step 2 is damaged (it has 2 bytes" in text
    assert "shard rank-00000 of step 1 is damaged" in text and caught.value.remedy


def test_a_damaged_file_has_a_remedy(tmp_path):
    path = save(tmp_path, 1)
    (path / "rank-00000.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match=r"Take an older checkpoint, or put a good copy of"):
        checkpoint.load(path, store(PLACED))


def test_values_that_json_does_not_have_are_refused_first(tmp_path):
    made = store(PLACED, values(0))
    for about, part in (
        ({"a": values(0)["bias"] if "bias" in values(0) else object()}, r"about\['a'\] is"),
        ({"a": [1, {"b": {3}}]}, r"about\['a'\]\[1\]\['b'\] is \{3\}, a set"),
        ({"a": {(1, 2): 3}}, r"about\['a'\] has the key \(1, 2\), a tuple"),
    ):
        with pytest.raises(CheckpointError, match=part):
            checkpoint.save(tmp_path / "run", made, 5, about)
        with pytest.raises(CheckpointError, match=part):
            checkpoint.BackgroundSaver(tmp_path / "run", made).start(5, about)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step", [-1, 5.0, "7", None])
def test_a_step_that_would_not_be_found_is_refused(tmp_path, step):
    said = "steps are integers from 0 on" if step == -1 else "which is not a whole number"
    with pytest.raises((CheckpointError, ArgumentError), match=said):
        checkpoint.save(tmp_path / "run", store(PLACED, values(0)), step, {})
    assert not (tmp_path / "run").exists()
