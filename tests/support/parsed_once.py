"""Tests compose verl's config a thousand times: what a process has parsed once, it need not parse again.

YAML is kept as plain objects, and interpolations as trees that nobody writes to: every composition is made anew of
them.
"""

from functools import cache, lru_cache
from typing import Any

import omegaconf._utils
import omegaconf.base
import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader

_load = OmegaConf.load


@cache
def _parsed(text: str) -> Any:
    return yaml.load(text, Loader=get_yaml_loader())


def _load_parsed(file: Any) -> Any:
    """As OmegaConf.load, for what Hydra gives it: an open file, or the path of one."""
    if not hasattr(file, "read"):
        with open(file, encoding="utf-8") as opened:
            return _load_parsed(opened)
    text = file.read()
    try:
        parsed = _parsed(text)
    except yaml.YAMLError:
        file.seek(0)
        return _load(file)  # whose message names the file
    return OmegaConf.create() if parsed is None else OmegaConf.create(parsed)


OmegaConf.load = staticmethod(_load_parsed)
# Where omegaconf uses it: both have a name of their own for it.
omegaconf.base.parse = omegaconf._utils.parse = lru_cache(maxsize=None)(omegaconf.base.parse)
