"""Every setting that a message or a page names is one of verl's or ours, or is told with the + that
makes it one."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import verl
import yaml

ROOT = Path(__file__).parent.parent
VERL_CONFIGS = Path(verl.__file__).parent / "trainer" / "config"
SECTIONS = (
    "actor_rollout_ref|critic|trainer|data|algorithm|distillation|reward|skip|transfer_queue|padding"
    "|ray_kwargs"
)
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
"""Settings whose last part is a user's own, or what a user has set, Ray's, a chat template's, and a
model's."""


FILES = [
    p
    for place in ("verl_padding", "docs", "recipes")
    for p in (ROOT / place).rglob("*")
    if p.suffix in (".py", ".md")
]
FILES.append(ROOT / "README.md")


def paths_in(node: object, at: str = "") -> Iterator[str]:
    yield at
    for key, value in node.items() if isinstance(node, dict) else ():
        yield from paths_in(value, f"{at}.{key}".lstrip("."))


CONFIGS = [*VERL_CONFIGS.glob("_generated_*.yaml"), ROOT / "configs" / "shared" / "padding.yaml"]
SETTINGS = {
    path for file in CONFIGS for path in paths_in(yaml.load(file.read_text(), yaml.CSafeLoader))
}


def named_settings(path: Path) -> set[tuple[str, str]]:
    """(+ or nothing, path) of those that a page names, or a string of a module, with ``{}`` for
    what is put in."""
    text = path.read_text()
    if path.suffix == ".py":
        nodes = ast.walk(ast.parse(text))
        literals = [
            ast.unparse(node) for node in nodes if isinstance(node, (ast.JoinedStr, ast.Constant))
        ]
        text = "\n".join(re.sub(r"\{[^{}]*\}", "{}", literal) for literal in literals)
    found = {(match["plus"], match["name"]) for match in SETTING.finditer(text)}
    return {(plus, name) for plus, name in found if not name.endswith((".png", ".pt", ".py"))}


@cache
def is_known(plus: str, name: str) -> bool:
    by_plus = (re.escape(each).replace(r"\{\}", r"[\w{}]+") for each in BY_PLUS if plus)
    if OWN.fullmatch(name) or any(re.fullmatch(pattern, name) for pattern in by_plus):
        return True
    return any(map(re.compile(re.escape(name).replace(r"\{\}", r"[\w.]+")).fullmatch, SETTINGS))


def test_every_setting_that_is_named_is_there():
    named = {
        (path.relative_to(ROOT).as_posix(), *setting)
        for path in FILES
        for setting in named_settings(path)
    }
    assert len({name for _, _, name in named}) > 40
    assert [each for each in sorted(named) if not is_known(*each[1:])] == []
    assert not is_known("", "trainer.v1.{}.parameter_sync_steps")
