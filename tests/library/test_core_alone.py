"""The core needs little: the README's example runs where nothing but the core's dependencies can be imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import ROOT, blocks_of
from tests.test_docs import agrees

CORE = ("numpy", "mpi4py", "opt_einsum", "ml_dtypes", "threadpoolctl")
LIMIT_SECONDS = 120


def environment_with_the_core_alone(folder: Path) -> Path:
    """A virtual environment of links to this one's packages; returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=LIMIT_SECONDS)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in CORE:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        place = Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)
        (packages / place.name).symlink_to(place)
        libraries = place.with_name(f"{name}.libs")  # of a wheel
        if libraries.exists():
            (packages / libraries.name).symlink_to(libraries)
    (packages / "meshmpi").symlink_to(ROOT / "meshmpi")
    return folder / "bin" / "python"


def test_the_example_of_the_readme_needs_the_core_alone(tmp_path: Path):
    python = environment_with_the_core_alone(tmp_path / "venv")
    example = next(b for b in blocks_of(ROOT / "README.md") if "ranks=4" in b.info)
    (tmp_path / "example.py").write_text(example.text)
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # mpirun
    missing = subprocess.run([str(python), "-c", "import pydantic"], env=environment, capture_output=True, timeout=60)
    assert missing.returncode != 0, "other packages are still found"
    command = [str(python), "-m", "meshmpi.launch", "-n", "4", "--timeout", str(LIMIT_SECONDS), "example.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS + 30
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert agrees(done.stdout, str(example.output)), done.stdout
