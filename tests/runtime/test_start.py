"""How ranks begin and end under the launcher: real jobs, one rank of which is unusual."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshmpi.errors import MeshError
from meshmpi.guard import lifeline, outcome
from meshmpi.guard.exit_status import LOST
from meshmpi.guard.outcome import Outcome, read, verdict
from meshmpi.launch import launch as launch_module
from meshmpi.launch.command import launch_command
from meshmpi.launch.launch import launch
from meshmpi.launch.launchers import find_launcher
from meshmpi.launch.start import wrapped
from meshmpi.runtime import processes
from meshmpi.transformer.training.supervisor import BY_ITSELF

PROGRAM = ["-m", "tests.runtime.mpi_programs.ends"]  # not by its path: beside it is a numbers.py
MOST_SECONDS = 15.0
"""From kill -9 of a launcher to the end of its ranks: what is promised."""
START_SECONDS = 60.0


@pytest.fixture(autouse=True)
def launcher():
    try:
        return find_launcher()
    except MeshError:
        pytest.skip("no mpirun on this machine")


def run(how: str, **more) -> subprocess.CompletedProcess[str]:
    done = launch(2, [*PROGRAM, how], timeout_seconds=60, capture_output=True, **more)
    assert done.returncode != launch_module.TIMED_OUT, f"hangs: {done.stderr}"
    return done


# ---- what one rank does must not trouble the others -------------------------------------------


@pytest.mark.parametrize(
    ("how", "child"),
    [
        ("child exits with 0", 0),
        ("child exits with 3", 3),
        ("child raises", 1),
        ("child returns", 4),
        ("subprocess", 3),
        ("debug mesh", None),
        ("debug variable", None),
        ("debug step", None),
    ],
)
def test_harmless(how: str, child: int | None):
    done = run(how)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is done") == 2
    assert child is None or f"child {child}\n" in done.stdout


def test_a_rank_that_leaves_before_mpi_is_reported():
    """The other one would wait in MPI_Init for ever."""
    done = run("leaves early")
    assert done.returncode == 1
    assert "rank 1 left the program by exit status 0 without a mesh" in done.stderr
    assert "ends.py:" in done.stderr


def test_programs_without_mpi_just_end():
    assert run("nobody uses MPI").returncode == 0


def test_a_rank_that_goes_without_a_word_has_not_finished():
    done = run("goes hard")
    assert done.returncode == LOST
    assert "rank 1 has not reported the end of the program" in done.stderr


@pytest.mark.matrix
def test_a_rank_that_goes_without_a_word_before_mpi_is_not_waited_for():
    """The other one is in MPI_Init, where it sees nothing."""
    done = run("goes hard, missed")
    assert done.returncode == LOST
    assert done.stderr.count("meshmpi: rank 1 ended without a word") == 1
    assert "has not reported" not in done.stderr, "said once"


def test_who_has_gone_without_a_word(tmp_path: Path):
    """Neither who has told nor who runs, nor a process of which another host told."""
    with subprocess.Popen(["true"]) as child:
        pid, start = child.pid, processes.start_time(child.pid)
        where = processes.mark().split("-", 2)[2]
    elsewhere = f"{'0' * 8}-{where.rpartition('-')[2]}"
    words = [f"begun {pid}-{start}-{where}", "0", f"begun {processes.mark()}", f"begun {pid}-{start}-{elsewhere}"]
    for rank, word in enumerate(words):
        path = tmp_path / f"rank-{rank:05d}"
        path.write_bytes(outcome._content(path, word))
    assert read(tmp_path) == Outcome((0, 1, 2, 3), {1: 0}, False, gone=(0,))
    assert max(len(path.read_bytes()) for path in tmp_path.iterdir()) < outcome._MOST_BYTES


# ---- the outcome of a job ---------------------------------------------------------------------

ALL, HALF, NONE = (0, 1), (0,), ()
VERDICTS = {
    "all are done": (Outcome(ALL, {0: 0, 1: 0}, False), 0, 0),
    "a rank is missing": (Outcome(ALL, {0: 0}, False), 0, LOST),
    "no rank has told": (Outcome(ALL, {}, False), 0, LOST),
    "no rank has begun": (Outcome(NONE, {}, False), 0, LOST),
    "a rank is missing, mpirun says error": (Outcome(ALL, {0: 0}, False), 1, LOST),
    "a rank is missing, killed": (Outcome(ALL, {0: 0}, False), 137, 137),
    "mpirun could not start": (Outcome(NONE, {}, False), 1, 1),
    "a rank failed, mpirun says well": (Outcome(ALL, {0: 0, 1: 3}, False), 0, 3),
    "a rank failed, the other was ended": (Outcome(ALL, {1: 1}, False), 143, 1),
    "all were stopped": (Outcome(ALL, {0: 75, 1: 75}, False), 0, 75),
    "a rank found another lost": (Outcome(ALL, {0: LOST}, False), 1, LOST),
    "survivors went on": (Outcome(ALL, {0: 0}, True), 0, 0),
    "survivors went on, a file is damaged": (Outcome(ALL, {0: 0}, True, (1,)), 0, LOST),
    "all are done, mpirun crashed": (Outcome(ALL, {0: 0, 1: 0}, False), 139, 139),
    "the program called MPI_Abort": (Outcome(ALL, {}, False), 5, 5),
}
"""What -> what ranks told, the launcher's status, that of the job."""


