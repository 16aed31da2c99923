"""Broken environments: what is done to a machine, and what the doctor has to say of it.

Most are broken in earnest: other variables, file systems mounted in a namespace of their own, a
filter of system calls, a launcher that starts ranks without telling them.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshmpi.kernels import product_choice
from meshmpi.launch.launchers import find_launcher

ROOT = Path(__file__).parent.parent.parent
DEBIANS_MPICH = glob.glob("/usr/lib/*/libmpich.so.12")
FORBID_COPYING = Path(__file__).with_name("forbid_copying.py")


@dataclass(frozen=True)
class Broken:
    """One broken environment.

    Attributes:
        id: Of the test.
        names: Findings that must be there; of the first one the entry of the catalogue.
        says: Text in the first of them.
        paste: Text in the line to paste.
        environment: Variables, with ``{tmp}`` for the test's folder.
        options: Of the doctor.
        before: Given the test's folder; makes files there.
        shell: Runs first, as root in a mount namespace of its own, in a shell.
        wrapper: Command in front of the doctor's.
        when: Whether this machine can be broken so.
    """

    id: str
    names: Sequence[str]
    says: str
    paste: str
    environment: dict[str, str] = field(default_factory=dict)
    options: Sequence[str] = ("--ranks", "0")
    before: Callable[[Path], None] = lambda folder: None
    shell: str = ""
    wrapper: Sequence[str] = ()
    when: bool = True


def script(path: Path, text: str) -> None:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def _launcher_of_another_kind(folder: Path) -> None:
    """Answers as MPICH's, and starts two programs that know nothing of each other."""
    script(
        folder / "bin" / "mpirun",
        'if [ "$1" = --version ]; then echo "HYDRA build details: Version: 4.0.2"; exit; fi\n'
        'while [ "${1#-}" != "$1" ]; do shift 2; done\n"$@" & "$@"; wait',
    )


def _launcher_that(answer: str) -> Callable[[Path], None]:
    def before(folder: Path) -> None:
        script(
            folder / "bin" / "mpirun",
            f'if [ "$1" = --version ]; then echo "mpirun (Open MPI) 5.0.1"; exit; fi\n{answer}',
        )

    return before


def _numpy_that(text: str) -> Callable[[Path], None]:
    def before(folder: Path) -> None:
        (folder / "numpy").mkdir()
        (folder / "numpy" / "__init__.py").write_text(text)

    return before


def _other_numpy(folder: Path) -> None:
    info = folder / "other" / "numpy-1.0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.0.0\n")
    _two_programs(folder, f"PYTHONPATH={folder}/other:{ROOT}")


def _other_sources(folder: Path) -> None:
    import shutil

    shutil.copytree(ROOT / "meshmpi", folder / "other" / "meshmpi", ignore=shutil.ignore_patterns("__pycache__"))
    with open(folder / "other" / "meshmpi" / "ir" / "scalar.py", "a") as file:
        file.write("# a change on one host only\n")
    _two_programs(folder, f"PYTHONPATH={folder}/other")


def _no_mpi_on_one_rank(folder: Path) -> None:
    _two_programs(folder, f"PYTHONPATH={ROOT} MPI4PY_LIBMPI=/none/libmpi.so")


def _two_programs(folder: Path, variables: str) -> None:
    """A launcher that starts the second rank in another environment."""
    script(
        folder / "bin" / "mpirun",
        f'if [ "$1" = --version ]; then exec {find_launcher().path} --version; fi\n'
        f"cd /\nexec {find_launcher().path} -n 1 {{}} -m meshmpi.runtime.probe :"
        f" -n 1 env {variables} {{}} -m meshmpi.runtime.probe".replace("{}", sys.executable),
    )


FAKE = ("--ranks", "2", "--mpi", "{tmp}/bin/mpirun", "--limit", "20")
_HAS_OPENBLAS = product_choice.chosen().name == "openblas"
_OPEN_MPI = find_launcher().kind == "openmpi"
_FULL = "mount -t tmpfs -o size=1m tmpfs {tmp}/full && head -c 2000000 /dev/zero > {tmp}/full/x"

