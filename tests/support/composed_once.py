"""Has Hydra read each installed config once in this process, and put the same ones together once.

Tests compose verl's config a thousand times. Values that are overridden, and folders that a test
has written, are dealt with anew each time.
"""

import sysconfig
from copy import copy, deepcopy
from pathlib import Path

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType

ROOTS = (
    sysconfig.get_path("purelib"),
    str(Path(__file__).parent.parent),
)  # folders whose configs no test changes
_load, _compose = ConfigRepository.load_config, ConfigLoaderImpl._compose_config_from_defaults_list
_loaded, _composed = {}, {}


def _is_installed(source):
    return source.scheme() != "file" or source.path.startswith(ROOTS)


def _load_once(self, config_path):
    source = self._find_object_source(config_path=config_path, object_type=ObjectType.CONFIG)
    if source is None or not _is_installed(source):
        return _load(self, config_path)
    key = source.scheme(), source.path, config_path
    if key not in _loaded:
        _loaded[key] = _load(self, config_path)
    return copy(_loaded[key])


def _compose_once(self, defaults, repo):
    sources = repo.get_sources()
    key = repr((defaults, [(source.scheme(), source.path) for source in sources]))
    if key in _composed:
        return deepcopy(_composed[key])
    repo.cache = deepcopy(repo.cache)  # putting configs together writes into what was loaded
    config = _compose(self, defaults, repo)
    if all(map(_is_installed, sources)):
        _composed[key] = deepcopy(config)
    return config


ConfigRepository.load_config, ConfigLoaderImpl._compose_config_from_defaults_list = (
    _load_once,
    _compose_once,
)
