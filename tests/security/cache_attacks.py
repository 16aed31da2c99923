"""Attacks on the cache: code that others, or damage, put where kernels are loaded from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from meshmpi.files import cache
from meshmpi.files.private import Folder
from meshmpi.kernels.native import available, compiler
from tests.security.registry import STRANGER, Scene, attack, refused_to_strangers

SOURCE = "int answer(void) { return 42; }\n"
FOREIGN = "int answer(void) { return 666; }\n"
_LOAD = """
import sys
from meshmpi.kernels.native.compiler import load_library
print(load_library(sys.argv[1]).answer())
"""


def used(scene: Scene, root: Path) -> Path:
    """Makes ``root`` the cache and fills it with one library; the folder of libraries."""
    scene.patch.setenv("MESHMPI_CACHE", str(root))
    scene.patch.setattr("tempfile.tempdir", str(scene.folder / "tmp"))
    (scene.folder / "tmp").mkdir(mode=0o700, exist_ok=True)
    compiler._libraries.clear()
    assert compiler.load_library(SOURCE).answer() == 42
    compiler._libraries.clear()
    return root / "kernels"


def foreign_library(folder: Path) -> bytes:
    """What an attacker would have us load."""
    folder.mkdir(exist_ok=True)
    (folder / "foreign.c").write_text(FOREIGN)
    command = [compiler.compiler()[0], "-shared", "-fPIC", "foreign.c", "-o", "foreign.so"]
    subprocess.run(command, cwd=folder, check=True)
    return (folder / "foreign.so").read_bytes()


def outcome() -> str:
    """Loads the library again: what came of it."""
    answer = compiler.load_library(SOURCE).answer()
    return "" if answer == 42 else f"foreign code ran: {answer}"


def with_library(change: Callable[[Path, Scene], object]) -> Callable[[Scene], str]:
    """An attack that changes the one library of the cache."""

    def attempt(scene: Scene) -> str:
        if not available():
            return ""  # nothing is ever loaded
        (library,) = used(scene, scene.folder / "cache").glob("*.so")
        change(library, scene)
        return outcome()

    return attempt


def _planted(library: Path, scene: Scene) -> None:
    library.write_bytes(foreign_library(scene.folder / "evil"))


@attack()
def a_planted_library(scene: Scene) -> str:
    """Another library under the right name is loaded."""
    return with_library(_planted)(scene)


@attack(as_root=True)
def a_planted_library_of_another_user(scene: Scene) -> str:
    """A library that somebody else owns is loaded, even one with the right content."""

    def change(library: Path, scene: Scene) -> None:
        _planted(library, scene)
        entry = library.with_suffix(".json")
        with Folder.at(library.parent) as folder:
            cache.remember(folder, entry.name, hashlib.sha256(library.read_bytes()).hexdigest())
        os.chown(library, STRANGER, STRANGER)

    return with_library(change)(scene)


@attack()
def a_library_that_others_may_write_to(scene: Scene) -> str:
    """Code that anybody may change is loaded: it must be built again, with mode 0600."""

    def change(library: Path, scene: Scene) -> None:
        library.chmod(0o666)

    gained = with_library(change)(scene)
    (library,) = (scene.folder / "cache" / "kernels").glob("*.so")
    return gained or ("" if library.stat().st_mode & 0o777 == 0o600 else "it was kept")


@attack()
def a_link_in_place_of_a_library(scene: Scene) -> str:
    """A link to a foreign library is followed."""

    def change(library: Path, scene: Scene) -> None:
        foreign_library(scene.folder / "evil")
        library.unlink()
        library.symlink_to(scene.folder / "evil" / "foreign.so")

    return with_library(change)(scene)


@attack()
def two_libraries_swapped(scene: Scene) -> str:
    """The library of another source, built here, runs in place of the right one."""

    def change(library: Path, scene: Scene) -> None:
        compiler.load_library(FOREIGN)
        (other,) = (f for f in library.parent.glob("*.so") if f != library)
        library.write_bytes(other.read_bytes())

    return with_library(change)(scene)


@attack()
def a_library_and_its_entry_swapped_with_another(scene: Scene) -> str:
    """The entry of another library vouches for it under a name that is not its own."""

    def change(library: Path, scene: Scene) -> None:
        compiler.load_library(FOREIGN)
        (other,) = (f for f in library.parent.glob("*.so") if f != library)
        for suffix in (".so", ".json"):
            library.with_suffix(suffix).write_bytes(other.with_suffix(suffix).read_bytes())

    return with_library(change)(scene)


@attack()
def a_flipped_bit_in_a_library(scene: Scene) -> str:
    """A damaged library is loaded: it may crash or compute anything."""

    def change(library: Path, scene: Scene) -> None:
        data = bytearray(library.read_bytes())
        data[len(data) // 2] ^= 1
        library.write_bytes(data)
        scene.patch.setattr(compiler, "_loaded", _only(bytes(data), compiler._loaded))

    return with_library(change)(scene)


def _only(bad: bytes, real: Callable) -> Callable:
    def loaded(data: bytes, *more: object):
        assert data != bad, "the damaged library is loaded"
        return real(data, *more)

    return loaded


@attack()
def a_fifo_in_place_of_a_library(scene: Scene) -> str:
    """A run waits for ever for somebody to write into a pipe."""

    def change(library: Path, scene: Scene) -> None:
        library.unlink()
        os.mkfifo(library)

    return with_library(change)(scene)


@attack()
def a_folder_in_place_of_a_library(scene: Scene) -> str:
    """A run fails because a folder has the library's name."""

    def change(library: Path, scene: Scene) -> None:
        library.unlink()
        (library / "in").mkdir(parents=True)

    return with_library(change)(scene)


