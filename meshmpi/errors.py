"""Every error meshmpi raises on purpose, and the one template their messages follow.

A message says what is wrong, with names and numbers, then what would make it right; a last line
says which tensor, made where.  This module knows nothing of tensors, meshes or MPI.
"""

from __future__ import annotations

from collections.abc import Iterable


class MeshmpiError(Exception):
    """Base of all errors raised by meshmpi.

    Args:
        problem: What is wrong, with names and numbers; a sentence.
        remedy: What would make it right; a sentence, or empty.
        where: ``"<tensor> made at <file>:<line>"``, or empty.
    """

    def __init__(self, problem: str, remedy: str = "", where: str = ""):
        text = f"{problem} {remedy}".strip()
        super().__init__(f"{text}\nin {where}" if where else text)
        self.problem, self.remedy, self.where = problem, remedy, where


class ShapeError(MeshmpiError):
    """Dimensions, sizes or data types that do not fit together."""


class LayoutError(MeshmpiError):
    """A layout that names an unknown thing or splits one tensor twice over one mesh axis."""


class MeshError(MeshmpiError):
    """A mesh whose sizes do not match the ranks there are, or an unknown mesh axis."""


class ProgramError(MeshmpiError):
    """An SPMD program that breaks its own rules, or differs between ranks."""


class FeedError(MeshmpiError):
    """A feed that is missing, unknown, misshapen or of the wrong data type."""


class VariableError(MeshmpiError):
    """A variable that is unknown, or made twice with different shapes."""


class CheckpointError(MeshmpiError):
    """A checkpoint that is missing, damaged, or belongs to another model."""


class ConfigError(MeshmpiError):
    """A configuration key or value that does not exist or cannot be used."""


class DataError(MeshmpiError):
    """A corpus or vocabulary that is missing, empty or unreadable."""


class RangeError(MeshmpiError):
    """An index outside the dimension it addresses, found by ``mm.compile(..., debug=True)``."""


def suggest(name: str, known: Iterable[str]) -> str:
    """``" Did you mean 'rows'?"`` for the nearest known name, or the list of known names."""
    import difflib  # late: only a mistake needs it, and `import meshmpi` shall open few files

    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"Did you mean '{near[0]}'?"
    return f"Known names: {', '.join(known)}." if known else ""
