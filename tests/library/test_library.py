"""meshmpi inside a program that has an MPI life of its own, and without MPI at all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import meshmpi as mm
from apps.examples import contraction, kmeans, power_iteration
from meshmpi.errors import TRACEBACK_VARIABLE
from meshmpi.launch.launch import launch
from meshmpi.launch.start import wrapped
from tests.library.guest import CASES, W, X, product

ROOT = Path(__file__).parents[2]


def started(ranks: int, *argv: str):
    return launch(ranks, list(argv), timeout_seconds=120, capture_output=True, cwd=ROOT)


# -- a guest among other users of MPI --------------------------------------------------------------


@pytest.fixture(scope="module")
def guest():
    return started(4, "-m", "tests.library.guest")


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_beside_the_users_own_mpi(guest, case: str):
    assert f"{case} ok" in guest.stdout, guest.stderr


def test_the_job_ends_well(guest):
    assert guest.returncode == 0, guest.stderr


@pytest.mark.parametrize("level", ["single", "multiple"])
def test_the_user_initialises_and_finalises_mpi(level: str):
    done = started(2, "-m", "tests.library.own_init", level)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("ok"), done.stderr


# -- one report -----------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize(("when", "ranks"), [("without-mpi", 4), ("with-mpi", 3), ("compiling", 2), ("compiling", 4)])
def test_an_error_of_all_ranks_is_reported_once(when: str, ranks: int):
    done = started(ranks, "-m", "tests.library.before_a_mesh", when, str(ranks))
    assert done.returncode != 0
    assert len(re.findall(r"^meshmpi\.errors\.\w+Error: ", done.stderr, re.MULTILINE)) == 1
    assert done.stderr.count("Traceback") == 1
    assert "before_a_mesh.py" in done.stderr
    assert f"{os.sep}meshmpi{os.sep}" not in done.stderr.partition("Traceback")[2].partition("Err")[0]


SCRIPT = """
import meshmpi as mm

with mm.Graph():
    x = mm.placeholder("x", "batch:4")
    def build():
        return x + mm.placeholder("y", "batch:5")
    {call}
"""


def run_script(tmp_path: Path, call: str, **environment: str) -> str:
    """What a script prints that the launcher's own start runs."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(call=call))
    done = subprocess.run(
        [sys.executable, *wrapped([str(script)])],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    assert done.returncode == 1 and not done.stdout
    return done.stderr


def files_of(text: str) -> list[str]:
    return [Path(file).name for file in re.findall(r'^  File "(.*?)"', text, re.MULTILINE)]


def test_a_script_shows_the_users_lines(tmp_path: Path):
    text = run_script(tmp_path, "build()")
    assert files_of(text) == ["script.py", "script.py"]
    assert text.rstrip().endswith(f"made at {tmp_path / 'script.py'}:7")


def test_and_all_lines_when_asked(tmp_path: Path):
    text = run_script(tmp_path, "build()", **{TRACEBACK_VARIABLE: "full"})
    assert "elementwise.py" in files_of(text)


def test_other_errors_and_what_they_were_raised_in_are_shown_whole(tmp_path: Path):
    assert "dims.py" in files_of(run_script(tmp_path, 'mm.Shape("a:1").dim(3).nothing'))
    text = run_script(tmp_path, "try: {}[1]\n    except KeyError: build()")
    assert "KeyError" in text and files_of(text) == ["script.py"] * 3


def test_errors_inside_that_led_to_one_are_not_shown(tmp_path: Path):
    text = run_script(
        tmp_path,
        'from meshmpi.transformer.training.config import _read as r; r(mm.Path("no.toml"))'.replace(
            "mm.Path", "__import__('pathlib').Path"
        ),
    )
    assert text.count("Traceback") == 1 and "FileNotFoundError" not in text


def test_a_notebook_shows_the_users_lines():
    """IPython shows of an exception what its _render_traceback_ returns."""

    def cell() -> None:
        mm.Layout("a:rows;a:cols")

    with pytest.raises(mm.LayoutError) as caught:
        cell()
    lines = caught.value._render_traceback_()
    assert files_of("\n".join(lines)) == ["test_library.py"] * 2
    assert lines[0].startswith("Traceback") and lines[-2].startswith("meshmpi.errors.LayoutError")


class Shell:
    """As much of IPython as is asked for the names of cells."""

    compile = property(lambda self: self)

    def get_ipython(self) -> Shell:
        return self

    def format_code_name(self, file: str) -> tuple[str, str] | None:
        return ("Cell", "In[3]") if file == "/tmp/ipykernel_7/1.py" else None


def test_a_cell_is_named_as_the_notebook_does(monkeypatch: pytest.MonkeyPatch):
    program = "import meshmpi as mm\nmm.Layout('a:rows;a:cols')"
    code = compile(program, "/tmp/ipykernel_7/1.py", "exec")
    monkeypatch.setitem(sys.modules, "IPython", Shell())
    with pytest.raises(mm.LayoutError) as caught:
        exec(code, {"__name__": "__main__"})
    assert caught.value.where == "the call at In[3]:2"
    with pytest.raises(mm.LayoutError) as caught:
        mm.Layout("a:rows;a:cols")
    assert f"{__file__}:" in caught.value.where


def test_ipython_itself_shows_the_users_lines(tmp_path: Path):
    pytest.importorskip("IPython")
    (tmp_path / "shell.py").write_text(
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance(colors='NoColor', history_length=0)\n"
        "cell = 'import meshmpi as mm\\nmm.Layout(\"a:rows;a:cols\")'\n"
        "shell.run_cell(cell, store_history=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "shell.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path / "ipython")},
    )
    shown = done.stdout + done.stderr
    assert "meshmpi.errors.LayoutError: layout 'a:rows;a:cols'" in shown
    assert "in the call at In[1]:2" in shown and "dims.py" not in shown
    assert shown.count("File ") == 1, "the cell's line alone"


