"""graph + layout + mesh shape -> Program; knows no arrays, no MPI and no rank."""

from meshmpi.compiler.lowering.lower import cured, lower

__all__ = ["cured", "lower"]
