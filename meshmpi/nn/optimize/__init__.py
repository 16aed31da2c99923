"""Optimizers: ``mm.optimize.Adam(1e-3).minimize(loss)``."""

from meshmpi.errors import missing as _missing
from meshmpi.graph.arguments import check_all as _check_all
from meshmpi.nn.optimize.adafactor import Adafactor
from meshmpi.nn.optimize.base import Optimizer
from meshmpi.nn.optimize.first_order import LAMB, SGD, Adam, AdamW, Momentum
from meshmpi.nn.optimize.microbatches import microbatches, serialize_training_step

__all__ = [
    "LAMB",
    "SGD",
    "Adafactor",
    "Adam",
    "AdamW",
    "Momentum",
    "Optimizer",
    "microbatches",
    "serialize_training_step",
]
_check_all(globals(), __all__, "optimize.")


def __getattr__(name: str) -> object:
    raise _missing("meshmpi.optimize", name, __all__)
