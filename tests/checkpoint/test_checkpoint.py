"""Checkpoints: whole or not there, for any mesh, verified, never mistaken for another model's."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import meshmpi as mm
from meshmpi import checkpoint
from meshmpi.checkpoint import loading, shard
from meshmpi.checkpoint.hashing import PIECE_BYTES
from meshmpi.checkpoint.manifest import digest as manifest_digest
from meshmpi.errors import CheckpointError
from meshmpi.ir.scalar import DTYPES
from meshmpi.kernels import numpy_dtype
from tests.soak.stores import Placed, equal, store

LAYOUTS = [
    ("a:1", "", ""),
    ("rows:2;cols:3", "batch:rows;hidden:cols", ""),
    ("rows:3;cols:2", "hidden:rows", "io:cols"),
    ("rows:2;cols:2", "batch:rows", "hidden:cols;io:rows"),
]


def compiled(mesh="a:1", layout="", storage="", hidden=7, dtype="float32", optimizer=True):
    with mm.Graph() as graph:
        x = mm.placeholder("x", [("batch", 4), ("io", 5)])
        w = mm.get_variable("w", [("io", 5), ("hidden", hidden)], mm.VariableDType(dtype, "float32"))
        counter = mm.get_variable("count", [], "int32", trainable=False)
        y = mm.reduce_sum(mm.einsum([x, w], [("batch", 4), ("hidden", hidden)]))
        updates = [mm.assign(counter, counter + 1)]
        if optimizer:
            from meshmpi.nn import optimize

            updates += optimize.Adam(0.1).minimize(y)
    return mm.compile(graph, mm.SimulatedMesh(mesh), layout, fetches=[y], updates=updates, storage=storage)


def save(step, folder, number=3, **options):
    return checkpoint.save(folder, step.variables, number, {"note": "hello"}, **options)


def run(step, count):
    x = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    return [next(iter(step(x=x).values())) for _ in range(count)]


def test_table_of_types():
    assert sorted(shard.FORMAT_NAMES) == sorted(DTYPES)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_that_a_variable_may_have_is_saved_and_loaded(tmp_path, dtype):
    value = np.array([[0, 1, 1], [1, 0, 1]]).astype(numpy_dtype(dtype))

    def holding(array, mesh, layout):
        with mm.Graph() as graph:
            v = mm.get_variable("v", "a:2;b:3", dtype, array, trainable=False)
        return mm.compile(graph, mm.SimulatedMesh(mesh), layout, fetches=[v])

    written = holding(value, "r:2", "b:r")
    read = holding(np.zeros_like(value), "r:2", "a:r")
    checkpoint.load(checkpoint.save(tmp_path, written.variables, 1, {}), read.variables)
    np.testing.assert_array_equal(read.variables["v"], value)


@pytest.mark.parametrize("write", LAYOUTS)
@pytest.mark.parametrize("read", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_mesh_reads_what_any_mesh_wrote(tmp_path, write, read, dtype):
    a, b = compiled(*write, dtype=dtype), compiled(*read, dtype=dtype)
    run(a, 2)
    manifest = checkpoint.load(save(a, tmp_path), b.variables)
    assert (manifest.step, manifest.about) == (3, {"note": "hello"})
    for name in a.variables:
        np.testing.assert_array_equal(a.variables[name], b.variables[name], err_msg=name)


def test_every_block_is_written_once(tmp_path):
    step = compiled("rows:2;cols:3", "batch:rows;hidden:cols")
    manifest = checkpoint.read_manifest(save(step, tmp_path))
    files, pieces = zip(*manifest.pieces("w", ((0, 5), (0, 7))), strict=True)
    assert list(files) == [f"rank-{r:05d}.safetensors" for r in range(3)]
    assert [p.target[1] for p in pieces] == [slice(0, 3), slice(3, 5), slice(5, 7)]
    assert len(list(manifest.pieces("count", ()))) == 1
    assert sorted(manifest.files) == list(files)
    assert sum(len(load_file(manifest.folder / f)) for f in manifest.files) == 3 * 3 + 2


def test_files_are_safetensors(tmp_path):
    step = compiled()
    with safe_open(save(step, tmp_path) / "rank-00000.safetensors", framework="np") as file:
        np.testing.assert_array_equal(file.get_tensor("w"), step.variables["w"])
        assert sorted(file.keys()) == sorted(step.variables)


def test_resume_is_exact(tmp_path):
    whole = run(compiled(), 6)
    first = compiled()
    begun = run(first, 3)
    second = compiled()
    checkpoint.load(save(first, tmp_path), second.variables)
    assert begun + run(second, 3) == whole


def test_newest_is_found_and_old_ones_go(tmp_path):
    step = compiled()
    for number in (5, 10, 100):
        save(step, tmp_path, number, keep=2)
    (tmp_path / ".step-00000200.partial").mkdir()
    assert [p.name for p in checkpoint.find(tmp_path)] == ["step-00000100", "step-00000010"]
    save(step, tmp_path, 100, keep=2)  # the same step again
    manifest, notes = checkpoint.load_newest(tmp_path, step.variables)
    assert manifest.step == 100 and notes == []


def damage(path, offset=-10):
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


def test_damaged_shard_is_named_and_the_one_before_is_used(tmp_path):
    step = compiled()
    save(step, tmp_path, 1100)
    expected = step.variables["w"].copy()
    run(step, 1)
    newest = save(step, tmp_path, 1200)
    damage(newest / "rank-00000.safetensors")
    other = compiled()
    with pytest.raises(CheckpointError, match=r"shard rank-00000 of step 1200 is damaged.*checksum"):
        checkpoint.load(newest, other.variables)
    manifest, (note,) = checkpoint.load_newest(tmp_path, other.variables)
    assert manifest.step == 1100
    np.testing.assert_array_equal(other.variables["w"], expected)
    assert "shard rank-00000 of step 1200 is damaged" in note and "step-00001200" in note


def test_nothing_is_overwritten_by_a_damaged_checkpoint(tmp_path):
    step, other = compiled("a:2", "hidden:a"), compiled()
    run(step, 1)
    folder = save(step, tmp_path)
    damage(folder / "rank-00001.safetensors")
    before = other.variables["w"].copy()
    with pytest.raises(CheckpointError, match="shard rank-00001 of step 3"):
        checkpoint.load(folder, other.variables)
    np.testing.assert_array_equal(other.variables["w"], before)


def test_any_damaged_byte_is_found(tmp_path):
    step = compiled()
    folder = save(step, tmp_path)
    file = folder / "rank-00000.safetensors"
    data = file.read_bytes()
    for offset in range(len(data)):
        damage(file, offset)
        with pytest.raises(CheckpointError, match=r"shard rank-00000 .* is damaged"):
            checkpoint.load(folder, step.variables)
        file.write_bytes(data)


def test_shortened_and_missing_shard(tmp_path):
    step = compiled()
    folder = save(step, tmp_path)
    file = folder / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=r"it has \d+ bytes, \d+ were written"):
        checkpoint.load(folder, step.variables)
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        checkpoint.load(folder, step.variables)


def test_damaged_manifest(tmp_path):
    step = compiled()
    folder = save(step, tmp_path)
    file = folder / "manifest.json"
    text = file.read_text()
    for position in range(0, len(text), 97):
        damage(file, position)
        with pytest.raises(CheckpointError, match=r"manifest of .* is damaged"):
            checkpoint.load(folder, step.variables)
        file.write_text(text)
    _, body = text.rstrip("\n").split("\n")
    content = json.loads(body) | {"format": 99}
    body = json.dumps(content)
    file.write_text(f"{manifest_digest(body)}\n{body}\n")
    with pytest.raises(CheckpointError, match="has format 99"):
        checkpoint.load(folder, step.variables)


def test_missing_checkpoint(tmp_path):
    step = compiled()
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        checkpoint.load_newest(tmp_path / "nowhere", step.variables)
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        checkpoint.load(tmp_path, step.variables)


def test_foreign_checkpoint(tmp_path):
    folder = save(compiled(), tmp_path)
    with pytest.raises(CheckpointError, match=r"another model: 'w' is float32\[5, 7\] there and"):
        checkpoint.load(folder, compiled(hidden=8).variables)
    with pytest.raises(CheckpointError, match=r"'w' is float32\[5, 7\] there and bfloat16"):
        checkpoint.load(folder, compiled(dtype="bfloat16").variables)
    bare = compiled(optimizer=False)
    with pytest.raises(CheckpointError, match="it has 'adam/step' in addition"):
        checkpoint.load_newest(tmp_path, bare.variables)
    checkpoint.load(folder, bare.variables, extra=True)


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"rank 0 cannot write .*file: File exists \(EEXIST, errno 17\)"):
        save(compiled(), tmp_path / "file" / "checkpoints")


# ---- what killed jobs leave ------------------------------------------------------------------


def test_leftovers_go_with_the_next_save_or_resume(tmp_path):
    step = compiled()
    good = save(step, tmp_path, 5)
    for act in (lambda: save(step, tmp_path, 6), lambda: checkpoint.load_newest(tmp_path, step.variables)):
        for name in (".step-00000007.partial", ".step-00000004.gone", ".step-00000005.old"):
            shutil.copytree(good, tmp_path / name)
        act()
        assert not list(tmp_path.glob(".*"))


def test_killed_between_two_renames(tmp_path):
    step = compiled()
    save(step, tmp_path, 4)
    good = save(step, tmp_path, 5)
    good.rename(tmp_path / ".step-00000005.old")  # the new one was never renamed
    (tmp_path / ".step-00000005.partial").mkdir()
    assert checkpoint.find(tmp_path)[0].name == ".step-00000005.old"
    manifest, notes = checkpoint.load_newest(tmp_path, step.variables)
    assert (manifest.step, manifest.folder, notes) == (5, good, [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]


def test_damaged_checkpoints_do_not_push_out_whole_ones(tmp_path):
    step = compiled()
    for number in (1, 2, 3):
        save(step, tmp_path, number)
    (tmp_path / "step-00000003" / "rank-00000.safetensors").unlink()
    (tmp_path / "step-00000002" / "manifest.json").write_text("")
    newest = save(step, tmp_path, 4, keep=2)
    assert (tmp_path / "step-00000001").exists()
    (newest / "manifest.json").unlink()
    assert checkpoint.load_newest(tmp_path, step.variables)[0].step == 1


def test_a_folder_that_cannot_be_cleaned_can_be_read(tmp_path, monkeypatch):
    step = compiled()
    save(step, tmp_path, 5)
    (tmp_path / ".step-00000006.partial").mkdir()
    monkeypatch.setattr(os, "rmdir", lambda path: (_ for _ in ()).throw(OSError(30, "read-only")))
    manifest, notes = checkpoint.load_newest(tmp_path, step.variables)
    assert manifest.step == 5 and "leftovers stay" in notes[0]


# ---- reading ---------------------------------------------------------------------------------


class Counted:
    """Counts bytes read from files of tensors."""

    def __init__(self, monkeypatch):
        self.bytes, preadv = 0, os.preadv

        def counting(file, buffers, at):
            count = preadv(file, buffers, at)
            self.bytes += count
            return count

        monkeypatch.setattr(os, "preadv", counting)


ROWS = 4 * PIECE_BYTES // 512
"""Rows of a tensor of four pieces."""


@pytest.mark.parametrize(
    ("write", "read", "rank", "expected"),
    [
        (Placed("all:1"), Placed("all:1"), 0, 4),
        (Placed("all:1"), Placed("all:4", "x:all"), 2, 1),
        (Placed("all:1"), Placed("all:8", "x:all"), 3, 1),  # half a piece: all of it is verified
        (Placed("all:1"), Placed("all:3", "x:all"), 1, 2),
        (Placed("all:2", "x:all"), Placed("all:4", "x:all"), 3, 1),
        (Placed("all:2", "x:all"), Placed("all:2", "y:all"), 1, 4),  # all rows
        (Placed("all:2", "y:all"), Placed("all:2", "y:all"), 1, 2),
    ],
)
def test_only_what_a_rank_needs_is_read_once(tmp_path, monkeypatch, write, read, rank, expected):
    tensors = {"w": ([("x", ROWS), ("y", 128)], "float32")}
    given = {"w": np.arange(ROWS * 128, dtype=np.float32).reshape(ROWS, 128)}
    path = checkpoint.save(tmp_path, store(write, given, tensors=tensors), 1, {})
    there = store(read, tensors=tensors)
    there.ranks = [rank]
    there.blocks["w"] = {rank: there.blocks["w"][rank]}
    counted = Counted(monkeypatch)
    checkpoint.load(path, there)
    assert counted.bytes == expected * PIECE_BYTES
    assert equal(there, given)


def test_read_twice_where_memory_is_short(tmp_path, monkeypatch):
    step, other = compiled("rows:2;cols:3", "batch:rows;hidden:cols"), compiled()
    run(step, 1)
    path = save(step, tmp_path)
    counted = Counted(monkeypatch)
    checkpoint.load(path, other.variables)
    once = counted.bytes
    monkeypatch.setattr(loading, "fits_twice", lambda store: False)
    checkpoint.load(path, other.variables)
    assert counted.bytes == 3 * once
    np.testing.assert_array_equal(step.variables["w"], other.variables["w"])
    before = other.variables["w"].copy()
    run(step, 1)
    newer = save(step, tmp_path, 4)
    damage(newer / "rank-00002.safetensors")
    with pytest.raises(CheckpointError, match="shard rank-00002 of step 4"):
        checkpoint.load(newer, other.variables)
    np.testing.assert_array_equal(other.variables["w"], before)


def test_dims_of_the_same_size_are_told_apart(tmp_path):
    shapes = [[("a", 4), ("b", 4)], [("b", 4), ("a", 4)]]
    first, second = (store(Placed("all:1"), tensors={"w": (dims, "float32")}) for dims in shapes)
    path = checkpoint.save(tmp_path, first, 1, {})
    with pytest.raises(checkpoint.ForeignCheckpointError, match=r"'w' is \[a=4, b=4\] there and"):
        checkpoint.load(path, second)


def dropping(mesh="a:1", layout=""):
    """A step whose loss depends on its number, through dropout, and one that only evaluates."""
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:4;io:5")
        h = mm.dropout(mm.dense(x, mm.Dimension("hidden", 8)), True, rate=0.5)
        y = mm.reduce_mean(mm.square(h))
        updates = mm.optimize.Adam(0.1).minimize(y)
    mesh = mm.SimulatedMesh(mesh)
    step = mm.compile(graph, mesh, layout, fetches=[y], updates=updates)
    return step, mm.compile(graph, mesh, layout, fetches=[y], updates=[], variables=step.variables)


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("mesh", "layout"), [("a:1", ""), ("a:2", "batch:a")])
def test_dropout_of_a_script_goes_on_where_it_was(tmp_path, newest, background, mesh, layout):
    one, _ = dropping(mesh, layout)
    before = run(one, 3)
    if background:
        saver = checkpoint.BackgroundSaver(tmp_path, one.variables)
        saver.start(3, {})
        after = run(one, 3)  # what is saved is what was copied, whatever is done meanwhile
        path = saver.wait()
    else:
        path = checkpoint.save(tmp_path, one.variables, 3, {})
        after = run(one, 3)
    assert before != after
    other, evaluation = dropping(mesh, layout)
    run(evaluation, 2)  # only steps that update the variables have a number that is saved
    load, where = (checkpoint.load_newest, tmp_path) if newest else (checkpoint.load, path)
    load(where, other.variables)
    assert (other.step_number, evaluation.step_number) == (3, 2)
    assert run(other, 3) == after


def test_several_steps_get_their_numbers_back_in_order(tmp_path):
    def two():
        with mm.Graph() as graph:
            n, m = (mm.get_variable(name, (), "int32") for name in "nm")
            updates = [[mm.assign(n, n + 1)], [mm.assign(m, m + 1)]]
        first = mm.compile(graph, mm.SimulatedMesh("a:1"), fetches=[n, m], updates=updates[0])
        options = {"updates": updates[1], "variables": first.variables}
        return first, mm.compile(graph, first.mesh, fetches=[n], **options)

    (a, b), (c, d) = two(), two()
    for step in (a, a, b):
        step()
    checkpoint.load(checkpoint.save(tmp_path, a.variables, 9, {}), c.variables)
    assert (c.step_number, d.step_number) == (2, 1)


def test_a_checkpoint_without_step_numbers_leaves_them_alone(tmp_path):
    """As those of earlier versions."""
    step = compiled()
    run(step, 2)
    path = save(step, tmp_path)
    manifest = path / "manifest.json"
    content = json.loads(manifest.read_text().split("\n")[1])
    assert content.pop("step_numbers") == [2]
    text = json.dumps(content)
    manifest.write_text(f"{manifest_digest(text)}\n{text}\n")
    other = compiled()
    assert checkpoint.load(path, other.variables).step_numbers == ()
    assert other.step_number == 0


def test_what_was_loaded_has_names_and_a_short_look(tmp_path):
    step = compiled()
    path = save(step, tmp_path)
    found = checkpoint.load_newest(tmp_path, step.variables)
    assert (found.path, found.step, found.about) == (path, 3, {"note": "hello"})
    manifest, notes = found
    assert (manifest, notes) == (found.manifest, []) and manifest.path == path
    assert repr(found) == f"<Loaded {path}, step 3>"
    assert repr(manifest) == f"<Checkpoint {path}, step 3: 5 tensors, {manifest.data_bytes} bytes>"
