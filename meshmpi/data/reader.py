"""Batches by step number, of which each rank reads its own rows, ahead of time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, Union

import numpy as np

from meshmpi.data.columns import Array, ArrayColumn, Column, WindowColumn, check_there, chosen, npy
from meshmpi.data.copies import copied
from meshmpi.data.order import Places, rows_at
from meshmpi.errors import ArgumentError, DataError
from meshmpi.files import plain
from meshmpi.graph.arguments import asked, check_all, shown
from meshmpi.hashes import sha256
from meshmpi.runtime.compiled import CompiledStep
from meshmpi.runtime.feeding import BlockFeeder, Held

Blocks = dict[str, Array]
Map = Callable[[Blocks, Places], Mapping[str, Array]]
"""Rows as they were read, and their places in the training -> the feeds, with as many rows."""
Source = Union[str, os.PathLike[str], Mapping[str, Any]]
_SAMPLED = 16
_LOOKED_AT = 1 << 10
_PRINTED = frozenset(b"\t\n\r" + bytes(range(32, 127)))


class Reader:
    """Batches of columns; see `mm.data.reader`.

    Attributes:
        rows: Rows in an epoch.
        batch: Rows in a batch.
        digest: Of which data these are.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        batch: int,
        shuffle: bool = True,
        seed: int = 0,
        map: Map | None = None,
        prefetch: int = 1,
    ) -> None:
        counts = {name: c.shape[0] for name, c in columns.items()}
        if len(set(counts.values())) != 1:
            told = ", ".join(f"'{name}' {n:,}" for name, n in counts.items())
            raise DataError(f"columns have different numbers of rows: {told}.", "Give columns of the same rows.")
        self.rows, self.batch = next(iter(counts.values())), batch
        if not self.rows or batch < 1:
            raise DataError(f"cannot make batches of {batch} of {self.rows} rows.", "Both must be at least 1.")
        self._columns, self._seed, self._map = dict(columns), seed if shuffle else None, map
        self._prefetch, self._pool = prefetch, None if prefetch < 1 else ThreadPoolExecutor(1, "meshmpi-data")
        self._ahead: dict[int, Future[Blocks]] = {}
        self._held: Held | None = None
        self._feeder: tuple[CompiledStep, BlockFeeder] | None = None
        self.digest = _digest(self._columns)

    def __iter__(self, *at: Any) -> NoReturn:
        raise ArgumentError(
            f"a reader of {self.rows:,} rows is not a list of batches: it has one for every step.",
            "Give it to mm.fit(step, reader, steps=...), or write step(reader.block(step, n)) for n in range(steps).",
        )

    __getitem__ = __len__ = __iter__

    def __bool__(self) -> bool:
        return True

    @property
    def steps_per_epoch(self) -> float:
        return self.rows / self.batch

    def feeds(self, step: int, held: Held) -> Blocks:
        """The blocks of the batch of a step, from 0, that this rank holds; the next ones are read meanwhile.

        Args:
            held: Feed -> its range along each dimension, rows first; None: the whole.
        """
        if step < 0:
            raise DataError(f"step {step} has no batch.", "Steps are counted from 0.")
        if self._pool is None:
            return self._read(step, held)
        if held is not self._held and held != self._held:
            self._forget()
            self._held = held
        made = self._ahead.pop(step, None)
        for past in [n for n in self._ahead if not step < n <= step + self._prefetch]:
            self._ahead.pop(past).cancel()
        blocks = self._read(step, held) if made is None else made.result()
        for n in range(step + 1, step + 1 + self._prefetch):
            if n not in self._ahead:
                self._ahead[n] = self._pool.submit(self._read, n, held)
        return blocks

    def block(self, step: CompiledStep, number: int) -> Mapping[str, Any]:
        """What to call a compiled step with, in a loop of your own: ``step(reader.block(step, n))``."""
        if self._feeder is None or self._feeder[0] is not step:
            self._feeder = step, BlockFeeder(step, list(step.program.feeds))
        feeder = self._feeder[1]
        return feeder.feeds(self.feeds(number, feeder.held))

    def close(self) -> None:
        """Ends the thread that reads ahead; it also ends with the process."""
        self._forget()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool, self._prefetch = None, 0

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        told = ", ".join(f"{n} {c.dtype}{list(c.shape[1:])}" for n, c in self._columns.items())
        return f"<Reader of {self.rows:,} rows in batches of {self.batch}: {told}>"

    def _forget(self) -> None:
        for future in self._ahead.values():
            future.cancel()
        self._ahead = {}

    def _read(self, step: int, held: Held) -> Blocks:
        if self._map is None:
            for name in held:
                if name not in self._columns:
                    raise DataError(
                        f"there is no column for the feed '{name}'.",
                        f"The columns are {', '.join(self._columns)}; name them by columns={{feed: column}}.",
                    )
        whole = (0, self.batch)
        wanted = {name: (tuple(ranges[0]), ranges[1:]) if ranges else (whole, ()) for name, ranges in held.items()}
        out: Blocks = {}
        for rows in dict.fromkeys(rows for rows, _ in wanted.values()):
            places = step * self.batch + np.arange(*rows, dtype=np.int64)
            at = rows_at(places, self.rows, self._seed)
            here = {name: tuple(slice(*r) for r in rest) for name, (its, rest) in wanted.items() if its == rows}
            if self._map is None:
                out |= {name: self._columns[name].read(at, rest) for name, rest in here.items()}
            else:
                found = self._mapped({n: c.read(at) for n, c in self._columns.items()}, places, list(here))
                out |= {name: found[name][(slice(None), *rest)] for name, rest in here.items()}
        return {name: out[name] for name in held}

    def _mapped(self, blocks: Blocks, places: Places, wanted: Sequence[str]) -> Mapping[str, Array]:
        """The feeds that the user's function makes of columns."""
        assert self._map is not None
        given: Any = asked(self._map, "data.reader: map", blocks, places)
        if not isinstance(given, Mapping):
            raise DataError(f"map() returned {shown(given)}.", "Return a mapping with an array for each feed.")
        found = {name: _array(f"'{name}' of map()", given[name]) for name in wanted if name in given}
        for name in wanted:
            if name not in found:
                raise DataError(
                    f"map() returned no '{name}', only {', '.join(map(str, given)) or 'nothing'}.",
                    "Return a mapping with an array for each feed.",
                )
            rows = len(found[name]) if found[name].ndim else "a number"
            if rows != len(places):
                raise DataError(
                    f"map() was given {len(places)} rows and returned {rows} of '{name}'.",
                    "Return as many rows as were given: a rank maps only its own.",
                )
        return found


