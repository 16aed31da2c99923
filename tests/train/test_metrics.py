"""Metrics files and the loss curve."""

import json
import math
import os
import sys

import numpy as np
import pytest

from meshmpi.errors import DataError
from meshmpi.training.metrics import MetricsWriter, drop_ranks, metrics_path, plot_losses, read_metrics


def test_records_come_back(tmp_path):
    with MetricsWriter(tmp_path / "run", rank=3) as metrics:
        metrics.write(step=0, loss=np.float32(2.5), axes=["rows"], note="first")
        metrics.write(step=1, loss=math.nan, seconds=math.inf, count=np.int64(3))
        # on disk before the file is closed
        assert len(read_metrics(tmp_path / "run", rank=3)) == 2
    assert metrics.path.name == "metrics-rank-00003.jsonl"
    first, second = read_metrics(tmp_path / "run", rank=3)
    assert first == {"step": 0, "loss": 2.5, "axes": ["rows"], "note": "first"}
    assert math.isnan(second["loss"])
    assert second["seconds"] == math.inf
    assert second["count"] == 3
    for line in metrics.path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # strict JSON


def test_resuming_drops_what_will_be_written_again(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        for step in range(5):
            metrics.write(step=step, loss=1.0)
    with open(metrics.path, "a") as file:
        file.write('{"step": 5, "lo')  # the job was killed here
    with MetricsWriter(tmp_path, resume_step=3) as metrics:
        metrics.write(step=3, loss=2.0)
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path)] == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0)]


def test_damaged_and_missing_files(tmp_path):
    with pytest.raises(DataError, match="no metrics at"):
        read_metrics(tmp_path)
    metrics_path(tmp_path).write_text('{"step": 0}\noops\n{"step": 1}\n')
    with pytest.raises(DataError, match=r"jsonl:2 is not a record: b'oops"):
        read_metrics(tmp_path)


GOOD = b'{"step": 0}\n{"step": 1}\n'
BYTES = b"\xff\xfe\x81\n"
DAMAGE = {
    "garbage": (GOOD + BYTES + b'{"step": 2}\n{"step": 9}\n', [0, 1, 2], BYTES),
    "a cut line in the middle": (b'{"step": 0}\n{"ste{"step": 2}\n', [0], b'{"ste{"step": 2}\n'),
    "a cut last line": (GOOD + b'{"st', [0, 1], None),
    "a tail of NUL bytes": (GOOD + b"\0" * 500, [0, 1], None),
    "NUL bytes before a record": (GOOD + b'\0\0\0{"step": 2}\n', [0, 1, 2], None),
    "JSON that is no record": (GOOD + b"null\n[1]\n7\n", [0, 1], b"null\n[1]\n7\n"),
    "a step that is no number": (GOOD + b'{"step": "x"}\n', [0, 1], b'{"step": "x"}\n'),
    "nesting without end": (GOOD + b"[" * 9999 + b"\n", [0, 1], b"[" * 9999 + b"\n"),
    "an empty file": (b"", [], None),
}
"""What -> bytes of the file, steps that are kept, bytes that are set aside."""


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_file_never_blocks_a_resume(tmp_path, what):
    data, steps, aside = DAMAGE[what]
    path, lines = metrics_path(tmp_path), []
    path.write_bytes(data)
    with MetricsWriter(tmp_path, resume_step=5, say=lines.append) as metrics:
        metrics.write(step=5)
    assert [r["step"] for r in read_metrics(tmp_path)] == [*steps, 5]
    others = [p for p in tmp_path.iterdir() if p != path]
    assert [p.read_bytes() for p in others] == ([aside] if aside else [])
    assert len(lines) == len(others) and all(str(p) in lines[0] for p in others)


@pytest.mark.parametrize("what", ["folder", "fifo", "link to nothing"])
def test_what_is_no_file_is_set_aside(tmp_path, what):
    path, lines = metrics_path(tmp_path), []
    {"folder": path.mkdir, "fifo": lambda: os.mkfifo(path)}.get(what, lambda: path.symlink_to("nowhere"))()
    for _ in range(2):  # the second time there is a name already
        with MetricsWriter(tmp_path, resume_step=5, say=lines.append) as metrics:
            metrics.write(step=5)
    assert [r["step"] for r in read_metrics(tmp_path)] == [5]
    assert len(lines) == 1 and "damaged-1" in lines[0]


def test_a_run_is_resumed_over_damaged_metrics_of_a_rank_that_is_gone(tmp_path):
    metrics_path(tmp_path, 3).write_bytes(b"\xff\n")
    lines: list[str] = []
    drop_ranks(tmp_path, 2, 1, lines.append)
    assert read_metrics(tmp_path, 3) == [] and len(lines) == 1


def test_loss_curve(tmp_path):
    image = pytest.importorskip("matplotlib.image", reason="the extra 'plot' is not installed")
    records = [{"step": k, "loss": 4 / (k + 1)} for k in range(50)]
    records[7]["loss"] = math.nan
    records += [{"step": k, "held_out_loss": 3.0} for k in (0, 25, 49)]
    plain = plot_losses(records, tmp_path / "a" / "plain.png")
    lines = plot_losses(records, tmp_path / "lines.png", title="t", baselines={"published": 1.88})
    shapes = {image.imread(p).shape[:2] for p in (plain, lines)}
    assert shapes == {(600, 960)}
    assert plain.read_bytes() != lines.read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"a", "lines.png"}


def test_no_curve(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="no curve to draw"):
        plot_losses([{"step": 1}], tmp_path / "x.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DataError, match=r"pip install 'meshmpi\[plot\]'"):
        plot_losses([{"step": 1, "loss": 1.0}], tmp_path / "x.png")
