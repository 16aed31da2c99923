"""Buddies' copies: damaged and missing files come back, and it is said from where."""

from __future__ import annotations

import pytest

from meshmpi import checkpoint
from meshmpi.checkpoint.buddies import _IN_MEMORY, Buddies, buddy_ranks
from meshmpi.errors import CheckpointError
from meshmpi.launch.launch import launch
from tests.soak.stores import LAYOUTS, equal, store, values

PLACED = LAYOUTS[5]


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("a", [0]),
        ("aaa", [1, 2, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("abab", [1, 0, 3, 2]),
        ("aabbb", [2, 3, 0, 1, 0]),
        ("abc", [1, 2, 0]),
        ("aaab", [3, 3, 3, 0]),
    ],
)
def test_buddies_are_on_the_next_host(hosts, expected):
    assert buddy_ranks(list(hosts)) == expected


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_damaged_and_missing_files_come_back(tmp_path, where):
    given, folder = values(0, wide=True), tmp_path / "checkpoints"
    made = store(PLACED, given, True)
    buddies = Buddies(made.mesh, where if where == "memory" else str(tmp_path / "local"))
    path = checkpoint.save(folder, made, 7, {}, buddies=buddies)
    files = sorted(path.glob("*.safetensors"))
    before = [f.read_bytes() for f in files]
    files[0].write_bytes(before[0][:-1] + bytes([before[0][-1] ^ 1]))
    files[1].unlink()
    manifest = checkpoint.read_manifest(path)
    assert sorted(buddies.damaged(manifest)) == [f.name for f in files[:2]]
    found, said = store(LAYOUTS[0], wide=True), []
    with pytest.raises(CheckpointError, match="step 7"):
        checkpoint.load(path, found)
    checkpoint.load(path, found, buddies=buddies, say=said.append)
    assert equal(found, given) and [f.read_bytes() for f in files] == before
    assert buddies.damaged(manifest) == []
    text = "\n".join(said)
    assert "shard rank-00000 of step 7 is damaged" in text
    assert "shard rank-00001 of step 7 cannot be read: No such file" in text
    assert text.count("was restored from") == 2
    assert sorted(p.name for p in path.iterdir()) == sorted([*(f.name for f in files), "manifest.json"])


def test_a_damaged_copy_restores_nothing(tmp_path):
    made = store(PLACED, values(0))
    buddies = Buddies(made.mesh, str(tmp_path / "local"))
    path = checkpoint.save(tmp_path / "checkpoints", made, 7, {}, buddies=buddies)
    for copy in (tmp_path / "local").rglob("rank-00000.safetensors"):
        copy.write_bytes(copy.read_bytes()[:-1] + b"?")
    (path / "rank-00000.safetensors").unlink()
    assert buddies.damaged(checkpoint.read_manifest(path)) == [], "none that this could mend"
    with pytest.raises(CheckpointError, match="shard rank-00000 of step 7 cannot be read"):
        checkpoint.load(path, store(PLACED), buddies=buddies)


def test_copies_of_dropped_checkpoints_go(tmp_path):
    made = store(PLACED, values(0))
    local = Buddies(made.mesh, str(tmp_path / "local"))
    memory = Buddies(made.mesh, "memory")
    for step in (1, 2, 3):
        checkpoint.save(tmp_path / "a", made, step, {}, keep=2, buddies=local)
        checkpoint.save(tmp_path / "b", made, step, {}, keep=2, buddies=memory)
    kept = sorted(p.name[:13] for p in (tmp_path / "local").glob("*/*"))
    assert kept == ["step-00000002", "step-00000003"]
    assert {c.identity.step for c in _IN_MEMORY[str(tmp_path / "b")]} == {3}


def test_copies_in_memory_outlive_the_mesh(tmp_path):
    given = values(0)
    made = store(PLACED, given)
    path = checkpoint.save(tmp_path, made, 7, {}, buddies=Buddies(made.mesh, "memory"))
    (path / "rank-00001.safetensors").unlink()
    smaller = store(LAYOUTS[1])
    buddies = Buddies(smaller.mesh, "memory")
    checkpoint.load(path, smaller, buddies=buddies, say=lambda line: None)
    assert equal(smaller, given)


PROGRAM = """
import sys
from tests.soak.stores import Placed, equal, store, values
from meshmpi import checkpoint
from meshmpi.runtime.mesh import Mesh
folder, where = sys.argv[1:]
mesh, placed = Mesh("all:3"), Placed("all:3", "vocab:all;model:all")
given = values(0, wide=True)
made = store(placed, given, True, mesh)
buddies = checkpoint.Buddies(mesh, where)
path = checkpoint.save(folder, made, 1, {}, buddies=buddies)
if mesh.rank == 0:
    (path / "rank-00002.safetensors").unlink()
    (path / "rank-00001.safetensors").write_bytes(b"no such file")
mesh.comm.Barrier()
found = store(placed, None, True, mesh)
checkpoint.load(path, found, buddies=buddies, say=print)
assert equal(found, given)
assert not any(checkpoint.load(path, found).folder.glob(".*"))
mesh.comm.Barrier()
if mesh.rank == 0:
    (path / "rank-00001.safetensors").write_bytes(b"cut")
mesh.comm.Barrier()
found = store(Placed("all:3"), None, True, mesh)  # every rank reads every file
checkpoint.load(path, found, buddies=buddies, say=print)
assert equal(found, given)
"""


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_on_real_ranks_the_next_rank_has_the_copy(tmp_path, where):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    local = where if where == "memory" else str(tmp_path / "local")
    program = [str(script), str(tmp_path / "checkpoints"), local]
    done = launch(3, program, timeout_seconds=60, capture_output=True, environment={"PYTHONPATH": "."})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rank-00001 of step 1 is damaged (it has 3 bytes") == 1
    for rank, keeper in ((1, 2), (2, 0)):
        assert f"shard rank-0000{rank} of step 1 was restored from" in done.stdout
        expected = f"the memory of rank {keeper}" if where == "memory" else "rank 0's copy"
        assert expected in done.stdout
