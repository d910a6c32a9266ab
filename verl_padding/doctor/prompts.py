"""The first prompts of a job, on the way that they go: verl's data set, its data loader, the chat template, rewards.

verl's own code reads them, from copies of the beginnings of the files. A data set of the user's own is not run.
"""

from __future__ import annotations

import io
import itertools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_padding.doctor.agent_loops import AGENT_COLUMN, DEFAULT, Loop
from verl_padding.doctor.chat_templates import FILTER, SECONDS, rendered_prompts, template_of_job
from verl_padding.doctor.data_files import SETTINGS, enough_prompts, files_of, validates
from verl_padding.doctor.finding import Finding, in_one_line, not_looked_at, ok, warning, wrong
from verl_padding.doctor.loaded_model import LoadedModel
from verl_padding.doctor.rewards import read_by_verl, scores_source
from verl_padding.plan.counted import counted

MOST_ROWS = 1000
"""Rows of all files of a setting that are read, at most."""
MOST_BYTES = 2**24
"""Size of what is read of a file, at most, as far as its own head tells."""
TRIED = 64
"""Prompts that are taken through the data loader and the chat template, at most, as long as time allows."""
TAKEN = ("prompts", "responses", "response_mask", "session_id", "trajectory", "trace", "sampling_params", "output")
"""Names that a column may not have: verl's workers call functions with it, or put it over their own field."""


@dataclass
class Beginnings:
    """Copies of the first rows of files."""

    files: list[str] = field(default_factory=list)
    whole: bool = True
    """Whether all rows of all files are in them."""


def prompts_of_job(config: DictConfig, model: LoadedModel, loops: Sequence[Loop]) -> Iterator[Finding]:
    """What becomes of the first prompts of the training and of the validation files.

    Args:
        loops: the agent loops that the job starts.
    """
    if config.data.custom_cls.path:
        yield not_looked_at("data.custom_cls.path", f"{config.data.custom_cls.path}: a data set of your own is not run")
        return
    yield from template_of_job(config, model, loops)
    seen: list[list[str]] = []
    for setting in SETTINGS:
        files = files_of(config, setting)
        if files not in seen:
            seen.append(files)
            with _quiet(), tempfile.TemporaryDirectory() as folder, _cache_of_data_sets(folder):
                found = list(_of_files(config, model, loops, setting, files, Path(folder)))
            yield from found


def _of_files(
    config: DictConfig, model: LoadedModel, loops: Sequence[Loop], setting: str, files: list[str], folder: Path
) -> Iterator[Finding]:
    told = ", ".join(files)
    beginnings = Beginnings()
    for number, file in enumerate(files):
        if "://" in file:
            return  # told with the files
        if not _copy_beginning(Path(file).expanduser(), folder / f"{number}{Path(file).suffix}", beginnings):
            yield not_looked_at(setting, f"{file}: a large file of one JSON array")
            return
    try:
        data_set = _data_set(config, model, beginnings.files)
    except Exception as error:  # of the library `datasets`
        for file, copy in zip(files, beginnings.files, strict=True):
            try:
                _data_set(config, model, [copy])
            except Exception as own:  # the same
                yield wrong(setting, f"{file}: cannot be read ({in_one_line(own)}). Write it again.")
                return
        yield wrong(setting, f"{told}: verl's data set cannot read them together ({in_one_line(error)}).")
        return
    if beginnings.whole and not all(file.endswith(".parquet") for file in files):  # those are counted by their heads
        matter = [each for each in enough_prompts(config, setting, len(data_set)) if each.verdict == "wrong"]
        yield from matter
    if not len(data_set) or (setting == "data.val_files" and not validates(config)):
        return
    items: list[dict[str, Any]] = []
    started = perf_counter()
    while len(items) < min(TRIED, len(data_set)) and perf_counter() - started < SECONDS:
        try:
            items.append(data_set[len(items)])
        except Exception as error:  # of verl's data set, or of what reads images
            yield wrong(setting, f"{told}: verl's data set cannot make prompt {len(items)} ({in_one_line(error)}).")
            return
    matter = list(_of_items(config, model, loops, setting, told, items))
    yield from matter
    if config.data.filter_overlong_prompts:
        yield from _filtered(config, setting, data_set, whole=beginnings.whole)
    if not matter:
        yield ok(setting, f"{counted(len(items), 'prompt')} tried")


def _of_items(
    config: DictConfig,
    model: LoadedModel,
    loops: Sequence[Loop],
    setting: str,
    told: str,
    items: list[dict[str, Any]],
) -> Iterator[Finding]:
    """What is the matter with the first prompts, as the data set gives them."""
    if taken := [name for name in TAKEN if name in items[0]]:
        yield wrong(
            setting,
            f"{told}: has a column {taken[0]!r}, a name that verl's agent loop workers use themselves: every "
            "session fails. Rename it.",
        )
        return
    if problem := _refusal_of_batch(items):
        yield wrong(setting, f"{told}: verl cannot make a batch of the prompts ({problem}).")
        return
    by_name = {loop.name: loop for loop in loops}
    default = OmegaConf.select(config, DEFAULT)
    for_loops = [(item, by_name.get(str(item.get(AGENT_COLUMN, default)))) for item in items]
    if read_by_verl(config):
        yield from _rewards(config, setting, told, [item for item, loop in for_loops if loop and loop.leaves_rewards()])
    if by_verl := [item for item, loop in for_loops if loop and loop.is_verls and not _is_costly(item)]:
        yield from rendered_prompts(config, model, setting, told, by_verl)


