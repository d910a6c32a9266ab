"""Three steps of a tiny job on one rank: Ray, TransferQueue, trees; its rollout is transformers on
the CPU."""

import json
import os
import subprocess
import sys

from verl_padding.recipes.every_call import job as recipe

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
    "+ray_kwargs.ray_init.include_dashboard=false",
)
"""What ``+local=cpu`` says of rollout and processes, for an actor on a GPU."""
PADDED = ("+padding=prompt", "padding.packer=plan", "padding.sharing=on")


def run(folder, *, timeout_s=600):
    """The metrics of each step.

    Raises:
        subprocess.CalledProcessError: the job has failed; its output is in ``<folder>/job.log``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "RAY_prestart_worker_first_driver": "0",
        "HF_HUB_OFFLINE": "1",
        "VERL_USE_EXTERNAL_MODULES": "rollout_on_cpu",
        "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}",
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "VERL_PLATFORM"):
        environment.pop(name, None)
    (folder / "rollout_on_cpu.py").write_text(ROLLOUT_ON_CPU)
    job = [
        *ON_GPU,
        *recipe.tiny_job(folder),
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={STEPS}",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=false",
        *PADDED,
    ]
    with (folder / "job.log").open("w") as log:
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *job]
        subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
            timeout=timeout_s,
            check=True,
        )
    return [
        json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
