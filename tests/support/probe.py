"""Watches a verl job from inside: loaded by verl itself (VERL_USE_EXTERNAL_MODULES) in each process
of the job.

It asks nothing of the plug-in: what an optimizer step holds is read off the loss masks that reach
verl's worker, and what is left in TransferQueue off its own listing. So it watches stock verl just
as well.
"""

import functools
import json
import os
import signal
import weakref
from pathlib import Path

from wrapt import register_post_import_hook

import tests.support.engines  # noqa: F401  (jobs on these engines have no other module to load it)

# Environment variables.
FOLDER = "VERL_PADDING_PROBE"  # where the notes go
KILL = "VERL_PADDING_PROBE_KILL"
"""``update:4`` kills the trainer's process after the update of step 4, before anything is saved;
``save:4`` while its checkpoint is being written, the weights done."""
TRAINED = "VERL_PADDING_PROBE_TRAINED"
"""If it is there, each rank saves the rows and metrics of its optimizer steps,
``<model>_<rank>_<number>.pt``, and notes the worker calls that it makes, with the tokens of each
forward pass of its model; the trainer saves the rows of each step, ``batch_<step>.pt``, and their
masks as they were sampled."""


def text_of(message):
    """What a message says, without its images."""
    content = message["content"]
    return (
        content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    )


def _note(**facts):
    with (Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(facts) + "\n")


def _watch_optimizer_steps(module):
    import ray
    import torch

    train_batch = module.TrainingWorker.train_batch

    @functools.wraps(train_batch)
    def watched(self, data, *args, **kwargs):
        rows_with_loss = sum(bool(mask.sum() > 0) for mask in data["loss_mask"].unbind())
        before = [local.detach().clone() for local in _local_parameters(self.engine)]
        output = train_batch(self, data, *args, **kwargs)
        moved = any(
            not torch.equal(a, b)
            for a, b in zip(before, _local_parameters(self.engine), strict=True)
        )
        if (
            not self.engine.is_mp_src_rank_with_outputs()
        ):  # ranks that share rows would tell of them once each
            return output
        if TRAINED in os.environ:
            rank = self.engine.get_data_parallel_rank()
            _save_trained(f"{self.config.model_type}_{rank}", data, output["metrics"])
        _note(
            kind="optimizer_step",
            model=self.config.model_type,
            rank=self.engine.get_data_parallel_rank(),
            node=ray.get_runtime_context().get_node_id(),
            rows=len(data),
            real_rows=rows_with_loss,
            moved=moved,
        )
        return output

    module.TrainingWorker.train_batch = watched


def _rows_of(data):
    import torch

    rows = [{} for _ in range(len(data))]
    for name, values in data.items():
        if isinstance(values, torch.Tensor):
            for row, value in zip(rows, values.unbind(), strict=True):
                row[name] = value.detach().clone()
    for row, inputs in zip(rows, data.get("multi_modal_inputs", [None] * len(rows)), strict=True):
        row["images"] = getattr(inputs, "data", inputs) or {}
    return rows


def _save_trained(worker, data, metrics):
    import torch
    from verl.utils.metric import Metric

    metrics = {
        name: Metric.aggregate_dp(value)
        if isinstance(value, list) and isinstance(value[0], Metric)
        else value
        for name, value in metrics.items()
    }
    folder = Path(os.environ[FOLDER])
    number = len([*folder.glob(f"{worker}_*.pt")])
    torch.save({"rows": _rows_of(data), "metrics": metrics}, folder / f"{worker}_{number:03}.pt")


