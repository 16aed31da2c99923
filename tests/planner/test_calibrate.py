"""Calibration: on one rank, and on two under mpirun; what it writes is a machine."""

import pytest

import meshmpi as mm
from meshmpi.errors import ConfigError
from meshmpi.measuring import calibrate as module
from meshmpi.measuring.calibrate import calibrate
from meshmpi.measuring.machines import find_machine, machine_path
from meshmpi.planner.machine import RELATIVE_COSTS
from meshmpi.planner.machine_file import load_machine, machine_text, parse_machine
from meshmpi.runtime.launch import launch


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(module, "PRODUCT_SIZES", (8, 32, 64))
    monkeypatch.setattr(module, "MEMORY_BYTES", (1 << 14, 1 << 16))
    monkeypatch.setattr(module, "_SECONDS", 1e-4)


def test_one_rank_has_rates_and_no_network(small):
    machine = calibrate(mm.SimulatedMesh(""), repeats=1, quick=True)
    assert machine.peak > 1e6 and machine.networks == {} and machine.waits is None
    assert set(machine.operations) == set(RELATIVE_COSTS)
    assert all(seconds > 0 for seconds in machine.operations.values())
    assert all(rate > 0 for _, rate in machine.memory.points)
    again = parse_machine(machine_text(machine), "again")
    assert again.peak == pytest.approx(machine.peak, rel=1e-3)


def test_ranks_under_mpirun_measure_every_set_of_axes(tmp_path):
    out = tmp_path / "deep" / "machine.toml"
    command = ["-m", "meshmpi", "calibrate", "--mesh", "rows:2;cols:2", "--quick", "--repeats", "1"]
    done = launch(4, [*command, "--out", str(out)], timeout_seconds=240, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"wrote {out}") == 1
    machine = load_machine(out)
    assert set(machine.networks) == {"rows", "cols", "rows+cols", ""}
    for axes, ranks in (("rows", 2), ("rows+cols", 4)):
        network = machine.networks[axes]
        assert set(network.measured) == {
            "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift",
        }  # fmt: skip
        assert all(r == ranks for rows in network.measured.values() for r, _, _ in rows)
    assert machine.waits is not None and [s for s, _ in machine.waits.points] == [1e-4, 1e-3]
    assert "4 ranks" in machine.origin and machine.memory_bytes > 0


def test_what_was_measured_here_is_found_by_its_mesh(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHMPI_CACHE", str(tmp_path))
    mesh = mm.MeshShape("rows:2;cols:3")
    assert find_machine("", mesh) is None
    machine_path(mesh).write_text(machine_text(load_machine("tpuv2")))
    assert find_machine("", mesh).peak == load_machine("tpuv2").peak
    assert find_machine("", mm.MeshShape("rows:6")) is None
    with pytest.raises(ConfigError, match="no machine 'missing'"):
        find_machine("missing", mesh)
