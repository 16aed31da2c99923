"""Calibration: on one rank, and on two under mpirun; what it writes is a machine."""

import math
import os
import time

import pytest

import meshmpi as mm
from meshmpi import cli
from meshmpi.commands.starting import _for_ranks
from meshmpi.errors import ConfigError
from meshmpi.launch.launch import launch
from meshmpi.planner import calibrate as module
from meshmpi.planner import disturbance
from meshmpi.planner.calibrate import calibrate
from meshmpi.planner.machine import RELATIVE_COSTS
from meshmpi.planner.machine_file import find_machine, keep_machine, load_machine, machine_text, parse_machine


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


@pytest.mark.matrix
def test_ranks_under_mpirun_measure_every_set_of_axes(tmp_path):
    out = tmp_path / "deep" / "machine.toml"
    command = ["-m", "meshmpi", "calibrate", "--mesh", "rows:2;cols:2", "--quick", "--repeats", "1"]
    done = launch(4, [*command, "--out", str(out)], timeout_seconds=240, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"wrote {out}") == 1
    machine = load_machine(out)
    assert set(machine.networks) == {""} and machine.ranks_per_host == 4 and machine.between is None
    network = machine.networks[""]
    assert set(network.measured) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift"}
    assert all({r for r, _, _ in rows} == {2, 4} for rows in network.measured.values())
    assert machine.waits is not None
    computed = [s for s, _ in machine.waits.points]
    assert computed == sorted(set(computed)) and computed
    assert "4 ranks" in machine.origin and machine.memory_bytes > 0


def test_what_was_measured_here_is_found_by_its_mesh(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHMPI_CACHE", str(tmp_path))
    mesh = mm.MeshShape("rows:2;cols:3")
    assert find_machine("", mesh) is None
    path = keep_machine(load_machine("tpuv2"), mesh)
    assert find_machine("", mesh) == load_machine("tpuv2") == load_machine(path)
    assert find_machine("", mm.MeshShape("rows:6")) is None
    with pytest.raises(ConfigError, match="no machine 'missing'"):
        find_machine("missing", mesh)


def test_a_damaged_description_of_this_machine_takes_no_run_down(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MESHMPI_CACHE", str(tmp_path))
    mesh = mm.MeshShape("rows:2")
    path = keep_machine(load_machine("tpuv2"), mesh)
    path.write_text(path.read_text().replace("2.25", "9.25").replace("= 2", "= 9"))
    assert find_machine("", mesh) is None
    assert find_machine("", mesh) is None
    assert capsys.readouterr().err.count(f"{path} is not as `meshmpi calibrate` wrote it") == 1


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
        (["--ranks", "2", "--repeats", "-1"], "ConfigError: --repeats is -1. Give 1 or more."),
        (["--ranks=2", "--repeats=0"], "ConfigError: --repeats is 0. Give 1 or more."),
        (["--ranks", "0"], "ConfigError: --ranks is 0. Give 1 or more."),
        (["--ranks", "2", "--layout", "batch:all"], "ConfigError: calibrate does not take a layout."),
    ],
)
def test_mistakes_are_told_before_ranks_are_started(monkeypatch, capfd, arguments, said):
    monkeypatch.setattr("meshmpi.commands.planning.on_ranks", lambda *a, **k: pytest.fail("started ranks"))
    assert cli.main(["calibrate", *arguments]) == 1
    told = capfd.readouterr().err
    assert told.startswith(said) and told.splitlines()[1:] in ([], told.splitlines()[1:2])
    assert "Traceback" not in told and "abort" not in told.lower()


@pytest.mark.parametrize("arguments", [[], ["--mesh", "rows:2", "--quick"], ["--out", "a b.toml", "--repeats", "3"]])
def test_ranks_get_what_the_command_was_given(monkeypatch, arguments):
    started = []
    monkeypatch.setattr(
        "meshmpi.commands.planning.on_ranks", lambda ranks, given, module: started.append((ranks, given)) or 7
    )
    assert cli.main(["calibrate", "--ranks", "2", *arguments]) == 7
    [(ranks, given)] = started
    parse = cli._parser().parse_args
    assert ranks == 2 and parse(_for_ranks(given)) == parse(["calibrate", *arguments])


