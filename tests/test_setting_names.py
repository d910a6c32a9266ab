"""Every setting that a message or a page names is one of verl's or ours, or is told with the + that makes it one."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import verl
import yaml

ROOT = Path(__file__).parent.parent
VERL_CONFIGS = Path(verl.__file__).parent / "trainer" / "config"
SECTIONS = "actor_rollout_ref|critic|trainer|data|algorithm|distillation|reward|skip|transfer_queue|padding|ray_kwargs"
SETTING = re.compile(
    rf"(?<![\w./\[+{{-])(?P<plus>\+{{0,2}})(?P<name>(?:{SECTIONS})\.(?:[A-Za-z_]|{{}})(?:[\w.]|{{}})*(?<![.]))(?!/)"
)
"""The path of a setting, with ``{}`` where an f-string puts something in."""

BY_PLUS = {
    "critic.ppo_infer_max_token_len_per_gpu",
    "critic.{}.micro_batch_size_per_gpu",
    "critic.{}.infer_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.policy_loss.rollout_correction.{}",
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
}
"""Settings that verl or the plug-in reads and no YAML has, so that Hydra wants them with a +."""

OWN = re.compile(
    r"padding\.(fields\.[\w{}]+|\{\}(\.\{\})?)|ray_kwargs\.ray_init\.(num_gpus|address|object_store_memory|_temp_dir"
    r"|runtime_env\.env_vars(\.\w+)?)"
    r"|data\.apply_chat_template_kwargs\.\w+|(actor_rollout_ref|critic)\.model\.override_config\.\w+"
)
"""Settings whose last part is a user's own, or what a user has set, Ray's, a chat template's, and a model's."""


@cache
def settings() -> frozenset[str]:
    """Paths of all settings of verl's composed configs, as verl ships them for each engine, and of ours."""
    files = [*VERL_CONFIGS.glob("_generated_*.yaml"), ROOT / "configs" / "shared" / "padding.yaml"]
    assert len(files) >= 4
    return frozenset(path for file in files for path in _paths(yaml.load(file.read_text(), yaml.CSafeLoader)))


def _paths(node: object, at: str = "") -> Iterator[str]:
    if at:
        yield at
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _paths(value, f"{at}.{key}" if at else str(key))


def named_settings(text: str) -> list[tuple[str, str]]:
    """(+ or nothing, path) of the settings that a text names."""
    found = [(match["plus"], match["name"]) for match in SETTING.finditer(text)]
    return [(plus, name) for plus, name in found if not name.endswith((".png", ".pt", ".py"))]


def texts_of(path: Path) -> Iterator[str]:
    """The strings of a module, with ``{}`` for what is put in; the whole of a page."""
    if path.suffix != ".py":
        yield path.read_text()
        return
    inside: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(child) for child in ast.walk(node)} - {id(node)}
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


def is_known(name: str) -> bool:
    if OWN.fullmatch(name):
        return True
    pattern = re.compile(re.escape(name).replace(r"\{\}", r"[\w.]+"))
    return any(pattern.fullmatch(setting) for setting in settings())


def is_made_by_a_plus(name: str) -> bool:
    return any(re.fullmatch(re.escape(each).replace(r"\{\}", r"[\w{}]+"), name) for each in BY_PLUS)


FILES = [
    *sorted((ROOT / "verl_padding").rglob("*.py")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").rglob("*.md")),
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_setting_that_is_named_is_there(path):
    unknown = [
        f"{plus}{name}"
        for text in texts_of(path)
        for plus, name in named_settings(text)
        if not is_known(name) and not (plus and is_made_by_a_plus(name))
    ]
    assert unknown == []


def test_names_are_found_in_messages_and_pages_and_a_wrong_one_is_seen():
    named = [name for path in FILES for text in texts_of(path) for _, name in named_settings(text)]
    assert len(set(named)) > 40
    assert named_settings("set trainer.v1.{}.parameter_sync_step=2, or +padding.fields.x=response.") == [
        ("", "trainer.v1.{}.parameter_sync_step"),
        ("+", "padding.fields.x"),
    ]
    assert is_known("trainer.v1.{}.parameter_sync_step")
    assert not is_known("trainer.v1.{}.parameter_sync_steps")
    assert not is_known("critic.ppo_infer_micro_batch_size_per_gpu")
    assert not is_known("padding.stratgy")
