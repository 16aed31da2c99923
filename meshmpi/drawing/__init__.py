"""Pictures of layouts, programs, steps and memory, as text, SVG, PNG, and one HTML page with all of it.

Knows programs, dimensions and layouts; no MPI, no arrays.  Text needs the standard library only,
everything else matplotlib.
"""

from meshmpi.drawing.blocks import blocks_of, blocks_text, draw_blocks, type_in
from meshmpi.drawing.memory import draw_memory
from meshmpi.drawing.picture import Picture, stacked
from meshmpi.drawing.program import draw_program
from meshmpi.drawing.report import report_page
from meshmpi.drawing.timeline import draw_timeline
from meshmpi.planner.step_time import predicted, recorded

__all__ = [
    "Picture",
    "blocks_of",
    "blocks_text",
    "draw_blocks",
    "draw_memory",
    "draw_program",
    "draw_timeline",
    "predicted",
    "recorded",
    "report_page",
    "stacked",
    "type_in",
]
