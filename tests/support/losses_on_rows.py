"""verl's losses on a few rows and pads, added up over micro-batches and ranks as verl does."""

from functools import cache, partial
from itertools import chain, product
from statistics import mean

import pytest
import torch
from tensordict import TensorDict
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.distillation import distillation_ppo_loss
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.utils.py_functional import append_to_dict
from verl.workers.config import (
    DistillationConfig,
    DistillationLossConfig,
    FSDPActorConfig,
    FSDPCriticConfig,
    PolicyLossConfig,
)
from verl.workers.utils.losses import ppo_loss, value_loss

from benchmarks.one_gpu.rows import nested
from tests.support.plan_oracles import layout_of_local_batches
from verl_padding.pads.planned_call import (
    BATCH_ROW,
    CALL,
    IS_PADDING,
    MINI_BATCH,
    MiniBatch,
    PlannedCall,
)

PAD = "pad"
# [rank][micro-batch] -> rows; a micro-batch of pads alone, one mixed, one of real rows.
SPREAD = [[[0, PAD], [1, 2]], [[PAD, PAD], [3, 4]]]
IDLE_RANK = [[[0, 1], [2, 3, 4]], [[PAD, PAD], [PAD]]]
LAYOUTS = pytest.mark.parametrize("layout", [SPREAD, IDLE_RANK], ids=["spread", "rank of pads"])
MODES = [
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
QUICK_MODE = "seq-mean-token-mean"


def in_each_mode(cases, all_modes_of="vanilla"):
    """Parameters of a test: each case, a name or several, and a mode.

    All but one of the modes are slow, unless the case has the name ``all_modes_of``.
    """
    found = []
    for case, mode in product(cases, MODES):
        names = case if isinstance(case, tuple) else (case,)
        is_quick = mode == QUICK_MODE or all_modes_of in names
        found.append(pytest.param(*names, mode, marks=() if is_quick else pytest.mark.slow))
    return found


SETTINGS = {
    # What a policy loss needs beside its name, or what makes it pick tokens among the few here.
    "dro": {"dro_beta": 0.5},
    "clip_cov": {"clip_cov_ratio": 0.3, "clip_cov_lb": -5.0, "clip_cov_ub": 5.0},
    "kl_cov": {"kl_cov_ratio": 0.3},
    "bypass_mode": {
        "rollout_correction": RolloutCorrectionConfig(bypass_mode=True, rollout_is="token")
    },
}


class Rows:
    """Five real rows and any number of pads, with everything that verl's losses read, in float64.

    Args:
        masked: rows without a trained token, as an agent loop gives them, or as rejection leaves
            them.
    """

    factor_R: list[float] | None = None
    """What the gradient of each row's outputs is multiplied by."""

    def __init__(self, *masked, rejected=False):
        self.lengths = [(3, 4), (5, 1), (2, 6), (4, 2), (1, 3)]
        gen = torch.Generator().manual_seed(0)
        self.fields = [self._row(prompt, response, gen) for prompt, response in self.lengths]
        self.n_real, self.masked = len(self.fields), masked
        for row in masked:
            zeros = torch.zeros_like(self.fields[row]["response_mask"])
            self.fields[row] |= {"response_mask": zeros} | (
                {} if rejected else {"loss_mask": zeros}
            )

    @staticmethod
    def _row(prompt, response, gen):
        def draw(n, scale=1.0):
            return torch.randn(n, generator=gen, dtype=torch.float64) * scale

        old = -draw(response).abs()
        return {
            "output": (-draw(prompt + response).abs()),
            "prompts": torch.ones(prompt, dtype=torch.int64),
            "responses": torch.ones(response, dtype=torch.int64),
            "response_mask": torch.ones(response, dtype=torch.int64),
            "loss_mask": torch.ones(response, dtype=torch.int64),
            "old_log_probs": old,
            "ref_log_prob": old + draw(response, 0.1),
            "rollout_log_probs": old + draw(response, 0.1),
            "advantages": draw(response),
            "values": draw(response),
            "returns": draw(response),
            "teacher_logprobs": -draw(prompt + response).abs().unsqueeze(1),
        }

    @classmethod
    @cache
    def pad(cls):
        row = cls._row(1, 1, torch.Generator().manual_seed(9))
        zeros = torch.zeros(1, dtype=torch.float64)
        mask = torch.zeros(1, dtype=torch.int64)
        for name in (
            "old_log_probs",
            "ref_log_prob",
            "rollout_log_probs",
            "advantages",
            "values",
            "returns",
        ):
            row[name] = zeros
        return row | {
            "response_mask": mask,
            "loss_mask": mask,
            "teacher_logprobs": zeros.new_zeros(2, 1),
        }

    def trains(self, row):
        """Whether a row has a trained token; a pad has none."""
        return row is not PAD and bool(self.fields[row]["response_mask"].any())

    def with_loss(self, rows):
        """How many of some rows and pads have a token with a loss."""
        return sum(row is not PAD and bool(self.fields[row]["loss_mask"].any()) for row in rows)

    def tokens(self, mask, rows):
        return int(sum(self.fields[row][mask].sum() for row in rows))

    def leaves(self):
        return [row["output"].clone().requires_grad_() for row in self.fields]

    def micro_batch(
        self,
        rows,
        leaves,
        output_name,
        *,
        dp_size,
        real_rows,
        reporting_ranks,
        nominal=7,
        dropped=(),
        takes_own_log_probs=False,
        **said,
    ):
        picked = [self.pad() if row is PAD else self.fields[row] for row in rows]
        outputs = [
            row["output"].clone().requires_grad_() if name is PAD else leaves[name]
            for name, row in zip(rows, picked, strict=True)
        ]
        names = [name for name in picked[0] if name != "output"]
        data = TensorDict(
            {name: nested(row[name] for row in picked) for name in names}, batch_size=len(rows)
        )
        data[IS_PADDING] = torch.tensor([row is PAD for row in rows])
        data[BATCH_ROW] = torch.tensor([self.n_real if row is PAD else row for row in rows])
        computed = [row for row in range(self.n_real) if row not in dropped]
        mini_batch = MiniBatch(
            local_batches=(),
            rows_with_loss=real_rows,
            trained_tokens=self.tokens("response_mask", computed),
            trained_rows=sum(map(self.trains, computed)),
            reporting_ranks=reporting_ranks,
            all_loss_tokens=self.tokens("loss_mask", range(self.n_real)) if dropped else None,
        )
        call = PlannedCall(
            layout=layout_of_local_batches(self.n_real, [[tuple(range(self.n_real))]]),
            factor_R=self.factor_R,
            takes_own_log_probs=takes_own_log_probs,
        )
        tokens = self.tokens("loss_mask", computed)  # as verl counts them: of the rows that it gets
        tu.assign_non_tensor(
            data, dp_size=dp_size, batch_num_tokens=tokens, global_batch_size=nominal, **said
        )
        tu.assign_non_tensor(data, **{CALL: call, MINI_BATCH: mini_batch})
        output = {output_name: nested(outputs)}
        if output_name == "log_probs":
            output["entropy"] = nested(o * o for o in outputs)
            # What verl's engine asks a top-k distillation loss for, token by token.
            output["distillation_losses"] = nested(o * o - o for o in outputs)
            output["student_mass"] = nested(o.detach().exp() for o in outputs)
            output["teacher_mass"] = nested(o.detach().exp().sqrt() for o in outputs)
        return output, data


def policy_loss(mode, name="vanilla", *, terms=True, **settings):
    """verl's actor loss with a registered policy loss, with KL and entropy terms or without
    them."""
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_mini_batch_size=1,
        use_dynamic_bsz=True,
        loss_agg_mode=mode,
        loss_scale_factor=8,
        use_kl_loss=terms,
        kl_loss_coef=0.3,
        entropy_coeff=0.2 if terms else 0.0,
        policy_loss=PolicyLossConfig(loss_mode=name, **SETTINGS.get(name, {}) | settings),
    )
    return partial(ppo_loss, config=config)


