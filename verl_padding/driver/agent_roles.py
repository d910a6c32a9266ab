"""Roles of an agent's rows, such as a lead and its sub-agents: each is compared with its own kind.

What is easy for one role may be hard for another, and not every session has rows of each. So with
``padding.baseline=role`` verl's estimator runs once for each role, on the rows of that role alone.
"""

from collections.abc import Iterator, Sequence

from omegaconf import DictConfig

from verl_padding.config import PaddingConfig
from verl_padding.errors import PaddingDataError, refuse
from verl_padding.job.verl_losses import WITHOUT_GROUPS
from verl_padding.pads.queue import KVBatchMeta, read_extra_fields, select_rows
from verl_padding.plan.row_keys import rows_by_name

ROLE = "role"
"""What an agent loop puts into a row's ``extra_fields``: a name, the same in all sessions."""


def check_baseline(config: DictConfig, padding: PaddingConfig) -> None:
    """Refuses a baseline of roles for an estimator that has none."""
    name = config.algorithm.adv_estimator
    if padding.baseline == "role" and name in WITHOUT_GROUPS:
        why = f"algorithm.adv_estimator={name} does not compare the sessions of a prompt"
        refuse("padding.baseline='role'", why, "Set it to prompt, or use such an estimator (grpo).")


def read_roles(keys: Sequence[str], partition_id: str) -> list[str]:
    """The role of each row; a PaddingDataError if one has none."""
    role_R: list[str] = []
    for key, extra in zip(keys, read_extra_fields(keys, partition_id), strict=True):
        role = extra.get(ROLE)
        if not isinstance(role, str) or not role:
            raise PaddingDataError(
                f"row {key!r}: extra_fields[{ROLE!r}] is {role!r}, not the name of a role. Have "
                "the agent loop give each row one, or set padding.baseline=prompt."
            )
        role_R.append(role)
    return role_R


def parts_by_role(
    batch: KVBatchMeta, role_R: Sequence[str], parent_R: Sequence[int | None]
) -> Iterator[tuple[KVBatchMeta, list[int | None]]]:
    """The rows of each role, and which of them each continues.

    Args:
        role_R: role of each row of the batch.
        parent_R: number of the row of the batch that each row continues. A row that goes on from
            one of another role continues the nearest of its own before that.
    """
    for rows in rows_by_name(role_R).values():
        place_of = {row: place for place, row in enumerate(rows)}
        continued: list[int | None] = []
        for row in rows:
            earlier = parent_R[row]
            while earlier is not None and earlier not in place_of:
                earlier = parent_R[earlier]
            continued.append(None if earlier is None else place_of[earlier])
        yield select_rows(batch, rows), continued
