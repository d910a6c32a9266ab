"""Rows of Parquet files without a value that a job needs, wherever they are: read from the files' own statistics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.data_files import BUFFER, READ_BY_REWARDS, SETTINGS, Needs, files_of, validates
from verl_padding.doctor.finding import Finding, warning, wrong
from verl_padding.plan.counted import counted

MOST_BYTES = 2**24
"""Size of a column whose rows are counted where its statistics alone do not tell."""
FILTER = "data.filter_overlong_prompts"


def null_rows_of_job(config: DictConfig, needs: Needs) -> Iterator[Finding]:
    """Prompts that are null, and what reward managers read of a row; nothing of files that are told already."""
    if config.data.custom_cls.path:
        return
    for setting in SETTINGS:
        if setting == "data.val_files" and not validates(config):
            continue
        files = [name for name in files_of(config, setting) if _is_parquet(name)]
        key = config.data.prompt_key
        yield from _prompts(config, setting, {name: _nulls(name, key) for name in files}, files_of(config, setting))
        if not needs.rewards:
            continue
        own = config.reward.custom_reward_function.path
        for column in READ_BY_REWARDS:
            if column == "data_source" and own:
                continue  # which may do without
            for name in files:
                nulls, rows = _nulls(name, column)
                if nulls:
                    yield warning(
                        setting,
                        f"{name}: {nulls} of {counted(rows, 'row')} have no {column}, which verl's reward managers "
                        "read of each; their sessions fail. Fill them in, or leave these rows out.",
                    )


def _prompts(
    config: DictConfig, setting: str, found: dict[str, tuple[int, int]], files: list[str]
) -> Iterator[Finding]:
    """
    Args:
        found: of each Parquet file, its null prompts and its rows.
        files: all files of the setting.
    """
    if config.data.filter_overlong_prompts:
        return  # it leaves them out
    nulls, rows = sum(each[0] for each in found.values()), sum(each[1] for each in found.values())
    is_met = set(found) == set(files) and _read_for_certain(config, setting, rows) > rows - nulls
    for name, (of_file, in_file) in found.items():
        if not of_file:
            continue
        told = f"{name}: {of_file} of {counted(in_file, 'prompt')} are null"
        if is_met:
            yield wrong(setting, f"{told}, and verl's data set ends with the job at the first of them. Leave them out.")
        else:
            yield warning(setting, f"{told}: where verl's data set comes to one, it ends with the job. Leave them out.")


def _read_for_certain(config: DictConfig, setting: str, rows: int) -> int:
    """Rows that the job reads at least, whatever their order."""
    data = config.data
    if (OmegaConf.select(config, SETTINGS[setting]) or 0) > 0 or config.trainer.get("val_only"):
        return 0
    if setting == "data.val_files":
        return rows
    if data.train_batch_size < 1:
        return 0  # told as a setting
    steps, epoch = config.trainer.total_training_steps, rows // data.train_batch_size
    return int(data.train_batch_size * (epoch if steps is None else min(steps, epoch)))


def _is_parquet(name: str) -> bool:
    return "://" not in name and name.endswith(".parquet") and Path(name).expanduser().is_file()


def _nulls(name: str, column: str) -> tuple[int, int]:
    """Returns: rows of a file whose value in a column is null, as far as that can be told quickly, and all rows."""
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(Path(name).expanduser(), buffer_size=BUFFER) as read:
            return _nulls_of(read, column), read.metadata.num_rows
    except (OSError, ArrowException):  # told as a file that cannot be read
        return 0, 0


def _nulls_of(read: Any, column: str) -> int:
    head, nulls = read.metadata, 0
    for number in range(head.num_row_groups):
        group = head.row_group(number)
        leaves = [group.column(index) for index in range(group.num_columns)]
        leaves = [leaf for leaf in leaves if leaf.path_in_schema.split(".")[0] == column]
        counts = [_null_count(leaf) for leaf in leaves]
        if not counts or 0 in counts:
            continue
        smallest = min(leaves, key=lambda leaf: leaf.total_uncompressed_size)
        if smallest.path_in_schema == column:
            nulls += counts[0] or 0
        elif smallest.total_uncompressed_size <= MOST_BYTES:
            # a list or mapping that is there may hold nulls, too
            nulls += read.read_row_group(number, columns=[smallest.path_in_schema]).column(0).null_count
    return nulls


def _null_count(leaf: Any) -> int | None:
    statistics = leaf.statistics
    return statistics.null_count if statistics is not None and statistics.has_null_count else None
