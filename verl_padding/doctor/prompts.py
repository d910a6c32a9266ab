"""The first prompts of a job, on the way that they go: verl's data set, its data loader, the chat template, rewards.

verl's own code reads them, from copies of the beginnings of the files. A data set of the user's own is not run.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_padding.doctor.agent_loops import AGENT_COLUMN, DEFAULT, Loop, loops_by_name, own_manager
from verl_padding.doctor.chat_templates import (
    FILTER,
    SECONDS,
    is_costly,
    rendered_prompts,
    shows_something,
    template_of_job,
    tokens_of_template,
)
from verl_padding.doctor.data_files import BUFFER, SETTINGS, enough_prompts, named_files, validates
from verl_padding.doctor.finding import (
    Finding,
    PanicError,
    in_one_line,
    not_looked_at,
    ok,
    panics_as_errors,
    warning,
    wrong,
)
from verl_padding.doctor.loaded_model import LoadedModel
from verl_padding.doctor.rewards import FUNCTION, missing_to_score, read_by_verl, scores_source
from verl_padding.plan.counted import counted

MOST_ROWS = 1000
"""Rows of all files of a setting that are read, at most; and one row of each file with columns of its own."""
MOST_BYTES = 2**24
"""Size of what is read of all files of a setting, at most, as far as their own heads tell."""
MOST_FILES = 16
"""Files of a setting that are read, at most."""
NAMED = 3
"""Files that a finding names, at most."""
TRIED = 64
"""Prompts that are taken through the data loader and the chat template, at most, as long as time allows."""
TAKEN = ("prompts", "responses", "response_mask", "session_id", "trajectory", "trace", "sampling_params", "output")
"""Names that a column may not have: verl's workers call functions with it, or put it over their own field."""
SHOWN = ("image_key", "video_key", "audio_key")
"""Settings of the data with the column of what a prompt has beside text."""
VALIDATE = "validate"
"""What verl's trainer adds to prompts of a validation, and its workers look for in all; whatever it holds."""


@dataclass
class Beginnings:
    """Copies of the first rows of files."""

    files: list[str] = field(default_factory=list)
    """Those of which there is a copy."""
    copies: list[str] = field(default_factory=list)
    rows: int = MOST_ROWS
    """That may still be copied, and so with the size."""
    size: int = MOST_BYTES
    whole: bool = True
    """Whether all rows of all files are in them."""
    kinds: set[str] = field(default_factory=set)
    """Columns of the Parquet files, with their types."""

    def add(self, source: Path, target: Path, *, rows: int, size: int) -> None:
        self.files.append(str(source))
        self.copies.append(str(target))
        self.rows -= rows
        self.size -= size

    @property
    def full(self) -> bool:
        return len(self.files) >= MOST_FILES or self.rows <= 0 or self.size <= 0

    @property
    def have_types(self) -> bool:
        """Whether the columns have the types that they have in the files; JSON has none, but those of all rows."""
        return self.whole or all(file.endswith(".parquet") for file in self.files)


def prompts_of_job(config: DictConfig, model: LoadedModel, loops: Sequence[Loop]) -> Iterator[Finding]:
    """What becomes of the first prompts of the training and of the validation files.

    Args:
        loops: the agent loops that the job certainly starts.
    """
    if config.data.custom_cls.path:
        yield not_looked_at("data.custom_cls.path", f"{config.data.custom_cls.path}: a data set of your own is not run")
        return
    template = list(template_of_job(config, model, loops))
    yield from template
    without = any(finding.verdict == "wrong" for finding in template)
    seen: list[list[tuple[str, list[str]]]] = []
    for setting in SETTINGS:
        named = named_files(config, setting)
        files = [file for _, each in named for file in each]
        if named in seen or any("://" in file for file in files):  # told with the files
            continue
        seen.append(named)
        try:
            with (
                _quiet(),
                tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
                _cache_of_data_sets(folder),
            ):
                found = list(_of_files(config, model, setting, named, Path(folder), without_template=without))
        except (OSError, MemoryError) as error:  # of the temporary folder: the files themselves were read before
            found = [not_looked_at(setting, f"{_told(files)}: not tried ({in_one_line(error)})")]
        yield from found


