"""``meshmpi doctor``: what is wrong with this machine, and the commands that fix it.

Imports nothing outside the standard library, so that it runs where the rest of meshmpi cannot.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshmpi.commands.parser import Parser
from meshmpi.dims import MeshShape
from meshmpi.doctor.checks import examine
from meshmpi.doctor.facts import Facts, gather, heading, in_bare_step, take_part
from meshmpi.doctor.findings import BROKEN, Finding, summary, verdict
from meshmpi.errors import MeshmpiError
from meshmpi.job import in_job, rank_by_environment

HELP = "what is wrong with this machine, and the commands that fix it"


def main(arguments: Sequence[str]) -> int:
    """Runs the command without the rest of the command line and returns the exit status."""
    parser = Parser(prog="meshmpi doctor", description=f"{HELP[0].upper()}{HELP[1:]}.")
    add_arguments(parser)
    return run(parser.parse_args(arguments))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--ranks",
        dest="job_ranks",
        type=int,
        metavar="N",
        help="MPI ranks of a test job (default: as --mesh, or 2); 0: none.  Under mpirun or srun: the ranks of the job",
    )
    parser.add_argument(
        "--mesh",
        type=_mesh,
        metavar="SHAPE",
        help="print which axes of this mesh cross the network, such as 'rows:2;cols:2'",
    )
    parser.add_argument("--mpi", metavar="KIND", help="openmpi, mpich, intel or the path of an mpirun")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs"), metavar="DIR", help="folder for checkpoints (default: runs)"
    )
    parser.add_argument(
        "--limit", type=float, default=60.0, metavar="SECONDS", help="time limit of the test job (default: 60)"
    )
    parser.add_argument("--json", action="store_true", help="everything, for a support ticket")


def _mesh(text: str) -> MeshShape:
    try:
        return MeshShape(text)
    except MeshmpiError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(options: argparse.Namespace) -> int:
    """Gathers facts, examines them and prints; returns 1 if something is broken."""
    if rank_by_environment() and (in_job() or in_bare_step()):  # rank 0 prints for all
        if in_job():
            take_part(options.limit)
        return 0
    facts = gather(options.job_ranks, options.mpi, options.folder, options.limit, options.mesh)
    findings = examine(facts)
    if options.json:
        print(json.dumps(as_dict(facts, findings), indent=1), file=getattr(options, "stdout", None))
    else:
        print(f"{heading(facts)}\n\n{summary(findings)}")
    return int(verdict(findings) == BROKEN)


def as_dict(facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    """All facts and findings, for ``--json``."""
    import meshmpi

    names = "OMPI_ PMI PRTE_ SLURM_ I_MPI_ FI_ OMP_ OPENBLAS_ MKL_ MPI4PY_ MESHMPI_ LD_LIBRARY_PATH CC"
    shown = tuple(f"{names} PBS_ PALS_ LSB_ JSM_ FLUX_ ALPS_".split())
    return {
        "meshmpi": meshmpi.__version__,
        "verdict": verdict(findings),
        "findings": [finding.as_dict() for finding in findings],
        "heading": heading(facts).splitlines(),
        "environment": {n: v for n, v in sorted(facts.environment.items()) if n.startswith(shown)},
        "library": dict(facts.library),
        "launcher": None if facts.launcher is None else facts.launcher._asdict(),
        "parts": {name: dict(part) for name, part in facts.parts.items()},
        "ranks": [dict(rank) for rank in facts.ranks],
    }
