"""The agent loops that a job starts: there, and callable as verl calls them. None is run."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_padding.doctor.certain_code import nodes_run_by
from verl_padding.doctor.data_files import names_in_column
from verl_padding.doctor.entries import entries_of, refuse_bad_entry, refuse_missing_keys
from verl_padding.doctor.finding import Finding, not_looked_at, ok, warning, wrong
from verl_padding.doctor.loop_outputs import OUTPUT, WRITTEN, encodings_as_ids, fields_left_out
from verl_padding.doctor.named_objects import file_of, module_and_name, parsed
from verl_padding.doctor.returned import gives_nothing_to_await, is_generator
from verl_padding.doctor.signatures import class_of_target, lacks_attribute, method, refuse_call

AGENT = "actor_rollout_ref.rollout.agent"
LOOPS = f"{AGENT}.agent_loop_config_path"
DEFAULT = f"{AGENT}.default_agent_loop"
MANAGER = f"{AGENT}.agent_loop_manager_class"
EXTERNAL = "actor_rollout_ref.model.external_lib"
"""A module that verl's workers import as they start, and that may register what it likes."""
PARSER = "actor_rollout_ref.rollout.multi_turn.format"

AGENT_COLUMN = "agent_name"
"""Column of the prompts that names the agent loop of each, in place of the default one."""
WITH_TOOLS = "tool_agent"
OF_VERL = "verl."
"""Beginning of the dotted path of a class of verl's own."""

READ_LOG_PROBS = (
    "actor_rollout_ref.rollout.calculate_log_probs",
    "algorithm.rollout_correction.bypass_mode",
)
"""Settings by which verl's trainer reads the log-probs of the rollout."""
NEEDED = ("name", "_target_")
"""Keys of an entry in the job's file of loops."""
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
APPLY = ("self.tokenizer.apply_chat_template", "self.processor.apply_chat_template", "self.ct_build_initial_tokens")
"""Calls that put messages through the model's own chat template."""
BUILDS = "ct_build_initial_tokens"
MAKE_NO_OUTPUT = {*sys.stdlib_module_names, "verl", "torch", "numpy", "transformers"} - {"importlib"}
"""Packages none of whose functions gives an agent loop an output with a reward."""
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

    def seems_to_apply_template(self) -> bool:
        """Whether a loop of the user's own calls its model's chat template, and never asks whether there is one."""
        applied = False
        for node in self._own_nodes():
            match node:
                case ast.Attribute(attr="chat_template") | ast.Constant(value="chat_template"):
                    return False
                case ast.keyword(arg="chat_template") | ast.Try():
                    return False
                case ast.Call() if ast.unparse(node.func) in APPLY:
                    applied |= not any(keyword.arg is None for keyword in node.keywords)
        return applied

    def builds_tokens(self) -> bool:
        """Whether a loop of the user's own certainly has verl put messages through the chat template."""
        loop = self._class()
        return loop is not None and any(
            name == BUILDS and not nodes and method(loop, name) is None for name, nodes in nodes_run_by(loop, "run")
        )

    def leaves_rewards(self) -> bool:
        """Whether it certainly leaves them to verl's reward managers: all that ``run`` returns is made without any."""
        if self.is_verls:
            return True
        loop = self._class()
        run = method(loop, "run") if loop is not None and self._extends_verls() else None
        if run is None:
            return False
        returned = [node.value for node in ast.walk(run) if isinstance(node, ast.Return)]
        in_sight = bool(returned) and all(map(_is_made_in_full, returned))
        return self._names_no_reward() and (in_sight or self._makes_all_outputs())

    def seems_to_leave_rewards(self) -> bool:
        """Whether it leaves them to verl's reward managers, unless what it calls in other files sets them."""
        return self.is_verls or (self._class() is not None and self._names_no_reward())

    def _makes_all_outputs(self) -> bool:
        """Whether its file makes outputs, all in plain sight, and imports nothing that might make others."""
        made = [node for node in self._nodes() if isinstance(node, ast.Call) and _name_of(node) == OUTPUT]
        imported = [name for node in self._nodes() for name in _packages_of(node)]
        return bool(made) and all(map(_is_made_in_full, made)) and all(name in MAKE_NO_OUTPUT for name in imported)

    def _names_no_reward(self) -> bool:
        """Whether nothing in its file is called as the field of outputs with a reward."""
        for node in self._nodes():
            match node:
                case ast.Name(id="reward_score") | ast.Attribute(attr="reward_score"):
                    return False
                case ast.Constant(value="reward_score") | ast.keyword(arg="reward_score"):
                    return False
        return True

    def _class(self) -> ast.ClassDef | None:
        try:
            found = class_of_target(self.target)
        except LookupError:  # told with the file of loops
            return None
        return found[1] if found else None

    def _extends_verls(self) -> bool:
        """Whether all that its class extends is verl's own, and nobody else's."""
        loop = self._class()
        imported = {
            alias.asname or alias.name
            for node in self._nodes()
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(OF_VERL)
            for alias in node.names
        }
        return loop is not None and all(isinstance(base, ast.Name) and base.id in imported for base in loop.bases)

    def _own_nodes(self) -> Iterator[ast.AST]:
        """All of its class."""
        loop = self._class()
        yield from ast.walk(loop) if loop is not None else ()

    def _nodes(self) -> Iterator[ast.AST]:
        """All of the file that its class is in."""
        try:
            source = file_of(f"pkg://{module_and_name(self.target)[0]}")
            yield from ast.walk(parsed(source)) if source else ()
        except LookupError:  # told with the file of loops
            return


