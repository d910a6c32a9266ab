"""A later verl that would weigh rows twice, or send them past TransferQueue, is refused before a
job starts."""

import pytest
import verl

from verl_padding.errors import PaddingConfigError
from verl_padding.job.known_verl import check_verl_is_known

refuse = check_verl_is_known.__wrapped__
"""Without the memory of an earlier answer."""


@pytest.fixture
def later(tmp_path, monkeypatch):
    """The folder of another verl, which is found in the place of the installed one."""
    (tmp_path / "trainer/ppo").mkdir(parents=True)
    (tmp_path / "trainer/ppo/core_algos.py").write_text("def agg_loss(loss_mat, loss_mask): ...")
    monkeypatch.setattr(verl, "__file__", str(tmp_path / "__init__.py"))
    return tmp_path


def test_the_installed_verl_passes():
    refuse()


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("workers/data_plane.py", "", "data_plane"),
        ("data_plane/__init__.py", "", "data_plane"),
        ("trainer/ppo/core_algos.py", 'weight = data["loss_weight"]', "loss_weight"),
    ],
)
def test_a_later_verl_with_another_data_plane_is_refused(file, text, message, later):
    refuse()
    (later / file).parent.mkdir(parents=True, exist_ok=True)
    (later / file).write_text(text)
    with pytest.raises(PaddingConfigError, match=message):
        refuse()
