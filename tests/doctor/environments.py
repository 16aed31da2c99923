"""Broken environments: what is done to a machine, and what the doctor has to say of it.

Most are broken in earnest: other variables, file systems mounted in a namespace of their own, a
filter of system calls, a launcher that starts ranks without telling them.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshmpi.kernels import product_choice
from meshmpi.launch.launchers import find_launcher

ROOT = Path(__file__).parent.parent.parent
DEBIANS_MPICH = glob.glob("/usr/lib/*/libmpich.so.12")
FORBID_COPYING = Path(__file__).with_name("forbid_copying.py")


@dataclass(frozen=True)
class Broken:
    """One broken environment; ``{tmp}`` is the test's folder, ``{root}`` that of the sources."""

    id: str
    names: Sequence[str]  # findings that must be there; of the first one the entry of the catalogue
    says: str  # text in the first of them
    paste: str  # text in its line to paste
    environment: Mapping[str, str]
    options: Sequence[str]  # of the doctor
    before: Callable[[Path], None] = lambda folder: None  # given the test's folder; makes files there
    shell: str = ""  # runs first, as root in a mount namespace of its own
    wrapper: Sequence[str] = ()  # command in front of the doctor's
    when: bool = True  # whether this machine can be broken so


def broken(row: str, environment: str = "", options: str = "--ranks 0", **how: Any) -> Broken:
    """A row ``id | findings | says | paste``, and how the machine is broken: the other fields."""
    name, findings, says, paste = row.split(" | ")
    variables = dict(word.split("=", 1) for word in environment.split())
    return Broken(name, findings.split(), says, paste, variables, options.split(), **how)


def script(path: Path, text: str) -> None:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def _program(name: str) -> Callable[[Path], None]:
    """A program of that name, which does nothing, in the folder ``bin``."""
    return lambda folder: script(folder / "bin" / name, "exit 0")


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


def _mounted(options: str, at: str = "{tmp}/full") -> str:
    return f"mount -t tmpfs -o {options} tmpfs {at}"


FAKE = "--ranks 2 --mpi {tmp}/bin/mpirun --limit 20"
_HAS_OPENBLAS = product_choice.chosen().name == "openblas"
_OPEN_MPI = find_launcher().kind == "openmpi"
_OTHER_KIND = (
    "mpich-name | libmpi | LD_LIBRARY_PATH" if DEBIANS_MPICH else "mpi-library-forced | libmpi | unset MPI4PY_MPIABI"
)
_ONE_CORE = ("taskset", "-c", str(min(os.sched_getaffinity(0))))
_FULL = _mounted("size=1m") + " && head -c 2000000 /dev/zero > {tmp}/full/x"

