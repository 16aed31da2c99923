"""The launcher's own words after a report: left out to the letter, and nothing else is."""

from __future__ import annotations

import pytest

from meshmpi.errors import MeshError
from meshmpi.launch.launch import launch
from meshmpi.launch.launchers import find_launcher
from meshmpi.launch.notices import Notices

RULE = "-" * 74 + "\n"
REPORT = "[rank 1 of 4] Traceback (most recent call last):\nValueError: 7 apples\n"
OPEN_MPI_5 = (
    RULE + "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n"
    "  Proc: [[7965,1],1]\n  Errorcode: 1\n\n"
    "NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.\n"
    "You may or may not see output from other processes, depending on\n"
    "exactly when Open MPI kills them.\n"
    + RULE
    + RULE
    + "prterun has exited due to process rank 1 with PID 0 on node node-17 calling\n"
    '"abort". This may have caused other processes in the application to be\n'
    "terminated by signals sent by prterun (as reported here).\n" + RULE + "\0"
)
OPEN_MPI_4 = (
    RULE + "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n"
    "with errorcode 1.\n\n"
    "NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.\n"
    "You may or may not see output from other processes, depending on\n"
    "exactly when Open MPI kills them.\n" + RULE
)
INTEL = "Abort(3) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 3) - process 1\n"
KILLED = RULE + "prterun noticed that process rank 1 with PID 10290 on node vm exited on\nsignal 9 (Killed).\n" + RULE
NONZERO = (
    RULE + "prterun detected that one or more processes exited with non-zero status,\n"
    "thus causing the job to be terminated. The first process to do so was:\n\n"
    "   Process name: [prterun-vm-10297@1,1]\n   Exit code:    5\n" + RULE
)
HYDRA = (
    "\n" + "=" * 83 + "\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n"
    "=   RANK 1 PID 10509 RUNNING AT vm\n=   KILLED BY SIGNAL: 9 (Killed)\n" + "=" * 83 + "\n"
)
NOTICES = {"Open MPI 5": OPEN_MPI_5, "Open MPI 4": OPEN_MPI_4, "Intel MPI": INTEL}


def shown(text: str, size: int = 1 << 16, ranks: int = 4) -> str:
    """What comes out where the text comes in pieces of so many bytes."""
    notices, data = Notices(ranks), text.encode()
    out = b"".join(notices.feed(data[k : k + size]) for k in range(0, len(data), size))
    return (out + notices.end()).decode()


@pytest.mark.parametrize("size", [1, 7, 75, 1 << 16])
@pytest.mark.parametrize("notice", NOTICES.values(), ids=NOTICES)
def test_the_words_about_a_rank_that_reported_are_left_out(notice: str, size: int):
    assert shown(REPORT + notice, size) == REPORT
    assert shown(f"half\rway {REPORT}{notice}more\n", size) == f"half\rway {REPORT}{notice}more\n"
    assert shown(f"50 %\r{REPORT}{notice}more\n", size).replace("\0", "") == f"50 %\r{REPORT}more\n"


@pytest.mark.parametrize("size", [1, 75, 1 << 16])
@pytest.mark.parametrize("text", [KILLED, NONZERO, HYDRA], ids=["killed", "status", "hydra"])
def test_a_first_cause_stays(text: str, size: int):
    assert shown(REPORT + text, size) == REPORT + text
    assert shown(REPORT + text + OPEN_MPI_5, size) == REPORT + text


@pytest.mark.parametrize("notice", NOTICES.values(), ids=NOTICES)
def test_without_a_report_of_that_rank_everything_stays(notice: str):
    other = REPORT.replace("rank 1", "rank 2")
    elsewhere = REPORT.replace("of 4", "of 8")
    for before in ("", "a user's own last words\n", other, elsewhere, f"said {REPORT}"):
        assert shown(before + notice) == before + notice


@pytest.mark.parametrize("size", [1, 5, 1 << 16])
def test_what_users_write_passes_unchanged(size: int):
    """Rules, half notices, lines without an end, bytes that are no text."""
    half = OPEN_MPI_5[: len(OPEN_MPI_5) // 3]
    for text in (
        RULE,
        RULE * 3,
        f"{RULE}title\n{RULE}",
        half,
        f"{half}\nand more\n",
        "-" * 74,
        "Abort(3) on a whim\n",
        "no end",
        "a\r\nb\rc",
        "\0",
        "x\0\n",
        OPEN_MPI_5.replace("PID 0", "PID x"),
    ):
        assert shown(text, size) == text
        if "MPI_ABORT was invoked on rank 1" not in text or "exactly" not in text:
            assert shown(REPORT + text, size) == REPORT + text
    notices = Notices(4)
    assert notices.feed(b"\xff\xfe\n") == b"\xff\xfe\n"


def test_lines_are_shown_at_once_before_any_report():
    notices = Notices(4)
    for piece in (RULE.encode(), b"-----", b"...\r", b"Abort(", b"\n"):
        assert notices.feed(piece) == piece


_ERROR = """
import meshmpi as mm
mesh = mm.Mesh("rows:2")
if mesh.rank == 1:
    raise ValueError("7 apples")
mesh.comm.Barrier()
"""
_ABORT = """
from mpi4py import MPI
import time
if MPI.COMM_WORLD.rank == 1:
    MPI.COMM_WORLD.Abort(3)
time.sleep(30)
"""


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize(("script", "stays"), [(_ERROR, False), (_ABORT, True)])
def test_real_jobs(script: str, stays: bool, capture: bool, capfd):
    try:
        kind = find_launcher().kind
    except MeshError:
        pytest.skip("no mpirun on this machine")
    done = launch(2, ["-c", script], timeout_seconds=60, capture_output=capture)
    err = done.stderr if capture else capfd.readouterr().err
    assert done.returncode == (3 if stays else 1), err
    assert ("ValueError: 7 apples" in err) != stays
    if kind == "openmpi":
        assert ("MPI_ABORT was invoked" in err) == stays, err
        assert ("calling" in err) == stays, err
