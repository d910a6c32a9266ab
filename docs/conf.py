"""The site of the documentation: ``sphinx-build -W --keep-going -b html docs docs/_build/html``; takes no network."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]

import verl_padding  # noqa: E402

project = "verl_padding"
author = "the authors of verl_padding"
version = release = verl_padding.__version__
project_copyright = author

extensions = ["myst_parser", "padding_settings", "verl_settings"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3
nitpicky = True
smartquotes = False

html_theme = "furo"
html_title = f"{project} {release}"
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
