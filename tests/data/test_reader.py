"""Readers: every format, whole and in blocks, gives the rows of the array; copies, maps, reading ahead, errors."""

from __future__ import annotations

import importlib
import sys
import threading

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.data.columns import ArrayColumn
from meshmpi.data.order import rows_at
from meshmpi.launch.launch import launch

COUNT = 23
X = np.random.default_rng(0).standard_normal((COUNT, 6)).astype(np.float32)
T = np.arange(COUNT, dtype=np.int32) * 10
WHOLE = {"x": None, "t": None}


def npy_files(folder):
    np.save(folder / "x.npy", X)
    np.save(folder / "t.npy", T)
    return folder


def shards(folder):
    for name, array in (("x", X), ("t", T)):
        (folder / name).mkdir()
        for k, part in enumerate(np.array_split(array, 4)):
            np.save(folder / name / f"part-{k}.npy", part)
    return folder


def hdf5(folder):
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "data.h5", "w") as file:
        file.create_dataset("x", data=X, chunks=(4, 6), compression="gzip")
        file["t"], file["about"] = T, "text"
    return folder / "data.h5"


def zarr_group(folder):
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(str(folder / "data.zarr"), mode="w")
    group.create_array("x", shape=X.shape, chunks=(5, 6), dtype=X.dtype)[:] = X
    group.create_array("t", shape=T.shape, chunks=(5,), dtype=T.dtype)[:] = T
    return folder / "data.zarr"


def table():
    arrow = pytest.importorskip("pyarrow")
    rows = arrow.FixedSizeListArray.from_arrays(arrow.array(X.ravel()), 6)
    return arrow, arrow.table({"x": rows, "t": T, "said": [str(n) for n in T]})


def parquet(folder):
    _, made = table()
    importlib.import_module("pyarrow.parquet").write_table(made, folder / "data.parquet", row_group_size=5)
    return folder / "data.parquet"


def arrow_file(folder):
    arrow, made = table()
    with arrow.OSFile(str(folder / "data.arrow"), "wb") as out, arrow.ipc.new_file(out, made.schema) as writer:
        writer.write_table(made, max_chunksize=7)
    return folder / "data.arrow"


def datasets_folder(folder):
    """As `datasets` saves it: files of streams, and lists of any length."""
    arrow, made = table()
    lists = made.set_column(0, "x", arrow.array(X.tolist(), arrow.list_(arrow.float32())))
    (folder / "state.json").write_text("{}")
    for k, (begin, end) in enumerate(((0, 11), (11, COUNT))):
        with arrow.OSFile(str(folder / f"data-{k}.arrow"), "wb") as out, arrow.ipc.new_stream(out, made.schema) as w:
            w.write_table(lists.slice(begin, end - begin).cast(made.schema) if k else made.slice(begin, end - begin))
    return folder


FORMATS = [npy_files, shards, hdf5, zarr_group, parquet, arrow_file, datasets_folder]


