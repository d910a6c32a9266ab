"""Gradients of packed rows, pads, trees and skipped rows, beside those of each row alone.

41 rows are planned for eight ranks, which one rank plays in turn. In float32 the differences are rounding; in bfloat16,
the packed rows have to be as far off float32 as the rows alone are.
"""

import gc
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.one_gpu import rank, rows
from benchmarks.one_gpu.figures import Figures
from tests.support.engine_in_process import COMMON, Row, cut_as_planned, loss_tokens, micro_batch_of, trained_rows
from verl_padding.pads.columns import LEAVES_OUT
from verl_padding.worker.leak_probe import probe_for_leaks
from verl_padding.worker.plan_packer import install

KINDS = ("qwen3", "qwen2")
DTYPES = ("fp32", "bf16")
ROWS, RANKS = 41, 8  # which need seven pads
TERMS = ("entropy_coeff=0.01", "use_kl_loss=true", "loss_agg_mode=seq-mean-token-mean")


def measure(figures: Figures, folder: Path, device: str) -> Iterator[dict[str, Any]]:
    """Keeps and yields the differences of each kind of model and dtype."""
    batch = make_rows(0.02 if device == "cpu" else 0.12)
    for kind in KINDS:
        model = rank.make_model(folder, "small" if device == "cpu" else "exact", kind, 259, device)
        reference = None
        for dtype in DTYPES:
            case = Case(model, dtype, device, batch)
            own = case.gradient(case.alone)
            reference = own if reference is None else reference
            for name, difference in case.differences(own, reference):
                found = {"model": kind, "dtype": dtype, "gradient_of": name} | difference
                figures.keep("gradient", **found)
                yield found
            case.probe()
            figures.keep("probe of packed rows and trees passes", model=kind, dtype=dtype)
            del case
            gc.collect()


def make_rows(scale: float) -> dict[str, Row]:
    """Sessions whose reasoning is left out, and growing ones; those of prompts 0 and 1 have no advantage."""
    draw = random.Random(0)
    made = [rows.sessions(draw, 4, scale=scale, vocabulary=250, turns=3, grows=grows) for grows in (False, True)]
    texts = dict([*(made[0] | made[1]).items()][:ROWS])
    batch = trained_rows(texts)
    for number in rows.rows_of_prompts(batch, "01"):
        row = list(batch.values())[number]
        row["advantages"] = row["advantages"] * 0
    return batch


class Case:
    """A model in a dtype, and the rows as it computes them."""

    def __init__(self, model: Path, dtype: str, device: str, batch: dict[str, Row]):
        self._rows, every = batch, list(batch.values())
        self._budget = 3 * max(len(row["input_ids"]) for row in every)
        terms = (f"actor_rollout_ref.actor.{term}" for term in TERMS)
        self._worker = rank.start_worker(model, dtype, self._budget, device, *terms)
        self.alone = [micro_batch_of([row]) for row in every]
        shape = {"dp_size": 1, "batch_num_tokens": loss_tokens(every), "global_batch_size": len(every)}
        for data in self.alone:
            self._say(data, COMMON | shape)

    @staticmethod
    def _say(data: TensorDict, what: dict[str, Any]) -> None:
        from verl.utils import tensordict_utils as tu

        tu.assign_non_tensor(data, **what)

    def gradient(self, micro_batches: Iterable[TensorDict]) -> torch.Tensor:
        engine, loss = self._worker.actor.engine, self._worker.actor.loss_fn
        with engine.train_mode():
            for data in micro_batches:
                value, _ = engine.forward_step(data, loss, forward_only=False)
                (value / data["dp_size"]).backward()  # FSDP takes the mean over ranks
            return rank.gradient_of(engine)

    def differences(self, own: torch.Tensor, reference: torch.Tensor) -> Iterator[tuple[str, dict[str, Any]]]:
        """What is computed, and how far it is off the rows alone in the same dtype and in float32."""

        def off(gradient: torch.Tensor, **more: Any) -> dict[str, Any]:
            of_dtype, of_float32 = (rank.distance(gradient, each) for each in (own, reference))
            return {"off_rows_alone": of_dtype, "off_float32": of_float32} | more

        yield "rows alone", off(own)
        for sharing in ("off", "trees"):
            install(sharing)(self._worker)
            plan = rows.plan(self._rows, self._budget, sharing=sharing, ranks=RANKS)
            cut = cut_as_planned(self._rows, plan, "actor", 0, token_budget=self._budget, global_batch_size=7)
            found, of_plan = self.gradient(data for _, data in cut), plan.figures["actor"]
            yield f"sharing={sharing}", off(found, pads=of_plan.pads, sharing_factor=round(of_plan.sharing_factor, 2))
        computed, skipped = (self._update(idle) for idle in ([], rows.rows_of_prompts(self._rows, "01")))
        yield "zero-advantage rows skipped", {"off_rows_computed": rank.distance(skipped, computed)}

    def _update(self, idle: list[int]) -> torch.Tensor:
        """The gradient of verl's own ``update_actor``, taken before its optimizer step."""
        engine, config = self._worker.actor.engine, self._worker.actor.loss_fn.inner.keywords["config"]
        before, taken, step = (config.use_kl_loss, config.entropy_coeff), [], engine.optimizer_step
        plan = rows.plan(self._rows, self._budget, sharing="trees", idle=idle)
        engine.optimizer_step = lambda: taken.append(rank.gradient_of(engine)) or step()
        try:
            self._set_terms(config, False, 0.0)  # with which rows without an advantage teach something
            said = {LEAVES_OUT: bool(idle), "calculate_entropy": False}
            self._worker.update_actor(rank.rows_of_call(self._rows, plan, **said))
        finally:
            engine.optimizer_step = step
            self._set_terms(config, *before)
        return taken[0]

    @staticmethod
    def _set_terms(config: Any, kl: bool, entropy: float) -> None:
        for name, value in (("use_kl_loss", kl), ("entropy_coeff", entropy)):
            object.__setattr__(config, name, value)  # verl's configs are frozen

    def probe(self) -> None:
        """The probe that each job starts with, which raises where packed rows see each other."""
        fixes = {"actor": "actor_rollout_ref.model.use_remove_padding=False"}
        probe_for_leaks((), sharing="trees", fixes=fixes, multiples={"actor": 1})(self._worker)