def _of_files(
    config: DictConfig,
    model: LoadedModel,
    setting: str,
    named: list[tuple[str, list[str]]],
    folder: Path,
    *,
    without_template: bool,
) -> Iterator[Finding]:
    """
    Args:
        named: names of the setting, and the files that each stands for.

    Raises:
        OSError: of the temporary folder.
    """
    files = [file for _, each in named for file in each]
    told, beginnings, to_read = _told(files), Beginnings(), []
    for number, (name, each) in enumerate(named):
        (folder / str(number)).mkdir()
        for place, file in enumerate(each):
            source, target = Path(file).expanduser(), folder / str(number) / f"{place:06}{Path(file).suffix}"
            copy = _copy_parquet if source.suffix == ".parquet" else _copy_json
            if problem := copy(setting, source, target, beginnings):
                yield problem
                return
        if any((folder / str(number)).iterdir()):
            # A pattern, as in the job: verl puts its files into one table, with the columns of the first one.
            to_read.append(str(folder / str(number) / f"*{Path(name).suffix}"))
    try:
        data_set = _data_set(config, model, to_read)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # of the library `datasets`
        yield _refused(config, model, setting, beginnings, error)
        return
    if beginnings.whole and not all(file.endswith(".parquet") for file in files):  # those are counted by their heads
        matter = [each for each in enough_prompts(config, setting, len(data_set)) if each.verdict == "wrong"]
        yield from matter
    if not len(data_set) or (setting == "data.val_files" and not validates(config)):
        return
    items: list[dict[str, Any]] = []
    started = perf_counter()
    while len(items) < min(TRIED, len(data_set)) and (not items or perf_counter() - started < SECONDS):
        try:
            items.append(data_set[len(items)])
        except Exception as error:  # of verl's data set, or of what reads images
            yield _no_prompt(config, model, setting, told, data_set.dataframe[len(items)], len(items), error)
            return
    matter = list(_of_items(config, model, setting, told, items, len(data_set), without_template=without_template))
    yield from matter
    if config.data.filter_overlong_prompts and not without_template:
        try:
            with panics_as_errors():
                filtered = list(_filtered(config, model, setting, data_set, items, whole=beginnings.whole))
        except PanicError as panic:  # which verl's filter does not catch, as it does all other errors
            filtered = [
                wrong(
                    FILTER,
                    f"true: verl's filter ends with the job at the prompts of {setting} ({in_one_line(panic)}). Name "
                    "another tokenizer, or mend its files.",
                )
            ]
        except Exception as error:  # of the library `datasets`
            filtered = [
                not_looked_at(FILTER, f"true: the first prompts cannot be filtered here ({in_one_line(error)})")
            ]
        yield from filtered
    if not matter:
        yield ok(setting, f"{counted(len(items), 'prompt')} tried")


def _no_prompt(
    config: DictConfig, model: LoadedModel, setting: str, told: str, row: dict[str, Any], number: int, error: Exception
) -> Finding:
    """Why verl's data set makes no prompt of a row."""
    if isinstance(row.get("extra_info"), str):
        return wrong(
            setting,
            f"{told}: prompt {number} has a text in its column 'extra_info', and verl takes a mapping. Write it as "
            "one, a struct of Parquet or an object of JSON, not as text.",
        )
    shown = [key for key in (config.data.get(name) for name in SHOWN) if key and row.get(key)]
    if shown and model.processor is None:
        return wrong(
            setting,
            f"{told}: prompt {number} has something in its column {shown[0]!r}, and the model reads text alone. Name a "
            "model that takes more than text, or leave the column out, and its marks (<image>) in the prompts.",
        )
    return wrong(setting, f"{told}: verl's data set cannot make prompt {number} ({in_one_line(error)}).")


def _told(files: list[str]) -> str:
    return ", ".join(files) if len(files) <= NAMED else f"{files[0]} and {len(files) - 1} others"


def _refused(config: DictConfig, model: LoadedModel, setting: str, beginnings: Beginnings, error: Exception) -> Finding:
    """What verl's data set says of files, by the file that is why."""
    told = _told(beginnings.files)
    if not beginnings.have_types:
        return not_looked_at(setting, f"{told}: their beginnings cannot be read alone ({in_one_line(error)})")
    for file, copy in zip(beginnings.files, beginnings.copies, strict=True):
        try:
            _data_set(config, model, [copy])
        except (OSError, MemoryError):
            raise
        except Exception as own:  # of the library `datasets`
            return wrong(setting, f"{file}: cannot be read ({in_one_line(own)}). Write it again.")
    return wrong(
        setting,
        f"{told}: verl's data set cannot read them together ({in_one_line(error)}). Write them anew, with the same "
        "columns of the same types.",
    )