@pytest.mark.parametrize("what", VERDICTS)
def test_verdict(what: str):
    found, status, wanted = VERDICTS[what]
    answer, note = verdict(found, 2, status)
    assert answer == wanted
    assert bool(note) == (answer == LOST and LOST not in found.told.values())
    assert (answer == LOST) <= (answer not in BY_ITSELF), "a lost rank leads to a restart"


def test_a_status_that_a_launcher_made_up():
    """Under Slurm, Open MPI ends a rank with 14 when it has lost another one."""
    found = Outcome(ALL, {}, False)
    assert verdict(found, 2, 14)[0] == 14, "a program of the user may have said so"
    assert verdict(found, 2, 14, all_tell=True)[0] == LOST
    assert verdict(Outcome(NONE, {}, False), 2, 14, all_tell=True)[0] == 14, "nothing was started"
    assert verdict(found, 2, 137, all_tell=True)[0] == 137


FORGIVING = """#!{python}
import os, signal, subprocess, sys
if "--version" in sys.argv:
    sys.exit(print("mpirun (Open MPI) 5.0.11"))
program = sys.argv[sys.argv.index({python!r}) :]
settings = [{{**os.environ, "OMPI_COMM_WORLD_RANK": str(r)}} for r in range(2)]
ranks = [subprocess.Popen(program, env=each) for each in settings]
for rank in ranks:
    rank.wait()
"""
"""An mpirun that ends with 0 whatever has become of its ranks, as Open MPI's may."""


@pytest.mark.parametrize(("how", "status"), [("nobody uses MPI", 0), ("is killed", LOST)])
def test_mpiruns_status_of_0_is_not_believed(tmp_path: Path, how: str, status: int):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(FORGIVING.format(python=sys.executable))
    mpirun.chmod(0o755)
    assert run(how, mpi=str(mpirun)).returncode == status


def test_a_host_that_does_not_see_the_folder_says_so(tmp_path: Path):
    """As where several hosts share no file system: at once, not when all is done."""
    gone = tmp_path / "gone"
    done = subprocess.run(
        [sys.executable, *wrapped(["-c", "print('runs')"])],
        capture_output=True,
        text=True,
        env={**os.environ, "MESHMPI_OUTCOME": str(gone)},
    )
    assert done.returncode == 1 and "runs" not in done.stdout
    assert f"cannot write to {gone}" in done.stderr and "MESHMPI_SHARED_FOLDER" in done.stderr


# ---- a program runs as it would alone ---------------------------------------------------------