@attack()
def a_huge_library(scene: Scene) -> str:
    """A run reads a file of a terabyte (of holes) into memory."""

    def change(library: Path, scene: Scene) -> None:
        os.truncate(library, 1 << 40)

    return with_library(change)(scene)


@attack()
def a_command_in_the_note_of_the_compiler(scene: Scene) -> str:
    """A command that was put into the cache is run."""
    if not available():
        return ""
    compiler._compiler.cache_clear()
    folder = used(scene, scene.folder / "cache")
    mark = scene.folder / "ran"
    evil = scene.folder / "cc"
    evil.write_text(f"#!/bin/sh\ntouch {mark}\n")
    evil.chmod(0o755)
    (note,) = folder.glob("compiler-*.json")
    told = {"command": [str(evil)], "accepts": [str(evil)], "version": "1"}
    note.write_text(json.dumps(told))
    compiler._compiler.cache_clear()
    gained = outcome()
    with Folder.at(folder) as opened:
        cache.remember(opened, note.name, told)  # and one with the right seal
    compiler._compiler.cache_clear()
    compiler._libraries.clear()
    try:
        gained = gained or outcome()
        return gained or (f"{evil} was run" if mark.exists() else "")
    finally:
        compiler._compiler.cache_clear()


@attack()
def a_library_changed_after_it_was_hashed(scene: Scene) -> str:
    """The file changes between the check and the loading, and the new content is loaded."""
    if not available():
        return ""
    (library,) = used(scene, scene.folder / "cache").glob("*.so")
    evil, real = foreign_library(scene.folder / "evil"), compiler._loaded

    def late(*arguments: object):
        library.unlink()
        library.write_bytes(evil)
        return real(*arguments)

    scene.patch.setattr(compiler, "_loaded", late)
    return outcome()


@attack()
def a_descriptor_used_again(scene: Scene) -> str:
    """A second library is taken for the first, as both were loaded by the same descriptor."""
    if not available():
        return ""
    used(scene, scene.folder / "cache")
    found = [compiler.load_library(SOURCE.replace("42", str(k))).answer() for k in range(4)]
    return "" if found == [0, 1, 2, 3] else f"{found}"


