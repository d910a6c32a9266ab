"""A later verl that would weigh rows twice, or send them past TransferQueue, is refused before a job starts."""

from importlib.machinery import ModuleSpec

import pytest
import verl

from verl_padding.errors import PaddingConfigError
from verl_padding.job import known_verl


@pytest.fixture
def later(tmp_path, monkeypatch):
    """The folder of another verl, which is found in the place of the installed one."""
    (tmp_path / "trainer/ppo").mkdir(parents=True)
    (tmp_path / "trainer/ppo/core_algos.py").write_text("def agg_loss(loss_mat, loss_mask): ...")
    monkeypatch.setattr(
        known_verl, "find_spec", lambda _: ModuleSpec("verl", None, origin=str(tmp_path / "__init__.py"))
    )
    return tmp_path


def refuse() -> None:
    known_verl.check_verl_is_known.__wrapped__()


def test_the_installed_verl_passes_and_so_does_a_later_one_without_either(later, monkeypatch):
    refuse()
    monkeypatch.undo()
    assert (known_verl.Path(verl.__file__).parent / "trainer/ppo/core_algos.py").is_file()
    refuse()


@pytest.mark.parametrize("file", ["workers/data_plane.py", "data_plane/__init__.py"])
def test_a_verl_with_a_data_plane_is_refused(file, later):
    (later / file).parent.mkdir(parents=True)
    (later / file).touch()
    with pytest.raises(PaddingConfigError, match="data_plane"):
        refuse()


def test_a_verl_whose_losses_weigh_rows_is_refused(later):
    (later / "trainer/ppo/core_algos.py").write_text('weight = data["loss_weight"]')
    with pytest.raises(PaddingConfigError, match="loss_weight"):
        refuse()
