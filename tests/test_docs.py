"""The documents are true: every Python block runs and prints what the page says.

The Python blocks of a page are run in order in one namespace, as a reader would.  What stands in
the info string of a block steers that:

- ```` ```python ranks=4 ````: a program of its own, started on 4 real MPI ranks;
- ```` ```python no-run ````: a fragment that cannot run (kept rare: it is only compiled);
- a ```` ```text ```` block directly behind a Python block is what that block prints; ``...`` stands
  for anything.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from meshmpi.checking import bounds
from meshmpi.ir.kinds import KINDS
from meshmpi.kernels import numpy_kernels
from meshmpi.launch.launch import launch
from tests.docs.pages import PAGES, ROOT, Block, blocks_of, name_of


def agrees(printed: str, expected: str) -> bool:
    """Whether the lines are equal; ``...`` in the expected ones stands for anything."""
    pattern = r"[\s\S]*".join(re.escape(part) for part in expected.strip().split("..."))
    return re.fullmatch(pattern, printed.strip()) is not None


def check_output(block: Block, printed: str, page: Path) -> None:
    if block.output is not None:
        place = f"{page.name}:{block.line}"
        assert agrees(printed, block.output), f"{place} prints\n{printed}\nnot\n{block.output}"


def run_here(block: Block, names: dict, page: Path) -> None:
    # Line numbers in error messages shall be those of the page.
    source = "\n" * (block.line - 1) + block.text
    code = compile(source, f"docs/{name_of(page)}", "exec")
    if "no-run" in block.info:
        return
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    check_output(block, printed.getvalue(), page)


def run_on_ranks(block: Block, ranks: int, page: Path, folder: Path) -> None:
    script = folder / "block.py"
    script.write_text(block.text + "\n")
    environment = {"PYTHONPATH": str(ROOT)}
    done = launch(ranks, [str(script)], timeout_seconds=120, capture_output=True, environment=environment)
    assert done.returncode == 0, f"{page.name}:{block.line}\n{done.stdout}{done.stderr}"
    check_output(block, done.stdout, page)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "__main__"}
    # A page may register a kind, which other tests must not meet.
    with patch.dict(KINDS), patch.dict(numpy_kernels.PLANS), patch.dict(bounds.RULES):
        for block in blocks_of(page):
            if block.info[0] != "python":
                continue
            ranks = next((int(w[6:]) for w in block.info if w.startswith("ranks=")), None)
            if ranks is None:
                run_here(block, names, page)
            else:
                run_on_ranks(block, ranks, page, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_architecture_names_every_room():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for path in sorted((ROOT / "meshmpi").iterdir()):
        if path.name.startswith(("_", ".")) or not any(path.rglob("*.py") if path.is_dir() else [1]):
            continue
        name = f"{path.name}/" if path.is_dir() else path.name
        assert f"`{name}`" in text or f"`{path.stem}" in text, f"ARCHITECTURE.md lacks {name}"


def test_table_of_operations_is_current():
    command = [sys.executable, "-m", "docs.generate_ops", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", sorted((ROOT / "slurm").glob("*.sbatch")), ids=lambda p: p.name)
def test_batch_scripts_parse(script: Path):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
