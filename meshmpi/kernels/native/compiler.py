"""From C source to a loaded library, through a cache on disk.

The cache key is the source, the compiler and the CPU.  One process of a node builds, the others
wait for it; a library appears under its name only when it is complete, so that any number of ranks
and jobs may start at once.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from meshmpi.errors import MeshmpiError

FLAGS = (
    "-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-w",
    "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
    "-freciprocal-math", "-ffp-contract=fast",
)  # fmt: skip
"""Of -ffast-math everything but -ffinite-math-only: NaN and infinities keep their meaning."""
OPTIONAL_FLAGS = ("-mprefer-vector-width=512", "-fopenmp")
"""Left out where the compiler refuses them."""
BUILD_SECONDS = 300
"""A compiler that takes longer is taken for hung."""


class CompilerError(MeshmpiError):
    """There is no usable C compiler, or it refused generated code."""


@functools.lru_cache(maxsize=1)
def compiler() -> tuple[str, ...]:
    """The compiler command with all flags it accepts: $MESHMPI_CC, $CC, cc, gcc or clang.

    Raises:
        CompilerError: None is found, or it cannot build a trivial file.
    """
    wanted = os.environ.get("MESHMPI_CC") or os.environ.get("CC")
    candidates = [wanted] if wanted else ["cc", "gcc", "clang"]
    found = next((c for c in candidates if shutil.which(shlex.split(c)[0])), None)
    if found is None:
        raise CompilerError(
            f"no C compiler was found (looked for {', '.join(candidates)}).",
            "Install one (Debian: apt install gcc), or use kernels='numpy'.",
        )
    command = (*shlex.split(found), *FLAGS)
    if not _accepts(command):
        raise CompilerError(
            f"'{found}' cannot build a trivial file.", "Try it by hand: " + shlex.join(command)
        )
    for flag in OPTIONAL_FLAGS:
        if _accepts((*command, flag)):
            command = (*command, flag)
    return command


def _accepts(command: tuple[str, ...]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "t.c")
        source.write_text("int f(void) { return 0; }\n")
        done = subprocess.run(
            [*command, str(source), "-o", str(Path(folder, "t.so"))],
            capture_output=True,
            timeout=60,
        )
        return done.returncode == 0


def available() -> bool:
    """Whether native kernels can be built here."""
    try:
        compiler()
    except (CompilerError, OSError, subprocess.TimeoutExpired):
        return False
    return True


def cache_folder() -> Path:
    """$MESHMPI_CACHE, or meshmpi in the user's cache folder; a private temporary one if unwritable."""
    base = os.environ.get("MESHMPI_CACHE")
    if not base:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        base = os.path.join(home, "meshmpi")
    folder = Path(base, "kernels")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="meshmpi-kernels-"))


@functools.lru_cache(maxsize=1)
def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


@functools.lru_cache(maxsize=1)
def _version() -> str:
    done = subprocess.run([compiler()[0], "--version"], capture_output=True, text=True, timeout=60)
    return done.stdout


def load_library(source: str) -> ctypes.CDLL:
    """The library built from ``source``; built now if no process has built it before.

    Raises:
        CompilerError: The compiler failed; its message is included.
    """
    text = "\n".join([source, *compiler(), _version(), _cpu()])
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    folder = cache_folder()
    library = folder / f"{key}.so"
    if not library.exists():
        with open(folder / f"{key}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _build(source, library)
    return ctypes.CDLL(str(library))


def _build(source: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        c, out = Path(folder, library.stem + ".c"), Path(folder, library.name)
        c.write_text(source)
        command = [*compiler(), str(c), "-o", str(out), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
        if done.returncode:
            raise CompilerError(
                f"the C compiler failed on generated code:\n{done.stderr[-2000:]}",
                "Use kernels='numpy' and report this.",
            )
        os.replace(c, library.with_suffix(".c"))
        os.replace(out, library)
