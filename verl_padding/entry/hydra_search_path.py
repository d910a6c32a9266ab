"""Puts ``pkg://verl_padding.configs`` on Hydra's search path, so that ``+padding=prompt`` finds its
group."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class VerlPaddingSearchPath(SearchPathPlugin):
    """Appends the plug-in's configs last: a group of the same name in the user's own configs
    wins."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="verl_padding", path="pkg://verl_padding.configs")
