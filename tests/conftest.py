"""What all tests share: seeds and thread counts; and no hanging MPI job when one rank fails."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import zlib
from pathlib import Path

# Read by the BLAS when NumPy is imported: two cores are shared by several test processes.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("meshmpi", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "meshmpi"))

TESTS = Path(__file__).parent


MATRIX_FOLDERS = ("install", "slurm")
"""Folders of tests/ that `make test` leaves out: they install packages, or start a whole Slurm."""
WHOLE_PRODUCT = 8
"""`make test` runs every case of a parametrised test with at most this many cases."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thins products of parameters (cases x meshes x types, say), and marks what `make test` leaves out as ``matrix``.

    Of three or more parameters every *pair* of values is tried, not every combination.  Of these cases `make test`
    keeps those that show some *value* for the first time: every operation, every mesh and every type still occurs.
    """
    products: dict[str, list[pytest.Item]] = {}
    for item in items:
        if Path(str(item.fspath)).relative_to(TESTS).parts[0] in MATRIX_FOLDERS:
            item.add_marker("matrix")
        elif hasattr(item, "callspec"):
            products.setdefault(item.nodeid.split("[")[0], []).append(item)
    dropped: set[pytest.Item] = set()
    for cases in products.values():
        for quick in cases[0].iter_markers("quick"):
            for case in cases[quick.args[0] :]:
                case.add_marker("matrix")
        if len(cases) <= WHOLE_PRODUCT:
            continue
        if len(_parameters(cases[0])) > 2:
            kept = _first_to_show(cases, 2)
            dropped |= set(cases) - kept
            cases = [c for c in cases if c in kept]
        for case in set(cases) - _first_to_show(cases, 1):
            case.add_marker("matrix")
    if dropped:
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=list(dropped))


def _parameters(case: pytest.Item) -> list[tuple]:
    """Names and values of each ``parametrize`` mark and each parametrised fixture; objects by their identity."""
    values = {n: v if isinstance(v, (str, int, float)) else id(v) for n, v in case.callspec.params.items()}
    marks = [m.args[0] for m in case.iter_markers("parametrize")]
    groups = [tuple(m.replace(" ", "").split(",")) if isinstance(m, str) else tuple(m) for m in marks]
    groups += [(n,) for n in values if not any(n in g for g in groups)]
    return [(g, *(values[n] for n in g)) for g in groups]


def _first_to_show(cases: list[pytest.Item], size: int) -> set[pytest.Item]:
    """The cases that show a combination of ``size`` values of parameters for the first time, in a scattered order."""
    seen: set[tuple] = set()
    kept: set[pytest.Item] = set()
    for case in sorted(cases, key=lambda c: zlib.crc32(c.nodeid.encode()) if size > 1 else 0):
        shown = set(itertools.combinations(_parameters(case), size))
        if not shown <= seen:
            kept.add(case)
            seen |= shown
    return kept


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def _stays_in_its_folder():
    """Fails a test that leaves the process in another folder, where the next ones find no file."""
    before, handlers = os.getcwd(), [signal.getsignal(s) for s in SIGNALS]
    yield
    assert [signal.getsignal(s) for s in SIGNALS] == handlers, "the test has left a handler of a signal"
    after = os.getcwd()
    os.chdir(before)
    assert after == before, f"the test has changed the working folder to {after}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """Aborts the MPI job when a test marked ``mpi`` fails on any rank.

    Without this the failing rank goes on to the next test while the others wait inside a collective
    of this one: the job hangs, or pairs collectives of different tests and reports nonsense.
    """
    report = (yield).get_result()
    if not report.failed or item.get_closest_marker("mpi") is None:
        return
    if "mpi4py.MPI" not in sys.modules:
        return
    from mpi4py import MPI

    if MPI.COMM_WORLD.size > 1:
        rank = MPI.COMM_WORLD.rank
        sys.__stderr__.write(f"\nrank {rank} failed in {item.nodeid}:\n{report.longreprtext}\n")
        sys.__stderr__.flush()
        MPI.COMM_WORLD.Abort(1)
