"""Notebooks run from top to bottom and show what is kept in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import notebook_runner
from docs.notebook_runner import as_text, notebooks, read, run, run_cell, source


@pytest.mark.quick(1)
@pytest.mark.parametrize("path", notebooks(), ids=lambda p: p.stem)
def test_cells_show_what_is_kept(path: Path):
    kept, now = read(path), run(path)
    for number, (a, b) in enumerate(zip(kept["cells"], now["cells"], strict=True), 1):
        place = f"{path.name}, cell {number}:\n{source(a)}\nRun: python -m docs.notebook_runner\n"
        assert a == b, f"{place}{b.get('outputs')}"
    assert path.read_text() == as_text(now)


@pytest.mark.parametrize("path", notebooks(), ids=lambda p: p.stem)
def test_format(path: Path):
    """Version 4.5 of the format: what Jupyter needs to open them."""
    notebook = read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(ids) == len(set(ids)) > 10
    for cell in notebook["cells"]:
        extra = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | extra


def test_a_cell_shows_what_it_prints_and_its_value():
    names: dict = {}
    assert run_cell("x = 2", names, "cell") == []
    (value,) = run_cell("x + 1", names, "cell")
    assert value["data"] == {"text/plain": ["3"]}
    printed, picture = run_cell(
        "class P:\n  def _repr_svg_(self): return '<svg/>'\n  def __str__(self): return 'P'\nprint('a')\nP()",
        names,
        "cell",
    )
    assert printed["text"] == ["a\n"]
    assert picture["data"] == {"image/svg+xml": ["<svg/>"], "text/plain": ["P"]}


def test_an_old_notebook_is_found(tmp_path: Path, monkeypatch, capsys):
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "source": ["1 + 1"], "execution_count": None, "outputs": []}
    path = tmp_path / "old.ipynb"
    path.write_text(as_text({"cells": [cell]}))
    monkeypatch.setattr(notebook_runner, "FOLDER", tmp_path)
    assert notebook_runner.main(["--check"]) == 1
    assert "old.ipynb is not current" in capsys.readouterr().out
    assert notebook_runner.main([]) == 0
    assert notebook_runner.main(["--check"]) == 0
    assert '"2"' in path.read_text()
