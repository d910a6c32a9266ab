"""Watches a verl job from inside: loaded by verl itself (VERL_USE_EXTERNAL_MODULES) in each process of the job.

It asks nothing of the plug-in: what an optimizer step holds is read off the loss masks that reach verl's worker,
and what is left in TransferQueue off its own listing. So it watches stock verl just as well.
"""

import functools
import json
import os
from pathlib import Path

from wrapt import register_post_import_hook

FOLDER = "VERL_PADDING_PROBE"


def _note(**facts) -> None:
    with (Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(facts) + "\n")


def _watch_optimizer_steps(module) -> None:
    train_batch = module.TrainingWorker.train_batch

    @functools.wraps(train_batch)
    def watched(self, data, *args, **kwargs):
        import torch

        rows_with_loss = sum(bool(mask.sum() > 0) for mask in data["loss_mask"].unbind())
        model = self.config.model_type
        before = [p.detach().clone() for p in self.engine.module.parameters()]
        output = train_batch(self, data, *args, **kwargs)
        moved = any(
            not torch.equal(a.to_local(), b.to_local())
            for a, b in zip(before, self.engine.module.parameters(), strict=True)
        )
        _note(
            kind="optimizer_step",
            model=model,
            rank=self.engine.get_data_parallel_rank(),
            rows=len(data),
            real_rows=rows_with_loss,
            moved=moved,
        )
        return output

    module.TrainingWorker.train_batch = watched


def _watch_steps(module) -> None:
    step_once = module.PPOTrainer._step_once

    def watched(self, *args, **kwargs):
        batch = step_once(self, *args, **kwargs)
        _note(kind="batch", step=self.global_steps, rows=len(batch), pads=_pads(batch.tags), keys=batch.keys)
        return batch

    module.PPOTrainer._step_once = watched

    step = module.PPOTrainer.step

    def watched_step(self, *args, **kwargs):
        import transfer_queue as tq

        batch = step(self, *args, **kwargs)
        tags = (tq.kv_list("train") or {}).get("train", {})
        _note(kind="queue", step=self.global_steps, keys=len(tags), pads=_pads(tags.values()))
        return batch

    module.PPOTrainer.step = watched_step


def _pads(tags) -> int:
    return sum(bool(tag.get("is_padding", False)) for tag in tags)


if FOLDER in os.environ:
    register_post_import_hook(_watch_optimizer_steps, "verl.workers.engine_workers")
    register_post_import_hook(_watch_steps, "verl.trainer.ppo.v1.trainer_base")