def _is_made_in_full(returned: ast.expr | None) -> bool:
    """Whether it is ``AgentLoopOutput(..)`` with all that it gets in plain sight."""
    if not isinstance(returned, ast.Call) or _name_of(returned) != OUTPUT:
        return False
    return not any(keyword.arg is None for keyword in returned.keywords)


def _name_of(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _packages_of(node: ast.AST) -> list[str]:
    """First parts of the names that an import imports from; "" for the module's own package."""
    match node:
        case ast.Import(names=names):
            return [alias.name.split(".")[0] for alias in names]
        case ast.ImportFrom(module=module, level=level):
            return ["" if level else str(module).split(".")[0]]
    return []


def known_loops(config: DictConfig) -> dict[str, str]:
    """Name -> dotted path of verl's loops and of those in the job's file, whether they are there or not.

    Raises:
        LookupError: the file cannot be read, or an entry of it is none, with a sentence.
    """
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    known = {name: str(entry["_target_"]) for name, entry in _agent_loop_registry.items()}
    if path := OmegaConf.select(config, LOOPS):
        entries = entries_of(path)
        if entries and not isinstance(entries, ListConfig):
            raise LookupError(f"it holds no list. Write each loop as an entry with {' and '.join(NEEDED)}, behind a -")
        for entry in entries:
            refuse_missing_keys(entry, *NEEDED)
            known[str(entry.name)] = _target(entry)
    return known


def _target(entry: DictConfig) -> str:
    try:
        return str(entry["_target_"])
    except OmegaConfBaseException:  # a reference to what the workers may have, and this machine has not
        return ""


def loops_of_job(config: DictConfig) -> list[Loop]:
    """Loops that the job starts, of those that are known; none of them where that cannot be told."""
    try:
        known = known_loops(config)
    except LookupError:
        return []
    started = None if own_manager(config) else _started(config)
    return [Loop(name=name, target=known[name]) for name in sorted((started or set()) & known.keys())]


def loops_by_name(config: DictConfig) -> dict[str, Loop]:
    """All loops that prompts of the job may name; none where a manager of the user's own starts them."""
    try:
        known = {} if own_manager(config) else known_loops(config)
    except LookupError:
        return {}
    return {name: Loop(name=name, target=target) for name, target in known.items()}


def own_manager(config: DictConfig) -> str | None:
    """The class of the user's own that starts agent loops in its own way, if the job has one."""
    return OmegaConf.select(config, MANAGER) or None


def _started(config: DictConfig) -> set[str] | None:
    """Names that the data gives to the loops of its prompts; None if they are not known."""
    default, started = str(OmegaConf.select(config, DEFAULT)), set()
    for names in names_in_column(config, AGENT_COLUMN):
        if not names.known:
            return None
        started |= {default} if names.values is None else names.values
    return started


def agent_loops_of_job(config: DictConfig) -> Iterator[Finding]:
    """The loops of the job's file, and whether the loop that it starts is one of these or of verl's."""
    if manager := own_manager(config):
        yield not_looked_at(LOOPS, f"{manager}: a manager of your own starts agent loops in its own way")
        return
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
        yield from _entries(config, path)
    yield _default(config, known)
    registers = OmegaConf.select(config, EXTERNAL)
    for column in names_in_column(config, AGENT_COLUMN):
        if unknown := sorted((column.values or set()) - known.keys()):
            if registers:
                yield not_looked_at(column.setting, f"{', '.join(unknown)}: {registers} may register it")
                continue
            told = _choices(unknown, known, path)
            yield wrong(column.setting, f"{column.file}: its column {AGENT_COLUMN} names {', '.join(unknown)}. {told}")
    if any(loop.name == WITH_TOOLS and loop.is_verls for loop in loops_of_job(config)):
        yield from _parser(config)


def _entries(config: DictConfig, path: str) -> Iterator[Finding]:
    """What is the matter with loops of the job's file; verl makes only those that prompts name, or that is for all."""
    started = _started(config) or set()
    for entry in entries_of(path):
        name = str(entry.name)
        try:
            refuse_bad_entry(entry, "_target_", needed=NEEDED)
            _refuse_uncallable(entry)
        except LookupError as problem:
            if name in started:
                yield wrong(LOOPS, f"{path}: {problem}. Correct the setting, or the file.")
            else:
                yield warning(LOOPS, f"{path}: {problem}. No prompt is known to name {name!r}; one that does fails.")
            continue
        if name in started:
            yield from _outputs(config, path, _target(entry))


def _outputs(config: DictConfig, path: str, target: str) -> Iterator[Finding]:
    """What the outputs of a loop lack."""
    found = class_of_target(target) if target else None
    if found is None or target.startswith(OF_VERL):
        return
    given = sorted(encodings_as_ids(found[1]), key=lambda each: (not each[1], each[0]))
    for line, is_certain in given[:1]:
        told, fix = f"{path}: {target}, line {line}", "Add return_dict=False to apply_chat_template."
        if is_certain:
            yield wrong(
                LOOPS,
                f"{told}: what apply_chat_template returns is a mapping, as of transformers 5, and prompt_ids are "
                f"a list of token ids. {fix}",
            )
        else:
            yield warning(
                LOOPS,
                f"{told}: a session that comes here ends, since apply_chat_template returns a mapping, as of "
                f"transformers 5, and prompt_ids are a list of token ids. {fix}",
            )
    # verl's trainer takes them from TransferQueue, to compare them with the model's or in their place.
    log_probs = any(OmegaConf.select(config, setting) for setting in READ_LOG_PROBS)
    for field, is_certain in fields_left_out(parsed(found[0]), found[1], log_probs=log_probs):
        told, written = f"{path}: {target}: makes {OUTPUT}(..)", WRITTEN.get(field, field)
        if is_certain:
            yield wrong(LOOPS, f"{told} without {field}, and a step ends for want of it. Add {written}.")
        else:
            yield warning(LOOPS, f"{told} in some place without {field}; a step with it ends. Add {written}.")


def _default(config: DictConfig, known: dict[str, str]) -> Finding:
    """The loop of prompts that name none."""
    name, registers = str(OmegaConf.select(config, DEFAULT)), OmegaConf.select(config, EXTERNAL)
    if name in known:
        return ok(DEFAULT, name)
    if registers:
        return not_looked_at(DEFAULT, f"{name}: {registers} may register it")
    started = _started(config)
    if started is None:
        return warning(DEFAULT, f"{name}: no agent loop that is known here; a prompt that names none fails.")
    if name not in started:
        return ok(DEFAULT, f"{name}: each prompt names another")
    return wrong(
        DEFAULT, f"{name}: no agent loop of this name. {_choices([name], known, OmegaConf.select(config, LOOPS))}"
    )


def _choices(unknown: list[str], known: dict[str, str], path: str | None) -> str:
    near = [found for name in unknown for found in get_close_matches(name, known, n=1, cutoff=0.6)]
    meant = f"Did you mean {', '.join(dict.fromkeys(near))}? " if near else ""
    more = "" if path else f" {LOOPS} adds others."
    return f"{meant}Choices: {', '.join(sorted(known))}.{more}"


def _parser(config: DictConfig) -> Iterator[Finding]:
    from verl.experimental.agent_loop.tool_parser import ToolParser

    name = OmegaConf.select(config, PARSER)
    if name in ToolParser._registry:
        return
    if registers := OmegaConf.select(config, EXTERNAL):
        yield not_looked_at(PARSER, f"{name}: {registers} may register it")
    else:
        choices = ", ".join(sorted(ToolParser._registry))
        yield wrong(PARSER, f"{name}: verl reads tool calls in no such format. Choices: {choices}.")


def _refuse_uncallable(entry: DictConfig) -> None:
    """
    Raises:
        LookupError: verl's workers cannot make the loop of an entry, or not run it, with a sentence.
    """
    target = _target(entry)
    found = class_of_target(target) if target else None
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
    if (made := method(loop, "__init__")) and "_args_" not in entry:
        own = [str(key) for key in entry if not str(key).startswith("_")]  # those are Hydra's
        refuse_call(made, [*MADE_WITH, *own], positional=1)
    if run := method(loop, "run"):
        if is_generator(run):
            raise LookupError(f"{loop.name}.run has a yield, and verl awaits what it returns")
        if isinstance(run, ast.FunctionDef) and gives_nothing_to_await(run, (OUTPUT,)):
            raise LookupError(f"{loop.name}.run is no async function, and verl awaits it")
        refuse_call(run, RUN_WITH, positional=2, or_more=True)
