"""A command line that asks for padding is known without the plug-in's own modules."""

import pytest

from verl_padding.entry.plugin_errors import asks_for_padding


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["data.n=1", "+padding=prompt"], "+padding=prompt"),
        (["++padding.seed=1"], "++padding.seed=1"),
        (["trainer.v1.trainer_mode=sync", "data.padding=1", "padding_side=left"], None),
    ],
)
def test_a_command_line_asks_for_padding_by_its_section(arguments, found):
    assert asks_for_padding(arguments) == found
