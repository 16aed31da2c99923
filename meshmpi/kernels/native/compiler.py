"""From C source to a loaded library, through a cache on disk whose key is the source, the compiler and the CPU.

One process of a node builds, the others wait.  A library is loaded only from a private folder (`private`), if
its hash is the one in its entry of the index; what is loaded are the very bytes that were hashed.  All others
are built again.  Nothing that is read from the cache becomes part of a command.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import itertools
import os
import platform
import shlex
import shutil
from pathlib import Path
from typing import Any

from meshmpi.errors import DataError, MeshmpiError
from meshmpi.files import cache
from meshmpi.files.private import Folder
from meshmpi.hashes import sha256

FLAGS = (
    *shlex.split("-O3 -std=gnu11 -fPIC -shared -w -fwrapv -fno-math-errno -ffp-contract=fast"),
    # With it GCC 12 for POWER9 makes erf(infinity) 0.87 (seen in an emulator).
    *([] if platform.machine().startswith("ppc64") else ["-fno-trapping-math"]),
)
"""Nothing of -ffast-math that changes values: -fassociative-math turns (x + y) - x into y, and
inf - inf into 0.  Sums are reordered where the source says so, by ``omp simd reduction``."""
TARGET_FLAGS = ("-march=native", "-mcpu=native")
"""For the instructions of this processor; the second, which GCC for POWER has, where the first is refused.  A compiler
that builds for another machine refuses both, and is told its processor in its command."""
OPTIONAL_FLAGS = (*TARGET_FLAGS, "-mprefer-vector-width=512", "-fopenmp-simd", "-fopenmp")
"""Left out where the compiler refuses them."""
TRIAL = b"""#include <math.h>
#include <stdint.h>
#include <string.h>
double f(double x) { return exp(x); }
#ifdef _OPENMP
#include <omp.h>
int threads(void) { return omp_get_max_threads(); }
#endif

static float floats[8500];
static int64_t whole[64];
static uint16_t halves[300];

__attribute__((noinline)) static double pieces(const float *x, long n) {
  float sums[8];
  for (long w = 0; w < n; w += 4096) {
    const long end = w + 4096 < n ? w + 4096 : n;
    float a = 0;
    #pragma omp simd reduction(+: a)
    for (long c = w; c < end; ++c) a += x[c];
    sums[w / 4096] = a;
  }
  double all = 0;
  for (long w = 0; w < n; w += 4096) all += sums[w / 4096];
  return all;
}

__attribute__((noinline)) static int64_t products(const int64_t *x, long rows, long n) {
  int64_t all = 0;
  for (long r = 0; r < rows; ++r) {
    int64_t a = 1;
    #pragma omp simd reduction(*: a)
    for (long c = 0; c < n; ++c) a *= x[r * n + c];
    all += a;
  }
  return all;
}

__attribute__((noinline)) static float widened(const uint16_t *x, long n) {
  float a = 0;
  #pragma omp simd reduction(+: a)
  for (long c = 0; c < n; ++c) {
    uint32_t u = (uint32_t)x[c] << 16;
    float v;
    memcpy(&v, &u, 4);
    a += v;
  }
  return a;
}

