"""Algorithms of verl that give a row's advantages to another row, found by running verl's function on a few rows.

verl's v1 trainer computes advantages of a batch and puts them into TransferQueue under the keys that the batch had
before. A function that returns other rows, or the same in another order, then gives each key the advantages of whatever
row has come into its place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from verl_padding.errors import PaddingConfigError

N_ROWS = 16
"""Rows to try: of so many drawn at random, one in 10**19 draws is the rows in their order."""
NUMBER = "row_number"


def check_advantages_stay_with_rows(config: DictConfig) -> None:
    """
    Raises:
        PaddingConfigError: rows would be trained with the advantages of other rows.
    """
    algorithm = config.algorithm
    if _keeps_rows(algorithm):
        return
    # A switch without which rows keep their places; else it is the estimator.
    switches = [str(name) for name, value in algorithm.items() if value is True]
    of_switch = (name for name in switches if _keeps_rows(OmegaConf.merge(algorithm, {name: False})))
    name = next(of_switch, "adv_estimator")
    raise PaddingConfigError(
        f"algorithm.{name}={algorithm[name]}: verl draws or orders the rows of a batch anew, and its v1 trainer then "
        "puts their advantages under the keys of the old ones, so that rows are trained with the advantages of other "
        "rows. Set it to another value."
    )


def _keeps_rows(algorithm: Any) -> bool:
    """Whether verl's function returns the rows that it gets, in their order; True where it cannot be tried."""
    # Their import registers the padded trainers, which import this module.
    from verl.protocol import DataProto
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    fields = ("token_level_scores", "token_level_rewards", "values", "response_mask", "old_log_probs")
    numbers = torch.arange(N_ROWS)
    data = DataProto.from_dict(
        tensors={NUMBER: numbers.clone(), **{name: torch.ones(N_ROWS, 2) for name in fields}},
        non_tensors={"uid": np.array([f"prompt{row // 2}" for row in range(N_ROWS)], dtype=object)},
    )
    try:
        # What an estimator of the user's own returns, verl's function only puts beside the rows.
        if not get_adv_estimator_fn(algorithm["adv_estimator"]).__module__.startswith("verl."):
            return True
        with torch.random.fork_rng(devices=[]):
            computed = compute_advantage_for_multi_trajectories(
                data,
                batch_keys=[f"prompt{row // 2}_{row % 2}_0" for row in range(N_ROWS)],
                adv_estimator=algorithm["adv_estimator"],
                gamma=algorithm["gamma"],
                lam=algorithm["lam"],
                config=algorithm,
            )
    except Exception:  # these rows lack something, or verl refuses the estimator, which code loaded later may bring
        return True
    return torch.equal(computed.batch[NUMBER], numbers)
