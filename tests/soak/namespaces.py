"""Several hosts on one Linux machine, for trials of what happens when one is lost.

Each has a network, process numbers, a host name, /tmp and /dev/shm of its own and a link to a
common bridge; all other folders are shared, as on a cluster.  Needs root, iproute2, util-linux, and
nftables for lost packets.
Links can be cut, made to lose packets, and hosts killed as by a power failure.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

READY_SECONDS = 20.0
"""Most time that a host takes to come up."""
TOOLS = ("ip", "unshare", "nsenter", "mount")

_HOST = """
set -e
hosts=$1 name=$2 ready=$3; shift 3
mount -t proc proc /proc
mount --bind "$hosts" /etc/hosts
mkdir -p /run/meshmpi-root; mount --rbind / /run/meshmpi-root
mount -t tmpfs -o mode=1777 tmpfs /tmp
for k; do mkdir -p "$k"; mount --bind "/run/meshmpi-root$k" "$k"; done
umount -l /run/meshmpi-root
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
hostname "$name"; ip link set lo up
: > "$ready"
exec sleep infinity
"""


def cannot_lose_packets() -> str:
    """Why `Hosts.lose` cannot work here, or empty."""
    return "" if shutil.which("nft") else "needs nft (Debian: nftables)"


def unavailable() -> str:
    """Why there can be no such hosts here, or empty."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian: iproute2 util-linux)"
    tried = subprocess.run(["unshare", "-n", "-u", "-i", "-m", "-p", "-f", "true"], capture_output=True, text=True)
    if tried.returncode:
        return f"namespaces are not allowed: {tried.stderr.strip()}"
    name = f"mt{os.getpid() % 100000}"
    tried = subprocess.run(["ip", "link", "add", name, "type", "bridge"], capture_output=True)
    if tried.returncode:
        return f"no bridge can be made: {tried.stderr.decode().strip()}"
    subprocess.run(["ip", "link", "del", name], check=True)
    return ""


