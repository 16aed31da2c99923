"""Columns: arrays on disk or in memory of which any rows can be read without the others."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshmpi.data.order import Places
from meshmpi.errors import DataError, suggest
from meshmpi.files import plain

Array = npt.NDArray[Any]
_GROUPS = 4
_NPY = b"\x93NUMPY"
Rest = tuple[slice, ...]
"""Which part of every row, along the dimensions after the first; an empty tuple is all of it."""


class Column(ABC):
    """Rows of one shape and type.

    Attributes:
        name: The file and the name in it, for messages.
        shape: The first size is the number of rows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @abstractmethod
    def read(self, rows: Places, rest: Rest = ()) -> Array:
        """These rows, in the order asked for, as a new array."""


def _of_numbers(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of a type are numbers; bfloat16 counts as void in NumPy."""
    return dtype.kind in "biufcV" and dtype.names is None and not dtype.hasobject


class ArrayColumn(Column):
    """A NumPy array, also one that is mapped from a file."""

    def __init__(self, name: str, array: Array) -> None:
        if not array.ndim:
            raise DataError(f"{name} is a single number and has no rows.", "Give an array of one dimension or more.")
        if not _of_numbers(array.dtype):
            what = "Python objects" if array.dtype.hasobject else f"{array.dtype}, not numbers"
            raise DataError(f"{name} holds {what}.", "Give an array of numbers.")
        self.name, self.array, self.shape, self.dtype = name, np.asarray(array), array.shape, array.dtype

    def read(self, rows: Places, rest: Rest = ()) -> Array:
        if rows.size and (np.diff(rows) == 1).all():  # one read
            return np.array(self.array[(slice(int(rows[0]), int(rows[-1]) + 1), *rest)])
        return self.array[(slice(None), *rest)][rows]


class RunColumn(Column):
    """An array of a library that reads ranges well and single rows badly, such as a dataset of HDF5."""

    def __init__(self, name: str, array: Any) -> None:
        if not array.shape:
            raise DataError(f"{name} is a single number and has no rows.", "Name an array.")
        self.name, self._array = name, array
        self.shape, self.dtype = tuple(array.shape), np.dtype(array.dtype)
        if not _of_numbers(self.dtype):
            raise DataError(f"{name} holds {array.dtype}, not numbers.", "Name an array of numbers.")

    def read(self, rows: Places, rest: Rest = ()) -> Array:
        order = np.argsort(rows, kind="stable")
        wanted = rows[order]
        cuts = [0, *(np.flatnonzero(np.diff(wanted) != 1) + 1).tolist(), len(wanted)]
        parts = [
            np.asarray(self._array[(slice(int(wanted[a]), int(wanted[b - 1]) + 1), *rest)])
            for a, b in itertools.pairwise(cuts)
            if a < b
        ]
        if not parts:
            return np.asarray(self._array[(slice(0, 0), *rest)])
        found = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if (np.diff(order) == 1).all():
            return found
        out = np.empty_like(found)
        out[order] = found
        return out


class JoinedColumn(Column):
    """Columns one after the other."""

    def __init__(self, name: str, parts: Sequence[Column]) -> None:
        first = parts[0]
        for part in parts[1:]:
            if (part.shape[1:], part.dtype) != (first.shape[1:], first.dtype):
                raise DataError(
                    f"{first.name} has rows {first.dtype}{list(first.shape[1:])}, {part.name}"
                    f" {part.dtype}{list(part.shape[1:])}.",
                    "Files of one column need rows of one shape and type.",
                )
        self.name, self._parts, self.dtype = name, parts, first.dtype
        self._ends = np.cumsum([p.shape[0] for p in parts])
        self.shape = (int(self._ends[-1]), *first.shape[1:])

    def read(self, rows: Places, rest: Rest = ()) -> Array:
        which = np.searchsorted(self._ends, rows, side="right")
        out: Array | None = None
        for k in np.unique(which).tolist():
            here = which == k
            begin = 0 if k == 0 else int(self._ends[k - 1])
            found = self._parts[k].read(rows[here] - begin, rest)
            out = np.empty((len(rows), *found.shape[1:]), self.dtype) if out is None else out
            out[here] = found
        return self._parts[0].read(rows, rest) if out is None else out


class GroupColumn(Column):
    """Rows that a file holds in compressed groups; a few groups at a time are kept in memory.

    Args:
        counts: Rows of each group.
        load: The rows of a group, by its number.
    """

    def __init__(self, name: str, counts: Sequence[int], load: Callable[[int], Array]) -> None:
        self.name, self._load, self._ends = name, functools.lru_cache(_GROUPS)(load), np.cumsum(counts)
        first = self._load(0)
        self.shape, self.dtype = (int(self._ends[-1]), *first.shape[1:]), first.dtype

    def read(self, rows: Places, rest: Rest = ()) -> Array:
        which = np.searchsorted(self._ends, rows, side="right")
        out = np.empty((len(rows), *self._load(0)[(slice(0, 0), *rest)].shape[1:]), self.dtype)
        for k in np.unique(which).tolist():
            group, here = self._load(k), which == k
            if group.shape[1:] != self.shape[1:]:
                raise DataError(
                    f"rows of {self.name} have shape {list(self.shape[1:])} first and {list(group.shape[1:])} later.",
                    "Pad or cut them to one length when the file is written.",
                )
            out[here] = group[(rows[here] - (int(self._ends[k - 1]) if k else 0), *rest)]
        return out


class WindowColumn(Column):
    """Windows of ``length`` numbers of a text, one after the other, each ``shift`` numbers further."""

    def __init__(self, name: str, tokens: Array, length: int, shift: int) -> None:
        count = (len(tokens) - 1) // length
        self.name, self._tokens, self._length, self._shift = name, tokens, length, shift
        self.shape, self.dtype = (count, length), tokens.dtype

    def read(self, rows: Places, rest: Rest = ()) -> Array:
        begin, stop, _ = (rest[0] if rest else slice(None)).indices(self._length)
        out = np.empty((len(rows), stop - begin), self.dtype)
        for row, at in zip(out, (rows * self._length + self._shift).tolist(), strict=True):
            row[:] = self._tokens[at + begin : at + stop]
        return out


# ---- files -----------------------------------------------------------------------------------


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors of a library while it reads a file become `DataError`, which names the file."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, KeyError, EOFError, TypeError) as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise DataError(f"{path} cannot be read: {why}.", "Give a complete file that nobody is writing.") from error


def library(name: str, path: Path) -> Any:
    """An optional package, or DataError with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise DataError(
            f"{path} needs the package {package}, which is not installed.",
            "Install it with: pip install 'meshmpi[data]'",
        ) from error


def check_there(path: Path) -> None:
    """DataError with the nearest name beside it where a file or folder does not exist."""
    if not path.exists():
        beside = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
        near = suggest(path.name, beside)
        raise DataError(f"{path} does not exist.", near if near.startswith("Did") else "Name a file or a folder.")


def npy(path: Path) -> Column:
    """A .npy file, mapped; or a folder of them, in the order of their names."""
    if path.is_dir():
        files = sorted(path.glob("*.npy"))
        if not files:
            raise DataError(f"the folder {path} has no .npy files.", "Name a folder of .npy files of one column.")
        return JoinedColumn(str(path), [npy(file) for file in files])
    check_there(path)
    with named(path):
        with os.fdopen(plain.opened(path), "rb") as file:  # nothing but a plain file is mapped
            begin = file.read(len(_NPY))
            if begin != _NPY:
                raise DataError(
                    f"{path} is not a .npy file: it begins with {begin!r}.",
                    "Write it by numpy.save(path, array); mm.data.tokens reads numbers without a header.",
                )
        try:
            return ArrayColumn(str(path), np.load(path, mmap_mode="r", allow_pickle=False))
        except ValueError as error:
            if "Python objects" not in str(error):
                raise
            raise DataError(f"{path} holds Python objects.", "Save an array of numbers.") from None


def columns_of(path: Path) -> dict[str, Column]:
    """All columns of a file or folder, by name.

    Raises:
        DataError: It cannot be read, is of no known format, or its package is missing.
    """
    check_there(path)
    if path.is_dir() and not any(path.iterdir()):
        raise DataError(f"the folder {path} is empty.", "Name a folder with files of data.")
    reader = next((reads for fits, reads in _FORMATS if fits(path)), None)
    if reader is None:
        raise DataError(
            f"{path} is of no known format.",
            "Known: .npy files and folders of them, HDF5 (.h5, .hdf5), Zarr, Parquet, Arrow (.arrow, .feather, folders"
            " of `datasets`); token files are read by mm.data.tokens.",
        )
    with named(path):
        return reader(path)


def _npy_columns(path: Path) -> dict[str, Column]:
    """Each .npy file, and each folder of .npy files, is a column."""
    if path.is_file():
        return {path.stem: npy(path)}
    found = {p.stem: p for p in sorted(path.iterdir()) if p.suffix == ".npy" or (p.is_dir() and any(p.glob("*.npy")))}
    return {name: npy(place) for name, place in found.items()}


def _hdf5(path: Path) -> dict[str, Column]:
    h5py = library("h5py", path)
    os.close(plain.opened(path))
    file, found = h5py.File(path, "r"), dict[str, Column]()

    def visit(name: str, item: Any) -> None:
        if not isinstance(item, h5py.Dataset) or not item.shape or item.dtype.kind not in "biufc":
            return
        label, place = f"{path}:{name}", item.id.get_offset()
        # In one piece and as it is: mapped, as random rows are slow through the library.
        if item.chunks or item.external or item.is_virtual or place is None or not item.size:
            found[name] = RunColumn(label, item)
        else:
            found[name] = ArrayColumn(label, np.memmap(path, item.dtype, "r", place, item.shape))

    file.visititems(visit)
    return found


def _zarr(path: Path) -> dict[str, Column]:
    zarr = library("zarr", path)
    opened = zarr.open(str(path), mode="r")
    if hasattr(opened, "shape"):
        return {path.stem: RunColumn(str(path), opened)}
    return {name: RunColumn(f"{path}:{name}", array) for name, array in sorted(opened.arrays())}


def _parquet(path: Path) -> dict[str, Column]:
    parquet = library("pyarrow.parquet", path)
    files = [parquet.ParquetFile(f) for f in (sorted(path.glob("**/*.parquet")) if path.is_dir() else [path])]
    groups = [(file, k) for file in files for k in range(file.num_row_groups) if file.metadata.row_group(k).num_rows]
    counts = [file.metadata.row_group(k).num_rows for file, k in groups]

    def load(name: str, k: int) -> Array:
        file, group = groups[k]
        found = _chunk(f"{path}:{name}", file.read_row_group(group, [name]).column(0).combine_chunks())
        if found is None:
            raise DataError(f"{path}:{name} does not hold numbers.", "Name a column of numbers.")
        return found

    found = dict[str, Column]()
    for name in files[0].schema_arrow.names if groups else ():
        if _numbers_in(files[0].schema_arrow.field(name).type):
            found[name] = GroupColumn(f"{path}:{name}", counts, functools.partial(load, name))
    return found


def _arrow(path: Path) -> dict[str, Column]:
    arrow = library("pyarrow", path)
    files = sorted(path.glob("*.arrow")) if path.is_dir() else [path]
    tables = []
    for file in files:
        source = arrow.memory_map(str(file))
        try:
            tables.append(arrow.ipc.open_file(source).read_all())
        except arrow.ArrowInvalid:  # `datasets` writes streams
            source.seek(0)
            tables.append(arrow.ipc.open_stream(source).read_all())
    return _tables(path, tables)


def _tables(path: Path, tables: Sequence[Any]) -> dict[str, Column]:
    """The columns of tables of Arrow that hold numbers, or lists of numbers of one length."""
    found = dict[str, Column]()
    for name in tables[0].column_names:
        label = f"{path}:{name}"
        chunks = [chunk for table in tables for chunk in table.column(name).chunks if len(chunk)]
        parts = [_chunk(label, chunk) for chunk in chunks]
        if parts and all(part is not None for part in parts):
            found[name] = JoinedColumn(label, [ArrayColumn(label, part) for part in parts if part is not None])
    return found


def _chunk(label: str, chunk: Any) -> Array | None:
    """A chunk as an array; None where it does not hold numbers."""
    types = importlib.import_module("pyarrow.types")
    sizes: list[int] = []
    while types.is_list(chunk.type) or types.is_large_list(chunk.type) or types.is_fixed_size_list(chunk.type):
        lengths = np.unique(chunk.value_lengths().to_numpy(zero_copy_only=False))
        if len(lengths) != 1 or chunk.null_count:
            raise DataError(
                f"rows of {label} have different lengths, {lengths[0]:g} to {lengths[-1]:g}.",
                "Pad or cut them to one length when the file is written.",
            )
        sizes.append(int(lengths[0]))
        chunk = chunk.flatten()
    if not _numbers_in(chunk.type):
        return None
    if chunk.null_count:
        raise DataError(f"{label} has {chunk.null_count} missing values.", "Fill them when the file is written.")
    return chunk.to_numpy(zero_copy_only=False).reshape(-1, *sizes)


def _numbers_in(kind: Any) -> bool:
    """Whether a type of Arrow is a number, or a list of numbers."""
    types = importlib.import_module("pyarrow.types")
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def _holds(*patterns: str) -> Any:
    return lambda path: path.is_dir() and any(next(path.glob(p), None) is not None for p in patterns)


def _ends(*suffixes: str) -> Any:
    return lambda path: path.is_file() and path.suffix.lower() in suffixes


_FORMATS: Sequence[tuple[Any, Any]] = (
    (_ends(".npy"), _npy_columns),
    (_ends(".h5", ".hdf5"), _hdf5),
    (_ends(".parquet"), _parquet),
    (_ends(".arrow", ".feather"), _arrow),
    (_holds("zarr.json", ".zarray", ".zgroup"), _zarr),
    (_holds("*.arrow"), _arrow),
    (_holds("*.parquet", "*/*.parquet"), _parquet),
    (_holds("*.npy", "*/*.npy"), _npy_columns),
)
"""Whether a path is of a format -> what reads it; the first that fits counts."""


def chosen(path: Path, wanted: Mapping[str, str] | Sequence[str] | None) -> dict[str, Column]:
    """Columns of a file under the names of the feeds.

    Args:
        wanted: Feed -> column, or columns that have the names of feeds; None: all.
    """
    found = columns_of(path)
    wanted = [wanted] if isinstance(wanted, str) else wanted
    names = dict(wanted) if isinstance(wanted, Mapping) else {n: n for n in (found if wanted is None else wanted)}
    for feed, column in names.items():
        if column not in found:
            known = ", ".join(found) or "none with numbers"
            raise DataError(f"{path} has no column '{column}' for '{feed}'.", f"Its columns: {known}.")
    if not names:
        raise DataError(f"{path} has no columns of numbers.", "Name another file.")
    return {feed: found[column] for feed, column in names.items()}