def _copy_beginning(source: Path, target: Path, beginnings: Beginnings) -> bool:
    """Returns: False if the file has none that could be read alone."""
    if source.suffix == ".parquet":
        beginnings.whole &= _copy_rows(source, target)
    elif source.stat().st_size <= MOST_BYTES:
        shutil.copyfile(source, target)
    else:
        with source.open(encoding="utf-8") as lines:
            first = list(itertools.islice(lines, MOST_ROWS))
        if first[0].lstrip().startswith("["):
            return False
        target.write_text("".join(first), encoding="utf-8")
        beginnings.whole = False
    beginnings.files.append(str(target))
    return True


def _copy_rows(source: Path, target: Path) -> bool:
    """Returns: whether all rows were copied."""
    import pyarrow
    from pyarrow import parquet

    with parquet.ParquetFile(source) as read:
        rows, head = read.metadata.num_rows, read.metadata
        size = sum(head.row_group(number).total_byte_size for number in range(head.num_row_groups))
        most = max(TRIED, min(MOST_ROWS, int(MOST_BYTES * rows / max(size, 1))))
        first = next(read.iter_batches(batch_size=most), None)
        table = pyarrow.Table.from_batches([first] if first else [], schema=read.schema_arrow)
    parquet.write_table(table, target)
    return bool(table.num_rows == rows)


def _data_set(config: DictConfig, model: LoadedModel, files: list[str]) -> Any:
    """verl's own, of the copies; all prompts are kept, and no tool is loaded: a tool may be the user's code."""
    from verl.trainer.ppo.utils import create_rl_dataset

    data = OmegaConf.create(OmegaConf.to_container(config.data, resolve=True))
    with open_dict(data):
        data.update(filter_overlong_prompts=False, filter_overlong_prompts_workers=None, use_shm=False)
        data.update(tool_config_path=None, function_tool_path=None)
    return create_rl_dataset(files, data, model.tokenizer, model.processor)


def _refusal_of_batch(items: list[dict[str, Any]]) -> str | None:
    from verl.utils import tensordict_utils
    from verl.utils.dataset.rl_dataset import collate_fn

    try:
        tensordict_utils.get_tensordict(collate_fn(items))
    except Exception as error:  # of NumPy, torch or tensordict
        return in_one_line(error)
    return None


def _is_costly(item: dict[str, Any]) -> bool:
    """Whether a prompt has a video or audio, which take seconds, or an image that is elsewhere."""
    contents = [message.get("content") for message in item["raw_prompt"] if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    kinds = {part.get("type") for part in parts}
    return bool(kinds & {"video", "audio"}) or any(str(part.get("image", "")).startswith("http") for part in parts)


def _rewards(config: DictConfig, setting: str, told: str, items: list[dict[str, Any]]) -> Iterator[Finding]:
    for number, item in enumerate(items):
        truth = item.get("reward_model")
        if "data_source" not in item or not isinstance(truth, dict) or "ground_truth" not in truth:
            yield wrong(
                setting,
                f"{told}: prompt {number} has no data_source, or no reward_model with a ground_truth, and verl's "
                "reward managers read both. Add them, or have the agent loop give each output a reward_score.",
            )
            return
    if not config.reward.custom_reward_function.path:
        sources = {item["data_source"] for item in items}
        if unknown := sorted(str(source) for source in sources if not scores_source(str(source))):
            yield wrong(
                setting,
                f"{told}: its data_source is {', '.join(unknown)}, and verl has no score for that. Set "
                "reward.custom_reward_function.path to a function of your own.",
            )


def _filtered(config: DictConfig, setting: str, data_set: Any, *, whole: bool) -> Iterator[Finding]:
    """Leaves out what verl leaves out, and counts the rest."""
    data_set.filter_overlong_prompts = True
    before, left = len(data_set), len(data_set.maybe_filter_out_long_prompts(data_set.dataframe))
    limit = OmegaConf.select(config, SETTINGS[setting]) or 0
    told = f"true: leaves {left} of {counted(before, 'prompt')}"
    if whole and left < before and limit <= 0:
        matter = [each for each in enough_prompts(config, setting, left) if each.verdict == "wrong"]
        if matter:
            yield wrong(
                FILTER,
                f"{told} of {setting}, too few for a batch. Correct the prompts, or raise data.max_prompt_length="
                f"{config.data.max_prompt_length}; what cannot be put through the chat template is left out too.",
            )
            return
    elif not left:
        yield warning(FILTER, f"{told} at the beginning of {setting}. Raise data.max_prompt_length.")
        return
    yield ok(FILTER, told)


@contextmanager
def _quiet() -> Iterator[None]:
    """verl and the libraries print what they do, and the traceback of each prompt that they leave out."""
    import datasets

    shown = datasets.utils.logging.is_progress_bar_enabled()
    datasets.utils.logging.disable_progress_bar()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        if shown:
            datasets.utils.logging.enable_progress_bar()


@contextmanager
def _cache_of_data_sets(folder: str) -> Iterator[None]:
    """Copies of copies go into the same temporary folder, not among those of the user's own data sets."""
    import datasets.config

    kept = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"
    try:
        yield
    finally:
        datasets.config.HF_DATASETS_CACHE = kept
