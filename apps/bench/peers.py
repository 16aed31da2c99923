"""The environment in which PyTorch and JAX run: made on demand, never the one of meshmpi.

Each peer is installed by itself; one that cannot be had is left out, and said so in one line.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

REQUIREMENTS = {"torch": "torch==2.13.0", "jax": "jax==0.10.2", "transformers": "transformers==5.23.0"}
"""What is installed.  Source: the versions that docs/performance.md compares with."""
INSTALL_SECONDS = 900


class Peers(NamedTuple):
    """Which peers there are.

    Attributes:
        python: The interpreter of their environment.
        missing: Name of a peer -> why it is left out, one line.
    """

    python: str
    missing: Mapping[str, str]

    def has(self, name: str) -> bool:
        return name not in self.missing


def without(reason: str) -> Peers:
    """No peers, all for the same reason."""
    return Peers(sys.executable, dict.fromkeys(REQUIREMENTS, reason))


def install(folder: Path, say: Callable[[str], None]) -> Peers:
    """The peers in the virtual environment ``folder``, which is made where it is missing.

    Args:
        folder: Folder of the environment; kept between runs.
        say: Takes a line before something that takes long.
    """
    python = folder / "bin/python"
    if not python.exists():
        say(f"making an environment for the peers in {folder}")
        problem = _problem([sys.executable, "-m", "venv", str(folder)])
        if problem:
            return without(f"no virtual environment could be made: {problem}")
    missing = {}
    for name, requirement in REQUIREMENTS.items():
        if _imports(python, name):
            continue
        say(f"installing {requirement} (minutes; --no-peers leaves the peers out)")
        command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
        problem = _problem([*command, "--retries", "1", requirement])
        if problem or not _imports(python, name):
            missing[name] = f"{requirement} could not be installed: {problem or 'no import'}"
    for name, why in missing.items():
        say(f"left out: {name}: {why}")
    return Peers(str(python), missing)


def _imports(python: Path, name: str) -> bool:
    found = f"import sys, importlib.util; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([str(python), "-c", found], capture_output=True).returncode == 0


def _problem(command: list[str]) -> str:
    """The last line that a failing command printed; empty if it did not fail."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = (done.stderr or done.stdout).strip().splitlines()
    return "" if done.returncode == 0 else said[-1] if said else f"status {done.returncode}"