@attack()
def a_library_changed_while_it_runs(scene: Scene) -> str:
    """A loaded library whose file is cut crashes the process."""
    if not available():
        return ""
    (library,) = used(scene, scene.folder / "cache").glob("*.so")
    code = _LOAD + "import os\nloaded = load_library(sys.argv[1])\nos.truncate(sys.argv[2], 0)\n"
    code += "print(loaded.answer())\n"
    done = subprocess.run([sys.executable, "-c", code, SOURCE, str(library)], capture_output=True, text=True)
    right = done.stdout.split() == ["42", "42"]
    return "" if right else f"exit status {done.returncode}, {done.stdout!r}"


# ---- folders ---------------------------------------------------------------------------------


def _not_used(scene: Scene, root: Path, capture: list[str]) -> str:
    """Loads with the cache at ``root``: what was gained if anything was put there."""
    scene.patch.setenv("MESHMPI_CACHE", str(root))
    scene.patch.setattr("tempfile.tempdir", str(scene.folder / "tmp"))
    (scene.folder / "tmp").mkdir(mode=0o700, exist_ok=True)
    scene.patch.setattr(cache, "_told", {})
    scene.patch.setattr("sys.stderr.write", capture.append)
    before = sorted(root.rglob("*")) if root.exists() else []
    with cache.opened("kernels", programs=True) as folder:
        found = folder.path
    if root in found.parents or root == found:
        return f"{root} was trusted"
    if (sorted(root.rglob("*")) if root.exists() else []) != before:
        return f"{root} was written to"
    if len(capture) != 1 or str(root) not in capture[0] or capture[0].count("\n") != 1:
        return f"it was not said in one line: {capture}"
    return ""


@attack(as_root=True)
def a_cache_made_before_by_another_user(scene: Scene) -> str:
    """Who makes the root of the cache first can rename and replace everything in it."""
    root = scene.folder / "cache"
    (root / "kernels").mkdir(parents=True, mode=0o700)
    os.chown(root, STRANGER, STRANGER)  # the folder inside is the victim's own
    return _not_used(scene, root, [])


@attack(as_root=True)
def a_folder_inside_the_cache_of_another_user(scene: Scene) -> str:
    """A folder of the attacker's inside the victim's cache is trusted."""
    root = scene.folder / "cache"
    (root / "kernels").mkdir(parents=True, mode=0o700)
    root.chmod(0o700)
    os.chown(root / "kernels", STRANGER, STRANGER)
    return _not_used(scene, root, [])


@attack()
def a_cache_that_the_group_may_write_to(scene: Scene) -> str:
    """A member of the group puts libraries there."""
    root = scene.folder / "cache"
    (root / "kernels").mkdir(parents=True)
    root.chmod(0o700)
    (root / "kernels").chmod(0o770)
    return _not_used(scene, root, [])


@attack()
def a_cache_root_that_all_may_write_to(scene: Scene) -> str:
    """Anybody renames the folder of libraries, and puts another in its place."""
    root = scene.folder / "cache"
    (root / "kernels").mkdir(parents=True, mode=0o700)
    root.chmod(0o777)
    return _not_used(scene, root, [])


@attack()
def a_link_in_place_of_the_cache(scene: Scene) -> str:
    """The victim's files go where a link leads, into another folder of the victim's."""
    (scene.folder / "precious").mkdir(mode=0o700)
    root = scene.folder / "cache"
    root.symlink_to(scene.folder / "precious")
    return _not_used(scene, root, [])


@attack()
def a_link_inside_the_cache(scene: Scene) -> str:
    """The same, one folder further in."""
    (scene.folder / "precious").mkdir(mode=0o700)
    root = scene.folder / "cache"
    root.mkdir(mode=0o700)
    (root / "kernels").symlink_to(scene.folder / "precious")
    return _not_used(scene, root, [])


