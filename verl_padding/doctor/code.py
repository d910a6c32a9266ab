"""Code of the user's own that a job loads beside rewards, agent loops and tools. It is looked for, and not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.finding import Finding, looked_for, ok, wrong
from verl_padding.doctor.named_objects import file_of, is_module, refuse_missing_object, refuse_missing_target
from verl_padding.doctor.signatures import defined_in, lacks_attribute, method, refuse_call

AGENT = "actor_rollout_ref.rollout.agent"
DATA_SET = "data.custom_cls"
OBJECTS = (DATA_SET, "trainer.v1.sampler.custom_sampler", f"{AGENT}.custom_async_server")
"""Sections with the ``path`` of a file or module, and the ``name`` of what is taken from it."""
MADE_WITH = ("data_files", "tokenizer", "processor", "config", "max_samples")
"""What verl makes a data set with, by name."""

TARGETS = (f"{AGENT}.agent_loop_manager_class", "trainer.checkpoint_callback_class")
"""Settings that are the dotted path of a class."""


def code_of_job(config: DictConfig) -> Iterator[Finding]:
    """The files and modules that the job names are there, and hold what it takes from them."""
    for section in OBJECTS:
        path = OmegaConf.select(config, f"{section}.path")
        name = OmegaConf.select(config, f"{section}.name")
        if path:
            told = f"{path} ({name})"
            found = looked_for(f"{section}.path", told, partial(refuse_missing_object, path, name))
            if found.verdict == "ok" and section == DATA_SET:
                found = looked_for(found.subject, told, partial(_refuse_no_data_set, path, name))
            yield found
    for setting in TARGETS:
        if target := OmegaConf.select(config, setting):
            yield looked_for(setting, target, partial(refuse_missing_target, target))
    if module := config.actor_rollout_ref.model.get("external_lib"):
        setting = "actor_rollout_ref.model.external_lib"
        there = is_module(module)
        yield ok(setting, module) if there else wrong(setting, f"{module}: there is no such module. Correct the name.")


def _refuse_no_data_set(path: str, name: str) -> None:
    """
    Raises:
        LookupError: verl cannot make a data set of the class, with a sentence.
    """
    source = file_of(path)
    node = defined_in(source, name)
    if source is None or not isinstance(node, ast.ClassDef):
        return
    if not node.bases or lacks_attribute(source, node, "__getitem__"):
        raise LookupError(f"{name} is no torch.utils.data.Dataset with a method '__getitem__'")
    if made := method(node, "__init__"):
        refuse_call(made, MADE_WITH, positional=1)
