"""Sphinx: how the site is made from the pages of this folder and from docstrings.

    sphinx-build -W --keep-going -n docs build/site

Pages are MyST Markdown and read as well on their own.  The reference (docs/api) comes from
docstrings; docs/site_reference.py adds to each operation what an example of it sends.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import meshmpi  # noqa: E402

project = "meshmpi"
author = "The meshmpi authors"
version = release = meshmpi.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "docs.site_docstrings",
    "docs.site_notebooks",
    "docs.site_reference",
]
exclude_patterns = ["_build", "packaging", "**/.ipynb_checkpoints"]
myst_heading_anchors = 3  # links such as cluster.md#which-mpi
suppress_warnings = ["misc.highlighting_failure"]  # output blocks need not be a language

html_theme = "furo"
html_title = "meshmpi"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
pygments_style = "default"

# ---- docstrings ----------------------------------------------------------------------------------

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # what arguments are stands in the docstrings, in words
nitpick_ignore_regex = [
    (r"py:.*", r"(numpy|collections|typing|pathlib)\..*"),
    # Parts of what is documented, which nobody makes by hand.
    (r"py:class", r"meshmpi\.(ir\.program\.(Source|AxesTable)|ir\.halos\.HaloRegion|planner\..*)"),
]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = [
    ("Lowers", "Lowers"),
    ("Gradient", "Gradient"),
    ("Source", "Source"),
    ("Shapes", "Shapes"),
]
