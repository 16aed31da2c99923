"""`meshmpi checkpoint ...`: what it prints, its exit status, and that numbers stay as they are."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from meshmpi import checkpoint
from meshmpi.checkpoint.tools import differences, problems
from meshmpi.cli import main
from tests.soak.stores import LAYOUTS, Placed, equal, store, values

PLACED = LAYOUTS[6]
ABOUT = {"layout": PLACED.layout}


@pytest.fixture
def folder(tmp_path):
    """A run with two checkpoints."""
    for step in (10, 20):
        made = store(PLACED, values(step, wide=True), True)
        checkpoint.save(tmp_path / "run" / "checkpoints", made, step, ABOUT)
    return tmp_path / "run"


def call(capsys, *words):
    status = main(["checkpoint", *map(str, words)])
    done = capsys.readouterr()
    return status, done.out + done.err


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def test_ls(folder, capsys):
    status, text = call(capsys, "ls", folder)
    _, newest, oldest = text.splitlines()
    assert status == 0 and newest.startswith("step-00000020") and "step-00000010" in oldest
    for part in ("{rows: 2, cols: 3}", "model:rows;hidden:cols", "all files present", " 6 "):
        assert part in newest
    assert call(capsys, "ls", folder / "checkpoints")[1] == text
    (folder / "checkpoints" / "step-00000010" / "rank-00003.safetensors").unlink()
    flip(folder / "checkpoints" / "step-00000020" / "manifest.json")
    status, text = call(capsys, "ls", folder)
    assert status == 1 and "rank-00003.safetensors: No such file" in text
    assert "is damaged (" in text


def test_verify_names_every_damaged_block(folder, capsys):
    assert call(capsys, "verify", folder)[0] == 0
    newest = folder / "checkpoints" / "step-00000020"
    file = newest / "rank-00000.safetensors"
    text = file.read_bytes()
    wide = text.index(values(20, wide=True)["wide"][0].tobytes()[:64])
    flip(file, wide + (1 << 20))
    status, text = call(capsys, "verify", newest)
    assert status == 1
    assert "shard rank-00000 of step 20 is damaged (tensor 'wide', bytes 1048576 to" in text
    flip(file, -1)
    (newest / "rank-00004.safetensors").unlink()
    found = list(problems(checkpoint.read_manifest(newest)))
    assert len(found) == 3 and any("rank-00004" in p and "No such file" in p for p in found)
    status, text = call(capsys, "verify", folder)
    assert status == 1 and "step-00000010: whole, 9 tensors" in text


def test_diff(folder, capsys, tmp_path):
    run = folder / "checkpoints"
    same = call(capsys, "diff", run / "step-00000020", folder)
    assert same[0] == 0 and "9 tensors bit-equal" in same[1]
    status, text = call(capsys, "diff", run / "step-00000010", folder, "--rows", "100")
    assert status == 1 and "1 tensors bit-equal" in text  # the frozen one
    given = values(20, wide=True)
    given["layers/0/scale"][3] = 0.5
    given["steps"][...] += 2
    made = store(Placed("all:1"), given, True)
    before = made.blocks["layers/0/scale"][0].copy()
    a = checkpoint.save(tmp_path / "a", made, 20, {})
    made.blocks["layers/0/scale"][0][3] = 0.75
    made.blocks["layers/0/heads"][0][0, 0, 0] = np.nan
    b = checkpoint.save(tmp_path / "b", made, 20, {})
    found = {d.name: d for d in differences(*map(checkpoint.read_manifest, (a, b)))}
    assert set(found) == {"layers/0/scale", "layers/0/heads"} and before[3] == 0.5
    scale = found["layers/0/scale"]
    assert (scale.different, scale.elements, scale.largest) == (1, 12, 0.25)
    assert np.isnan(found["layers/0/heads"].largest)
    small = checkpoint.save(
        tmp_path / "c",
        store(Placed("all:1"), tensors={"other": ([("x", 2)], "float32"), "wide": ([("wide", 3)], "bfloat16")}),
        20,
        {},
    )
    text = call(capsys, "diff", a, small)[1]
    assert "other" in text and f"only in {small}" in text
    assert "float32 [wide=700, model=999] and bfloat16 [wide=3]" in text


@pytest.mark.parametrize("there", [Placed("all:1"), *LAYOUTS[8:11], LAYOUTS[12]], ids=str)
def test_convert(folder, capsys, tmp_path, there):
    words = ["--mesh", there.mesh, "--layout", there.layout, "--storage", there.storage]
    status, text = call(capsys, "convert", folder, tmp_path / "new", *words)
    assert status == 0 and f"wrote {tmp_path / 'new' / 'step-00000020'}" in text
    made = checkpoint.read_manifest(tmp_path / "new" / "step-00000020")
    old = checkpoint.read_manifest(folder / "checkpoints" / "step-00000020")
    assert list(differences(old, made)) == []
    assert made.about["layout"] == PLACED.layout and made.about["converted_from"] == str(old.folder)
    if there.mesh == "all:1":
        assert list(made.files) == ["rank-00000.safetensors"]
    found = store(LAYOUTS[5], wide=True)
    checkpoint.load(made, found)
    assert equal(found, values(20, wide=True))
    status, text = call(capsys, "convert", folder, tmp_path / "new", *words)
    assert status == 1 and "is there already" in text


def test_convert_refuses(folder, capsys, tmp_path):
    new = tmp_path / "new"
    for words, message in (
        (["--mesh", "a:2", "--layout", "model:a;vocab:a"], "split twice over mesh axis 'a'"),
        (["--mesh", "a:2", "--layout", "model:b"], "mesh axis 'b'"),
        (["--mesh", "a:2", "--layout", "modle:a"], "modle"),
    ):
        status, text = call(capsys, "convert", folder, new, *words)
        assert status == 1 and message in text
    flip(folder / "checkpoints" / "step-00000020" / "rank-00002.safetensors")
    status, text = call(capsys, "convert", folder, new)
    assert status == 1 and "shard rank-00002 of step 20 is damaged" in text
    assert not list(new.iterdir())


def test_export(folder, capsys, tmp_path):
    file = tmp_path / "sub" / "model.safetensors"
    status, text = call(capsys, "export", folder, file, "--without", "layers/*", "--only", "*")
    assert status == 0 and "5 tensors" in text
    given = values(20, wide=True)
    found = load_file(file)
    assert set(found) == {n for n in given if not n.startswith("layers/")}
    for name, x in found.items():
        assert x.tobytes() == given[name].tobytes() and x.shape == given[name].shape
    status, text = call(capsys, "export", folder, file, "--only", "nothing")
    assert status == 1 and "no tensor of" in text
    flip(folder / "checkpoints" / "step-00000020" / "rank-00000.safetensors")
    before = file.read_bytes()
    assert call(capsys, "export", folder, file)[0] == 1
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]


def test_there_is_none(tmp_path, capsys):
    for action in ("ls", "verify"):
        status, text = call(capsys, action, tmp_path)
        assert status == 1 and "there is no checkpoint in" in text
