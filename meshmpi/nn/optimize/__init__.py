"""Optimizers: ``mm.optimize.Adam(1e-3).minimize(loss)``."""

from meshmpi.nn.optimize.adafactor import Adafactor
from meshmpi.nn.optimize.base import Optimizer
from meshmpi.nn.optimize.first_order import LAMB, SGD, Adam, AdamW, Momentum
from meshmpi.nn.optimize.microbatches import microbatches, serialize_training_step

__all__ = [
    "LAMB", "SGD", "Adafactor", "Adam", "AdamW", "Momentum", "Optimizer", "microbatches",
    "serialize_training_step",
]  # fmt: skip