int right(void) {
  for (int i = 0; i < 8500; i++) floats[i] = i % 7;
  for (int i = 0; i < 57; i++) whole[i] = i % 2 + 1;
  for (int i = 0; i < 285; i++) halves[i] = 0x3f80;
  return pieces(floats, 4097) == 12286 && pieces(floats, 8500) == 25495 && products(whole, 3, 19) == 512 + 1024 + 512
      && widened(halves, 285) == 285;
}
"""
"""Needs the libraries that generated code needs, so that a flag whose library is missing is left out; and says whether
sums as in generated code are right: GCC 12 does not reduce by ``omp simd`` on processors with SVE as it should."""
BUILD_SECONDS = 300
"""A compiler that takes longer is taken for hung."""


class CompilerError(MeshmpiError):
    """There is no usable C compiler, or it refused generated code."""


def compiler() -> tuple[str, ...]:
    """The compiler command with all flags it accepts: $MESHMPI_CC, $CC, cc, gcc or clang.

    Raises:
        CompilerError: None is found, or it cannot build a small file that computes what it should.
    """
    return _compiler(_wanted())[0]


def _wanted() -> str:
    return os.environ.get("MESHMPI_CC") or os.environ.get("CC") or ""


@functools.lru_cache(maxsize=8)
def _compiler(wanted: str) -> tuple[tuple[str, ...], str]:
    """Command and version; what it can do is kept on disk, since to ask takes several runs of it.

    A compiler that has changed is asked again; what failed is not kept.
    """
    candidates = [wanted] if wanted else ["cc", "gcc", "clang"]
    found = next((c for c in candidates if shutil.which(shlex.split(c)[0])), None)
    if found is None:
        raise CompilerError(
            f"no C compiler was found (looked for {', '.join(candidates)}).",
            "Install one (Debian: apt install gcc), or use kernels='numpy'.",
        )
    path = Path(shutil.which(shlex.split(found)[0]) or "").resolve()
    status = path.stat()
    about = (found, str(path), status.st_mtime_ns, status.st_size, FLAGS, OPTIONAL_FLAGS, TRIAL, processor())
    name = f"compiler-{sha256(repr(about).encode()).hexdigest()[:24]}.json"
    try:
        with _opened() as folder:
            known = cache.recall(folder, name)
            if known is None:
                known = _facts(found)
                with contextlib.suppress(OSError):  # a full disk
                    cache.remember(folder, name, known)
    except DataError:  # nothing can be kept: asked in every process
        known = _facts(found)
    return _command(found, known["accepts"]), known["version"]


def _command(found: str, accepts: list[bool]) -> tuple[str, ...]:
    program, *options = shlex.split(found)
    if os.sep in program:  # it runs in another folder
        program = os.path.abspath(program)
    return (program, *options, *FLAGS, *itertools.compress(OPTIONAL_FLAGS, accepts))


def _facts(found: str) -> dict[str, Any]:
    """Which of `OPTIONAL_FLAGS` a compiler accepts, and its version."""
    command = _command(found, [])
    if not _accepts(command):
        raise CompilerError(
            f"'{found}' cannot build a small file that computes what it should.",
            f"Try it by hand: {shlex.join(command)}",
        )
    accepts: list[bool] = []
    for flag in OPTIONAL_FLAGS:
        known = flag == TARGET_FLAGS[1] and accepts[0]
        accepts.append(not known and _accepts((*_command(found, accepts), flag)))
    return {"accepts": accepts, "version": _run([command[0], "--version"], 60)}


def _accepts(command: tuple[str, ...]) -> bool:
    """Whether a small library comes out, can be loaded, and computes what it should."""
    import tempfile  # late: most processes find all in the cache

    with tempfile.TemporaryDirectory() as path, Folder.at(Path(path)) as folder:
        folder.write("t.c", TRIAL)
        try:
            _run([*command, "t.c", "-o", "t.so", "-lm"], 60, folder)
            library = _loaded(folder.read("t.so") or b"", "t", folder)
        except (CompilerError, OSError):
            return False
        return bool(library.right())


def _run(command: list[str], seconds: float, folder: Folder | None = None) -> str:
    """What the command printed; its temporary files go with the folder, also if it is killed."""
    import subprocess  # late: most processes find all in the cache

    at: dict[str, Any] = {} if folder is None else {"cwd": folder.reached(), "env": {**os.environ, "TMPDIR": "."}}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, umask=0o077, **at)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise CompilerError(f"the C compiler did not run: {e}.", "Set MESHMPI_CC, or use kernels='numpy'.") from e
    if done.returncode:
        raise CompilerError(
            f"the C compiler failed on generated code:\n{done.stderr[-2000:]}", "Use kernels='numpy' and report this."
        )
    return done.stdout


def available() -> bool:
    """Whether native kernels can be built here."""
    try:
        compiler()
    except CompilerError:
        return False
    return True


def _opened() -> Folder:
    return cache.opened("kernels", programs=True)


def kernel_folder() -> Path:
    """Where libraries are kept."""
    with _opened() as folder:
        return folder.path


@functools.lru_cache(maxsize=1)
def processor() -> str:
    """Identifies this kind of processor, for which `TARGET_FLAGS` build."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part", "cpu\t")  # the last: POWER
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def load_library(source: str) -> ctypes.CDLL:
    """The library built from ``source``; built now if no process has built it before.

    Raises:
        CompilerError: The compiler failed, its message is included; or the cache cannot be used.
    """
    command, version = _compiler(_wanted())
    text = "\n".join([source, *command, version, processor()])
    key = sha256(text.encode()).hexdigest()[:24]
    where = "a cache"
    try:
        with _opened() as folder:
            where = str(folder.path)
            if (where, key) in _libraries:
                return _libraries[where, key]
            data = _kept(folder, key)
            if data is None:
                with folder.locked(f"{key}.lock") as alone:
                    data = _kept(folder, key) or _build(folder, key, source, command, alone)
            _libraries[where, key] = library = _loaded(data, key, folder)
            return library
    except DataError as e:
        raise CompilerError(e.problem, e.remedy) from e
    except OSError as e:  # a full disk, a file system without memory maps, ...
        raise CompilerError(
            f"compiled kernels cannot be kept in {where}: {e}.",
            "Set MESHMPI_CACHE to a folder with space, or use kernels='numpy'.",
        ) from e


