"""Which library multiplies matrices: by figures, which are faked here, and by nothing else."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import meshmpi as mm
from meshmpi.errors import ConfigError
from meshmpi.kernels import blas, product_choice
from meshmpi.kernels.blas_libraries import Library
from meshmpi.runtime import executor

ROOT = Path(__file__).parent.parent.parent
ALL = (*blas.NAMES, *blas.EXTENDED)
OPENBLAS = ("openblas", "openblas+bf16", "numpy")


class Machine:
    """Libraries and the seconds that their products take; counts how often these are timed."""

    def __init__(self, patch: pytest.MonkeyPatch, tmp_path: Path):
        self.installed: tuple[str, ...] = ALL
        self.seconds: dict[str, float] = {}
        self.version, self.timed = "1.0", 0
        patch.setenv("MESHMPI_CACHE", str(tmp_path / "cache"))
        patch.delenv(blas.VARIABLE, raising=False)
        patch.setattr(blas, "_load", self._load)
        patch.setattr(product_choice, "time_products", self._time)
        self.forget()

    def _load(self, name: str) -> blas.Blas | None:
        if name == "numpy":
            return blas.Blas(None)
        library = Library(name, self.version, int, {"float32": None}, {}, lambda: 1)
        return blas.Blas(library) if name in self.installed else None

    def _time(self, kinds: Mapping[str, str]) -> dict[str, float]:
        self.timed += 1
        return {kind: self.seconds[kind] for kind in kinds}

    def forget(self) -> None:
        """As another process of the same user."""
        product_choice._figures.cache_clear()

    def chosen(self, bfloat16: bool) -> str:
        self.forget()
        return blas.agree([product_choice.measured(bfloat16)])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    yield Machine(monkeypatch, tmp_path)
    product_choice._figures.cache_clear()


def figures(openblas: float, mkl: float, own: float, of_mkl: float, converted: float) -> dict[str, float]:
    """In milliseconds; ``converted`` is what bfloat16 takes beside float32."""
    found = {
        "float32 openblas": openblas,
        "float32 mkl": mkl,
        "bfloat16 +bf16": own,
        "bfloat16 mkl": of_mkl,
        "bfloat16 openblas": openblas + converted,
        "bfloat16 mkl converted": mkl + converted,
    }
    return {kind: 1e-3 * s for kind, s in found.items()}


@pytest.mark.parametrize(
    ("installed", "seconds", "float32", "bfloat16"),
    [
        # Intel with AMX; Intel with AVX512-BF16 only; AMD: as they were measured
        (ALL, figures(1.8, 1.6, 2.0, 0.4, 0.2), "mkl", "mkl"),
        (ALL, figures(1.9, 1.8, 3.4, 3.4, 0.2), "mkl", "mkl+convert"),
        (ALL, figures(1.1, 2.4, 0.6, 2.5, 0.2), "openblas", "openblas+bf16"),
        (ALL, figures(1.1, 2.4, 0.9, 0.6, 0.2), "openblas", "openblas+mkl"),
        (ALL, figures(2.4, 1.1, 0.6, 2.5, 0.2), "mkl", "mkl+bf16"),
        (OPENBLAS, figures(1.1, 0, 0.6, 0, 0.2), "openblas", "openblas+bf16"),
        (OPENBLAS, figures(1.1, 0, 1.6, 0, 0.2), "openblas", "openblas"),
        (("numpy",), {}, "numpy", "numpy"),
    ],
)
def test_the_fastest_is_taken(machine: Machine, installed: tuple[str, ...], seconds: dict, float32: str, bfloat16: str):
    machine.installed, machine.seconds = installed, seconds
    assert (machine.chosen(False), machine.chosen(True)) == (float32, bfloat16)
    assert product_choice.measured()["numpy"] == (0.0 if installed == ("numpy",) else math.inf)


def test_figures_are_kept_by_processor_versions_and_threads(machine: Machine, monkeypatch):
    machine.seconds = figures(1.8, 1.6, 2.0, 0.4, 0.2)
    for _ in range(3):
        assert machine.chosen(True) == "mkl"
    assert machine.timed == 1
    machine.seconds = figures(1.1, 2.4, 0.6, 2.5, 0.2)
    assert machine.chosen(True) == "mkl"  # as long as nothing has changed
    machine.version = "2.0"
    assert machine.chosen(True) == "openblas+bf16"
    monkeypatch.setattr(product_choice, "processor", lambda: "another one")
    assert machine.chosen(True) == "openblas+bf16"
    monkeypatch.setattr(blas.Blas, "threads", 7)
    assert machine.chosen(True) == "openblas+bf16"
    assert machine.timed == 4


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"float32 mkl": 1}', b"\xff"])
def test_damaged_figures_are_measured_again(machine: Machine, tmp_path: Path, damage: bytes):
    machine.seconds = figures(1.8, 1.6, 2.0, 0.4, 0.2)
    machine.chosen(True)
    (kept,) = (tmp_path / "cache/products").glob("*.json")
    kept.write_bytes(damage)
    assert machine.chosen(True) == "mkl"
    assert machine.timed == 2


def test_without_a_place_to_keep_them_each_process_measures(machine: Machine, monkeypatch):
    def refused(*parts: str) -> None:
        raise OSError(30, "read-only")

    monkeypatch.setattr(product_choice.cache, "opened", refused)
    machine.seconds = figures(1.8, 1.6, 2.0, 0.4, 0.2)
    assert machine.chosen(False) == machine.chosen(False) == "mkl"
    assert machine.timed == 2


def test_all_ranks_take_the_same():
    """The fastest by the slowest rank, whatever the order: hosts may differ."""
    intel, amd = {"openblas": 1.9, "mkl": 1.8, "numpy": math.inf}, {"openblas": 1.1, "mkl": 2.4}
    amd["numpy"] = math.inf
    assert blas.agree([intel] * 3) == "mkl"
    assert blas.agree([amd] * 3) == "openblas"
    assert blas.agree([intel, amd]) == blas.agree([amd, intel]) == "openblas"
    assert blas.agree([intel, {"mkl": 9.0, "numpy": math.inf}]) == "mkl"
    assert blas.agree([intel, {"numpy": 0.0}]) == "numpy"
    with pytest.raises(ConfigError, match="rank 1: openblas"):
        blas.agree([{"numpy": 0.0}, {"openblas": 0.0}])
    with pytest.raises(ConfigError, match="on rank 1"):
        blas.agree([{"numpy": 0.0}, {}])


@pytest.mark.parametrize(("dtype", "name"), [("float32", "openblas"), ("bfloat16", "numpy")])
def test_a_program_takes_what_its_ranks_agree_on(machine: Machine, monkeypatch, dtype, name):
    """Another rank, which has other libraries, is asked."""
    machine.installed = ("openblas", "openblas+bf16", "numpy")
    machine.seconds = figures(1.1, 0, 0.6, 0, 0.2)
    others = {"float32": {"openblas": 5.0, "numpy": math.inf}, "bfloat16": {"numpy": 0.0}}
    gathered = executor.gathered

    def of_two(mesh: object, value: object, what: str) -> list:
        if isinstance(value, dict) and "numpy" in value:
            return [value, others[dtype]]
        return gathered(mesh, value, what)

    monkeypatch.setattr(executor, "gathered", of_two)
    with mm.Graph() as graph:
        x, w = mm.placeholder("x", "m:8;k:16", dtype), mm.placeholder("w", "k:16;n:4", dtype)
        y = mm.einsum([x, w], "m:8;n:4")
    monkeypatch.setattr(blas.Blas, "gemm", lambda *arguments, **options: None)
    step = mm.compile(graph, mm.SimulatedMesh(""), fetches=[y], kernels="numpy")
    assert step.executor.runtime.blas == name


def test_the_turns_of_a_busy_machine():
    """A library that was disturbed in its first turns is not taken for a slow one."""
    turns = {"float32 a": [9.0, 9.0, 9.0, 1.0], "float32 b": [2.0]}
    taken = dict.fromkeys(turns, 0)

    def seconds(kind: str, run: object) -> float:
        taken[kind] += 1
        return turns[kind][min(taken[kind], len(turns[kind])) - 1]

    kinds = {kind: kind for kind in turns}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product_choice, "_products", lambda dtype, library: lambda: None)
        patch.setattr(product_choice, "_seconds", seconds)
        assert product_choice.time_products(kinds) == {"float32 a": 1.0, "float32 b": 2.0}
        assert set(taken.values()) == {4 + product_choice.CALM_ROUNDS}
        turns["float32 a"] = [0.9**n for n in range(99)]
        product_choice.time_products(kinds)
    assert taken["float32 a"] == 4 + product_choice.CALM_ROUNDS + product_choice.MOST_ROUNDS


_RANK = """
import sys, time
from meshmpi.kernels import blas, product_choice as pc
from meshmpi.kernels.blas_libraries import Library
def load(name):
    return blas.Blas(Library(name, "1", int, {}, {}, lambda: 1)) if name in blas.NAMES else None
blas._load = load
def measure(kinds):
    with open(sys.argv[1], "a") as file:
        file.write("measured\\n")
    time.sleep(0.3)
    return {kind: 1.0 + len(kind) for kind in kinds}
pc.time_products = measure
print(pc.measured())
"""


def test_one_rank_of_a_host_measures_for_all(tmp_path: Path):
    environment = {**os.environ, "MESHMPI_CACHE": str(tmp_path / "cache")}
    environment.pop(blas.VARIABLE, None)
    command = [sys.executable, "-c", _RANK, str(tmp_path / "log")]
    ranks = [subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    told = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert len(set(told)) == 1 and "mkl" in told[0]
    assert (tmp_path / "log").read_text() == "measured\n"


def test_real_products_are_timed_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MESHMPI_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(blas.VARIABLE, raising=False)
    product_choice._figures.cache_clear()
    names = [n for n in blas.available(True) if n != "numpy"]
    told = product_choice.described()
    if len(names) < 2:
        assert "nothing to measure" in told
        return
    found = product_choice.measured(True)
    assert set(found) == {*names, "numpy"} and all(s > 0 for s in found.values())
    assert told.count(" ms") == len(product_choice.figures(True)) >= 3
    assert product_choice.chosen(True).name in names
