"""The wheel and the source archive: what is in them, and what a user has after installing."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import meshmpi
from tests.install.conftest import ROOT, clean, run

MOST_BYTES = 1_300_000
MOST_IMPORTED = 75


def test_the_wheel_has_everything_and_nothing_more(built):
    _, wheel = built
    assert wheel.name == f"meshmpi-{meshmpi.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size <= MOST_BYTES
    names = set(zipfile.ZipFile(wheel).namelist())
    source = wheel.parent / "source"
    present = {str(p.relative_to(source)) for p in source.rglob("*") if p.is_file()}
    present = {name for name in present if name.startswith("meshmpi/")}
    assert any(name.endswith(".c") for name in present)
    assert any(name.endswith(".toml") for name in present)
    assert present == {name for name in names if ".dist-info/" not in name}


def test_the_source_archive_builds_it(built):
    archive, wheel = built  # the wheel was built from the archive
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO"} <= names
    assert zipfile.ZipFile(wheel).testzip() is None


def test_an_installed_user_can_train(installed: Path, tmp_path: Path):
    """Without an MPI: one rank, the configuration that comes with the package, a text of hers."""
    python = installed / "bin" / "python"
    told = run(python, "-c", "import meshmpi; print(meshmpi.__version__, meshmpi.__file__)", cwd=tmp_path).split()
    assert told[0] == meshmpi.__version__ and told[1].startswith(str(installed))
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 300)
    out = run(
        installed / "bin" / "meshmpi",
        "train",
        "quickstart",
        "--dry-run",
        "--mesh",
        "rows:2",
        "--layout",
        "batch:rows",
        "--set",
        "data.corpus=text.txt",
        cwd=tmp_path,
    )
    assert "mesh {rows: 2} (2 ranks)" in out
    assert "quickstart" in run(installed / "bin" / "meshmpi", "train", "--help", cwd=tmp_path)


def test_versions_are_one():
    text = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
    assert version is not None and version[1] == meshmpi.__version__


_COUNT = """
import sys, {before}
known = set(sys.modules)
import meshmpi
new = sorted(n for n in set(sys.modules) - known if getattr(sys.modules[n], "__file__", None))
print(len(new), *new)
"""


def test_importing_opens_few_files(tmp_path: Path):
    """Files, not seconds: on a cluster thousands of processes ask one file server for them."""
    done = subprocess.run(
        [sys.executable, "-c", _COUNT.format(before="numpy")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=clean(PYTHONPATH=str(ROOT)),
        timeout=60,
        check=True,
    )
    count, *names = done.stdout.split()
    assert 20 < int(count) <= MOST_IMPORTED, names


@pytest.mark.parametrize("name", ["compile", "plan", "Plan", "Mesh", "optimize", "transformer"])
def test_what_is_opened_late_is_there(name: str):
    code = f"import meshmpi as mm; assert '{name}' in dir(mm); print(mm.{name})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