SCRIPT = """
import os, pickle, sys, threading
class Thing: pass
assert pickle.loads(pickle.dumps(Thing())).__class__ is Thing
assert __name__ == "__main__" and sys.modules["__main__"].Thing is Thing
print(sys.argv[1:], globals().get("__file__"), sys.path[0])
if sys.argv[1:] == ["fails"]:
    1 / 0
sys.exit("in words") if sys.argv[1:] == ["says"] else sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("kind", ["script", "module", "text", "folder"])
@pytest.mark.parametrize("argument", ["0", "3", "-1", "says", "fails"])
def test_as_python_alone(tmp_path: Path, kind: str, argument: str):
    (tmp_path / "prog.py").write_text(SCRIPT)
    (tmp_path / "__main__.py").write_text(SCRIPT)
    words = {"script": ["-X", "dev", "prog.py"], "module": ["-m", "prog"], "text": ["-c", SCRIPT], "folder": ["."]}[
        kind
    ]
    alone, under = (
        subprocess.run(
            [sys.executable, *w],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
        for w in ([*words, argument], wrapped([*words, argument]))
    )
    assert (alone.returncode, alone.stdout) == (under.returncode, under.stdout)
    assert alone.stderr.splitlines()[-1:] == under.stderr.splitlines()[-1:]
    assert "start.py" not in under.stderr
    if kind in ("script", "text"):
        assert alone.stderr == under.stderr


# ---- kill -9 ----------------------------------------------------------------------------------


def started(folder: Path, words: list[str], ranks: int = 2) -> tuple[subprocess.Popen, list[int]]:
    """A job, and the processes of its ranks as soon as all have come."""
    environment = {**os.environ, "FOLDER": str(folder)}
    job = subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    until(lambda: len(list(folder.iterdir())) == ranks, START_SECONDS, "the ranks do not come")
    return job, [int(p.name) for p in folder.iterdir()]


def until(happened: Callable[[], bool], seconds: float, problem: str) -> None:
    limit = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < limit, problem
        time.sleep(0.05)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def run_no_more(pids: list[int]) -> bool:
    return all(processes.state(pid, processes.start_time(pid)) == "gone" for pid in pids)


@pytest.mark.parametrize(
    ("killed", "how"),
    [
        ("launcher", "wait before"),
        ("launcher", "wait after"),
        ("mpirun", "wait before"),
        ("mpirun", "wait after"),
        ("mpirun by hand", "wait after"),  # before its first mesh such a program is left alone
    ],
)
def test_ranks_end_with_whoever_started_them(tmp_path: Path, launcher, how: str, killed: str):
    """One rank waits outside of MPI, the other one in MPI_Init or in a collective."""
    if killed == "mpirun by hand":
        command, environment = launch_command(2, [*PROGRAM, how])
        own = [w for w in command if not w.endswith("start.py")]
        settings = [f"{k}={v}" for k, v in environment.items() if k[:5] in ("PRTE_", "OMPI_")]
        words = ["env", *settings, *own]
    else:
        words = [sys.executable, "-m", "meshmpi.launch", "-n", "2", *PROGRAM, how]
    job, pids = started(tmp_path, words)
    try:
        os.kill(job.pid if killed == "launcher" else parent(pids[0]), signal.SIGKILL)
        until(lambda: run_no_more(pids), MOST_SECONDS, "ranks run on")
        assert job.wait(MOST_SECONDS) != 0
    finally:
        for pid in [*pids, job.pid]:
            if not run_no_more([pid]):
                os.kill(pid, signal.SIGKILL)
        job.wait()


def test_another_command_ends_with_its_launcher(tmp_path: Path):
    """It knows nothing of meshmpi."""
    script = 'touch "$FOLDER/$$"; sleep 100; true'
    words = [sys.executable, "-m", "meshmpi.launch", "-n", "2", "--", "sh", "-c", script]
    job, pids = started(tmp_path, words)
    job.kill()
    job.wait()
    until(lambda: run_no_more(pids), MOST_SECONDS, "ranks run on")


@pytest.mark.matrix
def test_ranks_outlive_the_shell_that_called_mpirun(tmp_path: Path):
    """As with nohup: mpirun lives on."""
    command, environment = launch_command(2, [*PROGRAM, "wait after"])
    environment = {**environment, "FOLDER": str(tmp_path)}
    shell = subprocess.Popen(
        ["bash", "-c", '"$@" & wait', "bash", *command], env=environment, stderr=subprocess.DEVNULL
    )
    until(lambda: len(list(tmp_path.iterdir())) == 2, START_SECONDS, "the ranks do not come")
    pids = [int(p.name) for p in tmp_path.iterdir()]
    mpirun = parent(pids[0])
    try:
        shell.kill()
        shell.wait()
        time.sleep(lifeline.SETTLE_SECONDS + 2.0)
        assert not any(run_no_more([pid]) for pid in [*pids, mpirun])
    finally:
        os.kill(mpirun, signal.SIGKILL)
        until(lambda: run_no_more(pids), MOST_SECONDS, "ranks run on")


# ---- a launcher that passes nothing on -----------------------------------------------------------


def silent_launcher(folder: Path, then: str) -> str:
    """An mpirun that answers as Open MPI's, does what ``then`` says and ends with status 1 without a word."""
    path = folder / "mpirun"
    path.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\n"
        "if '--version' in sys.argv: print('mpirun (Open MPI) 5.0.11'); sys.exit(0)\n"
        f"program = sys.argv[sys.argv.index({sys.executable!r}):]\n{then}\nsys.exit(1)\n"
    )
    path.chmod(0o755)
    return str(path)


