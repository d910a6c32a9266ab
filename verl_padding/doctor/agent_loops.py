"""The agent loops that a job starts: there, and callable as verl calls them. None is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.data_files import names_in_column
from verl_padding.doctor.entries import entries_of, refuse_bad_entry
from verl_padding.doctor.finding import Finding, ok, warning, wrong
from verl_padding.doctor.named_objects import file_of, module_and_name, parsed
from verl_padding.doctor.signatures import class_of_target, lacks_attribute, method, refuse_call

AGENT = "actor_rollout_ref.rollout.agent"
LOOPS = f"{AGENT}.agent_loop_config_path"
DEFAULT = f"{AGENT}.default_agent_loop"
PARSER = "actor_rollout_ref.rollout.multi_turn.format"

AGENT_COLUMN = "agent_name"
"""Column of the prompts that names the agent loop of each, in place of the default one."""
WITH_TOOLS = "tool_agent"
OF_VERL = "verl."
"""Beginning of the dotted path of a class of verl's own."""

MADE_WITH = (
    "trainer_config",
    "server_manager",
    "tokenizer",
    "processor",
    "hf_model_type",
    "dataset_cls",
    "data_config",
    "tools",
)
"""What verl's workers make an agent loop with, by name, beside what stands in its entry."""
RUN_WITH = ("raw_prompt", "index", "uid", "session_id")
"""What verl's workers always call ``run`` with, by name, beside the columns of the data."""


@dataclass(frozen=True)
class Loop:
    """An agent loop that a job starts."""

    name: str
    target: str
    """Dotted path of its class."""

    @property
    def is_verls(self) -> bool:
        """Whether it is one that comes with verl."""
        return self.target.startswith(OF_VERL)

    def applies_template(self) -> bool:
        """Whether it certainly puts prompts through the model's own chat template."""
        if self.is_verls:
            return True
        applied = False
        for node in self._nodes():
            match node:
                case ast.Attribute(attr="chat_template"):
                    return False  # it looks whether there is one, or sets its own
                case ast.Call(func=ast.Attribute(attr="apply_chat_template" | "ct_build_initial_tokens")):
                    applied |= not any(keyword.arg in (None, "chat_template") for keyword in node.keywords)
        return applied

    def leaves_rewards(self) -> bool:
        """Whether it certainly leaves them to verl's reward managers: all that it makes of outputs has no score."""
        if self.is_verls:
            return True
        if not self._extends_verls():
            return False
        made = False
        for node in self._nodes():
            match node:
                case ast.Name(id="reward_score") | ast.Attribute(attr="reward_score"):
                    return False
                case ast.Constant(value="reward_score") | ast.keyword(arg="reward_score"):
                    return False
                case ast.Call(func=ast.Name(id="AgentLoopOutput") | ast.Attribute(attr="AgentLoopOutput")):
                    if any(keyword.arg is None for keyword in node.keywords):
                        return False
                    made = True
        return made

    def _extends_verls(self) -> bool:
        """Whether all that its class extends is verl's own, and nobody else's."""
        try:
            found = class_of_target(self.target)
        except LookupError:
            return False
        if found is None:
            return False
        source, loop = found
        imported = {
            alias.asname or alias.name
            for node in parsed(source).body
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(OF_VERL)
            for alias in node.names
        }
        return all(isinstance(base, ast.Name) and base.id in imported for base in loop.bases)

    def _nodes(self) -> Iterator[ast.AST]:
        """All of the file that its class is in."""
        try:
            source = file_of(f"pkg://{module_and_name(self.target)[0]}")
            yield from ast.walk(parsed(source)) if source else ()
        except LookupError:  # told with the file of loops
            return


def known_loops(config: DictConfig) -> dict[str, str]:
    """Name -> dotted path of verl's loops and of those in the job's file.

    Raises:
        LookupError: the file or an entry of it is wrong, with a sentence.
    """
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    known = {name: str(entry["_target_"]) for name, entry in _agent_loop_registry.items()}
    if path := OmegaConf.select(config, LOOPS):
        for entry in entries_of(path):
            refuse_bad_entry(entry, "_target_", needed=("name", "_target_"))
            _refuse_uncallable(entry)
            known[str(entry.name)] = str(entry["_target_"])
    return known