def _of_items(
    config: DictConfig,
    model: LoadedModel,
    setting: str,
    told: str,
    items: list[dict[str, Any]],
    prompts: int,
    *,
    without_template: bool,
) -> Iterator[Finding]:
    """What is the matter with the first prompts, as the data set gives them."""
    if not own_manager(config) and (taken := [name for name in TAKEN if name in items[0]]):
        yield wrong(
            setting,
            f"{told}: has a column {taken[0]!r}, a name that verl's agent loop workers use themselves: every "
            "session fails. Rename it.",
        )
        return
    if not own_manager(config) and setting == "data.train_files" and VALIDATE in items[0]:
        yield wrong(
            setting,
            f"{told}: has a column {VALIDATE!r}, by which verl's agent loop workers know prompts of a validation: no "
            "row would come to the trainer, and the first step would never end. Rename it.",
        )
        return
    if problem := _refusal_of_batch(items):
        yield wrong(setting, f"{told}: verl cannot make a batch of the prompts ({problem}).")
        return
    by_name, default = loops_by_name(config), OmegaConf.select(config, DEFAULT)
    for_loops = [(item, by_name.get(str(item.get(AGENT_COLUMN, default)))) for item in items]
    if read_by_verl(config):
        certain = [item for item, loop in for_loops if loop and loop.leaves_rewards()]
        yield from _rewards(config, setting, told, certain)
        seem = [item for item, loop in for_loops if loop and loop.seems_to_leave_rewards() and "data_source" in item]
        if not certain and (unknown := _without_score(config, seem)):
            yield warning(
                setting,
                f"{told}: its data_source is {unknown}, and verl has no score for that: a session ends where its agent "
                f"loop gives an output no reward_score. Set {FUNCTION}.path to a function of your own.",
            )
    by_verl = [item for item, loop in for_loops if loop and loop.is_verls and not is_costly(item)]
    if without_template:
        return
    if by_verl:
        yield from rendered_prompts(config, model, setting, told, by_verl, prompts=prompts)
    elif any(loop.seems_to_apply_template() for loop in {loop for _, loop in for_loops if loop}):
        yield from tokens_of_template(config, model)


