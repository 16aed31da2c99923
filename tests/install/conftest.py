"""What the tests of installation share: the wheel, and environments in which it is installed.

Several processes of pytest-xdist build each of them once.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
_SECONDS = 300


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Standard output of a command that must succeed; without this repository on Python's path."""
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        cwd=cwd,
        env=clean(),
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def clean(**more: str) -> dict[str, str]:
    """This process's variables without those of Python's path, of jobs and of MPI."""
    mine = (
        "PYTHONPATH",
        "VIRTUAL_ENV",
        "OMPI_",
        "PMI",
        "PRTE_",
        "SLURM_",
        "I_MPI",
        "MPI4PY_",
        "OMP_",
        "OPENBLAS_",
        "MKL_",
        "LD_LIBRARY_PATH",
    )
    kept = {n: v for n, v in os.environ.items() if not n.startswith(mine)}
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1", **more}


@pytest.fixture(scope="session")
def once(tmp_path_factory) -> Callable[[str, Callable[[Path], None]], Path]:
    """``once(name, make)``: a folder that ``make`` has filled, once for all processes."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "install"
    shared.mkdir(exist_ok=True)

    def get(name: str, make: Callable[[Path], None]) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with open(shared / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a process that failed in the middle
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return get


@pytest.fixture(scope="session")
def built(once) -> tuple[Path, Path]:
    """The source archive, and the wheel that was built from it alone."""

    def make(folder: Path) -> None:
        source = folder / "source"
        shutil.copytree(ROOT / "meshmpi", source / "meshmpi", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        backend = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
        run(sys.executable, "-W", "error", "-c", backend, cwd=source)
        (archive,) = folder.glob("*.tar.gz")
        run(
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "--wheel-dir",
            folder,
            archive,
            cwd=folder,
        )

    folder = once("built", make)
    (archive,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return archive, wheel


@pytest.fixture(scope="session")
def installed(once, built) -> Path:
    """An environment with the wheel and what the wheel asks for: no MPI library, no tests."""

    def make(folder: Path) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        if not _install(folder, str(built[1])):
            (folder / "offline").touch()

    folder = once("installed", make)
    if (folder / "offline").exists():
        pytest.skip("no package registry could be reached for meshmpi's dependencies")
    return folder


@pytest.fixture(scope="session")
def with_mpi(once, installed) -> Callable[[str], Path]:
    """``with_mpi(wheel)``: an environment that has the wheel of an MPI beside it."""

    def get(wheel: str) -> Path:
        def make(folder: Path) -> None:
            run(sys.executable, "-m", "venv", "--without-pip", folder)
            base = next(installed.glob("lib/python*/site-packages"))
            (next(folder.glob("lib/python*/site-packages")) / "base.pth").write_text(f"{base}\n")
            if not _install(folder, wheel):
                (folder / "offline").touch()

        folder = once(f"with-{wheel}", make)
        if (folder / "offline").exists():
            pytest.skip(f"the package '{wheel}' could not be installed: no registry has it")
        return folder

    return get


def _install(environment: Path, package: str) -> bool:
    """Whether pip could install a package; a failure for another reason than the network fails."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(environment / "bin" / "python"),
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--retries",
            "1",
            package,
        ],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        env=clean(),
        check=False,
    )
    if done.returncode == 0:
        return True
    offline = ("No matching distribution", "ConnectionError", "Could not find a version")
    assert any(text in done.stderr for text in offline), done.stderr
    return False
