"""The page of verl's settings names each of them, and none that verl lacks."""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from verl.workers import config as verl_config

from tests.support.verl_config import compose_job

sys.path.append(str(Path(__file__).parent.parent / "docs" / "_ext"))
verl_settings = pytest.importorskip("verl_settings", reason="takes the extra `docs`")
pytestmark = pytest.mark.docs

ENGINES = ("dp", "megatron", "veomni", "torchtitan")
SECTIONS = ("actor_rollout_ref", "critic")
CLASSES = {
    "fsdp_config": verl_config.FSDPEngineConfig,
    "fsdp": verl_config.FSDPEngineConfig,
    "megatron": verl_config.McoreEngineConfig,
    "veomni": verl_config.VeOmniEngineConfig,
    "critic": verl_config.CriticConfig,
}
"""Last part of a section -> verl's class of it."""


def keys_below(section: dict, path: str = "") -> Iterator[str]:
    for key, value in section.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict) and value:
            yield from keys_below(value, name)
        elif key != "_target_":
            yield name


@pytest.fixture(scope="module")
def keys() -> set[str]:
    """Every key of verl's config, with each engine."""
    found: set[str] = set()
    for engine in ENGINES:
        config = compose_job(f"model_engine={engine}")
        found |= set(keys_below(OmegaConf.to_container(config)))
    return found


def stands_for(section: str, listed: str, key: str) -> bool:
    name = f"{section}.{listed}" if section else listed
    if name.endswith(".*"):
        return key.startswith(name.removesuffix("*")) or key == name.removesuffix(".*")
    return key == name


def listed_keys() -> list[tuple[str, str]]:
    return [
        (section, key)
        for _, rows in verl_settings.sections()
        for row in rows
        if not row.by_class
        for section in row.under
        for key in row.keys
    ]


def test_each_setting_of_verls_sections_is_on_the_page_once(keys):
    of_sections = [key for key in keys if key.startswith(tuple(f"{name}." for name in SECTIONS))]
    assert len(of_sections) > 700
    listed = listed_keys()
    met = Counter({key: sum(stands_for(*entry, key) for entry in listed) for key in of_sections})
    assert {key: count for key, count in met.items() if count != 1} == {}


def test_each_setting_on_the_page_is_one_of_verls(keys):
    stale = [
        key
        for _, rows in verl_settings.sections()
        for row in rows
        for key in row.keys
        if row.by_class is any(stands_for(section, key, known) for section in row.under for known in keys)
    ]
    assert stale == []


def test_what_the_yaml_leaves_out_are_fields_of_verls_classes():
    found = [
        (section, key)
        for _, rows in verl_settings.sections()
        for row in rows
        if row.by_class
        for section in row.under
        for key in row.keys
    ]
    assert len(found) > 10
    for section, key in found:
        assert key in {field.name for field in fields(CLASSES[section.split(".")[-1]])}, (section, key)


def test_a_new_setting_would_be_missed():
    # Known to be able to fail: none of the lines that stand for many is wide enough for one of these.
    for key in (
        "actor_rollout_ref.model.pack_rows",
        "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size",
        "critic.megatron.max_tokens",
        "actor_rollout_ref.rollout.log_prob_budget",
    ):
        assert not any(stands_for(*entry, key) for entry in listed_keys())


def test_each_line_has_a_verdict_and_a_reason():
    rows = [row for _, rows in verl_settings.sections() for row in rows]
    assert {row.verdict for row in rows} == set(verl_settings.VERDICTS)
    assert all(len(row.why) > 10 for row in rows)
    assert all(key in verl_settings.page() for row in rows for key in row.keys)