def reader(
    source: Source,
    *,
    batch: int,
    columns: Mapping[str, str] | Sequence[str] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    map: Map | None = None,
    prefetch: int = 1,
    copy: bool = False,
) -> Reader:
    """Batches of rows of files or arrays, for `mm.fit`: a function of the step's number, whatever the layout.

    Each rank reads the rows that it holds, and no others, and of them the columns that it holds.  Each epoch is
    another permutation of all rows; a batch that begins in one epoch may end in the next.

    Args:
        source: A mapping feed -> array, .npy file or folder of .npy files; or a file or folder with several
            columns: .npy files, HDF5, Zarr, Parquet, Arrow, a folder of `datasets`.
        batch: Rows in a batch, all ranks together.
        columns: Feed -> column of the file, or the columns that have the names of feeds; default: all.
        shuffle: False: rows come in their own order.
        seed: Of the order.
        map: Makes feeds of rows, on each rank of its own: ``map(columns, places)``, where places are the numbers of
            the rows in the order of the training, from which random changes can be seeded.
        prefetch: Batches that a thread reads ahead; 0: none.
        copy: Copy the columns into the cache as .npy first, once on each host.  Random rows of compressed files are
            slow: each row costs the reading of a chunk.

    Returns:
        A `Reader`, with the methods `feeds` and `block`.

    Raises:
        DataError: A file cannot be read, columns do not fit together, or a package is missing.

    Example:
        >>> data = mm.data.reader({"x": np.ones((100, 8)), "t": np.arange(100)}, batch=32)
        >>> data.feeds(0, {"x": ((0, 16), (0, 8))})["x"].shape
        (16, 8)
    """
    if isinstance(source, Mapping):
        if copy or columns is not None:
            raise DataError(
                "columns= and copy= are for a file with columns, and the source is a mapping.",
                "Leave them out: its keys are the feeds.",
            )
        found = {name: _column(name, given) for name, given in source.items()}
        if not found:
            raise DataError("there are no columns.", "Give {feed: array}.")
    else:
        path = Path(source)
        found = copied(path, columns) if copy else chosen(path, columns)
    return Reader(found, batch, shuffle, seed, map, prefetch)


