"""graph + layout + mesh shape -> Program; knows no arrays, no MPI and no rank."""

from meshmpi.lowering.lower import lower

__all__ = ["lower"]
