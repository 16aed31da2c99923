"""Parts of the doctor that no test can break in earnest: other hosts, network file systems."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from meshmpi.dims import MeshShape
from meshmpi.doctor import checks
from meshmpi.doctor.checks import job, library, processors, storage
from meshmpi.doctor.facts import Answer, Facts, heading, is_network, jobs_in, kind_of, mount_of
from meshmpi.doctor.findings import BROKEN, CATALOGUE, WARNING, Finding, found, summary, verdict
from meshmpi.launch.launchers import Launcher
from meshmpi.runtime.cores import Cores, group_memory
from meshmpi.runtime.probe import MARK


def facts(folder: Path, **more) -> Facts:
    nothing = Answer(())
    plain = Facts(
        {},
        2,
        folder,
        Cores(8, 8, True),
        {},
        "",
        nothing,
        {"library": "Open MPI v5.0.1, x", "library_file": "/lib/libmpi.so.40"},
        nothing,
        Launcher("/bin/mpirun", "openmpi", 5),
        "",
        None,
    )
    return replace(plain, **more)


def names(findings) -> list[str]:
    return [finding.name for finding in findings]


TABLE = """/dev/sda / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb /home/me/local\\040disk xfs rw 0 0
scratch /home2 lustre rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/x", "ext4"),
        ("/home/me/runs", "nfs4"),
        ("/home/me/local disk/a", "xfs"),
        ("/home2", "lustre"),
        ("/home23", "ext4"),
    ],
)
def test_the_file_system_of_a_folder(path: str, kind: str):
    assert mount_of(Path(path), TABLE).kind == kind
    assert is_network(kind) == (kind in ("nfs4", "lustre"))


def test_a_kernel_cache_on_a_network(tmp_path: Path, monkeypatch):
    part = {"folder": str(tmp_path / "kernels"), "command": "cc", "openmp": True, "answer": 42}
    told = facts(tmp_path, parts={"compiler": part}, environment={"MESHMPI_CACHE": str(tmp_path)})
    assert names(processors.cache(told)) == []
    monkeypatch.setattr(processors, "mount_of", lambda folder: mount_of(Path("/home/x"), TABLE))
    assert names(processors.cache(told)) == ["kernel-cache-on-network"]


def test_slow_storage_is_measured(tmp_path: Path):
    told = facts(tmp_path)
    assert "checkpoints-slow" not in names(storage.checkpoints(told, slow=1.0))
    assert "checkpoints-slow" in names(storage.checkpoints(told, slow=1e15))
    assert list(tmp_path.iterdir()) == []


def test_memory_of_control_groups(tmp_path: Path):
    membership = tmp_path / "cgroup"
    membership.write_text("0::/job/task\n")
    (tmp_path / "root" / "job" / "task").mkdir(parents=True)
    root = tmp_path / "root"
    assert group_memory(root, membership) is None
    (root / "job" / "task" / "memory.max").write_text("max\n")
    (root / "job" / "memory.max").write_text("1000000000\n")
    assert group_memory(root, membership) == 1_000_000_000
    membership.write_text("4:cpu,cpuacct:/a\n7:memory:/b\n")
    (root / "memory" / "b").mkdir(parents=True)
    (root / "memory" / "b" / "memory.limit_in_bytes").write_text("500000000\n")
    (root / "memory" / "memory.limit_in_bytes").write_text(str(2**63 - 4096))
    assert group_memory(root, membership) == 500_000_000


def test_clocks_and_cores_of_several_hosts(tmp_path: Path):
    a = {"host": "a", "clock": 100.0, "affinity": [0], "cores": 8}
    b = {"host": "b", "clock": 100.5, "affinity": [0], "cores": 8}
    assert names(job.clocks(facts(tmp_path, jobs=[[a, b]]))) == []
    late = {**b, "clock": 107.0}
    found = list(job.clocks(facts(tmp_path, jobs=[[a, late]])))
    assert names(found) == ["clocks-differ"] and "b is 7.0 s ahead of that of a" in found[0].what
    assert names(processors.pinning(facts(tmp_path, jobs=[[a, b]]))) == []
    crowded = facts(tmp_path, jobs=[[a, {**a, "clock": 1.0}, b]])
    assert "2 ranks on a share core 0 of 8" in next(processors.pinning(crowded)).what


