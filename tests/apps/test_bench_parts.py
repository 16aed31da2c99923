"""The parts of the bench run at toy size, without peers; no time decides a test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from apps.bench import __main__ as main
from apps.bench import (
    collectives,
    goals,
    lowering,
    overhead,
    peer_attention,
    peer_loops,
    peers,
    plot,
    scaling,
    startup,
    workers,
)
from apps.bench.bench import TINY, Bench
from apps.bench.loops import c_loops, data, meshmpi_loops, numpy_loops
from apps.bench.step import gemm_step, rounds, systems, yardstick
from apps.bench.tables import Table
from meshmpi.kernels import blas, product_choice
from meshmpi.kernels.native import available
from meshmpi.transformer.tasks.registry import build_training_graph
from meshmpi.transformer.training.settings import transformer_config

NONE = peers.without("not asked for")
LOOPS = data.Data(0.002)
KERNELS = ["numpy", *(["native"] if available() else [])]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"), TINY, NONE, lambda line: None)


def _measured(tables: list[Table]) -> list[str]:
    """Goals whose figures are found in ``tables``, under the names that the goals expect."""
    return [str(row[0]) for row in goals.table(tables).rows if row[2] is not None]


# ---- the step ---------------------------------------------------------------------------------


@pytest.mark.matrix
def test_systems_take_turns_with_the_bare_products_and_agree(bench: Bench):
    (table,) = rounds.measure(bench)
    names = table.column("system")
    assert str(names[0]).startswith(systems.BARE)
    assert names[1:3] == ["meshmpi data-parallel", "meshmpi model-parallel"]
    assert all(ms > 0 for ms in table.column("ms per step"))
    assert any("differ by at most" in note for note in table.notes)
    narrow = product_choice.chosen(bfloat16=True).bfloat16
    assert len(_measured([table])) == (5 if narrow else 4), "of the first five goals"
    assert [n for n in table.notes if n.startswith("Left out")] == [
        "Left out: torch: not asked for",
        "Left out: jax: not asked for",
    ]


def test_first_values_fit_the_model(bench: Bench):
    """Names and shapes are those of the variables of the yardstick's graph."""
    from apps.bench.step.meshmpi_step import PREFIX, settings

    chosen = settings(yardstick.TOY)
    built = build_training_graph(chosen, transformer_config(chosen.model, 1))
    own = {
        name.removeprefix(PREFIX): v.shape.sizes for name, v in built.graph.variables.items() if name.startswith(PREFIX)
    }
    assert own == {name: shape for name, shape, _ in yardstick.shapes(yardstick.TOY)}
    start = yardstick.Start(bench.start())
    assert {name: start[name].shape for name in start.names} == own
    assert start.sizes == yardstick.TOY
    x, y = start.batch(yardstick.BATCHES)
    assert np.array_equal(x[:, 1:], y[:, :-1])
    assert np.array_equal(x, start.batch(0)[0])


def test_yardstick_is_that_of_the_configuration():
    from apps.bench.step.meshmpi_step import CONFIG, settings
    from meshmpi.transformer.training import config
    from meshmpi.transformer.training.settings import Settings

    assert settings(yardstick.Sizes()) == config.load(Settings, CONFIG)


@pytest.mark.parametrize("split", ["data", "model"])
def test_bare_products_are_those_of_a_textbook_step(split: str):
    s = yardstick.Sizes()
    found = gemm_step.products(s, split, 2)
    tokens, wide = s.batch * s.length, s.heads * s.d_kv
    layer = tokens * (4 * s.d_model * wide + 2 * s.d_model * s.d_ff)
    layer += 2 * s.batch * s.heads * s.length**2 * s.d_kv
    forward = 2 * (s.layers * layer + tokens * s.d_model * s.vocab)
    assert 2 * sum(p.flops for p in found) == 3 * forward


def test_bare_products_compute_products():
    wanted = [gemm_step.Product(2, 3, 4, 5, 6, True), gemm_step.Product(1, 1, 7, 2, 3, False, True)]
    for made, p in zip(gemm_step.calls(wanted, blas.find(), 0), wanted, strict=True):
        _, call, (a, b, y) = made
        call()
        assert y.shape == (p.count, p.m, p.n)
        np.testing.assert_allclose(y, a @ b, rtol=1e-5, atol=1e-5)
        assert np.abs(y).max() > 0


# ---- loops, collectives, scaling, start-up, overhead ------------------------------------------


@pytest.mark.parametrize("name", data.NAMES[:-1])
@pytest.mark.parametrize("kind", ["numpy_loops", "c_loops", *KERNELS])
def test_loops_are_right(kind: str, name: str):
    if kind == "c_loops" and not available():
        pytest.skip("there is no C compiler")
    assert data.error(_made(kind)[name](), LOOPS.answers(name)) <= data.TOLERANCE


