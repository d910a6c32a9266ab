"""What the plug-in relies on in verl, looked up in the source of the verl that is installed.

A method that verl no longer calls, or a key that it no longer reads, would leave a part of the
plug-in out, and mostly without an error. ``verl_check.py`` refuses what needs a fact that does not
hold; what no source shows, a step does (``driver/receipts.py``).
"""

from collections.abc import Iterator, Mapping
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
    "_compute_ref_log_prob": "_step_once",
    "_compute_advantage": "_step_once",
    "_compute_metrics": "fit",
    "_save_checkpoint": "fit",
}
"""Method of verl's trainer that the padded ones override -> the method that calls it."""


@dataclass(frozen=True, eq=False)
class Fact:
    """Definitions in a file of verl's have some pieces of code, in the form of ``ast.unparse``."""

    without: str
    """What would happen in a job if it were not so."""
    file: str
    code: Mapping[str, tuple[str, ...]]
    """Definition -> the pieces."""
    needed_by: str = ""
    """Setting, from the config's root, that needs it if it is set; empty for the core."""
    engine: str = ""
    """Engines that need it, by the beginning of their strategy; empty for all."""

    def what_is_missing(self, source: VerlSource) -> str:
        """What is not so, with its place; empty if all is."""
        return "; ".join(
            f"{name} in {self.file} {lacking}"
            for name, pieces in self.code.items()
            if (lacking := source.lacks(self.file, name, pieces))
        )


def _facts_of_engine(engine: str, cls: str) -> Iterator[Fact]:
    file, run = f"{ENGINES}/{engine}/transformer_impl.py", f"{cls}.forward_backward_batch"
    yield Fact(
        "losses would not be divided by the number of trained tokens",
        file,
        {run: ("batch_num_tokens=", "dp_size=", "'loss_mask'")},
        engine=engine,
    )
    yield Fact(
        "workers would cut their own micro-batches",
        file,
        {run: ("prepare_micro_batches(",)},
        needed_by=f"padding.{PACKER}",
        engine=engine,
    )


DENOMINATORS = ("data['dp_size']", "data['batch_num_tokens']", "data['global_batch_size']")
NO_DENOMINATORS = "pads, or rows of other mini-batches, would count in the denominators"
FACTS = (
    *(
        Fact("padding would do less", BASE, {f"PPOTrainer.{caller}": (f"self.{method}(",)})
        for method, caller in OVERRIDDEN.items()
    ),
    Fact(
        "rows would come to workers without pads",
        BASE,
        {"PPOTrainer": tuple(f"self.{call.worker_group}.{call.method}(" for call in CALLS)},
    ),
    Fact(
        "seconds of worker calls, or steps that skip a method, would not be noticed",
        BASE,
        {
            "PPOTrainer._step_once": tuple(f"'{call.timer}'" for call in CALLS),
            "PPOTrainer.fit": ("'save_checkpoint'", "self.global_steps"),
        },
    ),
    Fact(
        "the job would have another trainer or agent loop manager than the padded one",
        "trainer/main_ppo.py",
        {"TaskRunnerV1": ("get_trainer_cls(", "'agent_loop_manager_class'")},
    ),
    Fact(
        "mini-batches and passes would not be the plan's, the learning rate would not change, or a "
        "reference would have its adapter",
        WORKERS,
        {
            "ActorRolloutRefWorker.compute_log_prob": ("self.actor.infer_batch(",),
            "ActorRolloutRefWorker.compute_ref_log_prob": ("self.ref.infer_batch(",),
            "ActorRolloutRefWorker.update_actor": ("self.actor.train_mini_batch(",),
            "TrainingWorker.train_mini_batch": ("'epochs'", "dataloader_kwargs="),
            "TrainingWorker.train_batch": (
                "self.engine.train_batch(",
                "'update_lr_scheduler'",
                "self.engine.lr_scheduler_step(",
            ),
            "TrainingWorker.infer_batch": ("self.engine.infer_batch(", "'no_lora_adapter'"),
        },
    ),
    Fact(
        NO_DENOMINATORS,
        "workers/utils/losses.py",
        {"ppo_loss": DENOMINATORS, "value_loss": DENOMINATORS},
    ),
    Fact(
        NO_DENOMINATORS,
        "trainer/distillation/losses.py",
        {"distillation_loss": DENOMINATORS},
        needed_by=DISTILLATION,
    ),
    Fact(
        "metrics of micro-batches would be counted with equal weights",
        "utils/py_functional.py",
        {"append_to_dict": ("val.init_list(", "data[new_key].append(")},
    ),
    Fact(
        "workers would have verl's own engines, losses would see pads, and micro-batches would not "
        "be the plan's",
        f"{ENGINES}/base.py",
        {
            "EngineRegistry.get_engine_cls": (f"'{VARIABLE}'",),
            "BaseEngine.train_batch": ("self.forward_backward_batch(", "self.optimizer_step("),
            "BaseEngine.infer_batch": ("self.forward_backward_batch(",),
        },
    ),
    *_facts_of_engine("fsdp", "FSDPEngine"),
    *_facts_of_engine("megatron", "MegatronEngine"),
    *_facts_of_engine("veomni", "VeOmniEngine"),
    *(
        Fact(
            "tokens would be computed, but reported as saved",
            f"{ENGINES}/fsdp/transformer_impl.py",
            {
                "FSDPEngineWithLMHead.forward_step": (
                    "self.prepare_model_inputs(",
                    "self.prepare_model_outputs(",
                )
            },
            needed_by=f"padding.{SHARING}",
            engine=engine,
        )
        for engine in ("fsdp", "veomni")  # which inherits it
    ),
    Fact(
        "losses would read other rows than those that share",
        f"{ENGINES}/megatron/transformer_impl.py",
        {
            "MegatronEngineWithLMHead.forward_step": (
                "next(batch_iter)",
                "partial(postprocess_micro_batch_func, data=",
            ),
            "MegatronEngineWithLMHead.postprocess_micro_batch_func": (
                "self.prepare_model_outputs(output, data)",
            ),
        },
        needed_by=f"padding.{SHARING}",
        engine="megatron",
    ),
    Fact(
        "sessions that failed would not be counted",
        REPLAY,
        {"ReplayBuffer.__init__": ("self.failure_keys",)},
    ),
    Fact(
        "the group filter would compare rows, not sessions",
        REPLAY,
        {
            "ReplayBuffer._terminal_eviction_reasons": ("self._dapo_filtered_keys(",),
            "ReplayBuffer._dapo_filtered_keys": (
                "self.finished_keys[",
                "self.partitions[",
                "self._dapo_classification_cache[",
            ),
        },
        needed_by=FILTER,
    ),
    Fact(
        "the teacher would see only the last row of a session",
        "trainer/ppo/v1/agent_loop_tq.py",
        {"AgentLoopWorkerTQ._agent_loop_postprocess": ("self._compute_teacher_logprobs(",)},
        needed_by=DISTILLATION,
    ),
)
