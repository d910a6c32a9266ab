"""Takes away what a CI sets for its own log: it changes what commands print, and so what their
tests would read.

Imported before anything that looks there, as typer and rich do.
"""

import os

for name in (
    "GITHUB_ACTIONS",
    "FORCE_COLOR",
    "CLICOLOR_FORCE",
    "PY_COLORS",
    "TTY_COMPATIBLE",
    "COLUMNS",
    "LINES",
):
    os.environ.pop(name, None)