def distilling_loss(mode, name="k3", *, policy_gradient=False, task_rewards=True):
    """verl's distillation loss with a registered loss mode, beside verl's actor loss or alone."""
    settings = DistillationLossConfig(
        loss_mode=name,
        topk=4,
        use_policy_gradient=policy_gradient,
        use_task_rewards=task_rewards,
        distillation_loss_coef=0.7,
    )
    actor = policy_loss(mode).keywords["config"]
    return partial(
        distillation_ppo_loss,
        config=actor,
        distillation_config=DistillationConfig(distillation_loss=settings),
    )


def critic_loss(mode):
    """verl's value loss."""
    config = FSDPCriticConfig(
        strategy="fsdp2",
        use_dynamic_bsz=True,
        loss_agg_mode=mode,
        loss_scale_factor=8,
        cliprange_value=0.5,
    )
    return partial(value_loss, config=config)


def run_as_verl_does(
    loss, rows, layout, output_name, nominal=7, dropped=(), denominator="rows", **said
):
    """Gradients and metrics of one optimizer step, as verl's engine, worker and trainer add them
    up.

    Args:
        denominator: ``padding.denominator``.
        dropped: rows that no micro-batch holds, though they belong to the mini-batch.
        said: goes to the loss with each micro-batch.
    """
    leaves = rows.leaves()
    held = [row for rank in layout for micro in rank for row in micro]
    reporting = sum(any(rows.trains(row) for micro in rank for row in micro) for rank in layout)
    shape = {
        "dp_size": len(layout),
        "real_rows": rows.with_loss([*held, *dropped]) if denominator == "rows" else None,
        "reporting_ranks": reporting,
        "nominal": nominal,
    }
    shape |= {"dropped": dropped} | said
    by_rank = []
    for rank in layout:
        metrics = {}
        for micro in rank:
            output, data = rows.micro_batch(micro, leaves, output_name, **shape)
            value, micro_metrics = loss(model_output=output, data=data, dp_group=None)
            (value / len(layout)).backward()  # FSDP averages gradients over the ranks
            append_to_dict(metrics, micro_metrics)
        by_rank.append(metrics)
    gathered = {}
    for metrics in by_rank:
        for name, value in metrics.items():
            gathered.setdefault(name, []).append(value)
    reduced = {
        name: Metric.aggregate_dp(v) if isinstance(v[0], Metric) else mean(chain.from_iterable(v))
        for name, v in gathered.items()
    }
    return [leaf.grad for leaf in leaves], reduced