def _copy_parquet(setting: str, source: Path, target: Path, beginnings: Beginnings) -> Finding | None:
    """Copies the first rows; where there are enough, one row of a file with columns of its own.

    Returns:
        Why the file cannot be tried, if it is so.

    Raises:
        OSError: of the temporary folder.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(source, buffer_size=BUFFER) as read:
            head, schema = read.metadata, read.schema_arrow
            kind = f"{schema.remove_metadata()} {(schema.metadata or {}).get(b'huggingface')!r}"
            if beginnings.full and (kind in beginnings.kinds or len(beginnings.kinds) >= MOST_FILES):
                beginnings.whole = False
                return None
            size = sum(head.row_group(number).total_byte_size for number in range(head.num_row_groups))
            per_row = max(1, size // max(1, head.num_rows))
            most = max(1, min(beginnings.rows, beginnings.size // per_row))
            first = next(read.iter_batches(batch_size=most), None)
            table = pyarrow.Table.from_batches([first] if first else [], schema=schema)
    except (OSError, pyarrow.ArrowInvalid) as error:
        return wrong(setting, f"{source}: cannot be read ({in_one_line(error)}). Write it again.")
    except pyarrow.ArrowException as error:
        return not_looked_at(setting, f"{source}: its beginning cannot be read alone ({in_one_line(error)})")
    try:
        parquet.write_table(table, target)
    except pyarrow.ArrowException as error:
        return not_looked_at(setting, f"{source}: its beginning cannot be copied ({in_one_line(error)})")
    beginnings.kinds.add(kind)
    beginnings.whole &= table.num_rows == head.num_rows
    beginnings.add(source, target, rows=table.num_rows, size=table.num_rows * per_row)
    return None


def _copy_json(setting: str, source: Path, target: Path, beginnings: Beginnings) -> Finding | None:
    """Copies a file, or the first lines of a large one.

    Returns:
        Why the file cannot be tried, if it is so.

    Raises:
        OSError: of the temporary folder.
    """
    if beginnings.full:
        beginnings.whole = False
        return None
    try:
        size = source.stat().st_size
        with source.open("rb") as read:
            first = read.read(min(size, beginnings.size))
    except OSError as error:
        return wrong(setting, f"{source}: cannot be read ({in_one_line(error)}). Write it again.")
    if size > len(first):
        first = _whole_lines(first)
        beginnings.whole = False
        if not first and beginnings.files:
            return None  # of which the others are tried
        if not first:
            return not_looked_at(setting, f"{source}: a large file that has not one object of JSON in each line")
    target.write_bytes(first)
    beginnings.add(source, target, rows=first.count(b"\n"), size=len(first))
    return None


def _whole_lines(first: bytes) -> bytes:
    """The first lines, if each is an object of JSON; otherwise nothing."""
    lines = first.split(b"\n", MOST_ROWS)[:-1]
    try:
        is_row = isinstance(json.loads(lines[0].decode("utf-8-sig")) if lines else None, dict)
    except ValueError:
        is_row = False
    return b"".join(line + b"\n" for line in lines) if is_row else b""


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


def _rewards(config: DictConfig, setting: str, told: str, items: list[dict[str, Any]]) -> Iterator[Finding]:
    for number, item in enumerate(items):
        truth = item.get("reward_model")
        if isinstance(truth, str):
            yield wrong(
                setting,
                f"{told}: prompt {number} has a text in its column 'reward_model', and verl's reward managers take a "
                "mapping with a ground_truth. Write it as one, not as text.",
            )
            return
        if "data_source" not in item or not isinstance(truth, dict) or "ground_truth" not in truth:
            yield wrong(
                setting,
                f"{told}: prompt {number} has no data_source, or no reward_model with a ground_truth, and verl's "
                "reward managers read both. Add them, or have the agent loop give each output a reward_score.",
            )
            return
    if unknown := _without_score(config, items):
        yield wrong(
            setting,
            f"{told}: its data_source is {unknown}, and verl has no score for that. Set {FUNCTION}.path to a function "
            "of your own.",
        )
    elif not config.reward.custom_reward_function.path:
        sources = sorted({str(item["data_source"]) for item in items})
        if missing := next(filter(None, map(missing_to_score, sources)), ""):
            yield wrong(
                setting,
                f"{told}: verl's score for its data_source cannot be imported: {missing}. Install it, or set "
                f"{FUNCTION}.path to a function of your own.",
            )


def _without_score(config: DictConfig, items: list[dict[str, Any]]) -> str:
    """The data sources that neither verl nor a function of the user's own scores, "" for none."""
    if config.reward.custom_reward_function.path:
        return ""
    return ", ".join(
        sorted({str(item["data_source"]) for item in items if not scores_source(str(item["data_source"]))})
    )


def _filtered(
    config: DictConfig, model: LoadedModel, setting: str, data_set: Any, items: list[dict[str, Any]], *, whole: bool
) -> Iterator[Finding]:
    """Leaves out what verl leaves out of the first prompts, and counts the rest."""
    if any(map(shows_something, items)):
        yield not_looked_at(FILTER, f"true: the prompts of {setting} have more than text, which takes long to filter")
        return
    started, tried = perf_counter(), len(items)
    left = _left(data_set, 0, tried)
    if model.processor is None and tried < len(data_set):  # no other prompt has more than text
        in_time = int(tried * SECONDS / max(perf_counter() - started, 1e-3))
        more = min(len(data_set), tried + in_time)
        left += _left(data_set, tried, more)
        tried = more
    whole = whole and tried == len(data_set)
    limit = OmegaConf.select(config, SETTINGS[setting]) or 0
    told = f"true: leaves {left} of {'' if whole else 'the first '}{counted(tried, 'prompt')}"
    if whole and left < tried and limit <= 0:
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


def _left(data_set: Any, first: int, end: int) -> int:
    """Prompts of some rows that verl's filter leaves."""
    data_set.filter_overlong_prompts = True
    return len(data_set.maybe_filter_out_long_prompts(data_set.dataframe.select(range(first, end))))


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
    """Copies of copies go into the same temporary folder, not among those of the user's own; no hub counts them."""
    import datasets.config

    ours = {"HF_DATASETS_CACHE": Path(folder) / "cache", "HF_UPDATE_DOWNLOAD_COUNTS": False}
    kept = {name: getattr(datasets.config, name) for name in ours}
    try:
        for name, value in ours.items():
            setattr(datasets.config, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(datasets.config, name, value)