# ---- busy machines ---------------------------------------------------------------------------


def timed(seconds: list[float], repeats: int) -> tuple[float, module._Probe]:
    """What a probe makes of measurements that take so long; further ones take as the last."""
    probe = module._Probe(mm.SimulatedMesh("all:1"), repeats, print)
    now, turns = [0.0], list(seconds)

    def clock() -> float:
        return now[0]

    def call() -> None:
        now[0] += turns.pop(0) if len(turns) > 1 else turns[0]

    skipped = [seconds[0]] * 2  # two calls come before the first measurement
    turns[:0] = skipped
    return probe._median(call, clock, 0.0), probe


@pytest.mark.parametrize(
    "seconds, found, unsteady",
    [
        ([1.0, 1.1, 1.0], 1.0, 0),
        ([1.0, 9.0, 1.1], 1.1, 0),  # one of three was disturbed: the median does not mind
        ([1.0, 9.0, 9.0, 1.0, 1.2, 1.1], 1.1, 0),  # most were: again
        ([1.0, 2.0, 3.0, 1.0, 4.0, 4.0, 1.0, 1.5, 9.0, 1.0, 5.0, 6.0], 1.5, 1),  # all the time
    ],
)
def test_what_does_not_settle_is_measured_again(seconds, found, unsteady):
    median, probe = timed(seconds, 3)
    assert median == pytest.approx(found)
    assert (probe.measurements, probe.unsteady) == (1, unsteady)


def test_what_disturbed_is_told():
    quiet = disturbance.Look("a", 10.0, 20.0, 0.0, 10.0, 3)
    assert disturbance.disturbances([quiet, quiet], 1, 100, False) == ""
    told = disturbance.disturbances([quiet._replace(working=35.0)] * 2, 0, 100, False)
    assert told == "other processes on a took 1.5 cores"
    other = quiet._replace(host="b", working=10.0, stolen=5.0, turns=900)
    told = disturbance.disturbances([quiet, quiet, other], 30, 100, False)
    assert told == (
        "b lost 0.50 cores to its hypervisor; a rank on b made room for others 90 times a second;"
        " 30 of 100 measurements did not settle"
    )
    assert "made room" not in disturbance.disturbances([other._replace(stolen=0.0)], 0, 1, True)
    assert disturbance.disturbances([quiet._replace(working=math.nan, stolen=9.0)], 0, 1, False) == ""


def test_the_counts_of_linux(tmp_path, monkeypatch):
    table = tmp_path / "stat"
    table.write_text("cpu  100 10 200 9999 9999 30 40 500 7 7\ncpu0 1 1 1 1\n")
    monkeypatch.setattr(disturbance, "STATISTICS", table)
    monkeypatch.setattr(os, "sysconf", {"SC_CLK_TCK": 100}.get)
    before = disturbance.look()
    assert (round(before.working, 6), before.stolen) == (3.8, 5.0)
    table.write_text("cpu  300 10 200 9999 9999 30 40 600 7 7\n")
    passed = disturbance.look().since(before)
    assert (round(passed.working, 6), round(passed.stolen, 6)) == (2.0, 1.0)
    table.write_text("other\n")
    assert math.isnan(disturbance.look().since(before).working)


def test_a_busy_machine_is_noted_in_output_and_file(small, monkeypatch, tmp_path):
    lines: list[str] = []
    monkeypatch.setattr(module, "disturbances", lambda *arguments: 'other "processes" took 1.5 cores')
    machine = calibrate(mm.SimulatedMesh(""), repeats=1, quick=True, say=lines.append)
    assert any("this machine was busy: other" in line for line in lines)
    again = parse_machine(machine_text(machine), "again")
    assert again.disturbed == machine.disturbed == 'other "processes" took 1.5 cores'
    monkeypatch.setattr(module, "disturbances", lambda *arguments: "")
    lines.clear()
    machine = calibrate(mm.SimulatedMesh(""), repeats=1, quick=True, say=lines.append)
    assert not any("busy" in line for line in lines)
    assert "disturbed" not in machine_text(machine)
