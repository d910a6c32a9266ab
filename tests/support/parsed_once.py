"""Tests compose verl's config a thousand times: what a process has parsed once, it need not parse again.

YAML is kept as plain objects, and interpolations as trees that nobody writes to. The configs of packages are kept, too,
and what some of them make together before any value is overridden: every composition goes on from a copy of that. With
a folder of configs that a test has written, all is made anew.
"""

from copy import deepcopy
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

import omegaconf._utils
import omegaconf.base
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
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

_compose = ConfigLoaderImpl._compose_config_from_defaults_list
_load_config = CachingConfigRepository.load_config
_composed: dict[str, DictConfig] = {}
_loaded: dict[str, ConfigResult | None] = {}


def _packages(repo: CachingConfigRepository) -> str | None:
    """Where the configs come from, if all of them are those of packages."""
    sources = [(source.scheme(), source.path) for source in repo.get_sources()]
    ours = all(scheme != "file" or "/verl/trainer/" in path for scheme, path in sources)
    return repr(sources) if ours else None


def _load_once(self: CachingConfigRepository, config_path: str) -> ConfigResult | None:
    packages = _packages(self)
    if packages is None:
        return _load_config(self, config_path)
    key = f"{packages} {config_path}"
    if key not in _loaded:
        _loaded[key] = self.delegate.load_config(config_path)
    return _loaded[key]


def _compose_once(self: ConfigLoaderImpl, defaults: list[Any], repo: CachingConfigRepository) -> DictConfig:
    packages = _packages(repo)
    if packages is None:
        return _compose(self, defaults, repo)
    key = f"{packages} {[vars(default) for default in defaults]}"
    if key not in _composed:
        # Hydra writes to what it has loaded when it puts it together.
        of_its_own = SimpleNamespace(
            load_config=lambda config_path: deepcopy(repo.load_config(config_path)),
            get_schema_source=repo.get_schema_source,
        )
        _composed[key] = _compose(self, defaults, of_its_own)
    return deepcopy(_composed[key])


CachingConfigRepository.load_config = _load_once
ConfigLoaderImpl._compose_config_from_defaults_list = _compose_once
