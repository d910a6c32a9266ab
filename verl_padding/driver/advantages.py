"""verl's estimators on whole sessions, and on rows: verl 0.9.1 takes each row for a sample of its
prompt, where a session of several rows is one here.

A session of ten rows, each with the session's reward, would be ten samples of its prompt. Here its
response tokens are put one after the other, in the order of its rows, with the reward on the last
token that is trained, and verl's own function computes advantages and returns of these
trajectories. Each row gets those of its tokens back. Rows that continue another row, prompt and
response, may have its response tokens among their own: such a token is one token of the trajectory.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.workers.utils.padding import response_to_nested

from verl_padding.errors import refuse
from verl_padding.job.verl_losses import OF_TWO_SAMPLES, WHITENING
from verl_padding.pads.queue import KVBatchMeta, jagged, put_columns, read_fields
from verl_padding.plan.row_keys import index_of_key, rows_of_sessions, uid_of_key
from verl_padding.prefix_sharing.repeated_tokens import MASK, number_tokens

SCORES, REWARDS, VALUES = "rm_scores", "token_level_rewards", "values"
READ = (MASK, SCORES, REWARDS, VALUES)
"""Fields of rows that estimators read. ``token_level_rewards`` are there with an in-reward KL,
values with a critic."""
READ_BY_VERL = (*READ, "rollout_log_probs", "old_log_probs", "ref_log_prob", "rollout_is_weights")
"""Fields that verl's trainer gives its estimators."""
RESULTS = ("advantages", "returns")


def trajectory_places(
    keys: Sequence[str],
    tokens_R: Sequence[int],
    prompt_R: Sequence[int],
    parent_R: Sequence[int | None],
) -> list[torch.Tensor]:
    """Of each row: the place of each response token in the trajectory of its session, where each
    token is once.

    Args:
        tokens_R, prompt_R: tokens of each row, and of its prompt.
        parent_R: number of the earlier row of its session that each row continues; None for
            none.
    """
    # A row that another one extends is shorter.
    by_length = sorted(range(len(keys)), key=lambda row: (tokens_R[row], index_of_key(keys[row])))
    parents = ((row, parent_R[row]) for row in by_length)
    shared = ((row, each, tokens_R[each]) for row, each in parents if each is not None)
    token_R = number_tokens(tokens_R, shared)
    # [5 | 6] is continued by [5 | 6 7 8]: the 6 has one number in both rows, so that the session is
    # 6 7 8, with the places [0] and [0 1 2].
    place_of_token = np.full(sum(tokens_R), -1, dtype=np.int64)
    for rows in rows_of_sessions(keys):
        length = 0
        for row in rows:
            # The tokens of a row come after those that it begins with.
            chain = [row]
            while (earlier := parent_R[chain[-1]]) is not None:
                chain.append(earlier)
            for begins in reversed(chain):
                tokens = token_R[begins][prompt_R[begins] :]
                new = tokens[place_of_token[tokens] < 0]
                place_of_token[new] = np.arange(length, length + len(new))
                length += len(new)
    return [
        torch.from_numpy(place_of_token[tokens[n:]])
        for tokens, n in zip(token_R, prompt_R, strict=True)
    ]


def session_advantages(
    rows: TensorDict,
    keys: Sequence[str],
    tokens_R: Sequence[int],
    parent_R: Sequence[int | None],
    algorithm: DictConfig,
) -> dict[str, torch.Tensor]:
    """Advantages and returns of each row, (R, response tokens) jagged, from verl's estimator on
    whole sessions.

    Args:
        rows: the fields of :data:`READ` that the rows have, jagged.
        tokens_R: of each row, prompt and response.
        parent_R: number of the row that each row continues; None for none.
    """
    response_R = rows[MASK].offsets().diff().tolist()
    prompt_R = [tokens - response for tokens, response in zip(tokens_R, response_R, strict=True)]
    places_R = trajectory_places(keys, tokens_R, prompt_R, parent_R)
    fields = {name: rows[name].unbind() for name in READ if name in rows}
    columns = [_columns(fields, session, places_R) for session in rows_of_sessions(keys)]
    return _estimate_sessions(keys, columns, places_R, algorithm)


