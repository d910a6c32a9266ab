"""The files of prompts that a job reads: there, readable, and with enough prompts for a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_padding.doctor.finding import Finding, not_looked_at, ok, wrong
from verl_padding.doctor.lfs_pointers import is_lfs_pointer
from verl_padding.doctor.settings import NAME_YOURS, is_verls_own
from verl_padding.job.modes import MODE_PREFIX, SYNC
from verl_padding.plan.counted import counted

READ_BY_REWARDS = ("data_source", "reward_model")
KINDS = (".parquet", ".json", ".jsonl")
"""What verl's data set reads."""
BUFFER = 2**20
"""Bytes that are read of a Parquet file at once; without it, a column of a whole row group is."""


SETTINGS = {"data.train_files": "data.train_max_samples", "data.val_files": "data.val_max_samples"}
"""Setting of files -> that of how many of their prompts are used, if it is more than 0."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the job's agent loops and rewards need of the data."""

    messages: bool
    rewards: bool


def data_files_of_job(config: DictConfig, needs: Needs) -> Iterator[Finding]:
    """Each file, and whether there are enough prompts. verl opens the validation files even if it never validates."""
    data = config.data
    for setting, most in SETTINGS.items():
        prompts: int | None = 0
        for named, files in named_files(config, setting):
            for name in files:
                finding, rows = _file(setting, named, name, data, needs)
                yield finding
                prompts = None if prompts is None or rows is None else prompts + rows
        if prompts is not None:
            limit = OmegaConf.select(config, most) or 0
            prompts = min(prompts, limit) if limit > 0 else prompts
            yield from enough_prompts(config, setting, prompts)


def files_of(config: DictConfig, setting: str) -> list[str]:
    """Files that a setting names."""
    return [file for _, files in named_files(config, setting) for file in files]


def named_files(config: DictConfig, setting: str) -> list[tuple[str, list[str]]]:
    """Each name of a setting, and the files that it stands for: a pattern stands for all that it matches."""
    value, own_data_set = OmegaConf.select(config, setting), bool(config.data.custom_cls.path)
    names = map(str, value) if isinstance(value, ListConfig) else [str(value)]
    return [(name, _matches(name, own_data_set) or [name]) for name in names]


def _matches(name: str, own_data_set: bool) -> list[str]:
    """Files of a pattern; none for a name with a slash at its end, which verl refuses.

    Args:
        own_data_set: one of the user's own, which may know what ~ is; verl's does not.
    """
    pattern = Path(name).expanduser() if own_data_set else Path(name)
    return [] if name.endswith("/") else sorted(glob(str(pattern)))


def _file(setting: str, named: str, name: str, data: DictConfig, needs: Needs) -> tuple[Finding, int | None]:
    """What is to be said of one file, and its rows if they are known.

    Args:
        named: the file's name in the setting, which may be a pattern.
        name: of the file.
    """
    if "://" in name:
        return not_looked_at(setting, f"{name}: verl copies it when the job starts"), None
    path = Path(name).expanduser()
    if not path.exists():
        if is_verls_own(setting, name):
            return wrong(setting, f"{name}: is the value of verl's own config, and not here. {NAME_YOURS}"), None
        return wrong(setting, f"{name}: there is no such file. Correct the path."), None
    if data.custom_cls.path:
        return ok(setting, name), None
    if name.startswith("~"):
        return wrong(setting, f"{name}: verl does not know what ~ is. Write the whole path: {path}"), None
    if path.is_dir():
        return wrong(setting, f"{name}: is a folder. Name the files in it: {name.rstrip('/')}/*.parquet"), None
    if name.endswith("/"):
        return wrong(setting, f"{name}: ends with a /, and verl takes no such path. Write {name.rstrip('/')}"), None
    if Path(named).suffix not in KINDS:  # by which verl chooses how to read all of a pattern
        return wrong(setting, f"{named}: verl's data set reads {', '.join(KINDS)} only. Name such files."), None
    if is_lfs_pointer(path):
        return wrong(setting, f"{name}: is a pointer of Git LFS, not the file itself. git lfs pull"), None
    if path.suffix != ".parquet":
        return ok(setting, name), None
    import pyarrow
    from pyarrow import parquet

    try:
        read: Any = parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        return wrong(setting, f"{name}: cannot be read ({_first_line(error)}). Write it again."), None
    with read:
        columns, rows = read.schema_arrow.names, read.metadata.num_rows
        kinds = {field.name: field.type for field in read.schema_arrow}
    if data.prompt_key not in columns:
        return wrong(
            setting,
            f"{name}: has no column {data.prompt_key!r} (data.prompt_key), only {', '.join(columns)}. Set "
            "data.prompt_key to the column of the prompts.",
        ), rows
    if needs.messages and (held := _no_messages(kinds[data.prompt_key])):
        return wrong(
            setting,
            f"{name}: its column {data.prompt_key!r} holds {held}, and verl's agent loops take lists of messages. "
            'Write each prompt as [{"role": "user", "content": ..}], or name an agent loop of your own.',
        ), rows
    if needs.rewards and (missing := [column for column in READ_BY_REWARDS if column not in columns]):
        return wrong(
            setting,
            f"{name}: has no column {missing[0]!r}, which verl's reward managers read. Add "
            f"{' and '.join(map(repr, missing))}; an example is in verl's examples/data_preprocess/gsm8k.py.",
        ), rows
    return ok(setting, f"{name}, {counted(rows, 'prompt')}"), rows


