"""Sphinx settings. The build needs no network: nothing is fetched, and the reference is made from the code itself."""

from __future__ import annotations

import sys
from pathlib import Path

import dougong

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "Dougong"
copyright = "The Dougong authors"
version = release = dougong.__version__

extensions = ["myst_parser", "reference_from_code"]
exclude_patterns = ["_build", "_ext"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
pygments_style = "default"

html_theme = "furo"
html_title = "Dougong"
html_show_sourcelink = False
html_copy_source = False
