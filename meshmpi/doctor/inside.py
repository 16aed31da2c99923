"""``python -m meshmpi.doctor.inside``: what must be imported or compiled to be known; JSON, an object a line.

A process of its own, because a broken package may end it: the name of each part is printed before it is tried.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import shlex
import sys
from collections.abc import Callable
from typing import Any

REQUIRED = ("numpy", "opt_einsum", "ml_dtypes", "threadpoolctl", "safetensors", "xxhash", "pydantic")
"""What meshmpi needs besides mpi4py, in the order in which they are imported here."""


def main() -> None:
    """Tries every part."""
    for name in REQUIRED:
        _try(name, lambda name=name: _package(name))
    _try("blas", _blas)
    _try("compiler", _compiler)
    _try("processes", _processes)


def _try(part: str, function: Callable[[], dict[str, Any]]) -> None:
    print(json.dumps({"begins": part}), flush=True)
    try:
        answer = function()
    except Exception as error:  # any fault of a package is a fact about it
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"part": part, **answer}), flush=True)


def _package(name: str) -> dict[str, Any]:
    module = importlib.import_module(name)
    return {"version": importlib.metadata.version(name), "file": module.__file__ or ""}


def _blas() -> dict[str, Any]:
    from meshmpi.kernels import product_choice

    plain, narrow = product_choice.chosen(), product_choice.chosen(bfloat16=True)
    return {
        "library": plain.name,
        "version": plain.version,
        "threads": plain.threads,
        "bfloat16": narrow.name if narrow.bfloat16 else "",
        "measured": product_choice.described(),
    }


def _compiler() -> dict[str, Any]:
    """Builds a library as kernels are built, through the cache, but never the same one."""
    from meshmpi.errors import DataError
    from meshmpi.files import cache
    from meshmpi.kernels.native import compiler

    refused = cache.refusal("kernels", programs=True)
    try:
        folder = compiler.kernel_folder()
    except DataError as error:
        return {"error": str(error)}
    about = {"refused": refused, "folder": str(folder)}
    try:
        command = compiler.compiler()
    except compiler.CompilerError as error:
        return {**about, "error": str(error)}
    about |= {"command": shlex.join(command[:1]), "openmp": "-fopenmp" in command}
    name = f"doctor_{os.getpid()}"
    library = None
    try:
        library = compiler.load_library(f"int {name}(void) {{ return 42; }}\n")
        return {**about, "answer": int(library[name]())}
    except (compiler.CompilerError, OSError) as error:
        return {**about, "build_error": f"{type(error).__name__}: {error}"}
    finally:
        for source in folder.glob("*.c"):
            if source.stat().st_size < 200 and name in source.read_text():
                for suffix in (".c", ".so", ".json", ".lock"):
                    source.with_suffix(suffix).unlink(missing_ok=True)


def _processes() -> dict[str, Any]:
    from meshmpi.launch.command import can_read_other_processes

    return {"can_read": can_read_other_processes()}


if __name__ == "__main__":
    sys.exit(main())