@pytest.mark.parametrize("copy", [False, True], ids=["direct", "copied"])
@pytest.mark.parametrize("shuffle", [False, True], ids=["ordered", "shuffled"])
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_the_rows_of_the_array(form, shuffle, copy, tmp_path, monkeypatch):
    monkeypatch.setenv("MESHMPI_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    path = form(tmp_path / "data")
    with mm.data.reader(path, batch=6, columns=["x", "t"], shuffle=shuffle, seed=5, copy=copy) as data:
        assert (data.rows, data.steps_per_epoch) == (COUNT, COUNT / 6)
        for step in (0, 1, 3, 4, 9):  # batches 3 and 7 go over the end of an epoch
            rows = rows_at(np.arange(6 * step, 6 * step + 6), COUNT, 5 if shuffle else None)
            whole = data.feeds(step, WHOLE)
            np.testing.assert_array_equal(whole["x"], X[rows])
            np.testing.assert_array_equal(whole["t"], T[rows])
            part = data.feeds(step, {"t": ((1, 4),), "x": ((4, 6), (2, 5))})
            np.testing.assert_array_equal(part["x"], X[rows[4:6], 2:5])
            np.testing.assert_array_equal(part["t"], T[rows[1:4]])
            assert data.feeds(step, {"x": ((2, 2), (0, 6))})["x"].shape == (0, 6)


@pytest.mark.parametrize("form", [npy_files, hdf5, zarr_group, parquet])
def test_a_whole_epoch_in_one_batch(form, tmp_path):
    """All rows follow each other in the file, but not in the batch."""
    data = mm.data.reader(form(tmp_path), batch=COUNT, columns=["x"], seed=1)
    np.testing.assert_array_equal(data.feeds(0, {"x": None})["x"], X[rows_at(np.arange(COUNT), COUNT, 1)])


def test_a_rank_reads_its_rows_only(monkeypatch):
    asked = []
    read = ArrayColumn.read
    monkeypatch.setattr(ArrayColumn, "read", lambda self, rows, rest=(): asked.append(rows) or read(self, rows, rest))
    data = mm.data.reader({"x": X}, batch=8, prefetch=0)
    asked.clear()
    data.feeds(1, {"x": ((2, 5), (0, 6))})
    assert [rows.tolist() for rows in asked] == [rows_at(np.arange(10, 13), COUNT, 0).tolist()]


def test_a_source_may_mix_arrays_and_files(tmp_path):
    shards(tmp_path)
    data = mm.data.reader({"x": tmp_path / "x", "t": T}, batch=COUNT, shuffle=False)
    found = data.feeds(0, WHOLE)
    np.testing.assert_array_equal(found["x"], X)
    np.testing.assert_array_equal(found["t"], T)


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_windows_of_tokens(tmp_path, suffix):
    text = np.arange(101, dtype=np.uint16)
    text.tofile(tmp_path / "text.bin")
    np.save(tmp_path / "text.npy", text)
    data = mm.data.tokens(tmp_path / f"text{suffix}", batch=2, length=10, shuffle=False)
    assert data.rows == 10
    found = data.feeds(4, {"tokens": ((1, 2), (3, 6)), "targets": None})
    np.testing.assert_array_equal(found["tokens"], [[93, 94, 95]])
    np.testing.assert_array_equal(found["targets"], [range(81, 91), range(91, 101)])
    shuffled = mm.data.tokens(tmp_path / f"text{suffix}", batch=5, length=10)
    windows = np.concatenate([shuffled.feeds(n, {"tokens": None})["tokens"] for n in (0, 1)])
    assert sorted(windows[:, 0].tolist()) == list(range(0, 100, 10))


def test_map_is_given_rows_and_their_places():
    def augment(columns, places):
        flipped = places % 2 == 1
        x = np.where(flipped[:, None], columns["x"][:, ::-1], columns["x"])
        return {"image": x, "label": columns["t"] // 10}

    data = mm.data.reader({"x": X, "t": T}, batch=4, shuffle=False, map=augment)
    found = data.feeds(1, {"image": ((1, 3), (0, 2)), "label": None})
    np.testing.assert_array_equal(found["image"], [X[5, ::-1][:2], X[6, :2]])
    np.testing.assert_array_equal(found["label"], [4, 5, 6, 7])


def test_reading_ahead_changes_nothing():
    ahead, plain = (mm.data.reader({"x": X, "t": T}, batch=5, prefetch=n) for n in (3, 0))
    held = {"x": ((0, 2), (0, 6)), "t": None}
    for step in (0, 1, 2, 9, 3, 4, 0):  # in any order
        for name, array in plain.feeds(step, held).items():
            np.testing.assert_array_equal(ahead.feeds(step, held)[name], array)
    assert any(t.name.startswith("meshmpi-data") for t in threading.enumerate())
    ahead.close()
    assert not any(t.name.startswith("meshmpi-data") for t in threading.enumerate())
    np.testing.assert_array_equal(ahead.feeds(1, WHOLE)["x"], plain.feeds(1, WHOLE)["x"])


def test_errors_of_the_thread_come_when_their_batch_is_wanted():
    def fails(columns, places):
        if 7 in places:
            raise ZeroDivisionError("row 7")
        return columns

    data = mm.data.reader({"x": X}, batch=4, map=fails)
    data.feeds(0, {"x": None})
    with pytest.raises(ZeroDivisionError, match="row 7"):
        data.feeds(1, {"x": None})


def test_the_digest_tells_data_apart():
    digest = mm.data.reader({"x": X}, batch=4).digest
    assert mm.data.reader({"x": X.copy()}, batch=5, seed=1).digest == digest
    other = X.copy()
    other[-1, -1] += 1
    for changed in ({"x": other}, {"y": X}, {"x": X[:-1]}, {"x": X.astype(np.float64)}):
        assert mm.data.reader(changed, batch=4).digest != digest


def test_in_a_loop_of_ones_own():
    with mm.Graph() as graph:
        x = mm.placeholder("x", "batch:4;io:6")
        total = mm.reduce_sum(x)
    step = mm.compile(graph, mm.SimulatedMesh("rows:2"), "batch:rows", fetches=[total])
    data = mm.data.reader({"x": X}, batch=4, shuffle=False)
    found = [step(data.block(step, n))[total] for n in range(3)]
    np.testing.assert_allclose(found, [X[4 * n : 4 * n + 4].sum() for n in range(3)], rtol=1e-5)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("mesh", "layout"), [("rows:2", "batch:rows"), ("rows:2", "io:rows"), ("rows:3;cols:1", "batch:rows")]
)
def test_every_layout_sees_the_same_data(tmp_path, mesh, layout):
    """Under MPI each rank reads its blocks; the fetched whole is the batch."""
    npy_files(tmp_path)
    ranks = int(mesh.partition(";")[0][-1])
    argv = ["-m", "tests.data.mpi_programs.reading", str(tmp_path), mesh, layout]
    done = launch(ranks, argv, timeout_seconds=60, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- errors ----------------------------------------------------------------------------------


def wrong(tmp_path, source, text, **more):
    with pytest.raises(mm.DataError) as caught:
        mm.data.reader(source(tmp_path) if callable(source) else source, **{"batch": 4, **more})
    assert text in str(caught.value), str(caught.value)


def test_what_cannot_be_read_is_told(tmp_path, monkeypatch):
    wrong(tmp_path, tmp_path / "nothing.h5", "nothing.h5 does not exist. Name a file or a folder.")
    wrong(tmp_path, {"x": X, "t": T[:-1]}, "columns have different numbers of rows: 'x' 23, 't' 22.")
    wrong(tmp_path, {"x": X[:0]}, "cannot make batches of 4 of 0 rows.")
    wrong(tmp_path, {"x": X}, "cannot make batches of 0 of 23 rows.", batch=0)
    wrong(tmp_path, {}, "there are no columns.")
    wrong(tmp_path, {"x": 3}, "'x' is a single number and has no rows.")
    wrong(tmp_path, {"x": ["a", None]}, "'x' holds Python objects.")
    (tmp_path / "text.csv").write_text("1,2\n")
    wrong(tmp_path, tmp_path / "text.csv", "text.csv is of no known format. Known: .npy files")
    (tmp_path / "bad.npy").write_bytes(b"\x93NUMPY broken")
    wrong(tmp_path, tmp_path / "bad.npy", "bad.npy cannot be read:")
    np.save(tmp_path / "objects.npy", np.array([{}, None]))
    wrong(tmp_path, tmp_path / "objects.npy", "objects.npy holds Python objects.")
    (tmp_path / "empty").mkdir()
    wrong(tmp_path, {"x": tmp_path / "empty"}, "has no .npy files.")
    (tmp_path / "mixed").mkdir()
    np.save(tmp_path / "mixed" / "a.npy", X)
    np.save(tmp_path / "mixed" / "b.npy", X[:, :4])
    wrong(tmp_path, {"x": tmp_path / "mixed"}, "Files of one column need rows of one shape and type.")
    wrong(tmp_path, tmp_path / "mixed" / "a.npy", "has no column 'z' for 'x'. Its columns: a.", columns={"x": "z"})
    monkeypatch.setitem(sys.modules, "h5py", None)
    (tmp_path / "data.h5").write_bytes(b"")
    wrong(tmp_path, tmp_path / "data.h5", "pip install 'meshmpi[data]'")


def test_formats_with_rows_of_different_lengths(tmp_path):
    arrow, _ = table()
    uneven = arrow.table({"x": [[1, 2], [3]]})
    importlib.import_module("pyarrow.parquet").write_table(uneven, tmp_path / "uneven.parquet")
    wrong(tmp_path, tmp_path / "uneven.parquet", "uneven.parquet:x have different lengths, 1 to 2.")
    holes = arrow.table({"x": arrow.array([1, None, 3])})
    importlib.import_module("pyarrow.parquet").write_table(holes, tmp_path / "holes.parquet")
    wrong(tmp_path, tmp_path / "holes.parquet", "holes.parquet:x has 1 missing values.")


def test_a_damaged_file_of_hdf5(tmp_path):
    path = hdf5(tmp_path)
    path.write_bytes(path.read_bytes()[:700])
    wrong(tmp_path, path, "data.h5 cannot be read:")


def test_tokens_that_do_not_fit(tmp_path):
    np.arange(9, dtype=np.uint8).tofile(tmp_path / "odd.bin")
    for more, text in (
        ({"length": 4}, "has 9 bytes, which are no whole number of uint16."),
        ({"length": 9, "dtype": "uint8"}, "has 9 tokens; a window of 9 and its target need 10."),
        ({"length": 4, "dtype": "uint7"}, "cannot be read as uint7"),
    ):
        with pytest.raises(mm.DataError, match=text):
            mm.data.tokens(tmp_path / "odd.bin", batch=1, **more)


def test_feeds_that_have_no_column():
    data = mm.data.reader({"images": X}, batch=4)
    with pytest.raises(mm.DataError, match=r"no column for the feed 'x'\. The columns are images"):
        data.feeds(0, {"x": None})
    short = mm.data.reader({"images": X}, batch=4, map=lambda columns, places: {"x": columns["images"][:2]})
    with pytest.raises(mm.DataError, match=r"map\(\) was given 4 rows and returned 2 of 'x'"):
        short.feeds(0, {"x": None})
    none = mm.data.reader({"images": X}, batch=4, map=lambda columns, places: columns)
    with pytest.raises(mm.DataError, match=r"map\(\) returned no 'x'"):
        none.feeds(0, {"x": None})
