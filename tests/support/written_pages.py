"""Pages that ``report`` has written: their data, and what a browser makes of
them."""

import base64
import gzip
import json
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
needs_a_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is installed"
)


class Page(HTMLParser):
    """The data of a page, the cells of each line of its table of steps, its links, and
    its notes."""

    def __init__(self):
        super().__init__()
        self.packed = {}
        self.lines = []
        self.links = []
        self.notes = []
        self._id = None
        self._in_cell = self._in_note = False

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.links += [named[name] or "" for name in ("src", "href") if name in named]
        self._id = named.get("id")
        if tag == "tr":
            self.lines.append([])
        self._in_cell, self._in_note = tag == "td", named.get("class") == "note"

    def handle_endtag(self, tag):
        self._in_cell = self._in_note = False

    def handle_data(self, data):
        if self._id and self._id.startswith("packed-"):
            self.packed[self._id.removeprefix("packed-")] = json.loads(
                gzip.decompress(base64.b64decode(data))
            )
            self._id = None
        elif self._in_cell:
            self.lines[-1].append(data.strip())
        elif self._in_note:
            self.notes.append(data)


def parsed(page):
    found = Page()
    found.feed(page.read_text(encoding="utf-8"))
    return found


class Opened:
    """What a browser has made of a page, and written to its console."""

    def __init__(self, page, folder, *, at=""):
        command = [
            *(
                str(BROWSER),
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--enable-logging=stderr",
                "--dump-dom",
            ),
            *(
                f"--user-data-dir={folder}",
                "--timeout=20000",
                "--virtual-time-budget=20000",
                f"{page.as_uri()}{at}",
            ),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=80)
        self.dom = done.stdout
        self.console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    @property
    def prompts(self):
        """HTML of the prompts and their rows."""
        return self.dom.split('id="prompts"')[1].split("<script")[0]
