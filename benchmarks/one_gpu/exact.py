"""Gradients of packed rows, pads, shared prefixes and skipped rows, beside those of each row alone.

41 rows are planned for eight ranks, which one rank plays in turn. In float32 the differences are
rounding; in bfloat16, the packed rows have to be as far off float32 as the rows alone are.
"""

import gc
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.one_gpu import rank, rows
from benchmarks.one_gpu.figures import Figures
from verl_padding.plan import BatchPlan, Sharing
from verl_padding.worker.cross_contamination import check_cross_contamination
from verl_padding.worker.losses import RealRowsLoss
from verl_padding.worker.plan_packer import follow_plan
from verl_padding.worker.worker_check import INCOMPATIBILITIES

KINDS = ("qwen3", "qwen2", "qwen3_5_text")
DTYPES = ("fp32", "bf16")
ROWS, RANKS = 41, 8  # which need seven pads
TERMS = ("entropy_coeff=0.01", "use_kl_loss=true", "loss_agg_mode=seq-mean-token-mean")


def measure(figures: Figures, folder: Path, device: str) -> None:
    """Keeps the differences of each kind of model and dtype."""
    batch = make_rows(0.02 if device == "cpu" else 0.12)
    for kind in KINDS:
        model = rank.make_model(folder, "small" if device == "cpu" else "exact", kind, 259, device)
        reference = None
        for dtype in DTYPES:
            case = Case(model, dtype, device, batch)
            own = case.gradient(case.alone())
            reference = own if reference is None else reference
            for name, difference in case.differences(own, reference):
                figures.keep("gradient", model=kind, dtype=dtype, gradient_of=name, **difference)
            case.check()
            figures.keep("cross-contamination check passes", model=kind, dtype=dtype)
            del case
            gc.collect()


def make_rows(scale: float) -> dict[str, rows.Row]:
    """Sessions whose reasoning is left out, and growing ones; those of prompts 0 and 1 have no
    advantage."""
    draw = random.Random(0)
    made = [
        rows.sessions(draw, 4, scale=scale, vocabulary=250, turns=3, grows=grows)
        for grows in (False, True)
    ]
    texts = dict([*(made[0] | made[1]).items()][:ROWS])
    batch = rows.trained_rows(texts)
    for number in rows.rows_of_prompts(batch, "01"):
        row = list(batch.values())[number]
        row["advantages"] = row["advantages"] * 0
    return batch


class Case:
    """A model in a dtype, and the rows as it computes them."""

    def __init__(self, model: Path, dtype: str, device: str, batch: dict[str, rows.Row]):
        self._rows, every = batch, list(batch.values())
        self._budget = 3 * max(len(row["input_ids"]) for row in every)
        terms = (f"actor_rollout_ref.actor.{term}" for term in TERMS)
        self._worker = rank.start_worker(model, dtype, self._budget, device, *terms)
        self._shape: dict[str, Any] = {
            "use_remove_padding": True,
            "calculate_entropy": True,
            "batch_num_tokens": sum(int(row["loss_mask"].sum()) for row in every),
            "use_dynamic_bsz": True,
            "max_token_len_per_gpu": self._budget,
            "sp_size": 1,
        }

    def alone(self) -> Iterator[TensorDict]:
        """Each row by itself, on one rank."""
        for key, row in self._rows.items():
            said = self._shape | {"dp_size": 1, "global_batch_size": len(self._rows)}
            yield rank.rows_of_call({key: row}, **said)

    def as_planned(self, plan: BatchPlan, **said: Any) -> Iterator[TensorDict]:
        """The micro-batches of each rank, one rank after the other."""
        from verl.utils import tensordict_utils as tu
        from verl.workers.engine.utils import prepare_micro_batches

        ranks = plan.layouts["actor"].dp_size
        data = rank.rows_of_call(self._rows, plan, dp_size=ranks, **self._shape | said)
        n_rows = len(data) // ranks
        for first in range(0, len(data), n_rows):
            rank_data = tu.index_select_tensor_dict(data, list(range(first, first + n_rows)))
            yield from follow_plan(prepare_micro_batches)(rank_data)[0]

    def gradient(self, micro_batches: Iterable[TensorDict]) -> torch.Tensor:
        engine = self._worker.actor.engine
        loss = RealRowsLoss(self._worker.actor.loss_fn)
        with engine.train_mode():
            for data in micro_batches:
                value, _ = engine.forward_step(data, loss, forward_only=False)
                (value / data["dp_size"]).backward()  # FSDP takes the mean over ranks
            return rank.gradient_of(engine)

    def differences(
        self, own: torch.Tensor, reference: torch.Tensor
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """What is computed, and how far it is off the rows alone in the same dtype and in
        float32."""

        def off(gradient: torch.Tensor, **more: Any) -> dict[str, Any]:
            own_error, float32_error = (rank.distance(gradient, each) for each in (own, reference))
            return {"off_rows_alone": own_error, "off_float32": float32_error} | more

        yield "rows alone", off(own)
        for sharing in ("off", "on"):
            plan = self._plan(sharing, RANKS)
            found = self.gradient(self.as_planned(plan))
            factor = plan.figures["actor"].sharing_factor
            yield f"sharing={sharing}", off(found, pads=plan.n_pads, sharing_factor=factor)
        for name in ("use_kl_loss", "entropy_coeff"):  # which have a gradient in every row
            config = self._worker.actor.loss_fn.keywords["config"]
            object.__setattr__(config, name, 0)  # verl's configs are frozen
        left_out = rows.rows_of_prompts(self._rows, "01")
        computed = self.gradient(self.as_planned(self._plan("on", 1)))
        skipped = self.gradient(self.as_planned(self._plan("on", 1, left_out), drops_rows=True))
        yield "zero-advantage rows skipped", {"off_rows_computed": rank.distance(skipped, computed)}

    def _plan(self, sharing: Sharing, ranks: int, left_out: Sequence[int] = ()) -> BatchPlan:
        return rows.plan(
            self._rows, self._budget, sharing=sharing, ranks=ranks, zero_advantage=left_out
        )

    def check(self) -> None:
        """The check that each job starts with, which raises where packed rows see each other."""
        check = check_cross_contamination((), shares=True)
        (incompatibilities,) = check(self._worker).non_tensor_batch[INCOMPATIBILITIES]
        assert not incompatibilities, incompatibilities
