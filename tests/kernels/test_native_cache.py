"""Building and keeping generated libraries: many processes, killed builders, bad compilers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

import meshmpi as mm
from meshmpi.errors import ConfigError
from meshmpi.kernels.native import available, compiler
from meshmpi.launch.launch import launch
from meshmpi.runtime import executor

ROOT = Path(__file__).parent.parent.parent
SOURCE = "int answer(void) { return %d; }\n"

needs_compiler = pytest.mark.skipif(not available(), reason="there is no C compiler")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHMPI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def script(folder: Path, text: str) -> str:
    """A compiler that runs ``text``, then the real one; $source is what it builds."""
    path = folder / "cc"
    real = compiler.compiler()[0]
    path.write_text(
        f'#!/bin/sh\nfor a in "$@"; do case "$a" in *.c) source=$a;; esac; done\n{text}\nexec {real} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


def squares_step(kernels: str) -> list[float]:
    with mm.Graph() as graph:
        x = mm.placeholder("x", "n:5")
        y = mm.square(x) + 1.0
    step = mm.compile(graph, mm.SimulatedMesh("all:1"), fetches=[y], kernels=kernels)
    return step(x=np.arange(5, dtype=np.float32))[y].numpy().tolist()


EXPECTED = [1.0, 2.0, 5.0, 10.0, 17.0]


def auto_warns(why: str) -> None:
    """kernels="auto" runs on NumPy, and says so."""
    with pytest.warns(UserWarning, match=f"(?s)all of this program runs on NumPy.*{why}"):
        assert squares_step("auto") == EXPECTED


_BUILD = """
import sys
from meshmpi.kernels.native.compiler import load_library
print(load_library(sys.argv[1]).answer())
"""


def start(source: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", _BUILD, source],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
        text=True,
        start_new_session=True,
    )


@needs_compiler
def test_eight_processes_build_once(tmp_path: Path, cache: Path):
    log = tmp_path / "log"
    text = f'if grep -q answer "$source" 2>/dev/null; then echo built >> {log}; sleep 0.3; fi'
    cc = script(tmp_path, text)
    started = [start(SOURCE % 42, MESHMPI_CC=cc) for _ in range(8)]
    assert [p.communicate(timeout=120)[0].strip() for p in started] == ["42"] * 8
    assert log.read_text().count("built") == 1
    assert len(list(cache.glob("*.so"))) == 1
    assert not [f for f in cache.iterdir() if f.is_dir()], "folders of unfinished builds"


@needs_compiler
def test_a_compiler_is_asked_once_for_what_it_can(tmp_path: Path, cache: Path):
    """Later processes run it only to build, and a changed compiler is asked again."""
    log = tmp_path / "log"
    cc = script(tmp_path, f"echo run >> {log}")
    counts = []
    for change in ("", "", "changed"):
        if change:
            with open(cc, "a") as file:
                file.write("# changed\n")
        done = start(SOURCE % 42, MESHMPI_CC=cc)
        assert done.communicate(timeout=120)[0].strip() == "42"
        counts.append(log.read_text().count("run"))
    asked, again, changed = counts
    assert asked >= 4  # flags, version, library
    assert again == asked
    assert changed > again


@pytest.mark.quick(1)
@needs_compiler
@pytest.mark.parametrize("damage", ["", "{", "[]", '{"accepts": [], "version": ""}'])
def test_a_damaged_note_of_the_compiler_is_made_anew(tmp_path: Path, cache: Path, damage: str):
    cc = script(tmp_path, ":")
    for number in (41, 42):
        done = start(SOURCE % number, MESHMPI_CC=cc)
        assert done.communicate(timeout=120)[0].strip() == str(number)
        (note,) = cache.glob("compiler-*.json")
        whole = note.read_text()
        assert "-O3" not in whole, "no command is kept"
        assert '"accepts"' in whole
        note.write_text(damage)


@needs_compiler
def test_a_flag_with_which_sums_are_wrong_is_left_out(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    """As by GCC 12 for processors with SVE."""
    flag, wrong = "-fopenmp-simd", "s/a += v;/a = v;/"
    text = f'for word; do if [ "$word" = {flag} ]; then sed -i "{wrong}" "$source"; fi; done'
    monkeypatch.setenv("MESHMPI_CC", script(tmp_path, text))
    found = compiler.compiler()
    assert flag not in found and "-march=native" in found and "-O3" in found


@needs_compiler
def test_a_compiler_that_can_add_nothing_is_none(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MESHMPI_CC", script(tmp_path, 'sed -i "s/a += v;/a = v;/" "$source"'))
    with pytest.raises(compiler.CompilerError, match="cannot build a small file that computes what it should"):
        compiler.compiler()


@needs_compiler
def test_a_killed_builder_does_not_hold_up_the_others(tmp_path: Path, cache: Path):
    ready = tmp_path / "ready"
    text = f'if grep -q answer "$source" 2>/dev/null && [ ! -e {ready} ]; then\n  touch {ready}; sleep 60\nfi'
    cc = script(tmp_path, text)
    first = start(SOURCE % 7, MESHMPI_CC=cc)
    for _ in range(600):
        if ready.exists():
            break
        time.sleep(0.1)
    second = start(SOURCE % 7, MESHMPI_CC=cc)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate(timeout=30)
    assert second.communicate(timeout=60)[0].strip() == "7"


@needs_compiler
def test_the_library_is_kept_by_source_compiler_and_cpu(cache: Path, monkeypatch):
    assert compiler.load_library(SOURCE % 1).answer() == 1
    assert compiler.load_library(SOURCE % 1).answer() == 1
    assert len(list(cache.glob("*.so"))) == 1
    assert compiler.load_library(SOURCE % 2).answer() == 2
    monkeypatch.setattr(compiler, "processor", lambda: "another CPU")
    assert compiler.load_library(SOURCE % 1).answer() == 1
    assert len(list(cache.glob("*.so"))) == 3


@needs_compiler
def test_a_damaged_library_is_built_again(cache: Path):
    environment = {"MESHMPI_CACHE": str(cache.parent)}
    assert start(SOURCE % 5, **environment).communicate(timeout=60)[0].strip() == "5"
    (library,) = cache.glob("*.so")
    library.write_bytes(b"not a library")
    assert start(SOURCE % 5, **environment).communicate(timeout=60)[0].strip() == "5"


@needs_compiler
def test_where_the_cache_cannot_be_written_a_temporary_folder_serves(tmp_path: Path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MESHMPI_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    assert compiler.load_library(SOURCE % 3).answer() == 3
    assert len(list((tmp_path / f"meshmpi-{os.getuid()}" / "kernels").glob("*.so"))) == 1


@needs_compiler
def test_a_folder_that_others_can_write_to_is_not_trusted(tmp_path: Path, cache: Path, monkeypatch):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    assert compiler.kernel_folder() == tmp_path / f"meshmpi-{os.getuid()}" / "kernels"


def test_without_a_compiler_auto_takes_numpy_and_native_says_why(cache: Path, monkeypatch):
    monkeypatch.setenv("MESHMPI_CC", "/nowhere/cc")
    monkeypatch.setattr(executor, "NATIVE_POINTS", 0)
    assert not available()
    auto_warns("no C compiler was found")
    with pytest.raises(ConfigError, match=r"no C compiler was found \(looked for /nowhere/cc\)"):
        squares_step("native")


@needs_compiler
def test_a_compiler_that_fails_is_reported_with_its_words(tmp_path: Path, cache: Path, monkeypatch):
    text = 'if grep -q bf16 "$source" 2>/dev/null; then echo "register file lost" >&2; exit 1; fi'
    monkeypatch.setenv("MESHMPI_CC", script(tmp_path, text))
    monkeypatch.setattr(executor, "NATIVE_POINTS", 0)
    assert available()
    with pytest.raises(ConfigError, match=r"(?s)failed on generated code.*register file lost"):
        squares_step("native")
    auto_warns("register file lost")
    assert not list(cache.glob("*.so"))


@needs_compiler
@pytest.mark.parametrize("kernels", ["native", "auto"])
def test_one_refused_kernel_is_left_to_numpy(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
):
    """Only that one, on all ranks, and it is said which, where it was made and why."""
    text = """
        if sed '1,/GCC poison/d' "$source" 2>/dev/null | grep -q TANH
        then echo "no tanh" >&2; exit 1; fi"""
    monkeypatch.setenv("MESHMPI_CC", script(tmp_path, text))
    monkeypatch.setattr(executor, "NATIVE_POINTS", 0)
    with mm.Graph() as graph:
        x = mm.placeholder("x", "n:5")
        parts = [f(mm.reduce_sum(x * k)) for k, f in enumerate((mm.exp, mm.tanh, mm.sin), 1)]
    mesh = mm.SimulatedMesh("all:2")
    with pytest.warns(UserWarning, match=r"(?s)NumPy runs 1 of .*tanh made at .*no tanh"):
        step = mm.compile(graph, mesh, "n:all", fetches=parts, kernels=kernels, optimize=False)
    native = step.executor.native
    assert native is not None and native.functions > 3
    at = {i.source.name: i for i in step.program.instructions if i.kind == "map"}
    ((refused,), loaded) = native.refused, native._names
    assert refused == at["tanh"].outputs
    assert {at["exp"].outputs, at["sin"].outputs} <= {key[1] for key in loaded}
    got = step(x=np.arange(5, dtype=np.float32) / 10)
    want = [np.exp(1.0), np.tanh(2.0), np.sin(3.0)]
    assert [got[t] for t in parts] == pytest.approx(want, rel=1e-5)


@needs_compiler
def test_a_compiler_that_hangs_is_given_up(tmp_path: Path, cache: Path, monkeypatch):
    text = 'if grep -q bf16 "$source" 2>/dev/null; then exec sleep 20; fi'
    monkeypatch.setenv("MESHMPI_CC", script(tmp_path, text))
    monkeypatch.setattr(compiler, "BUILD_SECONDS", 0.5)
    with pytest.raises(ConfigError, match="did not run"):
        squares_step("native")


@needs_compiler
def test_native_and_numpy_agree_and_small_programs_build_nothing(cache: Path):
    assert squares_step("native") == EXPECTED
    (first,) = cache.glob("*.so")
    first.unlink()
    assert squares_step("auto") == EXPECTED
    assert not list(cache.glob("*.so"))


@needs_compiler
def test_a_cache_without_space_is_an_error_of_the_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch):
    """Not an OSError in the middle of compile(): ranks agree on NumPy instead."""

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiler, "_build", full)
    with pytest.raises(compiler.CompilerError, match=r"cannot be kept in .*: .*No space left"):
        compiler.load_library(SOURCE % 43)
    monkeypatch.setattr(executor, "NATIVE_POINTS", 0)
    auto_warns("No space left")
    with pytest.raises(ConfigError, match="No space left"):
        squares_step("native")


_REFUSED_ON_ONE = """
import warnings
import numpy as np
import meshmpi as mm
from meshmpi.kernels import native
from meshmpi.runtime import executor
from meshmpi.launch.launch import launch
executor.NATIVE_POINTS = 0
mesh, right = mm.Mesh("all:2"), native.load_library
def load(source):
    if mesh.rank == 1 and "TANH_f32(" in source.split("GCC poison")[1]:
        raise native.CompilerError("no tanh", "")
    return right(source)
native.load_library = load
with mm.Graph() as graph:
    x = mm.placeholder("x", "n:8")
    fetches = [mm.tanh(x), mm.exp(x)]
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    step = mm.compile(graph, mesh, "n:all", fetches=fetches, optimize=False)
print("rank", mesh.rank, sorted(k[1] for k in step.executor.native._names), len(said), flush=True)
"""


@needs_compiler
def test_what_one_rank_cannot_build_none_uses(tmp_path: Path):
    """Replicas stay equal to the last bit; rank 0 says it, once."""
    (tmp_path / "two.py").write_text(_REFUSED_ON_ONE)
    done = launch(
        2, [str(tmp_path / "two.py")], timeout_seconds=60, capture_output=True, environment={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    first, second = (line.split(" ", 2)[2].rsplit(" ", 1) for line in lines)
    assert first[0] == second[0] and first[0].count("(") == 1
    assert (first[1], second[1]) == ("1", "0")
