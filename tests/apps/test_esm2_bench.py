"""The bench of ESM2's inference runs at toy size, without peers; no time decides a test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from apps.bench import esm2, peers
from apps.bench.bench import TINY, Bench
from apps.bench.esm2 import inputs
from apps.bench.esm2.rounds import SYSTEMS, check_logits
from apps.esm2.models import esm2 as model_of
from apps.esm2.models import weight_count
from apps.esm2.weights import open_model
from meshmpi.kernels.native import available


@pytest.mark.matrix
@pytest.mark.skipif(not available(), reason="there is no C compiler")
def test_table_of_inference(tmp_path: Path):
    bench = Bench(tmp_path, TINY, peers.without("not asked for"), lambda line: None)
    (table,) = esm2.measure(bench)
    assert table.column("system") == [s.name for s in SYSTEMS if not s.peer]
    assert all(n > 0 for n in table.column("tokens/s"))
    assert all(0 <= share <= 100 for share in table.column("share in collectives, %"))
    assert any("logits of all systems differ by at most" in note for note in table.notes)
    assert any(note == "Left out: not asked for" for note in table.notes)


def test_logits_that_differ_are_told():
    found = {"a": [1.0, -4.0], "b": [1.0, -4.00001], "c": [1.0, -4.1]}
    assert check_logits("x", {"a": found["a"]}) == []
    assert "at most 2.5e-06" in check_logits("x", {k: found[k] for k in "ab"})[0]
    (line,) = check_logits("x", found)
    assert line.startswith("**x: logits differ from those of a**: c by 0.025")
    assert "nan" in check_logits("x", {"a": found["a"], "b": [1.0, float("nan")]})[0]


def test_the_checkpoint_is_an_esm2_of_its_size(tmp_path: Path):
    inputs.write_checkpoint(tmp_path, 6, 320, 20)
    assert weight_count(open_model(tmp_path).config) == weight_count(model_of("8M"))
    assert (tmp_path / "model.safetensors").stat().st_size > 4 * weight_count(model_of("8M"))


def test_rows_are_proteins_of_different_lengths():
    rows = inputs.tokens(4, 40)
    lengths = (rows != inputs.PAD).sum(axis=1)
    assert lengths.tolist() == [40, 37, 34, 30]
    for row, n in zip(rows, lengths, strict=True):
        assert (row[0], row[n - 1]) == (inputs.CLS, inputs.EOS)
        inner = row[1 : n - 1]
        assert ((inner == inputs.MASK) | ((inner >= 4) & (inner < 24))).all()
        assert np.flatnonzero(inner == inputs.MASK).tolist() == list(range(0, n - 2, 9))