_MADE: dict[str, data.Loops] = {}


def _made(kind: str) -> data.Loops:
    if kind not in _MADE:
        modules = {"numpy_loops": numpy_loops, "c_loops": c_loops}
        _MADE[kind] = modules[kind].loops(LOOPS) if kind in modules else meshmpi_loops.loops(LOOPS, kind)
    return _MADE[kind]


@pytest.mark.skipif(not available(), reason="there is no C compiler")
def test_plain_loops_leave_small_numbers_alone():
    """A library linked with -ffast-math would flush them to zero in the whole process."""
    c_loops.build()
    tiny = np.array([5e-324, np.finfo(np.float32).tiny / 4])
    assert (tiny * 1.0 > 0).all() and (tiny.astype(np.float32)[1:] * np.float32(1) > 0).all()


@pytest.mark.matrix
def test_table_of_loops_and_products(bench: Bench):
    loops, products = peer_loops.measure(bench)
    assert loops.column("loop") == list(data.NAMES)
    assert all(x is None or x > 0 for row in loops.rows for x in row[1:])
    assert len(products.rows) == len(data.PRODUCTS) + 1
    assert not any("**" in note for note in loops.notes)
    assert len(_measured([loops])) == int(available())


def test_attention_is_right():
    q, k, v, dy = (x[:, :, :8].astype(np.float64) for x in data.attention_inputs(16))
    y, *_ = meshmpi_loops.attention([np.ascontiguousarray(x, np.float32) for x in (q, k, v, dy)])()
    scores = q @ k.swapaxes(2, 3) / np.sqrt(data.D_KV)
    p = np.exp(np.where(np.tri(8, dtype=bool), scores, -np.inf))
    np.testing.assert_allclose(y, p / p.sum(-1, keepdims=True) @ v, rtol=1e-4, atol=1e-5)


def test_table_of_attention(bench: Bench):
    table, layers = peer_attention.measure(bench)
    assert table.rows[0][0] == layers.rows[0][0] == 16
    assert all(x > 0 for x in layers.rows[0])
    assert table.rows[0][1] > 0


def test_table_of_collectives(bench: Bench):
    table, crowded = collectives.measure(bench)
    kinds = list(dict.fromkeys(table.column("collective")))
    assert kinds == list(collectives.KINDS)
    assert all(us > 0 for name in ("meshmpi", "mpi4py") for us in table.column(name))
    assert "Left out: gloo: not asked for" in table.notes
    assert len(_measured([table])) == 1 and len(crowded.rows) == len(table.rows)


@pytest.mark.matrix
def test_table_of_scaling(bench: Bench):
    (table,) = scaling.measure(bench)
    assert list(dict.fromkeys(table.column("changed"))) == list(scaling.SERIES)
    assert all(n > 100 for n in table.column("instructions"))


@pytest.mark.matrix
def test_tables_of_starting(bench: Bench, monkeypatch):
    monkeypatch.setattr(startup, "WARM_STARTS", 1)
    start, planning = startup.measure(bench)
    parts = start.column("part")
    assert parts[-2:] == ["ready", "launcher"]
    ready = start.rows[-2][1]
    assert ready == pytest.approx(sum(row[1] for row in start.rows[:-2]))
    assert planning.column("layout") == list(systems.LAYOUTS)
    assert len(_measured([start, planning])) == (3 if available() else 2)


@pytest.mark.matrix
def test_tables_of_lowering(bench: Bench):
    grown, plans = lowering.measure(bench)
    assert grown.column("family") == list(lowering.FAMILIES)
    assert {"lower", "verify", "fuse", "form_fused_kernels", "memory and cost"} <= set(grown.columns)
    assert all(600 < n < 1000 for n in grown.column("nodes")), "about as many as were asked for"
    assert plans.column("mesh") == list(lowering.PLANS)
    assert all(n > 100 for n in (*grown.column("instructions"), *plans.column("instructions")))
    assert len(_measured([grown, plans])) == 4


@pytest.mark.matrix
def test_table_of_overhead(bench: Bench):
    table, share = overhead.measure(bench)
    assert all(280 <= n <= 320 for n in table.column("instructions that run"))
    ((instructions, spent, step, percent, traced, _),) = share.rows
    assert isinstance(traced, float)
    assert instructions > 100 and percent == pytest.approx(100 * spent / step)
    assert len(_measured([table, share])) == (2 if available() else 1)


# ---- output -----------------------------------------------------------------------------------


