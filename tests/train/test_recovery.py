"""Lost ranks: survivors go on with a smaller mesh, or the job is started again; real mpirun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshmpi import checkpoint
from meshmpi.dims import MeshShape
from meshmpi.errors import ConfigError, MeshError
from meshmpi.guard.exit_status import LOST
from meshmpi.guard.recovery import LostRank, named, smaller_mesh
from meshmpi.launch import start
from meshmpi.launch.command import launch_command
from meshmpi.launch.launch import launch
from meshmpi.launch.launchers import Launcher
from meshmpi.training.metrics import read_metrics
from meshmpi.transformer.training.config import load
from meshmpi.transformer.training.recovery import Checkpoints, next_mesh
from meshmpi.transformer.training.settings import Settings
from meshmpi.transformer.training.supervisor import Host, Supervisor, parse_hosts
from tests.soak.stores import Placed, store, values
from tests.train.small import SMALL_MODEL, TEXT

MIXED = ("--mesh", "rows:2;cols:2", "--layout", "batch:rows;heads:cols;d_ff:cols;vocab:cols")
SMALL = (
    *SMALL_MODEL,
    "train.batch=12",
    "train.log_every=4",
    "train.plot=false",
    "evaluate.every=0",
    "evaluate.final_windows=2",
    "model.residual_dropout=0.1",
    "sample.tokens=3",
    "optimizer.learning_rate=0.01",
    "checkpoint.every=2",
    "checkpoint.keep=0",
)


def arguments(folder: Path, name: str, *more: str) -> list[str]:
    """Arguments of ``meshmpi train`` for a small model, into ``folder/name``."""
    (folder / "text.txt").write_text(TEXT)
    (folder / "config.toml").write_text("")
    sets = [word for s in (f"data.corpus={folder / 'text.txt'}", *SMALL) for word in ("--set", s)]
    return ["train", str(folder / "config.toml"), *sets, "--out", str(folder / name), *more]


def dying(folder: Path, ranks: int, faults: str, name: str, *more: str, recover: bool = True):
    script = Path(__file__).parent / "mpi_programs" / "dying.py"
    return launch(
        ranks,
        [str(script), faults, *arguments(folder, name, *more)],
        timeout_seconds=120,
        capture_output=True,
        recover=recover,
        # Jobs that recover reduce by MPI, in another order than shared memory: the last bits would differ.
        environment={"PYTHONPATH": os.getcwd(), "MESHMPI_SHARED": "off"},
    )


def losses(folder: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_metrics(folder) if "loss" in r}


SMALLER = ("--mesh", "rows:1;cols:2", "--layout", MIXED[3])
MODEL = ("--layout", "heads:all;d_ff:all;vocab:all")
COPIES = ("--set", "checkpoint.partner=memory")
BLOCKS = ("--layout", "d_model:cols;heads:rows;d_ff:rows;vocab:rows")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("ranks", "mesh", "faults", "said", "fresh"),
    [
        # Every block has a second holder; then a rank to spare stands in, but a block is lost.
        (
            4,
            MIXED,
            "3@5:commit 0@9",
            [
                "rank 3 (host",
                "rank 0 (host",
                "after step 6: 2 ranks go on with mesh {rows: 1, cols: 2}, 1 to spare from step 6,"
                " which is in memory; 0 steps to repeat",
                "after step 9: 2 ranks go on with mesh {rows: 1, cols: 2} from step 8; 1 step",
            ],
            [("reference", 6, 12, 2, SMALLER)],
        ),
        # Some ranks made the step during which another was lost: the others make it too.
        (
            4,
            (),
            "3@4:barrier 1@6:middle 0@8",
            [
                "after step 5: 3 ranks go on with mesh {all: 3} from step 5, which is in memory; 0",
                "after step 6: 2 ranks go on with mesh {all: 2} from step 6, which is in memory; 0",
                "after step 8: 1 rank goes on with mesh {all: 1} from step 8, which is in memory; 0",
            ],
            [("reference", 5, 6, 3, ()), ("run", 8, 12, 1, ())],
        ),
        # Nothing was saved yet.
        (
            4,
            (),
            "2@1:writing",
            ["after step 2: 3 ranks go on with mesh {all: 3} from step 2, which is in memory; 0"],
            [("reference", 2, 12, 3, ())],
        ),
        # Blocks that nobody else holds: back to the checkpoint.
        (
            2,
            MODEL,
            "1@5:begin",
            ["after step 5: 1 rank goes on with mesh {all: 1} from step 4; 1 step to repeat"],
            [("reference", 4, 12, 1, MODEL)],
        ),
        # Its files are gone too: those that keep copies put them back.
        (
            2,
            (*MODEL, *COPIES),
            "1@5:begin+",
            [
                "shard rank-00001 of step 4 was restored from the memory of rank 0",
                "after step 5: 1 rank goes on with mesh {all: 1} from step 4; 1 step to repeat",
            ],
            [("reference", 4, 12, 1, MODEL)],
        ),
        (
            4,
            (*MODEL, *COPIES),
            "2@5:begin+ 0@9:begin+",
            [
                "shard rank-00002 of step 4 was restored from the memory of rank 2",
                "after step 5: 3 ranks go on with mesh {all: 3} from step 4; 1 step to repeat",
                "shard rank-00000 of step 8 was restored from the memory of rank 0",
                "after step 9: 2 ranks go on with mesh {all: 2} from step 8; 1 step to repeat",
            ],
            [("reference", 4, 8, 3, MODEL), ("run", 8, 12, 2, MODEL)],
        ),
        # The copy is kept by a rank that becomes one to spare.
        (
            4,
            ("--mesh", "rows:2;cols:2", *BLOCKS, *COPIES),
            "2@5:begin+",
            [
                "shard rank-00002 of step 4 was restored from the memory of rank 2",
                "after step 5: 2 ranks go on with mesh {rows: 2, cols: 1}, 1 to spare from step 4; 1",
            ],
            [("reference", 4, 12, 2, ("--mesh", "rows:2;cols:1", *BLOCKS))],
        ),
    ],
    ids=[
        "2-D",
        "data-parallel",
        "before any save",
        "model-parallel",
        "copies of one",
        "copies of each",
        "copies of a rank to spare",
    ],
)
def test_survivors_go_on_as_a_fresh_run_would(tmp_path, ranks, mesh, faults, said, fresh):
    steps = ("--set", "train.steps=12", "--recover")
    done = dying(tmp_path, ranks, faults, "run", *mesh, *steps)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in said:
        assert text in done.stdout, done.stdout
    assert done.stdout.count("were lost") + done.stdout.count("was lost") == faults.count("@")
    assert "Traceback" not in done.stderr
    found = losses(tmp_path / "run")
    assert sorted(found) == list(range(1, 13))
    every = ("--set", "checkpoint.every=1", "--set", f"train.steps={fresh[0][1]}")
    whole = dying(tmp_path, ranks, "", "reference", *mesh, "--recover", *every)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    for source, first, last, few, where in fresh:
        path = tmp_path / source / "checkpoints" / f"step-{first:08d}"
        more = (*where, "--set", "train.steps=12", "--resume", str(path))
        alone = dying(tmp_path, few, "", f"fresh-{source}", *more, recover=False)
        assert alone.returncode == 0, alone.stdout + alone.stderr
        expected = losses(tmp_path / f"fresh-{source}")
        assert sorted(expected) == list(range(first + 1, 13))
        steps_of_it = range(first + 1, last + 1)
        assert [found[k] for k in steps_of_it] == [expected[k] for k in steps_of_it]


@pytest.mark.matrix
def test_an_error_of_one_rank_still_ends_the_job(tmp_path):
    began = time.monotonic()
    done = dying(tmp_path, 2, "1!3", "run", "--recover", "--set", "train.steps=100000")
    assert done.returncode == 1
    assert done.stderr.count("RuntimeError: by order") == 1
    assert "go on with mesh" not in done.stdout
    assert time.monotonic() - began < 60


@pytest.mark.matrix
def test_an_mpi_that_cannot_is_refused_before_the_first_step(tmp_path):
    done = dying(tmp_path, 2, "", "run", "--recover", recover=False)
    assert done.returncode == 1
    assert done.stderr.count("ConfigError: mesh.recover is on, but this job of 2 ranks") == 1
    assert "--restarts K" in done.stderr and not (tmp_path / "run").exists()


def test_a_launcher_that_cannot_is_refused(monkeypatch: pytest.MonkeyPatch):
    for kind, major in (("mpich", 5), ("intel", 2021), ("openmpi", 4)):
        monkeypatch.setattr(
            "meshmpi.launch.command.find_launcher", lambda mpi, k=kind, m=major: Launcher("/opt/mpirun", k, m)
        )
        with pytest.raises(MeshError, match="--restarts"):
            launch_command(2, ["a.py"], recover=True)
    monkeypatch.setattr("meshmpi.launch.command.find_launcher", lambda mpi: Launcher("/opt/mpirun", "openmpi", 5))
    assert "--with-ft ulfm" in " ".join(launch_command(2, ["a.py"], recover=True)[0])
    assert "--with-ft" not in launch_command(2, ["a.py"])[0]


@pytest.mark.parametrize(
    ("wanted", "ranks", "spared", "found"),
    [
        ("all:4", 3, "", "all:3"),
        ("all:4", 4, "", "all:4"),
        ("rows:2;cols:2", 3, "cols", "rows:1;cols:2"),
        ("rows:2;cols:2", 3, "rows", "rows:2;cols:1"),
        ("rows:2;cols:2", 3, "", "rows:2;cols:1"),
        ("rows:4;cols:2", 7, "cols", "rows:3;cols:2"),
        ("rows:2;cols:3", 5, "cols", "rows:2;cols:2"),
        ("a:3;b:2;c:2", 11, "c", "a:2;b:2;c:2"),
        ("rows:2;cols:2", 1, "cols", "rows:1;cols:1"),
        ("rows:2;cols:2", 9, "", "rows:2;cols:2"),
    ],
)
def test_the_largest_mesh_of_fewer_ranks(wanted: str, ranks: int, spared: str, found: str):
    axes = tuple(a for a in spared.split(",") if a)
    assert smaller_mesh(MeshShape(wanted), ranks, axes) == MeshShape(found)


def test_axes_that_split_no_batch_are_spared():
    mesh = load(Settings, None, ["mesh.shape=rows:2;cols:2", "mesh.layout=batch:cols;d_ff:rows"])
    assert next_mesh(mesh.mesh, MeshShape("rows:2;cols:2"), 3) == MeshShape("rows:2;cols:1")


def test_lost_ranks_are_named():
    ranks = [LostRank(r, "n2", 100 + r) for r in range(5)]
    assert named(ranks[:1]) == "rank 0 (host n2, pid 100)"
    assert named(ranks) == "ranks 0, 1, 2, 3, 4 (host n2)"


# ---- starting again --------------------------------------------------------------------------


class Jobs:
    """Stands in for real jobs: each start has an exit status and leaves a checkpoint, or not."""

    def __init__(self, folder: Path, *ends: tuple[int, int]) -> None:
        self.folder, self.ends, self.calls = folder, list(ends), []

    def start(self, ranks, more, hosts) -> int:
        self.calls.append((ranks, list(more), hosts))
        status, step = self.ends.pop(0)
        if step:
            (self.folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        return status


def supervised(tmp_path, *ends, restarts=3, ranks=4, hosts=(), resume=False, sets=()):
    jobs, lines = Jobs(tmp_path / "run", *ends), []
    settings = load(Settings, None, list(sets))
    supervisor = Supervisor(settings, tmp_path / "run", ranks, list(hosts), resume, jobs.start, lines.append)
    return supervisor.run(restarts), jobs, lines


def test_a_job_that_dies_is_started_again_from_its_newest_checkpoint(tmp_path):
    status, jobs, lines = supervised(tmp_path, (137, 2), (139, 4), (0, 6))
    assert status == 0
    assert jobs.calls == [(4, [], ""), (4, ["--resume"], ""), (4, ["--resume"], "")]
    assert "exit status 137" in lines[0] and "step-00000002; 2 restarts left" in lines[0]


@pytest.mark.parametrize("status", [0, 1, 2, 75, 130])
def test_a_job_that_ends_by_itself_is_not_started_again(tmp_path, status):
    assert supervised(tmp_path, (status, 2))[0] == status


def test_a_job_that_has_lost_a_rank_is_started_again(tmp_path):
    """Whatever mpirun says: `outcome.verdict` makes LOST of that, and so does the watchdog."""
    status, jobs, lines = supervised(tmp_path, (LOST, 2), (0, 4))
    assert (status, len(jobs.calls)) == (0, 2) and f"exit status {LOST}" in lines[0]


def test_restarts_are_counted(tmp_path):
    status, jobs, lines = supervised(tmp_path, (137, 2), (137, 4), (137, 6), restarts=2)
    assert (status, len(jobs.calls)) == (137, 3)
    assert "no restart is left (--restarts 2)" in lines[-1]


def test_deaths_without_progress_end_it(tmp_path):
    status, jobs, lines = supervised(tmp_path, (137, 2), (137, 0), (137, 0), restarts=9)
    assert (status, len(jobs.calls)) == (137, 3)
    assert "2 times without a new checkpoint" in lines[-1]


def test_a_lost_host_is_left_out_and_the_mesh_shrinks(tmp_path, monkeypatch):
    monkeypatch.setattr("meshmpi.transformer.training.supervisor.answering", lambda name: name != "n2")
    sets = ["mesh.shape=rows:2;cols:2", "mesh.layout=batch:rows;d_ff:cols"]
    hosts = [Host("n1", 1), Host("n2", 1), Host("n3", 2)]
    _, jobs, lines = supervised(tmp_path, (137, 2), (0, 4), hosts=hosts, sets=sets)
    assert jobs.calls[0] == (4, [], "n1:1,n2:1,n3:2")
    assert jobs.calls[1] == (2, ["--mesh", "rows:1;cols:2", "--resume"], "n1:1,n3:1")
    assert "gone: host n2" in lines[0]


def test_a_given_checkpoint_is_not_confused_with_later_ones_of_the_folder(tmp_path):
    (tmp_path / "run" / "checkpoints" / "step-00000099").mkdir(parents=True)
    source = str(tmp_path / "run" / "checkpoints" / "step-00000010")
    _, jobs, _ = supervised(tmp_path, (137, 0), (137, 12), (0, 14), resume=source)
    new = str(tmp_path / "run" / "checkpoints" / "step-00000012")
    assert [more for _, more, _ in jobs.calls] == [[], [], ["--resume", new]]


def test_only_checkpoints_made_since_count(tmp_path):
    """Neither one that got its name back nor one that got a file back is new."""
    saved = store(Placed("all:1"), values(0))
    old = [checkpoint.save(tmp_path, saved, step, {}) for step in (10, 40)]
    old[1].rename(tmp_path / ".step-00000040.old")  # as while it was being replaced
    made = Checkpoints(tmp_path)
    (tmp_path / ".step-00000040.old").rename(old[1])
    (old[0] / "rank-00000.safetensors").rename(old[0] / "again")
    (old[0] / "again").rename(old[0] / "rank-00000.safetensors")
    assert made.newest() is None
    said: list[str] = []
    new = checkpoint.save(tmp_path, saved, 15, {}, after=10, say=said.append)
    assert made.newest() == new and "step-00000040" in said[0]


@pytest.mark.matrix
def test_survivors_go_on_from_what_was_saved_after_going_back(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    first = launch(
        2,
        ["-m", "meshmpi", *arguments(tmp_path, "run", "--set", "train.steps=12")],
        timeout_seconds=120,
        capture_output=True,
    )
    assert first.returncode == 0, first.stdout + first.stderr
    whole = losses(tmp_path / "run")
    sets = ("--set", "train.steps=12", "--set", "checkpoint.keep=2", "--recover")
    done = dying(tmp_path, 2, "1@9", "run", *sets, "--resume", str(folder / "step-00000004"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "with mesh {all: 1} from step 9, which is in memory; 0 steps" in done.stdout
    assert done.stdout.count("set aside in") == 1
    assert [p.name for p in checkpoint.find(folder)] == ["step-00000012", "step-00000010"]
    (aside,) = folder.glob("abandoned-after-00000004-*")
    assert [int(p.name[5:]) for p in checkpoint.find(aside)] == [12, 10, 8, 6]
    assert losses(tmp_path / "run") == pytest.approx(whole, rel=1e-4)


def test_hosts_are_read():
    assert parse_hosts("n1,n2", 3) == [Host("n1", 2), Host("n2", 1)]
    assert parse_hosts("n1:1,n2:3", 4) == [Host("n1", 1), Host("n2", 3)]
    for text in ("n1:x", "n1:1,n2:1", "n1:0"):
        with pytest.raises(ConfigError, match="--hosts"):
            parse_hosts(text, 4)


@pytest.mark.matrix
def test_a_killed_rank_and_a_new_start_end_as_if_nothing_had_been(tmp_path):
    steps = ("--set", "train.steps=160", "--set", "checkpoint.every=20")
    more = (*steps, "--ranks", "2", "--restarts", "2")
    command = [sys.executable, "-m", "meshmpi", *arguments(tmp_path, "run", *more)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "run" / "checkpoints" / "step-00000020").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        os.kill(ranks_of(tmp_path / "run")[-1], signal.SIGKILL)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert out.count("the job died (exit status") == 1 and "1 restart left" in out
    whole = launch(
        2, ["-m", "meshmpi", *arguments(tmp_path, "whole", *steps)], capture_output=True, timeout_seconds=120
    )
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "run")) == 160
    assert not list(tmp_path.glob(".run.*")), "the note of the outcome is removed"


def ranks_of(folder: Path) -> list[int]:
    """Processes that train into this folder, launchers not counted."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            environment = (path / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in words and b"OMPI_COMM_WORLD_RANK=" in environment:
            found.append(int(path.name))
    return sorted(found)