def test_a_launcher_that_fails_without_a_word_is_named(tmp_path: Path):
    mpirun = silent_launcher(tmp_path, "")
    done = launch(2, ["-c", "pass"], mpi=mpirun, capture_output=True, timeout_seconds=60)
    assert done.returncode == 1
    assert done.stderr == (
        "meshmpi: the job ended with status 1 and said nothing; none of 2 ranks had begun:"
        f" {mpirun} itself has failed.\n"
    )


LISTENER = "The PMIx server's listener thread failed to start. We cannot"


@pytest.mark.parametrize(("words", "status"), [("", 1), (LISTENER, 213)], ids=["silent", "listener"])
@pytest.mark.parametrize("capture", [True, False])
def test_a_launcher_that_fails_once_by_chance_is_started_again(tmp_path: Path, words: str, status: int, capture: bool):
    tried = str(tmp_path / "tried")
    first = (
        f"import os\nif not os.path.exists({tried!r}):\n    open({tried!r}, 'x')\n"
        f"    print({words!r}, file=sys.stderr)\n    sys.exit({status})"
    )
    mpirun = silent_launcher(tmp_path, f"{first}\nelse:\n    sys.exit(subprocess.run(program).returncode)")
    done = launch(1, ["-c", "print('at last')"], mpi=mpirun, capture_output=capture, timeout_seconds=60)
    assert done.returncode == 0, done.stderr
    assert not capture or (done.stdout, done.stderr) == ("at last\n", "")


def test_a_launcher_that_fails_with_other_words_is_not_started_again(tmp_path: Path):
    mpirun = silent_launcher(tmp_path, "print('not enough slots', file=sys.stderr)")
    done = launch(1, ["-c", "print('never')"], mpi=mpirun, capture_output=True, timeout_seconds=60)
    assert (done.returncode, done.stderr) == (1, "not enough slots\n")


def test_a_report_that_a_launcher_has_lost_is_shown(tmp_path: Path):
    mpirun = silent_launcher(tmp_path, "subprocess.run(program, stderr=subprocess.DEVNULL)")
    program = ["-c", "raise ValueError('by order')"]
    done = launch(2, program, mpi=mpirun, capture_output=True, timeout_seconds=60)
    assert done.returncode == 1
    assert "rank 0 of 2 had begun, and ended rank 0 by status 1" in done.stderr
    assert "What rank 0 reported:\nTraceback" in done.stderr and "ValueError: by order" in done.stderr
