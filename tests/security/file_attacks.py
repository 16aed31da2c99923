"""Attacks on files that ranks of a host share: records of collectives, claims, stacks, status."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from meshmpi.errors import DataError
from meshmpi.files.private import Folder
from meshmpi.guard import flight, rings, stacks, status
from meshmpi.guard.flight import Ring
from meshmpi.guard.rings import Reader
from meshmpi.runtime import processes
from meshmpi.runtime.calls import CallKind, Tally
from tests.security.registry import STRANGER, Scene, attack, refused_to_strangers


def shared_place(scene: Scene) -> Path:
    """A folder as /tmp: all may write to it, nobody may rename what others made."""
    place = scene.folder / "shm"
    place.mkdir()
    place.chmod(0o1777)
    return place


def victims_file(scene: Scene) -> Path:
    """A file that must stay as it is."""
    path = scene.folder / "precious"
    path.write_text("precious")
    return path


def same(path: Path) -> str:
    """What was done to the victim's file."""
    return "" if path.exists() and path.read_text() == "precious" else f"{path} was changed"


def old_name(place: Path, suffix: str = ".ring") -> Path:
    """Where an earlier version put its files, which everybody could tell in advance."""
    pid = os.getpid()
    folder = place / f"meshmpi-{os.geteuid()}"
    folder.mkdir(exist_ok=True)
    return folder / f"{pid}-{processes.start_time(pid)}{suffix}"


@attack()
def a_link_where_the_record_goes(scene: Scene) -> str:
    """A link under a name that can be told in advance has a file of the victim's overwritten."""
    place, precious = shared_place(scene), victims_file(scene)
    for suffix in (".ring", ".txt", ".stacks", ".ending"):
        old_name(place, suffix).symlink_to(precious)
    scene.patch.setenv(flight.FOLDER_VARIABLE, str(place))
    scene.patch.setattr(flight, "_ring", None)
    for one in (place, old_name(place).parent):
        ring = Ring(one, 0, 2)
        stacks.dump(ring.path.with_suffix(".stacks"))
        ring.remove()
    return same(precious)


@attack()
def a_record_whose_folder_can_be_guessed(scene: Scene) -> str:
    """Two processes, or two starts of one, use a folder of equal name."""
    place = shared_place(scene)
    one, two = Ring(place, 0, 2), Ring(place, 0, 2)
    ends = {ring.path.parent.name.rsplit("-", 1)[1] for ring in (one, two)}
    one.remove()
    two.remove()
    return "" if len(ends) == 2 and min(map(len, ends)) >= 16 else f"{ends}"


@attack(as_root=True)
def a_stranger_reads_a_record(scene: Scene) -> str:
    """Another user sees file names and lines of the victim's program, or writes records."""
    place = shared_place(scene)
    ring = Ring(place, 0, 2)
    modes = [ring.path.parent.stat().st_mode & 0o777]
    modes += [p.stat().st_mode & 0o777 for p in ring.path.parent.iterdir()]
    refused = refused_to_strangers(scene.folder, ring.path.relative_to(scene.folder).read_bytes)
    ring.remove()
    return "" if modes == [0o700, 0o600, 0o600] and refused else f"modes {modes}, {refused}"


@attack(as_root=True)
def a_place_of_another_user(scene: Scene) -> str:
    """Records go where somebody else can rename and replace them."""
    place = scene.folder / "shm"
    place.mkdir(mode=0o755)
    os.chown(place, STRANGER, STRANGER)
    return _refused(place)


@attack()
def a_place_where_others_can_rename(scene: Scene) -> str:
    """The same, in a folder that all may write to and that is not sticky."""
    place = scene.folder / "shm"
    place.mkdir()
    place.chmod(0o777)
    return _refused(place)


def _refused(place: Path) -> str:
    try:
        Ring(place, 0, 2).remove()
    except PermissionError:
        return "" if not list(place.iterdir()) else "something was left there"
    return f"{place} was used"


def _dead_mark() -> str:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = processes.start_time(child.pid)
    child.kill()
    child.communicate()
    return f"{child.pid}-{started}-{processes.mark().split('-', 2)[2]}"