def _columns(
    fields: dict[str, Sequence[torch.Tensor]],
    session: Sequence[int],
    places_R: Sequence[torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Mask, rewards and values of a trajectory, (length,) each, from the rows of its session.

    A token that several rows have is that of the first of them which trains it.
    """
    rows = [(row, places_R[row]) for row in session]
    length = len(torch.cat([places for _, places in rows]).unique())
    zeros = {name: values[session[-1]].new_zeros(length) for name, values in fields.items()}
    columns = {name: zeros[name] for name in (MASK, VALUES) if name in zeros}
    rewards = zeros[REWARDS if REWARDS in zeros else SCORES]
    # Backwards, so that the first row has the last word; those that train a token after those that
    # do not.
    for trained in (False, True):
        for row, places in reversed(rows):
            selected = fields[MASK][row].bool() == trained
            at = places[selected]
            for name, column in columns.items():
                column[at] = fields[name][row][selected]
            # Less the row's copy of the reward: what an in-reward KL takes from each token.
            if REWARDS in fields:
                rewards[at] = (fields[REWARDS][row] - fields[SCORES][row])[selected]
    # Every row has a copy of the session's reward, but one without a response, which has no place
    # for it.
    rewarded = [(row, places) for row, places in rows if len(places)]
    if rewarded:
        row, places = rewarded[-1]
        scores = fields[SCORES][row].to(rewards.dtype)
        rewards[places[:-1]] += scores[:-1]
        # verl's GAE leaves out what is not trained, rewards included, and a session may end with an
        # observation or a rejected token, in a row of its own or not: the reward is that of the
        # last action.
        places_of_trained = columns[MASK].nonzero()
        rewards[places_of_trained[-1] if len(places_of_trained) else -1] += scores[-1]
    return columns | {REWARDS: rewards}


def _estimate_sessions(
    keys: Sequence[str],
    columns: Sequence[Mapping[str, torch.Tensor]],
    places_R: Sequence[torch.Tensor],
    algorithm: DictConfig,
) -> dict[str, torch.Tensor]:
    """Of rows with these keys, what verl's estimator makes of the :func:`_columns` of each session,
    at the places of their tokens, jagged."""
    sessions = rows_of_sessions(keys)
    fields = {name: jagged(column[name] for column in columns) for name in columns[0]}
    first_keys = [keys[session[0]] for session in sessions]
    found = estimate(TensorDict(fields, batch_size=len(sessions)), first_keys, algorithm)
    session_of = {row: number for number, session in enumerate(sessions) for row in session}
    return {
        name: jagged(found[name][session_of[row], places] for row, places in enumerate(places_R))
        for name in RESULTS
    }


def estimate(fields: TensorDict, keys: Sequence[str], algorithm: DictConfig) -> TensorDict:
    """What verl's estimator makes of samples with these keys, also where it raises: it whitens no
    single token, and best and second best are those of two samples.

    A token that no other is compared with is its own mean, so its advantage is 0. A sample without
    another of its prompt has no baseline, and what ``grpo`` gives it: its reward.
    """
    # What verl's trainer hands its estimators.
    settings = {name: algorithm[name] for name in ("gamma", "lam")} | {"config": algorithm}
    settings["norm_adv_by_std_in_grpo"] = algorithm.get("norm_adv_by_std_in_grpo", True)
    uids = np.array(list(map(uid_of_key, keys)), dtype=object)
    # verl's estimators take samples padded to the longest.
    samples = DataProto(batch=fields.to_padded_tensor(), non_tensor_batch={"uid": uids})
    estimator = algorithm.adv_estimator
    mask = samples.batch[MASK]
    found = {name: torch.zeros_like(samples.batch[REWARDS]) for name in RESULTS}
    parts = [(np.ones(len(mask), dtype=np.bool_), estimator)]
    if estimator in WHITENING and mask.sum() <= 1:
        parts = []
    elif estimator in OF_TWO_SAMPLES:
        _, prompt_S, counts = np.unique(uids, return_inverse=True, return_counts=True)
        is_alone_S = counts[prompt_S] == 1
        parts = [(is_alone_S, "grpo"), (~is_alone_S, estimator)]
    for some_S, name in parts:
        if not some_S.any():
            continue
        some = samples.select_idxs(some_S)
        estimated = compute_advantage(some, adv_estimator=name, **settings).batch
        trains = estimated[MASK].any(-1, keepdim=True)
        for result, values in found.items():
            # Such as a mean over the trained tokens of a prompt that has none.
            is_nothing = estimated[result].isnan() & ~trains
            values[torch.from_numpy(some_S)] = estimated[result].masked_fill(is_nothing, 0)
    return samples.batch.update(found)


@contextmanager
def estimator_for_any_rows(algorithm: DictConfig) -> Iterator[None]:
    """A with-block in which verl's trainer estimates by ``grpo``, which takes any rows: for its
    other results, where advantages come from :func:`estimate`."""
    name, algorithm.adv_estimator = algorithm.adv_estimator, "grpo"
    try:
        yield
    finally:
        algorithm.adv_estimator = name


def compute_row_advantages(batch: KVBatchMeta, algorithm: DictConfig) -> None:
    """Puts what verl's trainer would compute of these rows if there were no others, by another
    estimator than ``grpo``."""
    rows = read_fields(batch.keys, batch.partition_id, READ_BY_VERL)
    rows["token_level_scores"] = rows[SCORES]
    if REWARDS not in rows:
        rows[REWARDS] = rows[SCORES]
    computed = estimate(rows, batch.keys, algorithm)
    put_columns(batch, {name: response_to_nested(computed[name], rows[MASK]) for name in RESULTS})


def compute_grpo_advantages(
    batch: KVBatchMeta, algorithm: DictConfig, trained: Collection[str], *, has_verls: bool
) -> None:
    """Puts the advantages that verl's GRPO takes from sessions.

    verl gives all rows of a session the advantage of the last one, from its first trained token;
    without one, that is 0. Here its function sees, of each session, the reward of its last row,
    with the KL penalty of the last row that had a trained token, on one token that is trained.

    Args:
        trained: keys of the rows that had a trained token before any was rejected.
        has_verls: whether verl's are there, which stay where each session ends in a trained row.
    """
    rows = read_fields(batch.keys, batch.partition_id, READ)
    sessions = rows_of_sessions(batch.keys)
    mask_R = rows[MASK].unbind()
    if has_verls and all(mask_R[session[-1]].any() for session in sessions):
        return
    score_R, reward_R = (
        [values.sum() for values in rows[name if name in rows else SCORES].unbind()]
        for name in (SCORES, REWARDS)
    )
    samples = []
    for session in sessions:
        last = session[-1]
        kl_row = next((row for row in reversed(session) if batch.keys[row] in trained), last)
        reward = (
            reward_R[last] if kl_row == last else score_R[last] + reward_R[kl_row] - score_R[kl_row]
        )
        # One trained token stands for all of a session's: GRPO reads but the sum of rewards.
        samples.append({MASK: mask_R[0].new_ones(1), REWARDS: reward[None]})
    places_R = [torch.zeros_like(mask, dtype=torch.int64) for mask in mask_R]
    estimated = _estimate_sessions(batch.keys, samples, places_R, algorithm)["advantages"]
    advantages = jagged(map(torch.mul, estimated.unbind(), mask_R))
    put_columns(batch, dict.fromkeys(RESULTS, advantages))


def check_advantages_stay_with_rows(config: DictConfig) -> None:
    """Refuses an algorithm that draws the rows of a batch anew.

    verl's trainer puts advantages into TransferQueue under the keys that the batch had before: each
    key would get those of whatever row has come into its place.
    """
    if config.algorithm.get("use_pf_ppo") and config.algorithm.adv_estimator == "gae":
        refuse(
            "algorithm.use_pf_ppo=True",
            "verl resamples the rows and stores their advantages under the old rows' keys, so rows "
            "would train with the advantages of other rows",
            "Set it to False.",
        )
