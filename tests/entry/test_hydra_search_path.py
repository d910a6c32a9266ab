"""The config groups are on Hydra's search path while the plug-in is there."""

from tests.support.verl_config import compose_job
from verl_padding.entry.hydra_search_path import VerlPaddingSearchPath


def test_without_the_plugin_hydra_takes_the_flag_for_a_plain_string(monkeypatch):
    # Why run scripts start with the doctor: nothing of ours is there to speak. If this fails, Hydra
    # speaks.
    assert compose_job("+padding=prompt").padding.strategy == "prompt"
    monkeypatch.setattr(VerlPaddingSearchPath, "manipulate_search_path", lambda *_: None)
    assert compose_job("+padding=prompt").padding == "prompt"