@pytest.mark.parametrize(
    ("hosts", "mesh", "line"),
    [
        ("aabb", "rows:2;cols:2", "between hosts: rows; inside a host: cols"),
        ("abab", "rows:2;cols:2", "between hosts: rows; inside a host: cols"),  # a mesh goes host by host
        ("aabc", "rows:2;cols:2", "between hosts: rows, cols; inside a host: no axis"),
        ("aaaa", "all:4", "between hosts: no axis; inside a host: all"),
        ("ab", "all:4", "it needs 4 ranks, this job has 2"),
    ],
)
def test_axes_that_cross_the_network(hosts: str, mesh: str, line: str, tmp_path: Path):
    told = facts(tmp_path, jobs=[[{"host": h, "size": len(hosts)} for h in hosts]], mesh=MeshShape(mesh))
    assert f"\nmesh {MeshShape(mesh)}: {line}" in heading(told)
    assert "mesh {" not in heading(replace(told, mesh=None))


def test_damaged_messages_are_broken(tmp_path: Path):
    good, bad = {"rank": 0, "message_intact": True}, {"rank": 1, "message_intact": False}
    assert names(job.messages(facts(tmp_path, jobs=[[good, good]]))) == []
    assert names(job.messages(facts(tmp_path, jobs=[[good, bad]]))) == ["messages-damaged"]


def test_an_old_mpi4py(tmp_path: Path):
    for version, expected in (("3.1.6", ["mpi4py-old"]), ("4.0.3", ["mpi4py-old"]), ("4.1.0", [])):
        told = facts(tmp_path, library={"versions": {"mpi4py": version}})
        assert names(library.mpi4py(told)) == expected


def test_routines_the_processor_does_not_have(tmp_path: Path):
    """SIGILL in the process that tries matrix products."""
    ill = facts(
        tmp_path, died_in="numpy", inside=Answer((), status=-4), environment={"OPENBLAS_CORETYPE": "SapphireRapids"}
    )
    found = [f for f in checks.examine(ill) if f.level == BROKEN]
    assert names(found) == ["openblas-coretype"] and "SIGILL" in found[0].what


def test_a_check_that_fails_is_a_finding(tmp_path: Path):
    found = checks.examine(facts(tmp_path, jobs=[[{"host": "a"}]]))  # no versions
    assert "check-failed" in names(found)
    assert "packages.versions_of_ranks ended with KeyError" in summary(found)


def test_lines_of_several_ranks_may_run_together():
    line = f'warning: x{MARK}[{{"rank": 0}}]{MARK}[{{"rank": 0}}]'
    assert jobs_in(Answer([line, "noise"])) == [[{"rank": 0}], [{"rank": 0}]]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Open MPI v4.1.4, package: Debian", "openmpi"),
        ("MPICH Version:      5.0.2", "mpich"),
        ("Intel(R) MPI Library 2021.18", "intel"),
        ("HPE Something", ""),
    ],
)
def test_kinds_of_libraries(text: str, kind: str):
    assert kind_of(text) == kind


def test_the_verdict_is_the_worst():
    warning = Finding(WARNING, "w", "what.", "why.", "one\ntwo")
    broken = Finding(BROKEN, "b", "what.", "why.", "one")
    assert [verdict(f) for f in ([], [warning], [warning, broken])] == ["ok", WARNING, BROKEN]
    text = summary([warning, broken])
    assert text.startswith("BROKEN b: what.") and text.endswith("1 broken, 1 warning.")
    assert "    one\n    two" in text


def test_the_catalogue_has_what_the_checks_find_and_nothing_else():
    folder = Path(checks.__file__).parent
    text = "".join(path.read_text() for path in folder.glob("*.py"))
    listed = {name for line in CATALOGUE.splitlines() if line[:1].strip() for name in line.split()[1:]}
    assert all(f'"{name}"' in text for name in listed), listed
    assert set(re.findall(r'found\(\s*"([^"]+)"', text)) <= listed
    assert all(found(name, "x").why.endswith(".") and found(name, "x").paste for name in listed)