class Hosts:
    """Hosts h1, h2, ... while it is open.

    Args:
        count: How many.
        shared: Folders below /tmp that all see; that of this Python is always among them.

    Attributes:
        names: Of the hosts.
        agent: A program that runs a command on a host, for launchers in the place of ssh.
    """

    def __init__(self, count: int, shared: Sequence[str | os.PathLike[str]] = ()) -> None:
        self.names = [f"h{k}" for k in range(1, count + 1)]
        self.folder = Path(tempfile.mkdtemp(prefix="meshmpi-hosts-"))
        self.agent = self.folder / "agent"
        self._shared = [str(self.folder)]
        for path in (sys.prefix, os.getcwd(), *shared):
            if os.path.realpath(path).startswith("/tmp/"):
                self._shared.append(os.path.realpath(path))
        number = os.getpid() % 60000  # bridges, links and addresses of other jobs are left alone
        self._bridge, self._link = f"mb{number}", f"mh{number}x"
        self._net = f"10.{16 + number // 256 % 240}.{number % 256}"
        self._pids: dict[str, int] = {}
        self._starters: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Hosts:
        try:
            self._up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _up(self) -> None:
        lines = ["127.0.0.1 localhost", f"{self._net}.254 {os.uname().nodename}"]
        lines += [f"{self._net}.{k} {name}" for k, name in enumerate(self.names, start=1)]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        _run("ip", "link", "add", self._bridge, "address", "02:00:0a:00:00:fe", "type", "bridge")
        _run("ip", "addr", "add", f"{self._net}.254/24", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")
        self._write_agent()
        for name in self.names:
            self.start(name)

    def _write_agent(self) -> None:
        """A launcher calls it as ``agent [options] HOST WORD...``, words meant for a shell."""
        here = shlex.quote(str(self.folder))
        self.agent.write_text(
            "#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nhost=$1; shift\n"
            f'pid=$(cat {here}/"$host".pid) || exit 255\n'
            'nsenter -t "$pid" -n -u -i -m -p --wd="$PWD" -- sh -c "$*"\nstatus=$?\n'
            # Nobody tells a remote shell that the other end has lost its power.
            f'while [ -e {here} ] && [ ! -e {here}/"$host".pid ]; do sleep 0.5; done\n'
            "exit $status\n"
        )
        self.agent.chmod(self.agent.stat().st_mode | stat.S_IXUSR)

    def start(self, name: str) -> None:
        """Boots a host; it comes up empty."""
        k = self.names.index(name) + 1
        ready = self.folder / f"{name}.ready"
        ready.unlink(missing_ok=True)
        command = [
            "unshare",
            "-n",
            "-u",
            "-i",
            "-m",
            "-p",
            "-f",
            "--kill-child",
            "--propagation",
            "private",
            "bash",
            "-c",
            _HOST,
            "host",
            str(self.folder / "hosts"),
            name,
            str(ready),
            *self._shared,
        ]
        with open(self.folder / f"{name}.log", "wb") as log:
            starter = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._starters[name] = starter
        _until(ready.exists, f"host {name}: {self.folder / f'{name}.log'}")
        children = Path(f"/proc/{starter.pid}/task/{starter.pid}/children")
        self._pids[name] = pid = int(children.read_text().split()[0])
        (self.folder / f"{name}.pid").write_text(f"{pid}\n")
        link = f"{self._link}{k}"
        subprocess.run(["ip", "link", "del", link], capture_output=True)
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        _run("ip", "link", "set", link, "master", self._bridge, "up")
        _run(
            "nsenter",
            "-t",
            str(pid),
            "-n",
            "sh",
            "-c",
            f"ip addr add {self._net}.{k}/24 dev eth0; ip link set eth0 up; ip route add default via {self._net}.254",
        )
        _until(lambda: self._reaches(pid), f"the link of {name}")

    def _reaches(self, pid: int) -> bool:
        """Whether a connection to the bridge is answered, if only by a refusal."""
        tried = subprocess.run(
            ["nsenter", "-t", str(pid), "-n", "timeout", "1", "bash", "-c", f"</dev/tcp/{self._net}.254/9"],
            capture_output=True,
            text=True,
        )
        return "refused" in tried.stderr

    def cut(self, name: str) -> None:
        """Takes the link of a host down."""
        _run("ip", "link", "set", self._device(name), "down")

    def heal(self, name: str) -> None:
        """Takes the link up again."""
        _run("ip", "link", "set", self._device(name), "up")

    def lose(self, name: str, percent: float) -> None:
        """Lets so many percent of the packets of a host vanish, each way; 0 ends it."""
        address = f"{self._net}.{self.names.index(name) + 1}"
        for other, pid in self._pids.items():  # as they arrive: at this host, and from it
            whose = "" if other == name else f"ip saddr {address} "
            inside = ["nsenter", "-t", str(pid), "-n", "nft"]
            subprocess.run([*inside, "delete", "table", "ip", "lossy"], capture_output=True)
            if percent:
                _run(*inside, "add", "table", "ip", "lossy")
                _run(*inside, "add", "chain", "ip", "lossy", "in", "{ type filter hook input priority 0; }")
                drop = f"{whose}numgen random mod 1000 < {round(10 * percent)} drop"
                _run(*inside, "add", "rule", "ip", "lossy", "in", drop)

    def kill(self, name: str, silent: bool = True) -> None:
        """Ends all processes of a host.

        Args:
            name: The host.
            silent: As when the power fails: its kernel closes no connection any more.
        """
        if silent:
            self.cut(name)
        (self.folder / f"{name}.pid").unlink(missing_ok=True)
        self._end(name)

    def _end(self, name: str) -> None:
        pid, starter = self._pids.pop(name, None), self._starters.pop(name, None)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # the first process of a host takes all with it
        if starter is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                starter.wait(5)
            if starter.poll() is None:
                starter.kill()
                starter.wait()

    def _device(self, name: str) -> str:
        return f"{self._link}{self.names.index(name) + 1}"

    def environment(self) -> dict[str, str]:
        """Variables with which Open MPI's, MPICH's and Intel's mpirun start ranks on the hosts."""
        return {
            "PRTE_MCA_plm_ssh_agent": str(self.agent),
            "PRTE_MCA_prte_if_include": f"{self._net}.0/24",
            "OMPI_MCA_btl_tcp_if_include": f"{self._net}.0/24",
            "HYDRA_LAUNCHER": "ssh",
            "HYDRA_LAUNCHER_EXEC": str(self.agent),
        }

    def run(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on a host and returns what it printed."""
        return subprocess.run(
            [str(self.agent), name, shlex.join(command)],
            text=True,
            capture_output=True,
            env={**os.environ, **(environment or {})},
        )

    def close(self) -> None:
        """Takes everything down and removes the folder."""
        for name in list(self._pids) or []:
            self._end(name)
        for name in list(self._starters):
            self._end(name)
        for k in range(1, len(self.names) + 1):
            subprocess.run(["ip", "link", "del", f"{self._link}{k}"], capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{shlex.join(command)}: {done.stderr.strip()}")


def _until(happened, what: str) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not happened():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} is not up after {READY_SECONDS:g} s")
        time.sleep(0.02)