def test_pytest_shows_the_users_lines(tmp_path: Path):
    (tmp_path / "test_model.py").write_text(
        "import meshmpi as mm\n\n\ndef test_model():\n    mm.Layout('a:rows;a:cols')\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "meshmpi.guard.pytest_plugin",
        "test_model.py",
    ]
    shown = {}
    for amount in ("users", "full"):
        done = subprocess.run(
            command,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(ROOT), TRACEBACK_VARIABLE: amount},
        )
        assert done.returncode == 1 and "LayoutError: layout" in done.stdout
        shown[amount] = done.stdout
    assert "dims.py" not in shown["users"] and "test_model.py:5: LayoutError" in shown["users"]
    assert "dims.py" in shown["full"]


# -- without MPI -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["rows:1;cols:1", "rows:2;cols:2", "rows:3;cols:1"])
def test_arrays_of_a_simulated_mesh_are_numpys(shape: str):
    y = product(mm.SimulatedMesh(shape), "batch:rows;hidden:cols")(x=X)["y"]
    want = X @ W
    np.testing.assert_allclose(np.asarray(y), want)
    np.testing.assert_allclose(y[1:3, ::2], want[1:3, ::2])
    np.testing.assert_allclose([row.sum() for row in y], want.sum(axis=1))
    assert (y.shape, y.ndim, y.size, len(y), y.dims) == ((4, 5), 2, 20, 4, mm.Shape("batch:4;hidden:5"))
    assert str(y).splitlines()[0] == repr(y) and str(np.asarray(y)) in str(y)


def test_what_a_shell_shows_says_what_it_is():
    step = product(mm.SimulatedMesh("rows:2"), "batch:rows")
    out = step(x=X)
    shown = [
        (step, ["CompiledStep", "x float64[batch=4/rows, io=6]", "y, total", "w", "{rows: 2}"]),
        (step.program, ["Program", "{rows: 2}", f"{len(step.program.instructions)} instructions"]),
        (step.variables, ["VariableStore", "w float64[io=6, hidden=5]"]),
        (out, ["ShardedArray float64[batch=4/rows, hidden=5]", str(out["total"])]),
    ]
    with mm.Graph() as graph:
        w = mm.get_variable("w", "d:2")
        shown += [(mm.assign(w, w * 2.0), ["Update of w", "multiply"]), (w.variable, ["Variable w"])]
        shown += [(graph, ["Graph of", "variables: w", "dimensions: d"])]
        shown += [(mm.plan(graph, "rows:2", fetches=[w]), ["Plan", "{rows: 2}", "bytes sent"])]
    for thing, words in shown:
        text = repr(thing)
        assert all(word in text for word in words), text
        assert " object at 0x" not in text and len(text) < 400


def test_a_shell_completes_what_users_call():
    names = dir(mm)
    assert {"Mesh", "einsum", "compile", "ShardedArray", "verify", "nn"} <= set(names)
    assert not {"Any", "dims", "graph", "TYPE_CHECKING"} & set(names)
    assert not [
        n
        for n in names
        if not callable(getattr(mm, n))
        and n.islower()
        and n not in ("nn", "optimize", "transformer", "__version__", "schedules")
    ]


# -- the examples ----------------------------------------------------------------------------------


def lloyd() -> float:
    """k-means in plain NumPy, on the example's points."""
    rng = np.random.default_rng(0)
    k, n, d = kmeans.CLUSTERS, kmeans.POINTS, kmeans.COORDINATES
    data = 6 * np.eye(k, d)[np.arange(n) % k] + rng.standard_normal((n, d))
    centres, spread = data[:k].copy(), 0.0
    for _ in range(kmeans.STEPS):
        distances = ((data[:, None] - centres) ** 2).sum(axis=2)
        spread, nearest = distances.min(axis=1).sum(), distances.argmin(axis=1)
        centres = np.array([data[nearest == c].mean(axis=0) for c in range(k)])
    return spread


def test_kmeans_is_that_of_numpy():
    np.testing.assert_allclose(kmeans.main(mm.SimulatedMesh("rows:2;cols:2")), lloyd(), rtol=1e-12)


@pytest.mark.quick(1)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_examples_agree_on_real_ranks(ranks: int):
    done = started(ranks, "-m", "apps.examples")
    assert done.returncode == 0, done.stderr
    found = {name: float(value) for name, value in map(str.split, done.stdout.splitlines())}
    alone = mm.SimulatedMesh("rows:1;cols:1")
    for example in (contraction, power_iteration, kmeans):
        name = example.__name__.rpartition(".")[2]
        np.testing.assert_allclose(found[name], example.main(alone), rtol=1e-9)