BROKEN = [
    broken(
        "library-that-is-not-there | mpi-library-forced | /none/libmpi.so | unset MPI4PY_LIBMPI",
        environment="MPI4PY_LIBMPI=/none/libmpi.so",
    ),
    broken(f"library-of-another-kind | {_OTHER_KIND}", environment="MPI4PY_MPIABI=mpich", when=_OPEN_MPI),
    broken(
        "no-launcher | launcher-missing | no MPI launcher at '/none/mpirun' | pip install",
        options="--ranks 2 --mpi /none/mpirun",
    ),
    broken(
        "launcher-of-another-kind | launcher-mismatch singletons | MPICH | --mpi openmpi",
        options=FAKE,
        before=_launcher_of_another_kind,
        when=_OPEN_MPI,
    ),
    broken(
        "mpirun-on-path-of-another-kind | mpirun-mismatch | {tmp}/bin/mpirun | export PATH=",
        environment="PATH={tmp}/bin:" + os.environ["PATH"],
        before=_launcher_of_another_kind,
        when=_OPEN_MPI,
    ),
    broken(
        "ranks-of-a-launcher-of-another-kind | singletons | rank 0 of 1 | meshmpi.launch --mpi openmpi -n 2",
        environment="PMI_SIZE=2 PMI_RANK=0",
        options="",
        when=_OPEN_MPI,
    ),
    broken(
        "launcher-that-hangs | job-hangs | 2 ranks was stopped | export",
        options=f"{FAKE} --limit 2",
        before=_launcher_that("sleep 60"),
    ),
    broken(
        "launcher-that-fails | job-failed | no such card | meshmpi.runtime.probe",
        options=FAKE,
        before=_launcher_that("echo no such card >&2; exit 7"),
    ),
    broken(
        "slots | no-slots | fewer slots | oversubscribe",
        options=FAKE,
        before=_launcher_that("echo There are not enough slots available >&2; exit 1"),
    ),
    broken(
        "slurm-without-pmi | slurm-no-pmi | 4 tasks | srun --mpi=",
        environment="SLURM_STEP_NUM_TASKS=4 SLURM_NTASKS=4 SLURM_PROCID=0",
    ),
    broken(
        "flux-alone | allocation-alone | of Flux (FLUX_URI) | flux run -n N python train.py",
        environment="FLUX_URI=local:///run/flux PATH={tmp}/bin:/usr/bin:/bin",
        before=_program("flux"),
    ),
    broken(
        "jsrun-alone | allocation-alone | of LSF with jsrun (LSB_JOBID) | jsrun -n N -a 1 -c 1 python",
        environment="LSB_JOBID=7 PATH={tmp}/bin:/usr/bin:/bin",
        before=_program("jsrun"),
    ),
    broken(
        "aprun-alone | allocation-alone | of ALPS (PBS_JOBID) | aprun -n N python",
        environment="PBS_JOBID=7 PATH={tmp}/bin:/usr/bin:/bin",
        before=_program("aprun"),
    ),
    broken(
        "pals-alone | allocation-alone | of PBS with PALS (PBS_JOBID) | mpiexec -n N python",
        environment="PBS_JOBID=7 PATH={tmp}/bin:/usr/bin:/bin",
        before=_program("palstat"),
    ),
    broken("slurm-alone | slurm-alone | SLURM_NTASKS=4 | -n 4", environment="SLURM_NTASKS=4 SLURM_JOB_ID=7"),
    broken(
        "threads | too-many-threads | 128 threads | export OMP_NUM_THREADS=",
        environment="OMP_NUM_THREADS=64",
        options="--ranks 2",
        when=os.cpu_count() < 128,
    ),
    broken(
        "one-core | ranks-on-one-core | 2 ranks on | taskset -cp",
        options="--ranks 2",
        wrapper=_ONE_CORE,
        when=len(os.sched_getaffinity(0)) > 1,
    ),
    broken(
        "few-cores | few-cores | 1 of | --ntasks=2",
        options="--ranks 2 --mpi /none/mpirun",
        wrapper=_ONE_CORE,
        when=os.cpu_count() > 1,
    ),
    broken(
        "other-numpy-on-one-rank | versions-differ | 1.0.0 on rank 1 | PYTHONPATH",
        options=FAKE,
        before=_other_numpy,
        when=_OPEN_MPI,
    ),
    broken(
        "other-sources-on-one-rank | versions-differ | the sources of meshmpi | PYTHONPATH",
        options=FAKE,
        before=_other_sources,
        when=_OPEN_MPI,
    ),
    broken(
        "no-mpi-on-one-rank | rank-without-mpi | /none/libmpi.so | LD_LIBRARY_PATH",
        options=FAKE,
        before=_no_mpi_on_one_rank,
        when=_OPEN_MPI,
    ),
    broken(
        "numpy-that-does-not-import | package-broken | libopenblas is gone | pip install --force-reinstall numpy",
        environment="PYTHONPATH={tmp}:{root}",
        before=_numpy_that("raise ImportError('libopenblas is gone')"),
    ),
    broken(
        "numpy-that-crashes | package-broken/died | SIGABRT | faulthandler",
        environment="PYTHONPATH={tmp}:{root}",
        before=_numpy_that("import os\nos.abort()\n"),
    ),
    broken(
        "slow-routines | openblas-coretype | OPENBLAS_CORETYPE=Haswell | unset OPENBLAS_CORETYPE",
        environment="OPENBLAS_CORETYPE=Haswell",
        when=_HAS_OPENBLAS,
    ),
    broken(
        "products-by-nobody | blas-forced | MESHMPI_BLAS=acml | unset MESHMPI_BLAS", environment="MESHMPI_BLAS=acml"
    ),
    broken("compiler-that-fails | compiler-broken | 'false' | unset CC", environment="CC=false"),
    broken("no-compiler | compiler-missing | no-such-cc | apt install gcc", environment="CC=no-such-cc"),
    broken(
        "cache-below-a-file | kernel-cache-refused | Not a directory | export MESHMPI_CACHE=",
        environment="MESHMPI_CACHE={tmp}/file/cache",
        before=lambda folder: (folder / "file").write_text("") and None,
    ),
    broken(
        "cache-read-only | kernel-cache-refused | Read-only | export MESHMPI_CACHE=",
        environment="MESHMPI_CACHE={tmp}/full",
        shell=_mounted("ro,mode=700"),
    ),
    broken(
        "cache-without-programs | kernel-cache-refused | noexec | not noexec",
        environment="MESHMPI_CACHE={tmp}/full",
        shell=_mounted("noexec,mode=700"),
    ),
    broken(
        "cache-full | kernel-cache-unusable | No space left | export MESHMPI_CACHE=",
        environment="MESHMPI_CACHE={tmp}/full",
        shell=f"{_mounted('size=1m,mode=700')};"
        " mkdir -p -m 700 {tmp}/full/kernels;"
        " head -c 2000000 /dev/zero > {tmp}/full/x || true",
    ),
    broken(
        "checkpoints-on-a-full-disk | checkpoints-full/nothing | No space left | --out",
        options="--ranks 0 --folder {tmp}/full/runs",
        shell=f"{_FULL} || true",
    ),
    broken(
        "checkpoints-read-only | checkpoints-not-writable | {tmp}/full | --out",
        options="--ranks 0 --folder {tmp}/full",
        shell=_mounted("ro"),
    ),
    broken(
        "checkpoints-in-memory | checkpoints-in-memory checkpoints-full | tmpfs | --out",
        options="--ranks 0 --folder {tmp}/full",
        shell=_mounted("size=64m"),
    ),
    broken(
        "shared-memory | shared-memory-small | 1.05 MB | --shm-size",
        options="--ranks 2",
        shell=_mounted("size=1m", "/dev/shm"),
    ),
    broken(
        "temporary-folder-gone | temporary-folder | does not exist | export TMPDIR=", environment="TMPDIR=/none/tmp"
    ),
    broken(
        "temporary-folder-full | temporary-folder | left | export TMPDIR=",
        environment="TMPDIR={tmp}/full",
        shell=_mounted("size=1m"),
    ),
    broken(
        "address-space | address-space-limited | 4.1 GB | ulimit -v unlimited",
        wrapper=("sh", "-c", 'ulimit -v 4000000; exec "$@"', "sh"),
    ),
    broken(
        "copying-forbidden | copying-forbidden | process_vm_readv | OMPI_MCA_smsc=^cma",
        wrapper=(sys.executable, str(FORBID_COPYING)),
        options="--ranks 2",
        when=os.uname().machine == "x86_64",
    ),
    broken(
        "host-without-address | host-name | no-such-host-1 | /etc/hosts",
        wrapper=("unshare", "--uts", "sh", "-c", 'hostname no-such-host-1; exec "$@"', "sh"),
        when=os.geteuid() == 0,
    ),
    broken(
        "root | run-as-root | root | export OMPI_ALLOW_RUN_AS_ROOT=1",
        environment="OMPI_ALLOW_RUN_AS_ROOT=",
        when=os.geteuid() == 0 and _OPEN_MPI,
    ),
]