def _swept(scene: Scene, make: Callable[[Path, str], Path]) -> str:
    """Sweeps a place in which ``make`` has put something, and says whether that is gone."""
    place = shared_place(scene)
    made = make(place, f"meshmpi-{os.geteuid()}-{_dead_mark()}-{16 * 'a'}")
    flight.sweep(place)
    return "" if os.path.lexists(made) else f"{made.name} was removed"


@attack()
def folders_of_other_software_are_swept(scene: Scene) -> str:
    """Folders that are named as an earlier version named its own, job-..., are emptied."""

    def make(place: Path, name: str) -> Path:
        (place / "job-1-1").mkdir()
        (place / "job-1-1" / "1-1.ring").write_bytes(b"")
        os.utime(place / "job-1-1" / "1-1.ring", (0, 0))
        return place / "job-1-1" / "1-1.ring"

    return _swept(scene, make)


@attack(as_root=True)
def a_folder_of_another_user_is_swept(scene: Scene) -> str:
    """Root removes what a user has made under the name of root's folders."""

    def make(place: Path, name: str) -> Path:
        (place / name).mkdir(mode=0o700)
        os.chown(place / name, STRANGER, STRANGER)
        return place / name

    return _swept(scene, make)


@attack()
def a_link_is_swept_with_what_it_leads_to(scene: Scene) -> str:
    """A link under the name of a dead process's folder has a folder of the victim's removed."""

    def make(place: Path, name: str) -> Path:
        (scene.folder / "home").mkdir(mode=0o700)
        (scene.folder / "home" / "1-1.ring").touch()
        (place / name).symlink_to(scene.folder / "home")
        return scene.folder / "home" / "1-1.ring"

    return _swept(scene, make)


@attack()
def a_link_inside_a_folder_that_is_swept(scene: Scene) -> str:
    """What links in a dead process's folder lead to is removed with it."""

    def make(place: Path, name: str) -> Path:
        (scene.folder / "home").mkdir(mode=0o700)
        (scene.folder / "home" / "file").touch()
        (place / name).mkdir(mode=0o700)
        (place / name / "a").symlink_to(scene.folder / "home")
        return scene.folder / "home" / "file"

    return _swept(scene, make)


@attack()
def a_process_number_used_again(scene: Scene) -> str:
    """The folder of a running process goes, as another of its number has ended; or stays."""
    place, pid = shared_place(scene), os.getpid()
    where = processes.mark().split("-", 2)[2]
    start = processes.start_time(pid)
    names = {
        k: place / f"meshmpi-{os.geteuid()}-{mark}-{16 * 'b'}"
        for k, mark in {
            "alive": f"{pid}-{start}-{where}",
            "number used again": f"{pid}-{start + 1}-{where}",
            "another boot": f"{pid}-{start + 1}-00000000-1",
            "another namespace": f"{pid}-{start + 1}-{where.split('-')[0]}-1",
        }.items()
    }
    for path in names.values():
        path.mkdir(mode=0o700)
    flight.sweep(place)
    left = [k for k, path in names.items() if path.exists()]
    return "" if left == ["alive", "another boot", "another namespace"] else f"left: {left}"


# ---- what is read ----------------------------------------------------------------------------


def _status(scene: Scene, ring: str, **more: object) -> Path:
    """A run whose status file names this ring."""
    own = Ring(scene.folder, 0, 1)
    seen = Reader(own.path).look("host", "running")
    assert seen is not None
    status.Publisher(scene.folder / "run", 1)(rings.member(0, own), seen)
    own.remove()
    (file,) = (scene.folder / "run" / "status").glob("rank-*.json")
    told = {**json.loads(file.read_text()), "ring": ring, **more}
    file.write_text(json.dumps(told))
    return file


