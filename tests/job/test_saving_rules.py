"""What keeps a job from leaving out the pass that computes old log-probs; test_savings.py has the
jobs."""

import ast
from pathlib import Path

import verl

READERS = {
    "trainer/distillation/losses.py": {"distillation_loss"},
    "trainer/ppo/core_algos.py": {
        "compute_optimal_token_baseline_advantage",
        "compute_multi_turn_optimal_token_baseline_advantage",
    },
    "trainer/ppo/metric_utils.py": {"compute_variance_proxy_metrics"},
    "trainer/ppo/ray_trainer.py": {
        "apply_kl_penalty",
        "compute_advantage",
        "RayPPOTrainer._compute_old_log_prob",
        "RayPPOTrainer.fit",
    },
    "trainer/ppo/rollout_corr_helper.py": {
        "compute_rollout_correction_and_add_to_batch",
        "apply_bypass_mode",
    },
    "trainer/ppo/v1/trainer_base.py": {
        "PPOTrainer._compute_old_log_prob",
        "PPOTrainer._compute_ref_log_prob",
        "PPOTrainer._compute_advantage",
    },
    "utils/debug/metrics.py": {"calculate_debug_metrics"},
    "workers/utils/losses.py": {"ppo_loss", "sft_loss"},
}
"""Functions of verl that read what the pass computes."""


def readers_in_verl():
    root = Path(verl.__file__).parent
    # Elsewhere, log_probs and entropy are an engine's outputs.
    trainers = ("trainer/ppo/v1", "workers/utils")
    found = {}
    for part in ("trainer", "utils", "workers/utils"):
        for path in (root / part).rglob("*.py"):
            file = path.relative_to(root).as_posix()
            more = ("log_probs", "entropy") if file.startswith(trainers) else ()
            found[file] = _functions_with(ast.parse(path.read_text()), {"old_log_probs", *more})
    return {file: functions for file, functions in found.items() if functions}


def _functions_with(node, names, inside=""):
    """Functions that have one of these texts, or an argument of this name."""
    found = set()
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if getattr(child, "value", None) in names or getattr(child, "arg", None) in names:
            found.add(inside)
        found |= _functions_with(
            child, names, f"{inside}.{child.name}".lstrip(".") if named else inside
        )
    return found


def test_all_that_reads_old_log_probs_in_verl_is_known():
    # When this fails, verl has a new reader: see with which setting it reads, and have
    # job/saving_rules.py name that.
    assert readers_in_verl() == READERS