def test_the_command_writes_page_numbers_and_plot(tmp_path: Path, capsys, monkeypatch):
    made = Table("loops", "Loops", ("loop", "a", "b"), [["x", 1.0, None], ["y", 2.5, 3.5]], ["why"])
    monkeypatch.setattr(main, "PARTS", {"loops": lambda of: [made]})
    assert main.main(["--tiny", "--no-peers", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "bench.md").read_text()
    assert "| x | 1 | - |" in page
    assert "- why" in page
    found = json.loads((tmp_path / "bench.json").read_text())
    assert [t["name"] for t in found["tables"]] == ["goals", "loops"]
    assert found["tables"][1]["rows"] == [["x", 1.0, None], ["y", 2.5, 3.5]]
    assert found["about"]["peers"] == "none"
    pytest.importorskip("matplotlib")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_part_that_fails_leaves_the_others(tmp_path: Path, monkeypatch):
    def fails(of: Bench) -> list[Table]:
        raise workers.BenchError("no luck.", "")

    good = Table("good", "Good", ("a", "b"), [["x", 1]])
    monkeypatch.setattr(main, "PARTS", {"bad": fails, "good": lambda of: [good]})
    assert main.main(["--tiny", "--no-peers", "--out", str(tmp_path)]) == 1
    page = (tmp_path / "bench.md").read_text()
    assert "Failed: no luck." in page
    assert "## Good" in page


def test_every_panel_of_the_plot(tmp_path: Path):
    pytest.importorskip("matplotlib")
    tables = [
        Table("step", "", ("system", "step / bare products"), [["meshmpi", 1.1], ["other", 2.0]]),
        Table("loops", "", ("loop", "a", "a / b"), [["x", 1.0, None]]),
        Table("products", "", ("sizes", "a"), [["x", 1.0], ["median", 1.0]]),
        Table("attention", "", ("length", "a, ms", "b, ms", "c, ms"), [[16, 1.0, None, None], [32, 2.0, 3.0, None]]),
        Table(
            "collectives",
            "",
            ("collective", "bytes", "meshmpi", "mpi4py", "gloo"),
            [["all_reduce", 64, 1.0, 2.0, None]],
        ),
        Table(
            "scaling",
            "",
            ("changed", "to", "ranks", "ms", "rate", "s"),
            [["layers", 1, 2, 1.0, 1.0, 1.0], ["layers", 2, 2, 2.0, 1.0, 1.5]],
        ),
    ]
    assert {t.name for t in tables} == set(plot.PANELS)
    assert plot.draw(tables, tmp_path / "bench.png") == ""
    assert (tmp_path / "bench.png").stat().st_size > 10_000
    assert plot.draw([], tmp_path / "none.png").startswith("no plot: none of the parts")


# ---- workers and peers ------------------------------------------------------------------------


def test_what_a_failing_worker_said_is_told():
    with pytest.raises(workers.BenchError, match=r"ended with status 2(.|\n)*--start"):
        workers.alone(sys.executable, "step.gemm_step", [])


def test_a_worker_that_takes_too_long_is_ended():
    with pytest.raises(workers.BenchError, match=r"loops.worker ran out of time, 0 of 2"):
        endless = ["numpy", "--seconds", "1000"]
        workers.group(2, sys.executable, "loops.worker", endless, seconds=0.5)


def test_variables_that_slow_are_unset(monkeypatch):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    assert workers.forget_slowing_variables() == ["OPENBLAS_CORETYPE=Haswell"]
    assert workers.forget_slowing_variables() == []


def test_a_peer_that_cannot_be_installed_is_left_out_in_one_line(tmp_path: Path, monkeypatch):
    asked: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess:
        asked.append(command)
        status = 0 if "venv" in command else 1
        return subprocess.CompletedProcess(command, status, "", "a lot of text\nno network")

    monkeypatch.setattr(peers.subprocess, "run", run)
    said: list[str] = []
    found = peers.install(tmp_path / "peers", said.append)
    assert dict(found.missing) == {
        name: f"{requirement} could not be installed: no network" for name, requirement in peers.REQUIREMENTS.items()
    }
    assert [line for line in said if line.startswith("left out: torch:")] == [
        "left out: torch: torch==2.13.0 could not be installed: no network"
    ]
    assert any("install" in command for command in asked)


def test_peers_that_are_there_are_not_installed_again(tmp_path: Path, monkeypatch):
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess:
        assert "install" not in command
        return subprocess.CompletedProcess(command, 0, "", "")

    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.touch()
    monkeypatch.setattr(peers.subprocess, "run", run)
    assert peers.install(tmp_path, lambda line: None) == peers.Peers(str(python), {})


# ---- profile ----------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["data", "model"])
def test_profile_counts_every_instruction_that_runs(split: str):
    from apps.bench import profile

    parts, bare = profile.measure(yardstick.TOY, split, 1)
    kinds, longest = profile.table(parts, bare, 4)
    counted = {row[0]: row[1] for row in kinds.rows}
    assert counted["all"] == len(parts) == sum(list(counted.values())[:-2])
    assert bare > 0
    assert len(longest.rows) == 4
    times = longest.column("processor ms")
    assert times == sorted(times, reverse=True)
    assert sum(part.seconds for part in parts) > 0
