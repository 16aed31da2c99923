"""What a run tells: lines, the moving line of a terminal, records of every rank, event files."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

import meshmpi as mm
from meshmpi.errors import ConfigError
from meshmpi.launch.launch import launch
from meshmpi.planner.machine_file import load_machine
from meshmpi.training import metrics as recording
from meshmpi.training.callback import Step
from meshmpi.training.metrics import MetricsWriter, drop_ranks, metrics_path, read_metrics
from meshmpi.training.progress import Extras, LiveLine, Progress, bar, is_terminal
from meshmpi.transformer.training.config import load
from meshmpi.transformer.training.settings import Settings
from tests.train.small import run_of
from tests.train.small import small as shortest

pytestmark = pytest.mark.usefixtures("cache")


def small(tmp_path, *overrides):
    more = ("train.log_every=2", "evaluate.every=0", "sample.tokens=0", "checkpoint.at_end=false")
    return shortest(tmp_path, *more, *overrides)


def command(tmp_path, *overrides):
    (tmp_path / "run.toml").write_text("")
    sets = [part for o in small(tmp_path, *overrides) for part in ("--set", o)]
    config, out = str(tmp_path / "run.toml"), str(tmp_path / "run")
    return ["-m", "meshmpi", "train", config, "--out", out, *sets]


# ---- the moving line -------------------------------------------------------------------------


def test_a_bar_fits_its_width():
    for width in (10, 20, 33, 80, 200):
        for done in (0, 1, 7, 10):
            text = bar(done, 10, "loss 1.2345  12,345 tokens/s", width)
            assert len(text) <= width and text.startswith(f"{done}/10 "[:width])
    assert bar(10, 10, "", 60).count("#") == 30 and "." not in bar(10, 10, "", 60)
    assert "#" not in bar(0, 10, "", 60)


def test_without_a_terminal_nothing_is_drawn():
    lines, stream = [], io.StringIO()
    live = LiveLine("auto", lines.append, stream)
    live.show(1, 2, "x")
    live.say("a line")
    live.clear()
    assert (lines, stream.getvalue(), live.active) == (["a line"], "", False)
    assert not LiveLine("off", print, stream).active and not is_terminal(stream)


def test_lines_take_the_place_of_the_moving_one_and_it_leaves_nothing():
    lines, stream = [], io.StringIO()
    live = LiveLine("on", lambda line: lines.append((line, stream.getvalue())), stream)
    live.show(1, 2, "first")
    live.show(2, 2, "too soon after the first")
    live.say("a line")
    drawn = lines[0][1]
    assert "first" in drawn and "too soon" not in drawn
    assert drawn.endswith("\r\x1b[K")  # cleared before the line was printed
    live.clear()
    assert stream.getvalue() == drawn  # nothing to clear twice


def test_a_terminal_that_goes_away_stops_no_run():
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError("gone")

    live = LiveLine("on", lambda line: None, Gone())
    live.show(1, 2, "x")
    assert not live.active


def on_terminal(arguments, folder, **environment):
    """Output of a command whose stderr is a terminal and whose stdout is a file."""
    mine, theirs = pty.openpty()
    with open(folder / "stdout", "wb") as stdout:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=stdout,
            stderr=theirs,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "70", **environment},
        )
        os.close(theirs)
        seen, end = b"", time.monotonic() + 300  # many times what it takes: the machine may be busy
        while time.monotonic() < end:
            if select.select([mine], [], [], 0.2)[0]:
                try:
                    part = os.read(mine, 65536)
                except OSError:
                    break
                if not part:
                    break
                seen += part
        status = process.wait(timeout=60)
    os.close(mine)
    return status, seen.decode(), (folder / "stdout").read_text()


def test_on_a_terminal_a_line_moves_and_the_log_does_not_know(tmp_path):
    arguments = command(tmp_path, "train.steps=600", "train.log_every=300")
    status, terminal, log = on_terminal(arguments, tmp_path)
    assert status == 0, terminal
    drawn = re.findall(r"\r\x1b\[K(\d+)/600 \[[#.]+\] +\d+%  loss \d", terminal)
    assert drawn and sorted(map(int, drawn)) == [int(d) for d in drawn]
    assert all(len(part) < 70 for part in terminal.replace("\r\x1b[K", "\n").split("\n"))
    assert "\r" not in log and "\x1b" not in log and "step 600/600" in log
    assert terminal.rstrip("\n").endswith("\r\x1b[K")


def test_progress_can_be_asked_for_and_refused(tmp_path):
    status, terminal, _ = on_terminal(command(tmp_path, "train.progress=off"), tmp_path)
    assert status == 0 and "\x1b" not in terminal
    done = subprocess.run(
        [sys.executable, *command(tmp_path, "train.steps=300"), "--progress"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "\x1b[K" in done.stderr and "\x1b" not in done.stdout


# ---- lines and records -----------------------------------------------------------------------


def progress_lines(tmp_path, fastest, **reports):
    lines = []
    settings = load(Settings, None, ["train.steps=10", "train.log_every=1", "train.plot=false"])
    live = LiveLine("off", lines.append)
    mesh = mm.SimulatedMesh("a:1")
    progress = Progress(settings, tmp_path, mesh, live, (64.0, "tokens"), Extras(print), fastest)
    progress.on_begin(0, {})
    progress.on_step(Step(1, 2.0, 0.1, 0.5, 0.1, reports))
    progress.on_end("")
    return lines


def test_a_line_tells_loss_speed_share_of_peak_and_time_left(tmp_path):
    (line,) = progress_lines(tmp_path, 0.2)
    for part in ("step  1/10", "loss 2.0000", "128 tokens/s", "40% of peak", "20% communicating", "0:04 left"):
        assert part in line
    (line,) = progress_lines(tmp_path, None, skipped=1.0)
    assert "of peak" not in line and "skipped" in line


def test_records_hold_own_compute_and_communication(tmp_path):
    progress_lines(tmp_path, None)
    (record,) = read_metrics(tmp_path)
    assert record["compute_seconds"] == pytest.approx(0.4) and record["comm_seconds"] == 0.1


def test_buffered_records_are_written_by_time_and_at_the_end(tmp_path):
    with MetricsWriter(tmp_path, 1, flush_seconds=3600) as metrics:
        metrics.write(step=1)
        assert read_metrics(tmp_path, 1) == []
    assert read_metrics(tmp_path, 1) == [{"step": 1}]
    with MetricsWriter(tmp_path, 1, flush_seconds=1e-9) as metrics:
        metrics.write(step=2)
        assert len(read_metrics(tmp_path, 1)) == 2


def test_ranks_that_a_resumed_run_lacks_keep_only_what_stays_true(tmp_path):
    for rank in range(3):
        with MetricsWriter(tmp_path, rank) as metrics:
            for step in range(1, 6):
                metrics.write(step=step)
    drop_ranks(tmp_path, 1, 4)
    assert [len(read_metrics(tmp_path, r)) for r in range(3)] == [5, 3, 3]


def test_every_rank_records_its_own_times(tmp_path):
    done = launch(
        2,
        [*command(tmp_path), "--progress"],
        timeout_seconds=60,
        capture_output=True,
        environment={"MESHMPI_CACHE": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        records = [r for r in read_metrics(tmp_path / "run", rank) if "comm_seconds" in r]
        assert [r["step"] for r in records] == list(range(1, 7))
        for r in records:
            assert 0 < r["comm_seconds"] < r["seconds"]
            assert r["compute_seconds"] == pytest.approx(r["seconds"] - r["comm_seconds"])
    first, second = (metrics_path(tmp_path / "run", r).read_text() for r in range(2))
    assert "loss" in first and "loss" not in second
    assert "this machine was not measured: after `meshmpi calibrate --ranks 2`" in done.stdout


def test_a_described_machine_gives_the_share_of_peak(tmp_path):
    found = load_machine("tpuv2")
    assert max(found.products["float32"].rates.values()) > 0
    done = launch(
        1,
        command(tmp_path, "mesh.machine=tpuv2"),
        timeout_seconds=60,
        capture_output=True,
        environment={"MESHMPI_CACHE": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"step 6/6 .* \d+% of peak  \d+% communicating", done.stdout)
    assert "was not measured" not in done.stdout


# ---- TensorBoard -----------------------------------------------------------------------------


def events(folder):
    """(step, tag, value) of all event files of a run: length, checksum, event, checksum."""
    event = pytest.importorskip("tensorboardX.proto.event_pb2")
    found = []
    for path in sorted((folder / recording.EVENTS).glob("events.out.tfevents.*")):
        data, place = path.read_bytes(), 0
        while place < len(data):
            size = int.from_bytes(data[place : place + 8], "little")
            one = event.Event.FromString(data[place + 12 : place + 12 + size])
            found += [(one.step, v.tag, v.simple_value) for v in one.summary.value]
            place += 16 + size
    return found


def run(tmp_path, *overrides, resume=False):
    run_of(small(tmp_path, *overrides), tmp_path / "run", "all:2", resume)


def test_event_files_hold_what_the_records_hold(tmp_path):
    pytest.importorskip("tensorboardX")
    run(tmp_path, "train.tensorboard=true", "checkpoint.at_end=true", "train.steps=4")
    run(tmp_path, "train.tensorboard=true", "train.steps=6", resume=True)
    found = events(tmp_path / "run")
    losses = {step: value for step, tag, value in found if tag == "loss/training"}
    records = {r["step"]: r["loss"] for r in read_metrics(tmp_path / "run") if "loss" in r}
    assert losses == pytest.approx(records) and sorted(losses) == [1, 2, 3, 4, 5, 6]
    held_out = [(step, value) for step, tag, value in found if tag == "loss/held_out"]
    assert [step for step, _ in held_out] == [4, 6]
    assert {"step/communication_seconds", "run/learning_rate"} <= {tag for _, tag, _ in found}


def test_without_the_setting_there_are_no_event_files(tmp_path):
    run(tmp_path)
    assert not (tmp_path / "run" / recording.EVENTS).exists()


def test_the_missing_package_is_named_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(recording.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'meshmpi\[tensorboard\]'"):
        run(tmp_path, "train.tensorboard=true")
    assert not (tmp_path / "run").exists()


def test_records_are_strict_json_also_of_a_loss_that_is_none(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(step=1, loss=math.nan)
    json.loads(metrics_path(tmp_path).read_text(), parse_constant=pytest.fail)
