"""Three steps of a tiny job on one rank: Ray, TransferQueue, shared prefixes; its rollout is
transformers on the CPU."""

import os
import sys
from pathlib import Path

from verl_padding.on_cpu.launch import LOG, TIMED_OUT, run_command
from verl_padding.recipes.every_call import job as recipe
from verl_padding.record.run_files import read_metrics

STEPS = 3
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ROLLOUT_ON_CPU = """
from wrapt import register_post_import_hook
from verl_padding.on_cpu import verl_patches
for module, hook in verl_patches.HOOKS:
    if any(part in module for part in ("rollout", "agent_loop", "replay_buffer")):
        register_post_import_hook(hook, module)
"""
"""A module that workers import: of what runs verl on a CPU, the rollout alone."""
ON_GPU = (
    f"{ACTOR}.strategy=fsdp2",
    f"{ACTOR}.fsdp_config.strategy=fsdp2",
    f"{ACTOR}.use_dynamic_bsz=true",
    f"{ACTOR}.ppo_max_token_len_per_gpu=4096",
    f"{ACTOR}.use_torch_compile=false",
    f"{ACTOR}.fsdp_config.use_torch_compile=false",
    f"{ROLLOUT}.name=transformers",
    f"{ROLLOUT}.dtype=float32",
    f"{ROLLOUT}.calculate_log_probs=true",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
    f"{ROLLOUT}.agent.num_workers=1",
    f"{ROLLOUT}.log_prob_use_dynamic_bsz=true",
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu=4096",
    "data.dataloader_num_workers=0",
    "reward.num_workers=1",
    "trainer.logger=[console,file]",
    "trainer.val_before_train=false",
    "+ray_kwargs.ray_init.include_dashboard=false",
)
"""What ``+local=cpu`` says of rollout and processes, for an actor on a GPU."""
PADDED = ("+padding=prompt", "padding.packer=plan", "padding.sharing=on")


def run(folder, *, timeout_s=600):
    """The metrics of each step.

    Raises:
        RuntimeError: the job has failed.
    """
    job = [*ON_GPU, *recipe.tiny_job(folder), f"trainer.total_training_steps={STEPS}", *PADDED]
    if start(job, folder, timeout_s=timeout_s):
        raise RuntimeError(f"the job has not ended in {timeout_s} s")
    return [metrics for _, metrics in read_metrics(folder)]


def start(job: list[str], folder: Path, *, timeout_s: float, device: str = "cuda") -> bool:
    """Runs a job of one rank, and returns whether its time was over first.

    Raises:
        RuntimeError: the job has failed; its output is in ``<folder>/log``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rollout_on_cpu.py").write_text(ROLLOUT_ON_CPU)
    told = [f"PYTHONPATH={folder}:{os.environ.get('PYTHONPATH', '')}"]
    if device == "cuda":
        told = ["-u", "VERL_PLATFORM", *told, "VERL_USE_EXTERNAL_MODULES=rollout_on_cpu"]
    command = ["env", *told, sys.executable, "-m", "verl.trainer.main_ppo", *job]
    code = run_command([*command, "trainer.n_gpus_per_node=1"], folder=folder, timeout_s=timeout_s)
    if code not in (0, TIMED_OUT):
        raise RuntimeError(f"ended with {code}\n{(folder / LOG).read_text()[-3000:]}")
    return code == TIMED_OUT
