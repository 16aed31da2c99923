"""What accompanies a run never ends it: each of these fails, and the run does not notice."""

from __future__ import annotations

import os

import pytest

from meshmpi import checkpoint
from meshmpi.launch.launch import launch
from meshmpi.runtime import cores as counters
from meshmpi.training.metrics import read_metrics
from meshmpi.training.progress import Extras
from tests.train.test_progress import command

pytestmark = pytest.mark.usefixtures("cache")

BROKEN = {
    "prediction": "measured.predict_time",
    "loss curve": "progress.plot_losses",
    "TensorBoard": "progress.EventWriter",
    "trace": "measured.write_trace",
    "facts for `meshmpi compare`": "measured.write_document",
    "share of the peak": "measured.Measured._fastest",
    "report": "measured.Report",
    "network figures": "measured.network_bytes_sent",
}
"""What a line calls it -> what is broken."""
_RUN = """
import sys
from meshmpi import cli
from meshmpi.training import measured, progress
from meshmpi.transformer.training import trainer
def broken(*arguments, **options):
    raise KeyError("start")
for name in sys.argv.pop(1).split(","):
    module, *path, last = name.split(".")
    owner = {"measured": measured, "progress": progress}[module]
    for part in path:
        owner = getattr(owner, part)
    setattr(owner, last, broken)
trainer.check_tensorboard = lambda: None
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.matrix
@pytest.mark.parametrize("broken", [[n for n in BROKEN if n != "report"], ["report"]])
def test_a_run_goes_on_without(tmp_path, broken: list[str]):
    (tmp_path / "run.py").write_text(_RUN)
    script, *rest = command(
        tmp_path,
        "train.plot=true",
        "train.tensorboard=true",
        "trace.steps=1",
        "mesh.machine=tpuv2",
        "checkpoint.at_end=true",
    )
    given = rest[1:] if script == "-m" else rest
    done = launch(
        2,
        [str(tmp_path / "run.py"), ",".join(BROKEN[n] for n in broken), *given],
        timeout_seconds=120,
        capture_output=True,
        environment={"MESHMPI_CACHE": str(tmp_path / "cache"), "PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(read_metrics(tmp_path / "run")) >= 6
    assert checkpoint.find(tmp_path / "run" / "checkpoints")
    for name in broken:
        line = f"no {name}, the run continues without: KeyError: 'start'"
        assert done.stdout.count(line) == 1, f"{name}:\n{done.stdout}"
    if broken == ["report"]:
        return
    assert "measured per rank and step: " in done.stdout
    assert "bytes of resident memory at the peak" in done.stdout
    assert "accounted per rank and step: " in done.stdout


def test_a_failure_is_told_once_in_one_line():
    lines: list[str] = []
    extras, tries = Extras(lines.append), []

    def fails() -> int:
        tries.append(1)
        raise ValueError("two\n  lines " + "x" * 1000)

    assert extras("report", fails) is extras("report", fails) is None
    assert extras("picture", lambda: 3) == 3
    assert len(tries) == 1
    assert lines[0].startswith("no report, the run continues without: ValueError: two lines xxx")
    assert len(lines) == 1 and len(lines[0]) <= 300
    with pytest.raises(KeyboardInterrupt):
        extras("picture", lambda: (_ for _ in ()).throw(KeyboardInterrupt))


def test_counters_are_those_of_the_system(tmp_path, monkeypatch: pytest.MonkeyPatch):
    before = counters.peak_resident_bytes()
    block = bytearray(b"x" * (64 << 20))
    assert counters.peak_resident_bytes() >= max(before, len(block))
    table = tmp_path / "dev"
    table.write_text(
        "Inter-|   Receive  |  Transmit\n face |bytes    packets |bytes\n"
        "    lo: 9 1 0 0 0 0 0 0 900 1 0 0 0 0 0 0\n"
        "  eth0:7 1 0 0 0 0 0 0 1000 1 0 0 0 0 0 0\n"
        "  eth1: 7 1 0 0 0 0 0 0 50 1 0 0 0 0 0 0\n"
    )
    monkeypatch.setattr(counters, "NETWORK", table)
    monkeypatch.setattr(counters, "FABRIC", tmp_path / "infiniband")
    assert counters.network_bytes_sent() == 1050
    port = tmp_path / "infiniband/mlx5_0/ports/1/counters"
    port.mkdir(parents=True)
    (port / "port_xmit_data").write_text("25\n")
    assert counters.network_bytes_sent() == 1150
    monkeypatch.setattr(counters, "NETWORK", tmp_path / "none")
    assert counters.network_bytes_sent() is None
