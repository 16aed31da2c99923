"""The bench of decoding: its checkpoint, its rows and how texts are compared."""

from __future__ import annotations

import pytest

import meshmpi as mm
from apps.bench.decoding import inputs, rounds
from meshmpi.transformer.decoding.decoding import Generator, Sampling


def test_the_checkpoint_is_read_and_continued(tmp_path):
    pytest.importorskip("safetensors")
    from meshmpi.transformer.pretrained.model import open_model

    inputs.write_checkpoint(tmp_path, 1, 64, 100, 9)
    model = open_model(tmp_path)
    made = Generator(model.config, mm.SimulatedMesh("all:1"), batch=2)
    model.load(made.variables)
    prompts = inputs.prompts(2, 5, 100).tolist()
    found = inputs.measured(lambda: made.generate(prompts, 4, sampling=Sampling(0)), 2)
    assert len(found["seconds"]) == 2 and [len(t) for t in found["texts"]] == [4, 4]


def test_rows_compare_with_the_peer_on_as_many_cores():
    ours, theirs, _, split, two = rounds.SYSTEMS
    took = {ours: [1.0, 3.0, 2.0], theirs: [3.0], split: [1.0], two: [0.5]}
    found = {s.name: [[{"seconds": [t]}] for t in ts] for s, ts in took.items()}
    rows = rounds._rows(rounds.TOY[0], list(took), found)
    assert [row[-1] for row in rows] == [1.5, 1.0, 0.5, 1.0]
    assert rows[0][2:4] == [2 * 4 / 2.0, 500.0]


def test_texts_are_compared_up_to_the_first_difference():
    (line,) = rounds.compare_texts("toy", {"a": [[1, 2, 3, 4]], "b": [[1, 2, 9, 4]]})
    assert "at least 50 %" in line
    assert rounds.compare_texts("toy", {"a": [[1]]}) == []
