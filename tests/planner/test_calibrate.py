"""Calibration: on one rank, and on two under mpirun; what it writes is a machine."""

import os
import time

import pytest

import meshmpi as mm
from meshmpi import cli
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
    assert machine.waits is not None
    computed = [s for s, _ in machine.waits.points]
    assert computed == sorted(set(computed)) and computed
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


@pytest.mark.parametrize(
    "masks, quota, shared",
    [
        ([("", {0, 1}), ("", {0, 1})], None, 1.0),
        ([("", {0, 1})] * 4, None, 2.0),
        ([("", {0}), ("", {1})], None, 1.0),  # bound, each to its own
        ([("", {0, 1}), ("", {0, 1}), ("other", {0})], None, 1.0),
        ([("", {0, 1})] * 3, None, 1.5),
        ([("", {0, 1, 2, 3})] * 4, 2.0, 2.0),
        ([("", {0, 1, 2, 3})], None, 1.0),
    ],
)
def test_ranks_on_a_core_are_those_of_this_host(monkeypatch, masks, quota, shared):
    monkeypatch.setattr(module, "cgroup_quota", lambda: quota)
    places = [(host or os.uname().nodename, mask) for host, mask in masks]
    assert module._ranks_on_a_core(places) == shared


def test_processor_time_counts_for_all_ranks_of_a_core(small):
    """What sleeps does not compute: only the wall clock sees it."""
    probe = module._Probe(mm.SimulatedMesh("all:1"), 1, print)
    assert probe.seconds(lambda: time.sleep(2e-3)) >= 2e-3
    probe.sharing = 2.0
    assert probe.seconds(lambda: time.sleep(2e-3)) < 2e-3
    assert probe.together(lambda: time.sleep(2e-3)) >= 2e-3


@pytest.mark.parametrize(
    "allowed, names, each",
    [
        (None, 1, 1 << 40),
        (1 << 33, 1, 1 << 33),
        (1 << 62, 1, 1 << 40),  # more than there is
        (1 << 33, 4, 1 << 31),
    ],
)
def test_memory_is_what_control_groups_allow(small, monkeypatch, allowed, names, each):
    probe = module._Probe(mm.SimulatedMesh("all:1"), 1, print)
    monkeypatch.setattr(module, "group_memory", lambda: allowed)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 1 << 12, "SC_PHYS_PAGES": 1 << 28}.get)
    if names > 1:
        probe.alone = False
        monkeypatch.setattr(module, "gathered", lambda mesh, mine, what: [mine] * names)
    assert probe.memory_bytes() == each


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--ranks", "2", "--mesh", "rows:2;cols:2"], "MeshError: mesh {rows: 2, cols: 2} needs 4"),
        (["--ranks", "2", "--mesh", "rows"], "MeshError: 'rows' in the mesh shape 'rows' has no"),
        (["--ranks", "2", "--repeats", "-1"], "ConfigError: -1 repeats. Give 1 or more."),
        (["--ranks=2", "--repeats=0"], "ConfigError: 0 repeats. Give 1 or more."),
        (["--ranks", "0"], "ConfigError: 0 ranks. Give 1 or more."),
        (["--ranks", "2", "--layout", "batch:all"], "ConfigError: a machine has no layout."),
    ],
)
def test_mistakes_are_told_before_ranks_are_started(monkeypatch, capfd, arguments, said):
    monkeypatch.setattr(cli, "on_ranks", lambda *a, **k: pytest.fail("started ranks"))
    assert cli.main(["calibrate", *arguments]) == 1
    told = capfd.readouterr().err
    assert told.startswith(said) and told.splitlines()[1:] in ([], told.splitlines()[1:2])
    assert "Traceback" not in told and "abort" not in told.lower()


@pytest.mark.parametrize(
    "arguments", [[], ["--mesh", "rows:2", "--quick"], ["--out", "a b.toml", "--repeats", "3"]]
)
def test_ranks_get_what_the_command_was_given(monkeypatch, arguments):
    started = []
    monkeypatch.setattr(cli, "on_ranks", lambda ranks, given: started.append((ranks, given)) or 7)
    assert cli.main(["calibrate", "--ranks", "2", *arguments]) == 7
    [(ranks, given)] = started
    parse = cli._parser().parse_args
    assert ranks == 2 and parse(given) == parse(["calibrate", *arguments])