BROKEN = [
    Broken(
        "library-that-is-not-there",
        ["mpi-library-forced"],
        "/none/libmpi.so",
        "unset MPI4PY_LIBMPI",
        {"MPI4PY_LIBMPI": "/none/libmpi.so"},
    ),
    Broken(
        "library-of-another-kind",
        ["mpich-name" if DEBIANS_MPICH else "mpi-library-forced"],
        "libmpi",
        "LD_LIBRARY_PATH" if DEBIANS_MPICH else "unset MPI4PY_MPIABI",
        {"MPI4PY_MPIABI": "mpich"},
        when=_OPEN_MPI,
    ),
    Broken(
        "no-launcher",
        ["launcher-missing"],
        "no MPI launcher at '/none/mpirun'",
        "pip install",
        options=("--ranks", "2", "--mpi", "/none/mpirun"),
    ),
    Broken(
        "launcher-of-another-kind",
        ["launcher-mismatch", "singletons"],
        "MPICH",
        "--mpi openmpi",
        options=FAKE,
        before=_launcher_of_another_kind,
        when=_OPEN_MPI,
    ),
    Broken(
        "mpirun-on-path-of-another-kind",
        ["mpirun-mismatch"],
        "{tmp}/bin/mpirun",
        "export PATH=",
        {"PATH": "{tmp}/bin:" + os.environ["PATH"]},
        before=_launcher_of_another_kind,
        when=_OPEN_MPI,
    ),
    Broken(
        "ranks-of-a-launcher-of-another-kind",
        ["singletons"],
        "rank 0 of 1",
        "meshmpi.launch --mpi openmpi -n 2",
        {"PMI_SIZE": "2", "PMI_RANK": "0"},
        (),
        when=_OPEN_MPI,
    ),
    Broken(
        "launcher-that-hangs",
        ["job-hangs"],
        "2 ranks was stopped",
        "export",
        options=(*FAKE[:-1], "2"),
        before=_launcher_that("sleep 60"),
    ),
    Broken(
        "launcher-that-fails",
        ["job-failed"],
        "no such card",
        "meshmpi.runtime.probe",
        options=FAKE,
        before=_launcher_that("echo no such card >&2; exit 7"),
    ),
    Broken(
        "slots",
        ["no-slots"],
        "fewer slots",
        "oversubscribe",
        options=FAKE,
        before=_launcher_that("echo There are not enough slots available >&2; exit 1"),
    ),
    Broken(
        "slurm-without-pmi",
        ["slurm-no-pmi"],
        "4 tasks",
        "srun --mpi=",
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
    ),
    Broken("slurm-alone", ["slurm-alone"], "SLURM_NTASKS=4", "-n 4", {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}),
    Broken(
        "threads",
        ["too-many-threads"],
        "128 threads",
        "export OMP_NUM_THREADS=",
        {"OMP_NUM_THREADS": "64"},
        ("--ranks", "2"),
        when=os.cpu_count() < 128,
    ),
    Broken(
        "one-core",
        ["ranks-on-one-core"],
        "2 ranks on",
        "taskset -cp",
        options=("--ranks", "2"),
        wrapper=("taskset", "-c", str(min(os.sched_getaffinity(0)))),
        when=len(os.sched_getaffinity(0)) > 1,
    ),
    Broken(
        "few-cores",
        ["few-cores"],
        "1 of",
        "--ntasks=2",
        options=("--ranks", "2", "--mpi", "/none/mpirun"),
        wrapper=("taskset", "-c", str(min(os.sched_getaffinity(0)))),
        when=os.cpu_count() > 1,
    ),
    Broken(
        "other-numpy-on-one-rank",
        ["versions-differ"],
        "1.0.0 on rank 1",
        "PYTHONPATH",
        options=FAKE,
        before=_other_numpy,
        when=_OPEN_MPI,
    ),
    Broken(
        "other-sources-on-one-rank",
        ["versions-differ"],
        "the sources of meshmpi",
        "PYTHONPATH",
        options=FAKE,
        before=_other_sources,
        when=_OPEN_MPI,
    ),
    Broken(
        "no-mpi-on-one-rank",
        ["rank-without-mpi"],
        "/none/libmpi.so",
        "LD_LIBRARY_PATH",
        options=FAKE,
        before=_no_mpi_on_one_rank,
        when=_OPEN_MPI,
    ),
    Broken(
        "numpy-that-does-not-import",
        ["package-broken"],
        "libopenblas is gone",
        "pip install --force-reinstall numpy",
        {"PYTHONPATH": "{tmp}:{root}"},
        before=_numpy_that("raise ImportError('libopenblas is gone')"),
    ),
    Broken(
        "numpy-that-crashes",
        ["package-broken/died"],
        "SIGABRT",
        "faulthandler",
        {"PYTHONPATH": "{tmp}:{root}"},
        before=_numpy_that("import os\nos.abort()\n"),
    ),
    Broken(
        "slow-routines",
        ["openblas-coretype"],
        "OPENBLAS_CORETYPE=Haswell",
        "unset OPENBLAS_CORETYPE",
        {"OPENBLAS_CORETYPE": "Haswell"},
        when=_HAS_OPENBLAS,
    ),
    Broken("products-by-nobody", ["blas-forced"], "MESHMPI_BLAS=acml", "unset MESHMPI_BLAS", {"MESHMPI_BLAS": "acml"}),
    Broken("compiler-that-fails", ["compiler-broken"], "'false'", "unset CC", {"CC": "false"}),
    Broken("no-compiler", ["compiler-missing"], "no-such-cc", "apt install gcc", {"CC": "no-such-cc"}),
    Broken(
        "cache-below-a-file",
        ["kernel-cache-refused"],
        "Not a directory",
        "export MESHMPI_CACHE=",
        {"MESHMPI_CACHE": "{tmp}/file/cache"},
        before=lambda folder: (folder / "file").write_text("") and None,
    ),
    Broken(
        "cache-read-only",
        ["kernel-cache-refused"],
        "Read-only",
        "export MESHMPI_CACHE=",
        {"MESHMPI_CACHE": "{tmp}/full"},
        shell="mount -t tmpfs -o ro,mode=700 tmpfs {tmp}/full",
    ),
    Broken(
        "cache-without-programs",
        ["kernel-cache-refused"],
        "noexec",
        "not noexec",
        {"MESHMPI_CACHE": "{tmp}/full"},
        shell="mount -t tmpfs -o noexec,mode=700 tmpfs {tmp}/full",
    ),
    Broken(
        "cache-full",
        ["kernel-cache-unusable"],
        "No space left",
        "export MESHMPI_CACHE=",
        {"MESHMPI_CACHE": "{tmp}/full"},
        shell="mount -t tmpfs -o size=1m,mode=700 tmpfs {tmp}/full;"
        " mkdir -p -m 700 {tmp}/full/kernels;"
        " head -c 2000000 /dev/zero > {tmp}/full/x || true",
    ),
    Broken(
        "checkpoints-on-a-full-disk",
        ["checkpoints-full/nothing"],
        "No space left",
        "--out",
        options=("--ranks", "0", "--folder", "{tmp}/full/runs"),
        shell=f"{_FULL} || true",
    ),
    Broken(
        "checkpoints-read-only",
        ["checkpoints-not-writable"],
        "{tmp}/full",
        "--out",
        options=("--ranks", "0", "--folder", "{tmp}/full"),
        shell="mount -t tmpfs -o ro tmpfs {tmp}/full",
    ),
    Broken(
        "checkpoints-in-memory",
        ["checkpoints-in-memory", "checkpoints-full"],
        "tmpfs",
        "--out",
        options=("--ranks", "0", "--folder", "{tmp}/full"),
        shell="mount -t tmpfs -o size=64m tmpfs {tmp}/full",
    ),
    Broken(
        "shared-memory",
        ["shared-memory-small"],
        "1 MB",
        "--shm-size",
        options=("--ranks", "2"),
        shell="mount -t tmpfs -o size=1m tmpfs /dev/shm",
    ),
    Broken("temporary-folder-gone", ["temporary-folder"], "does not exist", "export TMPDIR=", {"TMPDIR": "/none/tmp"}),
    Broken(
        "temporary-folder-full",
        ["temporary-folder"],
        "left",
        "export TMPDIR=",
        {"TMPDIR": "{tmp}/full"},
        shell="mount -t tmpfs -o size=1m tmpfs {tmp}/full",
    ),
    Broken(
        "address-space",
        ["address-space-limited"],
        "4.1 GB",
        "ulimit -v unlimited",
        wrapper=("sh", "-c", 'ulimit -v 4000000; exec "$@"', "sh"),
    ),
    Broken(
        "copying-forbidden",
        ["copying-forbidden"],
        "process_vm_readv",
        "OMPI_MCA_smsc=^cma",
        wrapper=(sys.executable, str(FORBID_COPYING)),
        options=("--ranks", "2"),
        when=os.uname().machine == "x86_64",
    ),
    Broken(
        "host-without-address",
        ["host-name"],
        "no-such-host-1",
        "/etc/hosts",
        wrapper=("unshare", "--uts", "sh", "-c", 'hostname no-such-host-1; exec "$@"', "sh"),
        when=os.geteuid() == 0,
    ),
    Broken(
        "root",
        ["run-as-root"],
        "root",
        "export OMPI_ALLOW_RUN_AS_ROOT=1",
        {"OMPI_ALLOW_RUN_AS_ROOT": ""},
        when=os.geteuid() == 0 and _OPEN_MPI,
    ),
]
