"""Files of checkpoints: every way to be damaged is told; a block costs its own bytes."""

from __future__ import annotations

import json
import math
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from meshmpi.checkpoint.tensor_header import make_header
from meshmpi.errors import CheckpointError
from meshmpi.kernels import numpy_dtype
from meshmpi.transformer.pretrained.files import Checkpoint, contiguous_runs

NUMPY_KINDS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64}


def random(shape, dtype=np.float32, seed=0):
    return (np.random.default_rng(seed).standard_normal(shape) * 3).astype(dtype)


def small_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"a": random((3, 4)), "b": random((5,), seed=1), "c": random((2, 2, 2))}, path)
    return path


def raw(path: Path, header, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(shape, start, stop, kind="F32"):
    return {"dtype": kind, "shape": shape, "data_offsets": [start, stop]}


# ---- reading ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F64", "F32", "F16", "BF16", "I64"])
def test_every_type_is_read(tmp_path, kind):
    dtype = NUMPY_KINDS.get(kind) or numpy_dtype("bfloat16")
    x = random((3, 5), dtype)
    header, _ = make_header({"x": (kind, x.shape)})
    (tmp_path / "x.safetensors").write_bytes(header + x.tobytes())
    with Checkpoint(tmp_path / "x.safetensors") as file:
        narrow, wide = ("int64", "int64") if kind == "I64" else ("float32", "float64")
        got = file.read("x", [(1, 3), (2, 5)], dtype=narrow)
        assert got.dtype == narrow
        np.testing.assert_array_equal(got, x[1:3, 2:5].astype(narrow))
        assert file.read("x", dtype=wide).dtype == wide
        assert file.bytes_read == (6 + 15) * x.itemsize


@pytest.mark.parametrize("length", [636, 640, 644, 640 + 65536, 0x04034B50 % 65536])
def test_any_length_of_header(length):
    """640 is 80 02: what a pickle begins with."""
    entries = {"x": entry([3], 0, 12)}
    text = json.dumps(entries).encode().ljust(length)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.safetensors")
        path.write_bytes(struct.pack("<Q", len(text)) + text + np.arange(3, dtype="f4").tobytes())
        with Checkpoint(path) as file:
            assert file.read("x").tolist() == [0, 1, 2]


@given(st.data())
def test_a_block_costs_its_own_bytes(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
    pairs = [data.draw(st.tuples(st.integers(0, n), st.integers(0, n))) for n in shape]
    ranges = [(min(p), max(p)) for p in pairs]
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    path = tmp_path_factory.mktemp("block") / "x.safetensors"
    save_file({"before": random((3,)), "x": x, "z": random((2,))}, path)
    with Checkpoint(path) as file:
        got = file.read("x", ranges)
        assert file.bytes_read == got.nbytes == 4 * math.prod(b - a for a, b in ranges)
    np.testing.assert_array_equal(got, x[tuple(slice(a, b) for a, b in ranges)])
    runs = list(contiguous_runs(shape, [[r] for r in ranges]))
    covered = [k for start, count in runs for k in range(start, start + count)]
    assert covered == got.reshape(-1).astype(int).tolist()
    assert all(count for _, count in runs)


def test_whole_rows_are_one_run():
    for shape, pieces, runs in (
        ((4, 3, 5), [[(1, 3)], [(0, 3)], [(0, 5)]], [(15, 30)]),
        ((4, 3, 5), [[(0, 4)], [(0, 3)], [(0, 5)]], [(0, 60)]),
        ((2, 4), [[(0, 2)], [(1, 3)]], [(1, 2), (5, 2)]),
        ((2, 6), [[(0, 2)], [(0, 2), (4, 6)]], [(0, 2), (4, 2), (6, 2), (10, 2)]),
        ((6, 2), [[(0, 2), (4, 6)], [(0, 2)]], [(0, 4), (8, 4)]),
        ((6, 2), [[], [(0, 2)]], []),
        ((), [], [(0, 1)]),
    ):
        assert list(contiguous_runs(shape, pieces)) == runs


def test_what_cannot_be_read_of_a_good_file(tmp_path):
    path = small_file(tmp_path)
    with Checkpoint(path) as file:
        with pytest.raises(CheckpointError, match=r"has no tensor 'aa'.*Did you mean 'a'"):
            file.read("aa")
        for ranges in ([(0, 4), (0, 4)], [(0, 3)], [(2, 1), (0, 4)], [(-1, 1), (0, 4)]):
            with pytest.raises(CheckpointError, match=r"'a' of .* is \[3, 4\]; the block"):
                file.read("a", ranges)
    save_file({"q": np.zeros((4,), np.int8)}, tmp_path / "q.safetensors")
    with Checkpoint(tmp_path / "q.safetensors") as file:
        assert file.shape("q") == (4,)
        with pytest.raises(CheckpointError, match=r"'q' of .* is of type I8.*Quantised"):
            file.read("q")


def test_a_file_cut_while_it_is_read(tmp_path):
    path = small_file(tmp_path)
    with Checkpoint(path) as file:
        with open(path, "r+b") as other:
            other.truncate(path.stat().st_size - 4)
        with pytest.raises(CheckpointError, match=r"cut while it was read: of tensor '\w' \d+"):
            for key in file.places:
                file.read(key)


# ---- damaged files ---------------------------------------------------------------------------


def test_every_truncation_is_told(tmp_path):
    path = small_file(tmp_path)
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError) as caught:
            Checkpoint(path)
        text = str(caught.value)
        assert str(path) in text and "again" in text
        if size < 8:
            assert f"it has {size} bytes" in text
        elif size < 8 + length:
            assert f"ends at byte {8 + length}, the file has {size}" in text
        else:
            assert "ends within tensor '" in text and f"found {size - 8 - length}" in text
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="expected 100 bytes of data, found 101"):
        Checkpoint(path)


