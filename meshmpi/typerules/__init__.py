"""The type rules of the instruction set: what each instruction may take and what it makes.

`redistributed` gives the result type of an instruction that redistributes; `verify` checks a whole
program.  Lowering uses the first to build, every pass is followed by the second.  Nothing here
knows arrays, MPI or the graph.
"""

from meshmpi.typerules.basics import REDUCTIONS, Violation
from meshmpi.typerules.computing import linear_in
from meshmpi.typerules.moving import nests, redistributed
from meshmpi.typerules.shaping import aligned_groups, view_splits
from meshmpi.typerules.verifying import Proven, verify
