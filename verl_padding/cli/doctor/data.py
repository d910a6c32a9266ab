"""What a job's files of data hold: columns, enough prompts, agent loops, prompts that the chat
template takes."""

import inspect
import re
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_padding.cli.doctor.choices import agent_loops
from verl_padding.cli.doctor.files import AGENT, own_agent_loops
from verl_padding.cli.doctor.finding import Finding, warning, wrong
from verl_padding.errors import plural, suggestion

TRAIN, VALIDATION = "data.train_files", "data.val_files"
REWARD = "reward.custom_reward_function.path"


def data_findings(config: DictConfig, tokenizer: Any | None) -> Iterator[Finding]:
    """Reads as many rows as a batch takes.

    Args:
        tokenizer: the model's, None where it is not here.
    """
    if OmegaConf.select(config, "data.custom_cls.path") is not None:
        return  # a data set of the user's own may read the setting in its own way
    for setting in (TRAIN, VALIDATION):
        files = OmegaConf.select(config, setting)
        files = list(files) if isinstance(files, ListConfig) else [str(files)][: files is not None]
        if any("://" in file for file in files):
            continue
        named = ", ".join(files) or "no file"
        needed = config.data.train_batch_size if setting == TRAIN else 1
        try:
            rows = list(islice(chain.from_iterable(map(_rows, files)), needed))
        except Exception as error:  # of the libraries that verl reads it with
            why = " ".join(str(error).split())
            yield wrong(setting, f"{named}: cannot be read ({why}). Correct it.")
            continue
        if len(rows) < needed:
            why = f"{plural(len(rows), 'prompt')}, and {needed} are needed"
            lower = ", or lower data.train_batch_size" if setting == TRAIN else ""
            yield wrong(setting, f"{named}: {why}. Give more{lower}.")
        if rows:
            yield from _columns(config, setting, rows[0])
            yield from _agents(config, setting, rows)
            if config.data.prompt_key in rows[0] and tokenizer is not None:
                yield from _prompts(config, setting, rows, tokenizer)


def _rows(file: str) -> Iterator[Mapping[str, Any]]:
    import datasets

    path = Path(file).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    datasets.disable_progress_bars()
    reader = "parquet" if path.suffix == ".parquet" else "json"
    rows = datasets.load_dataset(reader, data_files=str(path), split="train", streaming=True)
    return iter(rows.decode(False))  # images of rows may be elsewhere, and are not fetched


def _columns(config: DictConfig, setting: str, row: Mapping[str, Any]) -> Iterator[Finding]:
    """Columns that verl reads, and whether it has a reward for a row where the job has none."""
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
    from verl.utils.reward_score import default_compute_score

    if config.data.prompt_key not in row:
        fix = f"Set data.prompt_key. {suggestion(config.data.prompt_key, row.keys())}"
        yield wrong(setting, f"no column {config.data.prompt_key!r} (data.prompt_key). {fix}")
    rewards, has_function = config.reward, OmegaConf.select(config, REWARD) is not None
    # A loop of the user's may give rewards itself.
    if rewards.reward_model.enable or (own_agent_loops(config) and not has_function):
        return
    manager = REWARD_MANAGER.get(rewards.reward_manager.name)
    if manager is None or rewards.reward_manager.source != "register":
        return
    read = re.findall(r'\.non_tensor_batch\["(\w+)"\]', inspect.getsource(manager.run_single))
    if missing := set(read) - row.keys():
        why = f"no column {min(missing)!r}, which the reward manager reads"
        yield wrong(setting, f"{why}. Add it.")
    elif not has_function:
        source = row.get("data_source")
        try:
            # No reward takes None for a solution, but verl first says if it has none for a source.
            default_compute_score(source, None, None)
        except NotImplementedError:
            why = f"verl has no reward for data_source={source!r}"
            yield wrong(REWARD, f"None: {why}. Set it to a file with your reward function.")
        except (TypeError, AttributeError, ImportError):
            return


def _agents(config: DictConfig, setting: str, rows: list[Mapping[str, Any]]) -> Iterator[Finding]:
    """The agent loops that rows choose."""
    loops = agent_loops(config)
    named = {row["agent_name"] for row in rows if "agent_name" in row}
    for name in sorted(map(str, named - set(loops))):
        why = f"agent_name={name!r}: not an agent loop of {AGENT}.agent_loop_config_path"
        yield wrong(setting, f"{why}. {suggestion(name, loops)}")


def _prompts(
    config: DictConfig, setting: str, rows: list[Mapping[str, Any]], tokenizer: Any
) -> Iterator[Finding]:
    """Whether the chat template takes a prompt, and prompts are short enough."""
    column, longest = config.data.prompt_key, config.data.max_prompt_length
    if not isinstance(rows[0][column], list):
        why = f"{column!r} is not a list of messages (role and content)"
        yield wrong(setting, f"{why}. Make it one.")
        return
    options = dict(config.data.get("apply_chat_template_kwargs") or {})
    options |= {"add_generation_prompt": True, "return_dict": False}
    try:  # of text alone: images and sounds make a prompt longer
        lengths = [len(tokenizer.apply_chat_template(row[column], **options)) for row in rows]
    except Exception as error:  # of the template, or of a tokenizer without one
        why = " ".join(str(error).split())
        yield wrong(setting, f"the model's chat template rejects a prompt ({why}). Correct it.")
        return
    *before, last = rows[0][column] or [{}]
    if last.get("role") == "user" and isinstance(last.get("content"), str):
        texts = [f"{last['content']} {word}" for word in ("seven", "eight")]
        prompts = [[*before, {**last, "content": text}] for text in texts]
        seven, eight = (tokenizer.apply_chat_template(each, **options) for each in prompts)
        if seven == eight:
            why = f"the chat template and tokenizer of {tokenizer.name_or_path} drop what users say"
            yield wrong(setting, f"{why}. Correct model.custom_chat_template, or the folder.")
    long = sum(length > longest for length in lengths)
    if long == len(lengths) or (long and not config.data.filter_overlong_prompts):
        why = f"{long} of {plural(len(lengths), 'prompt')} are longer, up to {max(lengths)} tokens"
        yield warning("data.max_prompt_length", f"{longest}: {why}. Raise it, or drop them.")
