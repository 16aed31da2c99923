"""A whole Slurm cluster on this machine, for tests: munged, slurmctld, some slurmd, no systemd.

    python -m tests.slurm.cluster start FOLDER [NODES [CPUS]]    prints "export SLURM_CONF=..."
    python -m tests.slurm.cluster stop FOLDER
    python -m tests.slurm.cluster packages    prints what to install

Needs root and Debian's packages PACKAGES.  Nothing outside the folder is written, and the ports are
free ones, so that it runs beside a real cluster and beside others of its kind.  Nodes are several
slurmd on this host: what this cannot show is a network between them, binding to cores (their
processors are made up) and accounting.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PACKAGES = "slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins libpmi2-0 libpmix-dev libmpich12"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "sinfo")
_READY_SECONDS, _STOP_SECONDS = 60.0, 15.0

_CONFIGURATION = """\
ClusterName=meshmpi
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
TmpFS={folder}/tmp/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PriorityType=priority/basic
SchedulerParameters=sched_interval=1,sched_min_interval=100000,bf_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
MpiDefault=none
MailProg=/bin/true
JobRequeue=1
ReturnToService=2
KillWait=20
SlurmdTimeout=20
SlurmctldTimeout=20
InactiveLimit=0
MinJobAge=600
PropagateResourceLimitsExcept=ALL
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port={slurmd_ports} CPUS={cpus} \
RealMemory={memory} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 \
PreemptMode=REQUEUE GraceTime={grace}
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """Why no cluster can be started here, or empty."""
    if os.geteuid() != 0:
        return "a Slurm cluster for tests needs root"
    absent = [p for p in _PROGRAMS if shutil.which(p, path=_path()) is None]
    if absent:
        return f"there is no {', '.join(absent)}: apt-get install {PACKAGES}"
    return ""


class Cluster:
    """A cluster in a folder.

    Args:
        folder: For its files; its path must be short, as it holds a socket.
        nodes: Number of slurmd.
        cpus: Processors that each of them claims to have.
        grace: Seconds between the SIGTERM of a preemption and its end.

    Attributes:
        environment: For Slurm's commands.
    """

    def __init__(self, folder: Path, nodes: int = 2, cpus: int = 4, grace: int = 60) -> None:
        self.folder, self.nodes, self.cpus, self.grace = folder, nodes, cpus, grace
        outside = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        self.environment = {**outside, "SLURM_CONF": f"{folder}/slurm.conf", "PATH": _path()}

    def start(self) -> None:
        """Starts everything; returns when all nodes are idle.

        Raises:
            RuntimeError: Something did not start; the message has the ends of the logs.
        """
        # Nodes of one host must not share where PMIx keeps its files.
        each = [f"{kind}/n{k + 1}" for kind in ("spool", "tmp") for k in range(self.nodes)]
        for name in ("state", "log", *each):
            (self.folder / name).mkdir(parents=True)
        self._configure()
        for command in self._daemons():
            done = self._run(command)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        limit = time.monotonic() + _READY_SECONDS
        while self.idle() != self.nodes:
            if time.monotonic() > limit:
                raise RuntimeError(f"the nodes did not become idle\n{self.logs()}")
            time.sleep(0.2)

    def _configure(self) -> None:
        ports = _free_ports(1 + self.nodes)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20 // 2
        each = ",".join(map(str, ports[1:]))
        (self.folder / "slurm.conf").write_text(
            _CONFIGURATION.format(
                host=socket.gethostname().split(".")[0],
                user=pwd.getpwuid(os.geteuid()).pw_name,
                folder=self.folder,
                ports=ports,
                nodes=self.nodes,
                cpus=self.cpus,
                memory=memory,
                slurmd_ports=f"[{each}]" if self.nodes > 1 else each,
                grace=self.grace,
            )
        )
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)

    def _daemons(self) -> list[list[str]]:
        f = self.folder
        munged = ["munged", "--force", f"--key-file={f}/munge.key", f"--socket={f}/munge.socket"]
        munged += [f"--pid-file={f}/munged.pid", f"--log-file={f}/log/munged.log"]
        return [
            [*munged, f"--seed-file={f}/munge.seed"],
            ["slurmctld", "-i", "-c"],
            *(["slurmd", "-N", f"n{k + 1}"] for k in range(self.nodes)),
        ]

    def _run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        # Daemons inherit what they write to: a pipe would never end.
        with open(self.folder / "log" / f"{command[0]}.out", "w+") as out:
            done = subprocess.run(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=30, check=False
            )
            out.seek(0)
            return subprocess.CompletedProcess(command, done.returncode, out.read(), "")

    def command(self, *words: str, timeout: float = 60, **more: str) -> str:
        """The output of a command of Slurm.

        Args:
            words: The command.
            timeout: Seconds.
            more: Environment variables.

        Raises:
            RuntimeError: It failed.
        """
        done = subprocess.run(
            words,
            env={**self.environment, **more},
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def idle(self) -> int:
        """Number of idle nodes; 0 while the controller does not answer."""
        try:
            return sum(map(int, self.command("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D").split()))
        except (RuntimeError, subprocess.TimeoutExpired):
            return 0

    def logs(self) -> str:
        """The last lines of every log."""
        parts = []
        for path in sorted((self.folder / "log").iterdir()):
            lines = path.read_text(errors="replace").splitlines()[-15:]
            parts.append("\n".join([f"==== {path.name}", *lines]))
        return "\n".join(parts)

    def stop(self) -> None:
        """Ends all jobs and daemons, and removes the folder."""
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            self.command("scancel", "--signal=KILL", "--user", str(os.geteuid()))
            self.command("scancel", "--user", str(os.geteuid()))
        _end([*self.folder.glob("*.pid")])
        shutil.rmtree(self.folder, ignore_errors=True)


def _end(pid_files: Sequence[Path]) -> None:
    """Ends daemons: SIGTERM to all, SIGKILL to those that are still there later."""
    running = []
    for file in pid_files:
        with contextlib.suppress(OSError, ValueError):
            running.append(int(file.read_text()))
    limit = time.monotonic() + _STOP_SECONDS
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while running and time.monotonic() < limit:
            running = [pid for pid in running if _runs(pid)]
            time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # nobody may be there to bury it


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}{os.pathsep}/usr/sbin{os.pathsep}/sbin"


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    if arguments == ["packages"]:
        print(PACKAGES)
        return 0
    if len(arguments) < 2 or arguments[0] not in ("start", "stop"):
        sys.stderr.write(__doc__ or "")
        return 2
    why = missing()
    if why:
        sys.stderr.write(f"{why}\n")
        return 1
    cluster = Cluster(Path(arguments[1]).resolve(), *map(int, arguments[2:4]))
    if arguments[0] == "stop":
        cluster.stop()
        return 0
    cluster.start()
    print(f"export SLURM_CONF={cluster.folder}/slurm.conf")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
