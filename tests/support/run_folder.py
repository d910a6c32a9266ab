"""What a run leaves in its folder, written by hand."""

import json

from omegaconf import OmegaConf

from verl_padding.record.run_files import CONFIG

CONFIGURED = {
    "trainer": {"n_gpus_per_node": 2, "nnodes": 1},
    "actor_rollout_ref": {"rollout": {"n": 3}, "actor": {"ppo_mini_batch_size": 2}},
    "algorithm": {"adv_estimator": "grpo"},
    "critic": {"enable": None, "ppo_mini_batch_size": 2},
}


def write_run(folder, *, padded):
    """Two steps; stock verl with mini-batches of 2 x 3 rows dumps its pads."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / CONFIG).parent.mkdir(parents=True)
    OmegaConf.save(OmegaConf.create(CONFIGURED), folder / CONFIG)
    lines = []
    for step, real in enumerate((5, 8), start=1):
        data = {"critic/score/mean": 0.5, "actor/grad_norm": 0.1 * step}
        if padded:
            data |= {"padding/actor/optimizer_steps/total": 1.0, "padding/pad_rows/total": 1.0}
        lines.append(json.dumps({"step": step, "data": data}) + "\n")
        rows = [{"uid": f"p{row}_0_0", "score": 0.25 * step} for row in range(real)]
        if not padded:
            rows += [{"uid": f"padding_{row}_0_0", "score": 0.0} for row in range(-real % 6)]
        (folder / "rollouts" / f"{step}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder
