"""Advantages of whole sessions: the rows of a session are one trajectory, and every estimator sees it once.

verl 0.9.1 gives its estimators a row per sample. A session of ten rows, each with the session's reward, then is ten
samples of its prompt. Here a session's response tokens are put one after the other, in the order of its rows, with the
session's reward on the last token that is trained, and verl's own function computes advantages and returns of these
trajectories. Each row gets those of its tokens back.

Rows that continue another row, prompt and response, may have its response tokens among their own: such a token is one
token of the trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.ray_trainer import compute_advantage

from verl_padding.pads.lineage import find_continued
from verl_padding.pads.queue import KVBatchMeta, put_columns, read_fields, rows_like
from verl_padding.pads.tags import tokens_of_tags
from verl_padding.plan.row_keys import rows_of_sessions, uid_of_key

Int64s = NDArray[np.int64]

MASK, SCORES, REWARDS, VALUES = "response_mask", "rm_scores", "token_level_rewards", "values"
READ = (MASK, SCORES, REWARDS, VALUES)
"""Fields of rows that estimators read. ``token_level_rewards`` are there with an in-reward KL, values with a critic."""
RESULTS = ("advantages", "returns")


@dataclass(frozen=True)
class Trajectory:
    """The response tokens of a session, each once, in the order of its rows."""

    rows: list[int]
    """Numbers of its rows, in order."""
    places: list[Int64s]
    """Of each of its rows: the place of each response token in the trajectory."""
    length: int


def trajectories(
    keys: Sequence[str],
    prompt_R: Sequence[int],
    response_R: Sequence[int],
    extends_R: Sequence[int | None] | None = None,
) -> list[Trajectory]:
    """The trajectory of each session, sessions in the order of their first rows.

    Args:
        prompt_R, response_R: tokens of each row's prompt and response.
        extends_R: number of the row that each row continues, of its session; None if no row does.
    """
    extends_R = extends_R or [None] * len(keys)
    lengths = [prompt + response for prompt, response in zip(prompt_R, response_R, strict=True)]
    # A number for each token of each row; a row has the numbers of the row that it extends, which is shorter.
    token_R = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        earlier = extends_R[row]
        if earlier is not None:
            token_R[row][: lengths[earlier]] = token_R[earlier]
    place_of_token = np.full(sum(lengths), -1, dtype=np.int64)
    found = []
    for rows in rows_of_sessions(keys):
        length = 0
        for row in rows:
            for begins in _beginnings(row, extends_R):  # the tokens of a row come after those that it begins with
                tokens = token_R[begins][prompt_R[begins] :]
                new = tokens[place_of_token[tokens] < 0]
                place_of_token[new] = np.arange(length, length + len(new))
                length += len(new)
        found.append(Trajectory(rows, [place_of_token[token_R[row][prompt_R[row] :]] for row in rows], length))
    return found


def _beginnings(row: int, extends_R: Sequence[int | None]) -> list[int]:
    """The rows that a row begins with, the shortest first, and the row itself."""
    chain = [row]
    while (earlier := extends_R[chain[-1]]) is not None:
        chain.append(earlier)
    return chain[::-1]


def compute_session_advantages(batch: KVBatchMeta, algorithm: DictConfig, *, images: bool) -> None:
    """Puts advantages and returns of whole sessions into TransferQueue, in the place of verl's, which are of rows."""
    tokens_R = tokens_of_tags(batch.keys, batch.tags)
    extends_R = find_continued(batch, tokens_R, images=images)
    rows = read_fields(batch.keys, batch.partition_id, READ)
    response_R = rows[MASK].offsets().diff().tolist()
    prompt_R = [tokens - response for tokens, response in zip(tokens_R, response_R, strict=True)]
    sessions = trajectories(batch.keys, prompt_R, response_R, extends_R)
    put_columns(batch, session_advantages(rows, batch.keys, sessions, algorithm))


def session_advantages(
    rows: TensorDict, keys: Sequence[str], sessions: Sequence[Trajectory], algorithm: DictConfig
) -> dict[str, torch.Tensor]:
    """Advantages and returns of each row, (R, response tokens) jagged, from verl's estimator on whole sessions.

    Args:
        rows: the fields of :data:`READ` that the rows have, jagged.
        sessions: their trajectories.
    """
    fields = {name: rows[name].unbind() for name in READ if name in rows.keys()}  # noqa: SIM118  (a TensorDict)
    columns = [_columns(fields, session) for session in sessions]
    estimated = _estimated(columns, [keys[session.rows[0]] for session in sessions], algorithm)
    found: dict[str, list[torch.Tensor]] = {name: [torch.empty(0)] * len(keys) for name in RESULTS}
    for number, session in enumerate(sessions):
        for row, places in zip(session.rows, session.places, strict=True):
            for name in RESULTS:
                found[name][row] = estimated[name][number, torch.from_numpy(places)]
    return {name: torch.nested.as_nested_tensor(found[name], layout=torch.jagged) for name in RESULTS}


def _columns(fields: dict[str, Sequence[torch.Tensor]], session: Trajectory) -> dict[str, torch.Tensor]:
    """Mask, rewards and values of a trajectory, (length,) each.

    A token that several rows have is that of the first of them which trains it.
    """
    last = session.rows[-1]
    columns = {name: fields[name][last].new_zeros(session.length) for name in (MASK, VALUES) if name in fields}
    rewards = fields[REWARDS if REWARDS in fields else SCORES][last].new_zeros(session.length)
    # Backwards, so that the first row has the last word; those that train a token after those that do not.
    for trained in (False, True):
        for row, places in reversed(list(zip(session.rows, session.places, strict=True))):
            of_row = fields[MASK][row].bool() == trained
            at = torch.from_numpy(places)[of_row]
            for name, column in columns.items():
                column[at] = fields[name][row][of_row]
            if REWARDS in fields:  # less the row's copy of the reward: what an in-reward KL takes from each token
                rewards[at] = (fields[REWARDS][row] - fields[SCORES][row])[of_row]
    # Every row has a copy of the session's reward, but one without a response, which has no place for it.
    rewarded = [(row, places) for row, places in zip(session.rows, session.places, strict=True) if len(places)]
    if rewarded:
        row, places = rewarded[-1]
        scores = fields[SCORES][row].to(rewards.dtype)
        rewards[torch.from_numpy(places[:-1])] += scores[:-1]
        # verl's GAE leaves out what is not trained, rewards included, and a session may end with an observation or a
        # rejected token, in a row of its own or not: the reward is that of the last action.
        places_of_trained = columns[MASK].nonzero()
        rewards[places_of_trained[-1] if len(places_of_trained) else -1] += scores[-1]
    return columns | {REWARDS: rewards}


def _estimated(columns: Sequence[Mapping[str, torch.Tensor]], keys: Sequence[str], algorithm: DictConfig) -> TensorDict:
    """What verl's estimator makes of samples with these keys, from the :func:`_columns` of each: (samples, longest)."""
    padded = {
        name: torch.nn.utils.rnn.pad_sequence([column[name] for column in columns], batch_first=True)
        for name in columns[0]
    }
    uids = np.array([uid_of_key(key) for key in keys], dtype=object)
    data = compute_advantage(
        DataProto(batch=TensorDict(padded, batch_size=len(keys)), non_tensor_batch={"uid": uids}),
        adv_estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
        config=algorithm,
    )
    return data.batch


def repair_untrained_ends(batch: KVBatchMeta, algorithm: DictConfig) -> None:
    """Gives sessions whose last row has no trained token the advantages that verl's GRPO takes from them.

    verl gives all rows of a session the advantage of the last one, from its first trained token; without one, that is
    0. Here its function sees, of each session, the reward that verl takes (of its last row, with the KL penalty of that
    row), on one token that is trained. So all other sessions keep what verl has given them.
    """
    sessions = rows_of_sessions(batch.keys)
    if algorithm.adv_estimator != AdvantageEstimator.GRPO or len(sessions) == len(batch.keys):
        return
    rows = read_fields(batch.keys, batch.partition_id, READ)
    mask_R = rows[MASK].unbind()
    mended = [number for number, of in enumerate(sessions) if not mask_R[of[-1]].any()]
    if not mended:
        return
    reward_R = rows[REWARDS if REWARDS in rows.keys() else SCORES].unbind()  # noqa: SIM118  (a TensorDict)
    samples = [{MASK: mask_R[0].new_ones(1), REWARDS: reward_R[of[-1]].sum()[None]} for of in sessions]
    estimated = _estimated(samples, [batch.keys[of[-1]] for of in sessions], algorithm)["advantages"]
    advantage_of = {row: estimated[session, 0] * mask_R[row] for session in mended for row in sessions[session]}
    column = torch.nested.as_nested_tensor(list(advantage_of.values()), layout=torch.jagged)
    keys, tags = [batch.keys[row] for row in advantage_of], [batch.tags[row] for row in advantage_of]
    put_columns(rows_like(batch, keys, tags), dict.fromkeys(RESULTS, column))
