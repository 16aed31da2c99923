"""Is a layout right?  Reference mode, error bounds, and the comparison of layouts with one rank.

Runs programs; knows nothing of training, files or the command line.
"""

from meshmpi.checking.interpret import Computed, interpret
from meshmpi.checking.report import Check, Difference, Report
from meshmpi.checking.verify import verify

__all__ = ["Check", "Computed", "Difference", "Report", "interpret", "verify"]
