"""graph + layout + mesh shape -> Program; knows no arrays, no MPI and no rank."""

from meshmpi.compiler.lowering.lower import lower

__all__ = ["lower"]
