"""What the plug-in relies on in verl, looked up in the source of the verl that is installed.

A method that verl no longer calls, or a key that it no longer reads, would leave a part of the
plug-in out, and mostly without an error. ``verl_check.py`` refuses what needs a fact that does not
hold; what no source shows, a step does (``driver/called_methods.py``).
"""

from dataclasses import dataclass

from verl_padding.job.calls import CALLS
from verl_padding.job.savings import PACKER, SHARING
from verl_padding.job.vendor import VARIABLE
from verl_padding.job.verl_source import VerlSource

BASE, WORKERS = "trainer/ppo/v1/trainer_base.py", "workers/engine_workers.py"
ENGINES, REPLAY = "workers/engine", "trainer/ppo/v1/replay_buffer.py"
FILTER, DISTILLATION = "algorithm.filter_groups.enable", "distillation.enabled"

OVERRIDDEN = {
    "_setup": "init",
    "_init_tokenizer": "_setup",
    "_build_replay_buffer": "__init__",
    "step": "fit",
    "_step_once": "step",
    "_fetch_one_gen_batch": "_next_train_batch",
    "_balance_batch": "_step_once",
    "_compute_old_log_prob": "_step_once",
    "_compute_advantage": "_step_once",
    "_compute_metrics": "fit",
    "_save_checkpoint": "fit",
}
"""Method of verl's trainer that the padded ones override -> the one that calls it."""


@dataclass(frozen=True, eq=False)
class Fact:
    """A definition in verl's source has some pieces of code, in the form of ``ast.unparse``."""

    file: str
    name: str
    code: tuple[str, ...]
    needed_by: str = ""
    """Setting, from the config's root, that needs it if it is set; empty for the core."""
    engine: str = ""
    """Engines that need it, by the beginning of their strategy; empty for all."""

    def what_is_missing(self, source: VerlSource) -> str:
        """What is not so, with its place; empty if all is."""
        lacking = source.lacks(self.file, self.name, self.code)
        return lacking and f"{self.name} in {self.file} {lacking}"


ENGINE_CLASSES = {"fsdp": "FSDPEngine", "megatron": "MegatronEngine", "veomni": "VeOmniEngine"}
DENOMINATORS = ("data['dp_size']", "data['batch_num_tokens']", "data['global_batch_size']")
FACTS = (
    # Otherwise, methods of the padded trainers would not run.
    *(
        Fact(BASE, f"PPOTrainer.{caller}", (f"self.{method}(",))
        for method, caller in OVERRIDDEN.items()
    ),
    # Rows would come to workers without pads.
    *(Fact(BASE, "PPOTrainer", (f"self.{each.worker_group}.{each.method}(",)) for each in CALLS),
    # Steps that skip a method would not be noticed.
    Fact(BASE, "PPOTrainer.fit", ("'save_checkpoint'", "self.global_steps")),
    # The job would have another trainer or agent loop manager than the padded one.
    Fact("trainer/main_ppo.py", "TaskRunnerV1", ("get_trainer_cls(", "'agent_loop_manager_class'")),
    # The plug-in would change another worker than the one that computes.
    Fact(WORKERS, "ActorRolloutRefWorker.compute_log_prob", ("self.actor.infer_batch(",)),
    Fact(WORKERS, "ActorRolloutRefWorker.compute_ref_log_prob", ("self.ref.infer_batch(",)),
    Fact(WORKERS, "ActorRolloutRefWorker.update_actor", ("self.actor.train_mini_batch(",)),
    # Mini-batches and passes would not be the plan's, the learning rate would not change, or a
    # reference would have its adapter.
    Fact(WORKERS, "TrainingWorker.train_mini_batch", ("'epochs'", "dataloader_kwargs=")),
    Fact(
        WORKERS,
        "TrainingWorker.train_batch",
        ("self.engine.train_batch(", "'update_lr_scheduler'", "self.engine.lr_scheduler_step("),
    ),
    Fact(WORKERS, "TrainingWorker.infer_batch", ("self.engine.infer_batch(", "'no_lora_adapter'")),
    # Pads, or rows of other mini-batches, would count in the denominators.
    Fact("workers/utils/losses.py", "ppo_loss", DENOMINATORS),
    Fact("workers/utils/losses.py", "value_loss", DENOMINATORS),
    Fact("trainer/distillation/losses.py", "distillation_loss", DENOMINATORS, DISTILLATION),
    # Metrics of micro-batches would be counted with equal weights.
    Fact("utils/py_functional.py", "append_to_dict", ("val.init_list(", "data[new_key].append(")),
    # Workers would have verl's own engines, losses would see pads, and micro-batches would not be
    # the plan's.
    Fact(f"{ENGINES}/base.py", "EngineRegistry.get_engine_cls", (f"'{VARIABLE}'",)),
    Fact(
        f"{ENGINES}/base.py",
        "BaseEngine.train_batch",
        ("self.forward_backward_batch(", "self.optimizer_step("),
    ),
    Fact(f"{ENGINES}/base.py", "BaseEngine.infer_batch", ("self.forward_backward_batch(",)),
    *(
        Fact(
            f"{ENGINES}/{engine}/transformer_impl.py",
            f"{cls}.forward_backward_batch",
            code,
            needed_by,
            engine,
        )
        for engine, cls in ENGINE_CLASSES.items()
        for code, needed_by in (
            # Losses would not be divided by the number of trained tokens.
            (("batch_num_tokens=", "dp_size=", "'loss_mask'"), ""),
            # Workers would cut their own micro-batches.
            (("prepare_micro_batches(",), f"padding.{PACKER}"),
        )
    ),
    # Tokens would be computed, but reported as saved.
    *(
        Fact(
            f"{ENGINES}/fsdp/transformer_impl.py",
            "FSDPEngineWithLMHead.forward_step",
            ("self.prepare_model_inputs(", "self.prepare_model_outputs("),
            f"padding.{SHARING}",
            engine,
        )
        for engine in ("fsdp", "veomni")  # which inherits it
    ),
    # Losses would read other rows than those that share.
    *(
        Fact(
            f"{ENGINES}/megatron/transformer_impl.py",
            f"MegatronEngineWithLMHead.{name}",
            code,
            f"padding.{SHARING}",
            "megatron",
        )
        for name, code in {
            "forward_step": ("next(batch_iter)", "partial(postprocess_micro_batch_func, data="),
            "postprocess_micro_batch_func": ("self.prepare_model_outputs(output, data)",),
        }.items()
    ),
    # Position ids of rows of one length would be misread.
    Fact("utils/tensordict_utils.py", "maybe_fix_3d_position_ids", ("'position_ids'",)),
    # The group filter would compare rows, not sessions.
    Fact(REPLAY, "ReplayBuffer._terminal_eviction_reasons", ("self._dapo_filtered_keys(",), FILTER),
    Fact(
        REPLAY,
        "ReplayBuffer._dapo_filtered_keys",
        ("self.finished_keys[", "self.partitions[", "self._dapo_classification_cache["),
        FILTER,
    ),
    # The teacher would see only the last row of a session.
    Fact(
        "trainer/ppo/v1/agent_loop_tq.py",
        "AgentLoopWorkerTQ._agent_loop_postprocess",
        ("self._compute_teacher_logprobs(",),
        DISTILLATION,
    ),
)
