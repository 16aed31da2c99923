"""Speed of the readers of `mm.data` beside plain reads of the same bytes.

    python -m apps.bench.reading [--megabytes 512] [--rounds 5] [--folder FOLDER]

Files are written first and stay in the page cache, so what is measured is the work around the disk.  The plain read of
.npy rows is NumPy's copy from a mapped file, in order; that of the other formats is their library's, in order.
Each reader and its plain read take turns; medians count.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import meshmpi as mm
from apps.bench.__main__ import processor_name

BATCH = 64
ROWS = {"rows of 147 KB": (224, 224, 3), "rows of 3 KB": (32, 32, 3)}


def written(folder: Path, array: np.ndarray) -> dict[str, tuple[Path, Callable[[int, int], np.ndarray]]]:
    """Format -> its file and its plain read of rows from one place to another."""
    np.save(folder / "x.npy", array)
    mapped = np.load(folder / "x.npy", mmap_mode="r")
    found: dict[str, tuple[Path, Callable[[int, int], np.ndarray]]] = {
        ".npy": (folder / "x.npy", lambda a, b: np.array(mapped[a:b]))
    }
    try:
        import h5py

        with h5py.File(folder / "x.h5", "w") as file:
            file["x"] = array
        dataset = h5py.File(folder / "x.h5", "r")["x"]
        found["HDF5"] = folder / "x.h5", lambda a, b: dataset[a:b]
    except ImportError:
        print("HDF5 is left out: h5py is not installed")
    try:
        import zarr

        made = zarr.open_group(str(folder / "x.zarr"), mode="w")
        chunks = (min(BATCH, len(array)), *array.shape[1:])
        made.create_array("x", shape=array.shape, chunks=chunks, dtype=array.dtype, compressors=None)[:] = array
        group = zarr.open_group(str(folder / "x.zarr"), mode="r")["x"]
        found["Zarr"] = folder / "x.zarr", lambda a, b: group[a:b]
    except ImportError:
        print("Zarr is left out: zarr is not installed")
    return found


def seconds(read: Callable[[int], object], steps: int) -> float:
    """Seconds to read all batches once."""
    began = time.perf_counter()
    for step in range(steps):
        read(step)
    return time.perf_counter() - began


def main() -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write the files (default: a temporary folder)")
    options = parser.parse_args()
    print(f"{processor_name()}; {options.megabytes} MB, batches of {BATCH}, one process, medians of {options.rounds}")
    print(f"{'':26}{'plain MB/s':>12}{'in order':>12}{'shuffled':>12}{'shuffled, copied':>18}")
    for size, shape in ROWS.items():
        count = options.megabytes * 10**6 // int(np.prod(shape)) // BATCH * BATCH
        array = np.random.default_rng(0).integers(0, 256, (count, *shape), np.uint8)
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            for form, (path, plain) in written(Path(name), array).items():
                steps, held = count // BATCH, {"x": None}
                hows = ({"shuffle": False}, {"shuffle": True}, {"shuffle": True, "copy": True})
                readers = [mm.data.reader(path, batch=BATCH, prefetch=0, **how) for how in hows]
                reads = [lambda n, plain=plain: plain(BATCH * n, BATCH * n + BATCH)]
                reads += [lambda n, r=r, held=held: r.feeds(n, held) for r in readers]
                taken = [[seconds(read, steps) for read in reads] for _ in range(options.rounds)]
                raw, *others = (statistics.median(row[k] for row in taken) for k in range(len(reads)))
                ratios = "".join(f"{raw / other:>11.2f}x" for other in others[:2]) + f"{raw / others[2]:>17.2f}x"
                print(f"{form + ', ' + size:26}{array.nbytes / raw / 1e6:>12,.0f}{ratios}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
