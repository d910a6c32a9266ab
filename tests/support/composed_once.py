"""Has Hydra read each installed config once in this process, and put the same ones together once.

Tests compose verl's config a thousand times. Values that are overridden, and folders that a test
has written, are dealt with anew each time.
"""

import pickle
from copy import copy, deepcopy
from dataclasses import replace
from pathlib import Path

import hydra
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import Overrides
from hydra.core.object_type import ObjectType

ROOTS = tuple(
    str(Path(file).parents[1]) for file in (hydra.__file__, __file__)
)  # folders whose configs no test changes
_load, _compose = ConfigRepository.load_config, ConfigLoaderImpl._compose_config_from_defaults_list
_choose = config_loader_impl.create_defaults_list
_loaded, _chosen, _composed = {}, {}, {}


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


def _choose_once(repo, config_name, overrides_list, **how):
    """Which files a config is of follows the choices of groups alone."""
    sources = repo.get_sources()
    values = Overrides(repo, overrides_list).config_overrides
    groups = [each.input_line for each in overrides_list if each not in values]
    key = repr((config_name, groups, how, [(each.scheme(), each.path) for each in sources]))
    if key not in _chosen:
        found = _choose(repo, config_name, overrides_list, **how)
        if not all(map(_is_installed, sources)):
            return found
        _chosen[key] = found
    return replace(_chosen[key], config_overrides=values)


def _compose_once(self, defaults, repo):
    sources = repo.get_sources()
    key = repr((defaults, [(source.scheme(), source.path) for source in sources]))
    if key in _composed:
        return pickle.loads(_composed[key])  # a copy, in a fifth of the time
    repo.cache = deepcopy(repo.cache)  # putting configs together writes into what was loaded
    config = _compose(self, defaults, repo)
    if all(map(_is_installed, sources)):
        _composed[key] = pickle.dumps(config)
    return config


ConfigRepository.load_config, ConfigLoaderImpl._compose_config_from_defaults_list = (
    _load_once,
    _compose_once,
)
config_loader_impl.create_defaults_list = _choose_once