def _watch_calls(module):
    """Notes each call that a worker makes for the trainer: the tokens that each pass of a model
    gets.

    What the plug-in has a worker compute beside such calls is not noted.
    """
    tokens = []
    counted = weakref.WeakSet()

    def count_passes(compute):
        @functools.wraps(compute)
        def counting(self, *args, **kwargs):
            model = self.engine.module
            if not isinstance(model, list) and model not in counted:
                counted.add(model)
                model.register_forward_pre_hook(
                    lambda model, args, inputs: tokens.append(inputs["input_ids"].numel()),
                    with_kwargs=True,
                )
            return compute(self, *args, **kwargs)

        return counting

    def note_call(name, call, engine_of):
        @functools.wraps(call)
        def noted(self, *args, **kwargs):
            tokens.clear()
            output = call(self, *args, **kwargs)
            rank = engine_of(self).get_data_parallel_rank()
            _note(kind="call", call=name, rank=rank, tokens=list(tokens))
            return output

        return noted

    for name in ("train_batch", "infer_batch"):
        compute = getattr(module.TrainingWorker, name)
        setattr(module.TrainingWorker, name, count_passes(compute))
    for name, role in (
        ("compute_log_prob", "actor"),
        ("compute_ref_log_prob", "ref"),
        ("update_actor", "actor"),
    ):
        call = getattr(module.ActorRolloutRefWorker, name)
        noted = note_call(name, call, lambda worker, role=role: getattr(worker, role).engine)
        setattr(module.ActorRolloutRefWorker, name, noted)


def _local_parameters(engine):
    modules = engine.module if isinstance(engine.module, list) else [engine.module]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    return [p.to_local() if hasattr(p, "to_local") else p for p in parameters]


def _watch_steps(module):
    step_once = module.PPOTrainer._step_once

    def watched(self, *args, **kwargs):
        batch = step_once(self, *args, **kwargs)
        if TRAINED in os.environ:
            _save_batch(batch, self.global_steps)
        _note(
            kind="batch",
            step=self.global_steps,
            pads=_pads(batch.tags),
            keys=batch.keys,
            questions=_questions(batch.keys),
        )
        return batch

    step = module.PPOTrainer.step

    def watched_step(self, *args, **kwargs):
        import transfer_queue as tq

        batch = step(self, *args, **kwargs)
        tags = (tq.kv_list("train") or {}).get("train", {})
        prompts = [key for key, tag in tags.items() if tag.get("is_prompt", False)]
        _note(
            kind="queue",
            step=self.global_steps,
            pads=_pads(tags.values()),
            waiting=_questions(prompts) if self.trainer_mode != "sync" else [],
        )
        return batch

    save_checkpoint = module.PPOTrainer._save_checkpoint

    def watched_save(self):
        place, _, step = os.environ.get(KILL, "").partition(":")
        if step == str(self.global_steps):
            kill = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
            if place == "update":
                kill()
            module.tq.save_checkpoint = lambda *args, **kwargs: kill()
        return save_checkpoint(self)

    module.PPOTrainer._step_once, module.PPOTrainer.step = watched, watched_step
    module.PPOTrainer._save_checkpoint = watched_save


def _save_batch(batch, step):
    import torch
    import transfer_queue as tq

    rows = _rows_of(tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id))
    path = Path(os.environ[FOLDER]) / f"batch_{step}.pt"
    torch.save(dict(zip(batch.keys, rows, strict=True)), path)


def _watch_sampling(module):
    sample = module.ReplayBuffer.sample

    @functools.wraps(sample)
    def watched(self, global_steps, partition_id, batch_size):
        batch, metrics = sample(self, global_steps, partition_id, batch_size)
        masks = {}
        if TRAINED in os.environ and batch.keys:
            import transfer_queue as tq

            read = {"partition_id": batch.partition_id, "select_fields": ["response_mask"]}
            found = tq.kv_batch_get(keys=batch.keys, **read)["response_mask"]
            masks = {
                key: mask.tolist() for key, mask in zip(batch.keys, found.unbind(), strict=True)
            }
        _note(kind="sampled", partition=batch.partition_id, keys=list(batch.keys), masks=masks)
        return batch, metrics

    module.ReplayBuffer.sample = watched


def _questions(keys):
    import transfer_queue as tq

    if not keys:
        return []
    data = tq.kv_batch_get(keys=list(keys), partition_id="train", select_fields=["raw_prompt"])
    return [text_of(messages[-1]) for messages in data["raw_prompt"]]


def _pads(tags):
    return sum(bool(tag.get("is_padding", False)) for tag in tags)


if FOLDER in os.environ:
    register_post_import_hook(_watch_optimizer_steps, "verl.workers.engine_workers")
    if TRAINED in os.environ:
        register_post_import_hook(_watch_calls, "verl.workers.engine_workers")
    register_post_import_hook(_watch_steps, "verl.trainer.ppo.v1.trainer_base")
    register_post_import_hook(_watch_sampling, "verl.trainer.ppo.v1.replay_buffer")