LOSING = """
import os, signal, sys
import meshmpi as mm
from meshmpi.guard.recovery import Survivors, is_loss
survivors = Survivors()
rank, mesh = survivors.rank, survivors.first(2, lambda comm: mm.Mesh("all:2", comm))
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        survivors.gathered(rank)
except Exception as error:
    assert is_loss(error)
    survivors.turn_back()
survivors.agree(0)
survivors.shrink()
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.matrix
@pytest.mark.parametrize(("own_start", "status", "expected"), [(True, 0, 0), (True, 3, 3), (False, 3, LOST)])
def test_after_a_loss_no_failure_counts_as_a_success(tmp_path, own_start, status, expected):
    script = tmp_path / "losing.py"
    script.write_text(LOSING)
    command, variables = launch_command(3, [str(script), str(status)], recover=True)
    command = [word for word in command if own_start or word != start.__file__]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == expected, done.stderr
    assert ("is not known" in done.stderr) is not own_start


@pytest.mark.matrix
def test_a_rank_lost_before_mpi_has_started_is_not_waited_for():
    program = (
        "import os, signal\n"
        "from meshmpi.guard import recovery\n"
        "recovery.START_SECONDS = 8.0\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "recovery.Survivors()\n"
    )
    done = launch(3, ["-c", program], recover=True, capture_output=True, timeout_seconds=90)
    assert done.returncode != 124, done.stderr  # it may be 0: see `Supervisor`
    assert "Timeout" in done.stderr and "recovery.py" in done.stderr, "the stacks are shown"
