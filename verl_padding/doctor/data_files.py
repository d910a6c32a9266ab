"""The files of prompts that a job reads: there, readable, and with enough prompts for a batch."""

from __future__ import annotations

from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_padding.doctor.finding import Finding, not_looked_at, ok, wrong
from verl_padding.plan.counted import counted
from verl_padding.verl_job.modes import MODE_PREFIX, SYNC

VERLS_LOOPS = ("single_turn_agent", "tool_agent")
"""Agent loops that leave rewards to verl's reward managers and put prompts through the model's chat template."""
READ_BY_REWARDS = ("data_source", "reward_model")
KINDS = (".parquet", ".json", ".jsonl")
"""What verl's data set reads."""


def data_files_of_job(config: DictConfig) -> Iterator[Finding]:
    """Each file, and whether there are enough prompts. verl opens the validation files even if it never validates."""
    data = config.data
    own_data_set = bool(data.custom_cls.path)
    verls_loops = config.actor_rollout_ref.rollout.agent.default_agent_loop in VERLS_LOOPS
    prompts: int | None = 0
    for setting in ("data.train_files", "data.val_files"):
        for name in _names(OmegaConf.select(config, setting)):
            finding, rows = _file(setting, name, data, own_data_set=own_data_set, verls_loops=verls_loops)
            yield finding
            if setting == "data.train_files":
                prompts = None if prompts is None or rows is None else prompts + rows
    if prompts is not None:
        yield _enough(config, prompts)


def _names(value: str | ListConfig) -> list[str]:
    """Names of files; a pattern stands for all that it matches, as for the library that reads them."""
    names = map(str, value) if isinstance(value, ListConfig) else [str(value)]
    return [found for name in names for found in (sorted(glob(str(Path(name).expanduser()))) or [name])]


def _file(
    setting: str, name: str, data: DictConfig, *, own_data_set: bool, verls_loops: bool
) -> tuple[Finding, int | None]:
    """What is to be said of one file, and its rows if they are known."""
    if "://" in name:
        return not_looked_at(setting, f"{name}: verl copies it when the job starts"), None
    path = Path(name).expanduser()
    if not path.exists():
        return wrong(setting, f"{name}: there is no such file. Correct the path."), None
    if own_data_set:
        return ok(setting, name), None
    if path.is_dir():
        return wrong(setting, f"{name}: is a folder. Name the files in it: {name.rstrip('/')}/*.parquet"), None
    if path.suffix not in KINDS:
        return wrong(setting, f"{name}: verl's data set reads {', '.join(KINDS)} only. Name such a file."), None
    if path.suffix != ".parquet":
        return not_looked_at(setting, f"{name}: it is there; its prompts are not counted"), None
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
    if verls_loops and (held := _no_messages(kinds[data.prompt_key])):
        return wrong(
            setting,
            f"{name}: its column {data.prompt_key!r} holds {held}, and verl's agent loops take lists of messages. "
            'Write each prompt as [{"role": "user", "content": ..}].',
        ), rows
    if verls_loops and (missing := [column for column in READ_BY_REWARDS if column not in columns]):
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


def names_in_column(config: DictConfig, column: str) -> Iterator[tuple[str, set[str]]]:
    """(file, values) of each training file that can be read and has such a column of text."""
    from pyarrow import ArrowException, parquet

    for name in _names(config.data.train_files):
        path = Path(name).expanduser()
        if path.suffix != ".parquet" or not path.is_file():
            continue
        try:
            with parquet.ParquetFile(path) as read:
                if column in read.schema_arrow.names:
                    yield name, set(map(str, read.read([column])[column].unique().to_pylist()))
        except (OSError, ArrowException):  # told as a file that cannot be read
            continue


def _enough(config: DictConfig, prompts: int) -> Finding:
    data, setting = config.data, "data.train_batch_size"
    if data.train_max_samples > 0:
        prompts = min(prompts, data.train_max_samples)
    filters = (config.algorithm.get("filter_groups") or {}).get("enable", False)
    refills = filters or config.trainer.v1.sampler.get("sync_refill_failed_groups", False)
    is_sync = config.trainer.v1.trainer_mode.removeprefix(MODE_PREFIX) == SYNC
    # Its other modes fetch prompts one by one.
    fetched = (data.gen_batch_size or data.train_batch_size) if is_sync and not refills else 1
    told = f"{data.train_batch_size}: the data set has {counted(prompts, 'prompt')}"
    if prompts < fetched:
        return wrong(setting, f"{told}, and verl leaves out a batch that is not whole. Lower it, or add prompts.")
    if prompts < data.train_batch_size and config.trainer.total_training_steps is None:
        return wrong(
            setting, f"{told}, so an epoch has no step. Lower it, add prompts, or set trainer.total_training_steps."
        )
    return ok(setting, f"{data.train_batch_size} of {counted(prompts, 'prompt')}")


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