def test_files_of_the_library_are_equal(tmp_path):
    path = small_file(tmp_path)
    expected = load_file(path)
    with Checkpoint(path) as file:
        assert sorted(file.places) == sorted(expected)
        for key, value in expected.items():
            np.testing.assert_array_equal(file.read(key), value)


BAD_HEADERS = {
    "overlap": (
        {"a": entry([2], 0, 8), "b": entry([2], 4, 12)},
        12,
        r"'b' begins at byte 4 of the data, within tensor 'a', which ends at 8",
    ),
    "gap": ({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, 12, r"bytes 4\.\.8 .* before .*'b'"),
    "size": ({"a": entry([3], 0, 8)}, 8, r"'a' F32\[3\] should take 12 bytes.*give it 8"),
    "type": ({"a": entry([2], 0, 8, "F64")}, 8, r"'a' F64\[2\] should take 16 bytes"),
    "negative": ({"a": entry([-1], 0, 4)}, 4, "'a' is described as"),
    "backwards": ({"a": entry([1], 4, 0, "F4")}, 4, "'a' has offsets 4"),
    "words": ({"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}, 4, "is described"),
    "incomplete": ({"a": {"dtype": "F32"}}, 0, "'a' has no dtype, shape or data_offsets"),
    "twice": (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        4,
        "it has 'a' twice",
    ),
    "list": (b"[1, 2]", 0, "not a table"),
    "metadata": ({"__metadata__": 3}, 0, "__metadata__ is not a table"),
    "text": (b"{not json", 0, "header cannot be read: Expecting"),
    "bytes": (b'{"\xff": 1}', 0, "header cannot be read"),
    "deep": (b"[" * 100_000, 0, "header cannot be read"),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_bad_headers(tmp_path, name):
    header, size, message = BAD_HEADERS[name]
    path = raw(tmp_path / "bad.safetensors", header, b"\0" * size)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(path)
    assert f"{path} is damaged" in str(caught.value)


@pytest.mark.parametrize(
    ("begin", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"PK\x03\x04 something else", "ZIP or PyTorch"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"\xff" * 20, "would have 18446744073709551615 bytes, the most is 104857600"),
    ],
)
def test_other_files(tmp_path, begin, message):
    path = tmp_path / "x.safetensors"
    path.write_bytes(begin)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(path)


@given(st.data())
def test_a_damaged_header_is_never_a_crash(tmp_path_factory, data):
    """Some bytes of the header are others: it is refused, or still describes the file wholly."""
    path = small_file(tmp_path_factory.mktemp("header"))
    whole = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", whole[:8])
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, 7 + length))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    try:
        with Checkpoint(path) as file:
            assert sum(p.stored.stop - p.stored.start for p in file.places.values()) == len(whole) - 8 - length
    except CheckpointError as error:
        assert str(path) in str(error)


# ---- shards and folders ----------------------------------------------------------------------


def sharded(folder: Path, index=None) -> Path:
    save_file({"a": random((3, 4)), "b": random((5,), seed=1)}, folder / "one.safetensors")
    save_file({"c": random((2, 2))}, folder / "two.safetensors")
    map_ = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 84}, "weight_map": index or map_}))
    return path


