"""The catalogue of mistakes: programs that fail, what is said then, and what cures them."""

from tests.errors.catalogue.arguments import ARGUMENTS
from tests.errors.catalogue.files import FILES
from tests.errors.catalogue.fitting import FITTING
from tests.errors.catalogue.layouts import LAYOUTS
from tests.errors.catalogue.names import NAMES
from tests.errors.catalogue.outside import OUTSIDE
from tests.errors.catalogue.running import RUNNING
from tests.errors.catalogue.shapes import SHAPES

CATALOGUE = {
    "Names": NAMES,
    "Shapes and data types": SHAPES,
    "Arguments of another kind": ARGUMENTS,
    "Layouts and meshes": LAYOUTS,
    "Running a step": RUNNING,
    "Training with mm.fit": FITTING,
    "Files, feeds, checkpoints": FILES,
    "Settings, data, checkpoints": OUTSIDE,
}
