"""Optimizers: ``mm.optimize.Adam(1e-3).minimize(loss)``."""

from meshmpi.nn.optimize.adafactor import Adafactor
from meshmpi.nn.optimize.base import Optimizer
from meshmpi.nn.optimize.first_order import SGD, Adam, AdamW, Momentum

__all__ = ["SGD", "Adafactor", "Adam", "AdamW", "Momentum", "Optimizer"]