def test_shards_read_as_one(tmp_path):
    index = sharded(tmp_path)
    for path in (index, tmp_path):
        with Checkpoint(path) as file:
            assert list(file.places) == ["a", "b", "c"]
            np.testing.assert_array_equal(file.read("c", [(0, 2), (1, 2)]), random((2, 2))[:, 1:])
            assert file.bytes_read == 8


def test_bad_shards(tmp_path):
    one, two = "one.safetensors", "two.safetensors"

    def refused(message, index=None):
        path = sharded(tmp_path, index)
        with pytest.raises(CheckpointError, match=message):
            Checkpoint(path)

    refused(r"one.safetensors has no tensor 'd'", {"a": one, "b": one, "c": two, "d": one})
    refused(r"has no tensor 'b'.*one.safetensors has it", {"a": one, "b": two, "c": two})
    refused(r"has a tensor 'b' that", {"a": one, "c": two})
    refused(r"three.safetensors, a shard that .*json names, cannot be read", {"a": "three" + one[3:]})
    refused("not the name of a file next to it", {"a": "../one.safetensors"})
    refused("not the name of a file next to it", {"a": 3})
    index = sharded(tmp_path)
    (tmp_path / two).write_bytes((tmp_path / two).read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=r"two.safetensors is damaged: it ends within .*'c'"):
        Checkpoint(index)
    save_file({"a": random((3, 4)), "c": random((2, 2))}, tmp_path / two)
    with pytest.raises(CheckpointError, match=r"'a' is in .*one.safetensors and in two"):
        Checkpoint(index)
    for text in ("{", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "x", "a": "y"}}'):
        index.write_text(text)
        with pytest.raises(CheckpointError, match="the index .* cannot be read"):
            Checkpoint(index)


def test_finding_the_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"has neither model.safetensors nor"):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(CheckpointError, match=r"pytorch_model.bin is a PyTorch pickle.*Conv"):
            Checkpoint(path)
    with pytest.raises(CheckpointError, match="gpt2 is missing.*hub"):
        Checkpoint(tmp_path / "gpt2")
    with pytest.raises(CheckpointError, match=r"x.safetensors cannot be read: No such file"):
        Checkpoint(tmp_path / "x.safetensors")
    save_file({"a": random((2,))}, tmp_path / "other.safetensors")
    save_file({"a": random((2,))}, tmp_path / "adapter_model.safetensors")
    with Checkpoint(tmp_path) as file:
        assert file.path.name == "other.safetensors"
    save_file({"b": random((2,))}, tmp_path / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"2 .safetensors files and no .*more.*, other"):
        Checkpoint(tmp_path)


def test_files_are_closed(tmp_path):
    path = small_file(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with Checkpoint(path) as file:
        file.read("a")
    raw(tmp_path / "bad.safetensors", b"[]")
    for _ in range(3):
        with pytest.raises(CheckpointError):
            Checkpoint(tmp_path / "bad.safetensors")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
