"""The site of the documentation: ``sphinx-build -W --keep-going -b html docs docs/_build/html``;
takes no network."""

import os
import sys
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]

os.environ.setdefault("VERL_PLATFORM", "cpu")  # pages are made where there need be no accelerator

import verl_padding  # noqa: E402

project = "verl_padding"
author = "the authors of verl_padding"
version = release = verl_padding.__version__
project_copyright = author

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "api.rst.inc"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4
smartquotes = False

nitpicky = True
# Types of other packages and names that only annotations have: the site takes no network, so it
# knows no other site.
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(collections|numpy|omegaconf|pathlib|pydantic|tensordict|torch|transfer_queue|typing|verl)\..*",
    ),
    ("py:.*", r"verl_padding\.(?!plan\.[A-Z]|errors\.|pads\.field_kinds\.).*"),
    ("py:meth", r"_\w+"),
    ("py:class", "Packer|Sharing|OptimizerSteps|NoneType"),
    ("py:class", "AllowInfNan|FieldInfo|Strict|Ge|Lt|PydanticUndefined"),  # in annotations
]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88

copybutton_exclude = ".linenos, .gp"  # the prompt of a shell

html_theme = "furo"
html_title = f"{project} {release}"
html_show_copyright = False


def read_sections(
    app: Sphinx, what: str, name: str, of: object, options: object, lines: list[str]
) -> None:
    """Reads "Args", "Raises" and the like in a docstring.

    The extension of this class does so in those of attributes too, and takes what is before a colon
    for a type.
    """
    if what not in ("attribute", "data", "property"):
        lines[:] = GoogleDocstring(lines, what=what, name=name, obj=of, options=options).lines()


def setup(app: Sphinx) -> None:
    """Called by Sphinx when it has read this file."""
    app.connect("autodoc-process-docstring", read_sections)
