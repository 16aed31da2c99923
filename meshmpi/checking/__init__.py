"""Checks layouts: reference mode, error bounds, and the comparison of layouts with one rank.

Runs programs; does not depend on training, files or the command line.
"""

from meshmpi.checking.interpret import Computed, interpret
from meshmpi.checking.report import Check, Difference, Report
from meshmpi.checking.verify import verify

__all__ = ["Check", "Computed", "Difference", "Report", "interpret", "verify"]