def _kept(folder: Folder, key: str) -> bytes | None:
    """A library of the cache; None where it is missing or not what was built here."""
    data, entry = folder.read(f"{key}.so"), cache.recall(folder, f"{key}.json")
    if data is None or entry is None or entry != sha256(data).hexdigest():
        return None
    return data


def _build(folder: Folder, key: str, source: str, command: tuple[str, ...], alone: bool) -> bytes:
    """Builds a library in a folder of its own and puts it into the cache."""
    for name in folder.names() if alone else ():
        if name.startswith(f".build-{key}-"):  # the lock is held, so a killed process left it
            folder.remove(name)
    with folder.temporary(f".build-{key}-") as work:
        work.write(f"{key}.c", source.encode())
        _run([*command, f"{key}.c", "-o", f"{key}.so", "-lm"], BUILD_SECONDS, work)
        data = work.read(f"{key}.so")
        if data is None:
            raise CompilerError(
                "the C compiler reported success, but there is no library.",
                "Set MESHMPI_CC to another compiler, or use kernels='numpy'.",
            )
        folder.write(f"{key}.c", source.encode())
        folder.write(f"{key}.so", data)
        cache.remember(folder, f"{key}.json", sha256(data).hexdigest())
    return data


_loads = itertools.count()
_libraries: dict[tuple[str, str], ctypes.CDLL] = {}
"""Folder and key -> what is loaded: a library has its static data once in a process."""


def _loaded(data: bytes, name: str, folder: Folder) -> ctypes.CDLL:
    """Loads a library by a file in memory that cannot be changed any more, or where there is none, in ``folder``."""
    # The first such library brings OpenMP, which reads this once.  Its threads and those of BLAS
    # take turns on the same cores: waiting must not burn them.  Measured: docs/performance.md.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):  # not Linux, or forbidden
        with folder.temporary(".load-") as work:
            work.write(f"{name}.so", data)
            return ctypes.CDLL(str(work.path / f"{name}.so"))
    with open(fd, "wb") as file:
        file.write(data)
        file.flush()
        never_changed = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, never_changed)
        # The loader takes an equal path for a library that it has, and descriptors are used again:
        # the slashes tell this path from all earlier ones.
        slashes = f"{next(_loads):024b}".replace("0", "/").replace("1", "./")
        return ctypes.CDLL(f"/proc/self/fd/{slashes}{fd}")
