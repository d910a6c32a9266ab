"""A metric of your own in a padded trainer: how the tokens of a session are shared out between lead
and sub-agents.

``VERL_USE_EXTERNAL_MODULES=verl_padding.recipes.subagents.session_metrics`` loads this module in
every process, and ``trainer.v1.trainer_mode=subagents_sync`` chooses its trainer. verl imports such
a module while verl itself is being imported, so the trainer is defined when the padded trainers
are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook

from verl_padding.plan.row_keys import parts_of_key

TRAINER_NAME = "subagents_sync"


def session_metrics(keys: Sequence[str], tags: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Rows of a session, and the share of its response tokens that its last row has; both are means
    over sessions.

    Example:
        Session ``p0_3`` of rows ``p0_3_0``, ``p0_3_1``, ``p0_3_2`` with 2, 2 and 60 response tokens
        counts 3 rows and a share of 60 / 64.

    Args:
        keys: ``{uid}_{session}_{index}`` of the rows.
        tags: tags of the rows. None is a pad's, whatever ``is_padding`` says: by it, verl's means
            leave out rows without a trained token.
    """
    tokens_of: dict[str, dict[int, int]] = defaultdict(dict)
    for key, tag in zip(keys, tags, strict=True):
        parts = parts_of_key(key)
        assert parts is not None, key
        uid, session, index = parts
        tokens_of[f"{uid}_{session}"][int(index)] = tag["response_len"]
    sessions = [[tokens[index] for index in sorted(tokens)] for tokens in tokens_of.values()]
    return {
        "subagents/rows_per_session": sum(map(len, sessions)) / len(sessions),
        "subagents/lead_token_share": sum(tokens[-1] / sum(tokens) for tokens in sessions)
        / len(sessions),
    }


def _define_trainer(_: ModuleType) -> None:
    from verl.trainer.ppo.v1 import register_trainer

    from verl_padding.driver.trainers import PaddedTrainerSync

    @register_trainer(TRAINER_NAME)
    class SubagentsTrainer(PaddedTrainerSync):
        """The padded trainer with one more group of metrics; the batch that it gets holds real rows
        only."""

        def _compute_metrics(
            self, batch: Any, metrics: dict, timing_raw: dict, global_steps: int, epoch: int
        ) -> None:
            super()._compute_metrics(
                batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch
            )
            metrics.update(session_metrics(batch.keys, batch.tags))


register_post_import_hook(_define_trainer, "verl_padding.driver.trainers")