def _no_messages(kind: Any) -> str | None:
    """What a column of prompts holds that are no messages; None if they are, or if it is not known from the type."""
    from pyarrow import types

    if types.is_string(kind) or types.is_large_string(kind):
        return "text"
    if not (types.is_list(kind) or types.is_large_list(kind)) or not types.is_struct(kind.value_type):
        return None
    keys = [field.name for field in kind.value_type]
    return None if {"role", "content"} <= set(keys) else f"lists of objects with {', '.join(keys)}"


@dataclass(frozen=True, kw_only=True)
class Names:
    """What a column of one file names."""

    setting: str
    file: str
    values: set[str] | None
    """None where the file has no such column."""
    known: bool = True
    """False for a file whose columns cannot be told without reading it whole, or not here."""


def names_in_column(config: DictConfig, column: str) -> Iterator[Names]:
    """Values of a column of each file that the job puts to the model; a data set of the user's own makes its own."""
    from pyarrow import ArrowException, parquet

    for setting in SETTINGS:
        if setting == "data.val_files" and not validates(config):
            continue
        for name in files_of(config, setting):
            path, unknown = Path(name).expanduser(), Names(setting=setting, file=name, values=None, known=False)
            if config.data.custom_cls.path or "://" in name or path.suffix != ".parquet" or not path.is_file():
                yield unknown
                continue
            values: set[str] = set()
            try:
                with parquet.ParquetFile(path, buffer_size=BUFFER) as read:
                    has_it = column in read.schema_arrow.names
                    for batch in read.iter_batches(columns=[column]) if has_it else ():
                        values |= set(map(str, batch.column(0).unique().to_pylist()))
            except (OSError, ArrowException):  # told as a file that cannot be read
                yield unknown
            else:
                yield Names(setting=setting, file=name, values=values if has_it else None)


def enough_prompts(config: DictConfig, setting: str, prompts: int) -> Iterator[Finding]:
    """Whether there are as many prompts as verl's data loader fetches at once.

    Args:
        setting: of the files that they come from.
        prompts: how many there are.
    """
    if setting == "data.train_files":
        yield _enough_to_train(config, prompts)
    elif prompts == 0 and not config.data.val_batch_size:
        yield wrong(
            setting,
            "there is no prompt, and verl makes a data loader of them even if it never validates. Name other files, "
            "the training files for example.",
        )


def validates(config: DictConfig) -> bool:
    """Whether the job ever puts a prompt of its validation files to the model."""
    return bool(config.trainer.get("val_before_train", True) or config.trainer.test_freq > 0)


def prompts_at_once(config: DictConfig) -> int:
    """Prompts that verl's data loader fetches together; it leaves out a rest that is fewer."""
    data = config.data
    filters = (config.algorithm.get("filter_groups") or {}).get("enable", False)
    refills = filters or config.trainer.v1.sampler.get("sync_refill_failed_groups", False)
    is_sync = config.trainer.v1.trainer_mode.removeprefix(MODE_PREFIX) == SYNC
    # Its other modes fetch prompts one by one.
    return (data.gen_batch_size or data.train_batch_size) if is_sync and not refills else 1


def _enough_to_train(config: DictConfig, prompts: int) -> Finding:
    data, setting = config.data, "data.train_batch_size"
    fetched = prompts_at_once(config)
    limit = data.get("train_max_samples", -1)
    cut = f" (data.train_max_samples={limit})" if limit == prompts else ""
    told = f"{data.train_batch_size}: the data set has {counted(prompts, 'prompt')}{cut}"
    if prompts < fetched:
        return wrong(setting, f"{told}, and verl leaves out a batch that is not whole. Lower it, or add prompts.")
    if fetched > 1 and data.train_batch_size % fetched:
        return wrong(
            "data.gen_batch_size",
            f"{fetched}: does not divide data.train_batch_size={data.train_batch_size}, which verl fetches in parts of "
            "this size. Leave it out, or set it to a divisor.",
        )
    if prompts < data.train_batch_size and not config.trainer.get("val_only"):
        # verl counts its epochs by their steps, also where trainer.total_training_steps is set.
        return wrong(setting, f"{told}, so an epoch has no step, by which verl divides. Lower it, or add prompts.")
    return ok(setting, f"{data.train_batch_size} of {counted(prompts, 'prompt')}")


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
