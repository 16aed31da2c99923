"""What all tests share: seeds and thread counts; and no hanging MPI job when one rank fails."""

from __future__ import annotations

import os
import signal
import sys

# Read by the BLAS when NumPy is imported: two cores are shared by several test processes.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("meshmpi", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "meshmpi"))


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
