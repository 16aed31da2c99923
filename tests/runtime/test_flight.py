"""What a rank writes of itself, read by another process or after its death."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshmpi.errors import DataError
from meshmpi.guard import flight, rings, status
from meshmpi.guard.flight import Ring
from meshmpi.guard.rings import Reader, from_json, to_json
from meshmpi.runtime import processes
from meshmpi.runtime.calls import CallKind, Tally

SUM = CallKind("all_reduce", "sum", "float32", "rows", 10, "10")


@pytest.fixture
def ring(tmp_path: Path):
    made = Ring(tmp_path, 1, 4)
    yield made
    made.remove()


def look(ring: Ring):
    seen = Reader(ring.path).look("h", "running")
    assert seen is not None
    return seen


def test_what_is_written_is_read(ring: Ring):
    channel = ring.channel("m/rows/1", (1, 3))
    entry = ring.entry(SUM, 40, "a.py:3")
    ring.recorded(lambda: None, Tally(), channel, SUM, entry)()
    ring.phase("step", 12)
    seen = ring.recorded(lambda: look(ring), Tally(), channel, SUM, entry)()
    assert (seen.rank, seen.pid, seen.phase, seen.step) == (1, os.getpid(), "step", 12)
    assert [c.waits for c in seen.calls] == [False, True]
    call = seen.waiting
    assert call is not None and (call.kind, call.number, call.line) == (SUM, 2, "a.py:3")
    assert seen.members == {"m/rows/1": (1, 3)} and seen.reached["m/rows/1"][0] == 2
    assert str(call) == ("all_reduce(sum, float32, 10 elements, 40 B sent) over rows at a.py:3")
    assert from_json(json.loads(json.dumps(to_json(seen)))) == seen


def test_a_ring_that_has_gone_round(ring: Ring):
    channel, entry = ring.channel("k", (0, 1)), ring.entry(SUM, 40, "")
    run = ring.recorded(lambda: None, Tally(), channel, SUM, entry)
    for _ in range(3 * flight.RECORDS + 5):
        run()
    seen = look(ring)
    assert seen.count == 3 * flight.RECORDS + 5 == seen.calls[-1].number
    assert len(seen.calls) == flight.RECORDS
    assert [c.number for c in seen.calls] == list(range(seen.count - flight.RECORDS + 1, seen.count + 1))


def test_an_error_in_a_collective_ends_its_record(ring: Ring):
    def fail() -> None:
        raise ValueError

    run = ring.recorded(fail, Tally(), ring.channel("k", (0, 1)), SUM, ring.entry(SUM, 4, ""))
    with pytest.raises(ValueError):
        run()
    assert look(ring).waiting is None


def test_the_table_stays_bounded(ring: Ring, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flight, "MOST_ENTRIES", 10)
    entries = [ring.entry(SUM._replace(elements=k), k, "") for k in range(30)]
    assert entries[:9] == list(range(1, 10)) and set(entries[9:]) == {0}
    channel = ring.channel("k", (0, 1))
    seen = ring.recorded(lambda: look(ring), Tally(), channel, SUM, entries[-1])()
    assert seen.reached["k"][0] == 1 and seen.waiting is not None, "one of too many is seen too"
    assert "different ones" in str(seen.waiting)


def test_names_that_a_table_cannot_hold(ring: Ring):
    entry = ring.entry(SUM, 40, "a\tb\nc\udcff.py:3")
    seen = ring.recorded(lambda: look(ring), Tally(), ring.channel("k", (0, 1)), SUM, entry)()
    assert seen.waiting is not None and seen.waiting.line == "a\\tb\\nc\\udcff.py:3"


def test_a_folder_of_another_job_that_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    left_by_a_killed_process(tmp_path)
    monkeypatch.setattr(flight, "_ring", None)
    monkeypatch.setenv(flight.FOLDER_VARIABLE, str(tmp_path))
    real = flight.read_plain

    def vanishing(path: Path):
        for file in path.parent.iterdir():
            file.unlink()
        return real(path)

    monkeypatch.setattr(flight, "read_plain", vanishing)
    made = flight.start(0, 2)
    assert made is not None and made.path.parent.parent == tmp_path
    made.remove()
    assert list(tmp_path.iterdir()) == []


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        Ring(tmp_path, 0, 2)
    assert list(tmp_path.iterdir()) == []


_KILLED = """
import os, sys
from pathlib import Path
from meshmpi.runtime import processes
from meshmpi.guard.flight import Ring
ring = Ring(Path(sys.argv[1]), 0, 2)
if len(sys.argv) > 2:
    ring.beside([(int(pid), processes.start_time(int(pid))) for pid in sys.argv[2:]])
