"""From C source to a loaded library, through a cache on disk.

The cache key is the source, the compiler and the CPU.  One process of a node builds, the others
wait for it; a library appears under its name only when it is complete, so that any number of ranks
and jobs may start at once.  The lock is the kernel's: it ends with the process that holds it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from meshmpi.errors import MeshmpiError

FLAGS = (
    "-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-w", "-fwrapv",
    "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
)  # fmt: skip
"""Nothing of -ffast-math that changes values: -fassociative-math turns (x + y) - x into y, and
inf - inf into 0.  Sums are reordered where the source says so, by ``omp simd reduction``."""
OPTIONAL_FLAGS = ("-mprefer-vector-width=512", "-fopenmp-simd", "-fopenmp")
"""Left out where the compiler refuses them."""
BUILD_SECONDS = 300
"""A compiler that takes longer is taken for hung."""


class CompilerError(MeshmpiError):
    """There is no usable C compiler, or it refused generated code."""


def compiler() -> tuple[str, ...]:
    """The compiler command with all flags it accepts: $MESHMPI_CC, $CC, cc, gcc or clang.

    Raises:
        CompilerError: None is found, or it cannot build a trivial file.
    """
    return _compiler(_wanted())[0]


def _wanted() -> str:
    return os.environ.get("MESHMPI_CC") or os.environ.get("CC") or ""


@functools.lru_cache(maxsize=8)
def _compiler(wanted: str) -> tuple[tuple[str, ...], str]:
    """Command and version."""
    candidates = [wanted] if wanted else ["cc", "gcc", "clang"]
    found = next((c for c in candidates if shutil.which(shlex.split(c)[0])), None)
    if found is None:
        raise CompilerError(
            f"no C compiler was found (looked for {', '.join(candidates)}).",
            "Install one (Debian: apt install gcc), or use kernels='numpy'.",
        )
    return _remembered(found)


def _remembered(found: str) -> tuple[tuple[str, ...], str]:
    """Command and version of a compiler, kept on disk: to ask takes several runs of it.

    A compiler that has changed is asked again; what failed is not kept.
    """
    path = Path(shutil.which(shlex.split(found)[0]) or "").resolve()
    status = path.stat()
    about = (found, str(path), status.st_mtime_ns, status.st_size, FLAGS, OPTIONAL_FLAGS, _cpu())
    key = hashlib.sha256(repr(about).encode()).hexdigest()[:24]
    file = cache_folder() / f"compiler-{key}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # none, or damaged
        known = json.loads(file.read_text())
        return tuple(map(str, known["command"])), str(known["version"])
    command = _asked(found)
    version = _run([command[0], "--version"], 60)
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=file.parent) as folder:
        new = Path(folder, file.name)
        new.write_text(json.dumps({"command": command, "version": version}))
        os.replace(new, file)
    return command, version


def _asked(found: str) -> tuple[str, ...]:
    """The compiler with all flags that it accepts.

    Raises:
        CompilerError: It cannot build a trivial file.
    """
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
    """Whether a trivial library comes out, and can be loaded."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "t.c"), Path(folder, "t.so")
        source.write_text("#include <math.h>\nint f(void) { return 0; }\n")
        try:
            _run([*command, str(source), "-o", str(library), "-lm"], 60)
            _loaded(library)
        except (CompilerError, OSError):
            return False
    return True


def _run(command: list[str], seconds: float, folder: Path | None = None) -> str:
    """What the command printed.

    Args:
        command: The command.
        seconds: The longest that it may take.
        folder: Where it keeps temporary files, which go with the folder also if it is killed.

    Raises:
        CompilerError: It could not be started, failed or took too long.
    """
    try:
        environment = None if folder is None else {**os.environ, "TMPDIR": str(folder)}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise CompilerError(
            f"the C compiler did not run: {e}.", "Set MESHMPI_CC, or use kernels='numpy'."
        ) from e
    if done.returncode:
        raise CompilerError(
            f"the C compiler failed on generated code:\n{done.stderr[-2000:]}",
            "Use kernels='numpy' and report this.",
        )
    return done.stdout


def available() -> bool:
    """Whether native kernels can be built here."""
    try:
        compiler()
    except CompilerError:
        return False
    return True


def cache_folder() -> Path:
    """$MESHMPI_CACHE or the user's cache folder; where that is not writable, a temporary one."""
    base = os.environ.get("MESHMPI_CACHE")
    if not base:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        base = os.path.join(home, "meshmpi")
    shared = Path(tempfile.gettempdir(), f"meshmpi-{os.getuid()}")
    for folder in (Path(base), shared):
        if _usable(folder):
            return folder / "kernels"
    return Path(tempfile.mkdtemp(prefix="meshmpi-kernels-"))


def _usable(base: Path) -> bool:
    """Whether libraries can be kept below ``base``, where nobody else could have put others."""
    folder = base / "kernels"
    try:
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            status = folder.stat()
            private = status.st_uid == os.getuid() and not status.st_mode & 0o002
            # Where programs may not be run, libraries cannot be loaded.
            return private and not os.statvfs(folder).f_flag & os.ST_NOEXEC
    except OSError:
        return False


@functools.lru_cache(maxsize=1)
def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def load_library(source: str) -> ctypes.CDLL:
    """The library built from ``source``; built now if no process has built it before.

    Raises:
        CompilerError: The compiler failed, its message is included; or the cache cannot be used.
    """
    command, version = _compiler(_wanted())
    text = "\n".join([source, *command, version, _cpu()])
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    folder = cache_folder()
    try:
        return _from_cache(source, folder / f"{key}.so", command)
    except OSError as e:  # a full disk, a file system without memory maps, ...
        raise CompilerError(
            f"compiled kernels cannot be kept in {folder}: {e}.",
            "Set MESHMPI_CACHE to a folder with space, or use kernels='numpy'.",
        ) from e


def _from_cache(source: str, library: Path, command: tuple[str, ...]) -> ctypes.CDLL:
    if library.exists():
        try:
            return _loaded(library)
        except OSError:  # damaged, for instance by a full disk: built again
            library.unlink(missing_ok=True)
    with _locked(library.with_suffix(".lock")):
        if not library.exists():
            _build(source, library, command)
    return _loaded(library)


def _loaded(library: Path) -> ctypes.CDLL:
    # The first such library brings OpenMP, which reads this once.  Its threads and those of BLAS
    # take turns on the same cores: waiting must not burn them.  Measured: docs/performance.md.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    return ctypes.CDLL(str(library))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock; without one where the file system has none: then several may build."""
    with open(path, "w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(source: str, library: Path, command: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        c, out = Path(folder, library.stem + ".c"), Path(folder, library.name)
        c.write_text(source)
        _run([*command, str(c), "-o", str(out), "-lm"], BUILD_SECONDS, Path(folder))
        os.replace(c, library.with_suffix(".c"))
        os.replace(out, library)
