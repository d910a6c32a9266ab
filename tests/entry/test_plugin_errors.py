"""A command line that asks for padding is known without the plug-in's own modules."""

import pytest

from verl_padding.entry.plugin_errors import asks_for_padding
from verl_padding.job.modes import MODE_PREFIX, STOCK_MODES

MODE = "trainer.v1.trainer_mode"


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["data.n=1", "+padding=prompt"], "+padding=prompt"),
        (["++padding.seed=1"], "++padding.seed=1"),
        *(([f"{MODE}={MODE_PREFIX}{mode}"], f"{MODE}={MODE_PREFIX}{mode}") for mode in STOCK_MODES),
        ([f"{MODE}=sync", "data.padding=1", "padding_side=left"], None),
    ],
)
def test_a_command_line_asks_for_padding_by_section_or_trainer(arguments, found):
    assert asks_for_padding(arguments) == found