def tokens(
    path: str | os.PathLike[str],
    *,
    batch: int,
    length: int,
    dtype: str | type[Any] = "uint16",
    names: tuple[str, str] = ("tokens", "targets"),
    shuffle: bool = True,
    seed: int = 0,
    prefetch: int = 1,
) -> Reader:
    """Batches of windows of a file of token numbers, and of their targets, one token further.

    Args:
        path: Numbers one after the other, without a header, as nanoGPT writes them; or a .npy file.
        batch: Windows in a batch.
        length: Tokens in a window.  Windows do not overlap: each token is learned once in an epoch.
        dtype: Type of the numbers; that of a .npy file counts.
        names: Names of the two feeds.
        shuffle, seed, prefetch: As for `reader`.

    Raises:
        DataError: The file cannot be read, or is shorter than a window and its target.
    """
    file = Path(path)
    check_there(file)
    if file.is_dir():
        raise DataError(f"{file} is a folder.", "Name one file of tokens.")
    column = npy(file) if file.suffix == ".npy" else _numbers(file, dtype)
    assert isinstance(column, ArrayColumn)
    if column.array.ndim != 1 or column.dtype.kind not in "iu":
        raise DataError(
            f"{file} has {column.dtype} of shape {column.shape}, which is not a row of tokens.",
            "Name a file of whole numbers, one after the other.",
        )
    if length < 1 or len(column.array) <= length:
        raise DataError(
            f"{file} has {len(column.array):,} tokens; a window of {length} and its target need {length + 1}.",
            "Use a longer text or a shorter length.",
        )
    windows = {name: WindowColumn(f"{file}", column.array, length, k) for k, name in enumerate(names)}
    return Reader(windows, batch, shuffle, seed, None, prefetch)


def _numbers(file: Path, dtype: Any) -> ArrayColumn:
    """A file of numbers without a header, mapped."""
    try:
        kind = np.dtype(dtype)
        with os.fdopen(plain.opened(file), "rb") as opened:
            begin = opened.read(_LOOKED_AT)
        size = file.stat().st_size
    except (OSError, TypeError, ValueError) as error:
        raise DataError(
            f"{file} cannot be read as {dtype}: {error}.", "Name a file of numbers and their type."
        ) from None
    if kind.itemsize > 1 and begin and all(byte in _PRINTED for byte in begin):
        raise DataError(
            f"{file} is text, not numbers of {kind}: it begins with {begin[:20]!r}.",
            "Write its tokens as numbers first, or give dtype='uint8' for a token per byte.",
        )
    if not size or size % kind.itemsize:
        raise DataError(f"{file} has {size:,} bytes, which are no whole number of {kind}.", "Give the right dtype=.")
    return ArrayColumn(str(file), np.memmap(file, kind, "r"))


def _column(name: str, given: Any) -> Column:
    if isinstance(given, (str, os.PathLike)):
        return npy(Path(given))
    if isinstance(given, Column):
        return given
    return ArrayColumn(f"'{name}'", _array(f"'{name}'", given))


def _array(what: str, given: Any) -> Array:
    """An array from the user's memory."""
    try:
        array = np.asarray(given)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"{what} is not an array: {str(error).rstrip('.')}.", "Give rows of one length.") from None
    if not array.ndim and array.dtype.hasobject:
        raise DataError(f"{what} is {shown(given)}, which is not an array.", "Give an array with a row for each place.")
    return array


def _digest(columns: Mapping[str, Column]) -> str:
    """A hash of names, shapes, types and some rows."""
    found = sha256()
    for name, column in sorted(columns.items()):
        found.update(f"{name} {column.shape} {column.dtype.str}\n".encode())
        some = np.unique(np.linspace(0, column.shape[0] - 1, _SAMPLED).astype(np.int64))
        found.update(np.ascontiguousarray(column.read(some)).tobytes())
    return found.hexdigest()[:32]


check_all(globals(), ["Reader", "reader", "tokens"], "data.")