@attack(as_root=True)
def the_temporary_folder_taken_before(scene: Scene) -> str:
    """Who makes /tmp/meshmpi-UID first gets the files that a refused cache sends there."""
    tmp = scene.folder / "tmp"
    (tmp / f"meshmpi-{os.geteuid()}" / "kernels").mkdir(parents=True)
    os.chown(tmp / f"meshmpi-{os.geteuid()}", STRANGER, STRANGER)
    (scene.folder / "cache").mkdir()
    (scene.folder / "cache").chmod(0o777)
    tmp.chmod(0o1777)
    gained = _not_used(scene, scene.folder / "cache", [])
    with cache.opened("kernels", programs=True) as first, cache.opened("kernels") as second:
        if tmp / f"meshmpi-{os.geteuid()}" in first.path.parents:
            return "the folder of another user was trusted"
        return gained or ("" if first.path == second.path else "each process takes another")


@attack(as_root=True)
def roots_cache_in_the_home_of_a_user(scene: Scene) -> str:
    """As under sudo with the user's HOME: root takes code from there, or leaves files there."""
    home = scene.folder / "home"
    home.mkdir(mode=0o700)
    os.chown(home, STRANGER, STRANGER)
    return _not_used(scene, home / ".cache" / "meshmpi", [])


@attack()
def a_swapped_folder_between_check_and_use(scene: Scene) -> str:
    """The folder is renamed after it was looked at, and files come from the one in its place."""
    if not available():
        return ""
    folder = used(scene, scene.folder / "cache")
    evil = foreign_library(scene.folder / "evil")
    real = compiler._kept

    def late(opened: Folder, key: str):
        if folder.exists():
            folder.rename(folder.with_name("gone"))
            shutil.copytree(folder.with_name("gone"), folder)
            (folder / f"{key}.so").write_bytes(evil)
            (folder / f"{key}.json").write_text("true")
        found = real(opened, key)
        assert found is not None, "what was opened is still there"
        return found

    scene.patch.setattr(compiler, "_kept", late)
    return outcome()


@attack(as_root=True)
def a_stranger_reads_or_writes_the_cache(scene: Scene) -> str:
    """Another user of the machine lists, reads or writes what is kept."""
    folder = used(scene, scene.folder / "cache") if available() else scene.folder / "cache"
    folder.mkdir(parents=True, exist_ok=True)
    tried = {
        "listed": lambda: os.listdir("cache/kernels"),
        "written": lambda: Path("cache/kernels/x").write_text("x"),
        "root written": lambda: Path("cache/x").write_text("x"),
    }
    return ", ".join(k for k, v in tried.items() if not refused_to_strangers(scene.folder, v))


@attack()
def a_home_that_is_not_known(scene: Scene) -> str:
    """A user without a home gets a folder named ~ in whatever folder the run was started in."""
    scene.patch.delenv("MESHMPI_CACHE", raising=False)
    scene.patch.setenv("XDG_CACHE_HOME", "relative")
    scene.patch.setattr("os.path.expanduser", lambda path: path)
    scene.patch.setattr("tempfile.tempdir", str(scene.folder))
    scene.patch.chdir(scene.folder)
    path = cache.cache_folder("tokens")
    if not path.is_absolute() or (scene.folder / "~").exists():
        return f"{path} was used"
    return ""


@attack()
def a_document_under_another_name(scene: Scene) -> str:
    """What was measured for one machine is taken for another's."""
    with Folder.new(scene.folder, "cache-") as folder:
        cache.remember(folder, "one.json", {"fast": "a"})
        folder.write("two.json", folder.read("one.json") or b"")
        return "" if cache.recall(folder, "two.json") is None else "it was believed"


@attack()
def a_document_that_nests_without_end(scene: Scene) -> str:
    """Reading a planted document takes the process down."""
    with Folder.new(scene.folder, "cache-") as folder:
        folder.write("one.json", b"[" * 1_000_000)
        return "" if cache.recall(folder, "one.json") is None else "it was believed"