def loops_of_job(config: DictConfig) -> list[Loop]:
    """Those of known loops that the job starts: the ones that its data names, or else the default one."""
    try:
        known = known_loops(config)
    except LookupError:
        return []
    default = str(OmegaConf.select(config, DEFAULT))
    started: set[str] = set()
    for _, _, names in names_in_column(config, AGENT_COLUMN):
        started |= {default} if names is None else names
    return [Loop(name=name, target=known[name]) for name in sorted((started or {default}) & known.keys())]


def agent_loops_of_job(config: DictConfig) -> Iterator[Finding]:
    """The loops of the job's file, and whether the loop that it starts is one of these or of verl's."""
    path = OmegaConf.select(config, LOOPS)
    try:
        known = known_loops(config)
    except LookupError as problem:
        yield wrong(LOOPS, f"{path}: {problem}. Correct the setting, or the file.")
        return
    if path:
        names = [str(entry.name) for entry in entries_of(path)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            yield warning(LOOPS, f"{path}: names {twice[0]} twice; verl takes the last one. Give each its own name.")
        else:
            yield ok(LOOPS, str(path))
    name = OmegaConf.select(config, DEFAULT)
    if name in known:
        yield ok(DEFAULT, name)
    else:
        yield wrong(DEFAULT, f"{name}: no agent loop of this name. {_choices([str(name)], known, path)}")
    for setting, file, named in names_in_column(config, AGENT_COLUMN):
        if unknown := sorted((named or set()) - known.keys()):
            told = _choices(unknown, known, path)
            yield wrong(setting, f"{file}: its column {AGENT_COLUMN} names {', '.join(unknown)}. {told}")
    if any(loop.name == WITH_TOOLS and loop.is_verls for loop in loops_of_job(config)):
        yield from _parser(config)


def _choices(unknown: list[str], known: dict[str, str], path: str | None) -> str:
    near = [found for name in unknown for found in get_close_matches(name, known, n=1, cutoff=0.6)]
    meant = f"Did you mean {', '.join(dict.fromkeys(near))}? " if near else ""
    more = "" if path else f" {LOOPS} adds others."
    return f"{meant}Choices: {', '.join(sorted(known))}.{more}"


def _parser(config: DictConfig) -> Iterator[Finding]:
    from verl.experimental.agent_loop.tool_parser import ToolParser

    name = OmegaConf.select(config, PARSER)
    if name not in ToolParser._registry:
        choices = ", ".join(sorted(ToolParser._registry))
        yield wrong(PARSER, f"{name}: verl reads tool calls in no such format. Choices: {choices}.")


def _refuse_uncallable(entry: DictConfig) -> None:
    """
    Raises:
        LookupError: verl's workers cannot make the loop of an entry, or not run it, with a sentence.
    """
    target = str(entry["_target_"])
    found = class_of_target(target)
    if found is None:
        return
    source, loop = found
    try:
        _refuse_other_class(entry, source, loop)
    except LookupError as problem:
        raise LookupError(f"{target}: {problem}") from problem


def _refuse_other_class(entry: DictConfig, source: Path, loop: ast.ClassDef) -> None:
    if lacks_attribute(source, loop, "run"):
        raise LookupError(f"{loop.name} has no method 'run', which verl awaits for each session")
    if made := method(loop, "__init__"):
        own = [str(key) for key in entry if key != "_target_"]
        refuse_call(made, [*MADE_WITH, *own], positional=1)
    if run := method(loop, "run"):
        if isinstance(run, ast.FunctionDef) and not any(isinstance(node, ast.Return) for node in ast.walk(run)):
            raise LookupError(f"{loop.name}.run is no async function, and verl awaits it")
        refuse_call(run, RUN_WITH, positional=2, or_more=True)