ring.path.with_suffix(".ending").touch()
os.kill(os.getpid(), 9)
"""


def left_by_a_killed_process(place: Path, *others: int) -> Path:
    """The folder that a process leaves which is killed; ``others`` are of its job."""
    before = set(place.iterdir())
    command = [sys.executable, "-c", _KILLED, str(place), *map(str, others)]
    assert subprocess.run(command).returncode == -9
    (left,) = set(place.iterdir()) - before
    return left


def test_what_killed_processes_left_goes_at_the_next_start(tmp_path: Path):
    """At once, but not while a process of the same job may look at it."""
    dead = left_by_a_killed_process(tmp_path)
    watched = left_by_a_killed_process(tmp_path, os.getpid())
    own = Ring(tmp_path, 0, 2)
    flight.sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([watched, own.path.parent])
    assert not dead.exists()
    own.remove()


def test_the_folder_of_a_killed_launcher_goes_with_its_ranks(tmp_path: Path):
    launcher = left_by_a_killed_process(tmp_path)
    left_by_a_killed_process(launcher)
    (running,) = [launcher / name for name in [f"{flight._beginning()}{16 * 'a'}"]]
    running.mkdir(mode=0o700)
    flight.sweep(tmp_path)
    assert launcher.exists(), "one of its ranks runs"
    running.rmdir()
    flight.sweep(tmp_path)
    assert not launcher.exists()


def test_states_of_a_process():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = processes.start_time(child.pid)
    assert processes.state(child.pid, start) == "running"
    assert processes.state(child.pid, start + 1) == "gone", "another process of this number"
    os.kill(child.pid, 19)
    deadline = time.monotonic() + 5
    while processes.state(child.pid, start) != "stopped":
        assert time.monotonic() < deadline
    child.kill()
    child.communicate()
    assert processes.state(child.pid, start) == "gone"


def test_status_of_a_run(tmp_path: Path, ring: Ring):
    me = rings.member(1, ring)
    publish = status.Publisher(tmp_path, 2)
    ring.phase("save", 40)
    publish(me, look(ring))
    (row,) = status.read(tmp_path)
    assert (row.age, row.seen.life, row.seen.phase) == (0.0, "running", "save")
    ring.phase("step", 41)
    assert status.read(tmp_path)[0].seen.step == 41, "the ring tells the present moment"
    ring.leaving(75)
    publish(me, look(ring))
    ring.remove()
    (row,) = status.read(tmp_path)
    assert row.seen.life == "left" and "left (75)" in status.table([row])


def test_status_of_a_run_that_was_killed(tmp_path: Path, ring: Ring):
    me = rings.member(1, ring)._replace(start=1)
    status.Publisher(tmp_path, 2)(me, look(ring))
    ring.remove()
    (row,) = status.read(tmp_path)
    assert row.seen.life == "gone" and "last seen" in status.table([row])


def test_ranks_of_an_earlier_larger_job_are_left_out(tmp_path: Path, ring: Ring):
    me, seen = rings.member(1, ring), look(ring)
    seen.rank = 3
    status.Publisher(tmp_path, 4)(me, seen)
    seen.rank = 1
    status.Publisher(tmp_path, 2)(me, seen)
    assert [row.seen.rank for row in status.read(tmp_path)] == [1]


def test_no_status(tmp_path: Path):
    with pytest.raises(DataError, match="there is no status in"):
        status.read(tmp_path)
    (tmp_path / "status").mkdir()
    (tmp_path / "status" / "rank-00000.json").write_text("{")
    with pytest.raises(DataError, match="is not a status file"):
        status.read(tmp_path)