def _shown(scene: Scene, seconds: float = 5.0) -> str:
    """``meshmpi status`` of the run; raises where it does not come to an end."""

    def late(*_: object) -> None:
        raise TimeoutError("it does not end")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return status.table(status.read(scene.folder / "run"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@attack()
def a_status_file_that_names_an_endless_file(scene: Scene) -> str:
    """meshmpi status reads /dev/zero until memory is full."""
    _status(scene, "/dev/zero")
    return "" if "rank" in _shown(scene) else "nothing is shown"


@attack()
def a_status_file_that_names_a_pipe(scene: Scene) -> str:
    """meshmpi status waits for ever."""
    os.mkfifo(scene.folder / "x.ring")
    os.mkfifo(scene.folder / "x.txt")
    _status(scene, str(scene.folder / "x.ring"))
    return "" if "rank" in _shown(scene) else "nothing is shown"


@attack()
def a_pipe_in_place_of_a_status_file(scene: Scene) -> str:
    """The same, by the status file itself."""
    file = _status(scene, "")
    file.unlink()
    os.mkfifo(file)
    try:
        _shown(scene)
    except DataError:
        return ""
    return "it was believed"


@attack()
def a_status_file_that_commands_the_terminal(scene: Scene) -> str:
    """Somebody else's run moves the cursor, or renames the window, of who looks at it."""
    file = _status(scene, "")
    told = json.loads(file.read_text())
    told["seen"] |= {"host": "\x1b]0;evil\x07", "phase": "a\x1b[2J\rb", "pid": 1}
    file.write_text(json.dumps(told))
    shown = _shown(scene)
    return "" if shown.replace("\n", "").isprintable() else repr(shown)


@attack()
def a_status_file_that_nests_without_end(scene: Scene) -> str:
    """meshmpi status ends with a traceback."""
    _status(scene, "").write_text("[" * 1_000_000)
    try:
        _shown(scene)
    except DataError:
        return ""
    return "it was believed"


@attack()
def a_link_where_the_status_goes(scene: Scene) -> str:
    """In a run's folder that a group shares, a link has a file of the victim's overwritten."""
    precious = victims_file(scene)
    (scene.folder / "run" / "status").mkdir(parents=True)
    for name in ("rank-00000.part", ".rank-00000.json.part", "rank-00000.json"):
        (scene.folder / "run" / "status" / name).symlink_to(precious)
    _status(scene, "")
    return same(precious)


@attack()
def a_record_of_nonsense(scene: Scene) -> str:
    """Damage in a rank's record takes down those who watch it."""
    ring = Ring(scene.folder, 0, 2)
    kind = CallKind("all_reduce", "sum", "float32", "rows", 10, "10")
    ring.recorded(lambda: None, Tally(), ring.channel("k", (0, 1)), kind, ring.entry(kind, 4, "a.py:1"))()
    table, whole = ring.path.with_suffix(".txt"), ring.path.read_bytes()
    words = table.read_bytes()
    draw = random.Random(1)
    for trial in range(300):
        damaged, text = bytearray(whole), bytearray(words)
        for data in (damaged, text):
            data[draw.randrange(min(len(data), 2700))] ^= 1 << draw.randrange(8)
        ring.path.write_bytes(damaged if trial % 7 else damaged[: draw.randrange(len(damaged))])
        table.write_bytes(text)
        for calls in (8, flight.RECORDS):
            reader = Reader(ring.path)
            reader.heartbeat()
            reader.look("host", "running", calls)
    return ""


@attack()
def a_killed_job_leaves_nothing_to_the_next(scene: Scene) -> str:
    """Shared memory fills up with what killed jobs have left."""
    place = shared_place(scene)
    code = (
        "import sys, time; from pathlib import Path; from meshmpi.guard.flight import Ring;"
        "ring = Ring(Path(sys.argv[1]), 0, 2); print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(place)], stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        killed.stdout.readline()
        flight.sweep(place)
        alive = len(list(place.iterdir()))
        killed.kill()
    scene.patch.setenv(flight.FOLDER_VARIABLE, str(place))
    scene.patch.setattr(flight, "_ring", None)
    own = flight.start(0, 2)
    assert own is not None
    left = [p for p in place.iterdir() if p != own.path.parent]
    own.remove()
    scene.patch.setattr(flight, "_ring", None)
    return "" if alive == 1 and not left else f"{alive} while it ran, then {left}"


@attack(as_root=True)
def roots_files_in_a_stranger_s_private_folder(scene: Scene) -> str:
    """A folder that somebody else owns is taken for private because nobody else may write."""
    folder = scene.folder / "theirs"
    folder.mkdir(mode=0o700)
    os.chown(folder, STRANGER, STRANGER)
    with pytest.raises(PermissionError, match="belongs to user"):
        Folder.at(folder)
    return "" if not list(folder.iterdir()) else "it was used"
