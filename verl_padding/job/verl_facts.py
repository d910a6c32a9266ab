"""What the plug-in relies on in verl: a line for each thing, looked up in the source of the verl
that is installed.

A method that verl no longer calls, or a key that it no longer reads, would leave a part of the
plug-in out, and mostly without an error. ``verl_check.py`` refuses what needs a fact that does not
hold; what no source shows, a step does (``driver/receipts.py``).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl_padding.job.calls import CALLS
from verl_padding.job.savings import PACKER, SHARING
from verl_padding.job.vendor import VARIABLE
from verl_padding.job.verl_source import VerlSource

BASE, WORKERS = "trainer/ppo/v1/trainer_base.py", "workers/engine_workers.py"
ENGINES, REPLAY = "workers/engine", "trainer/ppo/v1/replay_buffer.py"
FILTER, DISTILLATION = "algorithm.filter_groups.enable", "distillation.enabled"
VISION, TIMING = "vision", "padding.timing"
"""The first is no setting: a model with a vision tower."""

OVERRIDDEN = {
    "_setup": ("init", "worker calls would bring no pads"),
    "_init_tokenizer": ("_setup", "models would not be checked"),
    "_build_replay_buffer": ("__init__", "the group filter would compare rows, not sessions"),
    "step": ("fit", "rows of earlier steps would count again"),
    "_step_once": ("step", "pads would stay in TransferQueue"),
    "_fetch_one_gen_batch": ("_next_train_batch", "plans would depend on which session ends first"),
    "_balance_batch": ("_step_once", "nothing would be planned"),
    "_compute_old_log_prob": ("_step_once", "padding.recompute_old_log_probs would be ignored"),
    "_compute_ref_log_prob": ("_step_once", "a critic would compute values without its adapter"),
    "_compute_advantage": ("_step_once", "rows, not sessions, would have advantages"),
    "_compute_metrics": ("fit", "metrics and records would be missing"),
    "_save_checkpoint": ("fit", "a snapshot of TransferQueue would hold trained rows"),
}
"""Method of verl's trainer that the padded ones override, or rely on -> the method that calls it,
and what would happen otherwise."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Fact:
    """A definition in verl's source has some pieces of code, in the form of ``ast.unparse``."""

    file: str
    name: str
    code: tuple[str, ...]
    without: str
    """What would happen in a job if it were not so."""
    needed_by: str = ""
    """Setting, from the config's root, that needs it if it is set; empty for the core."""
    engine: str = ""
    """Engines that need it, by the beginning of their strategy; empty for all."""

    def what_is_missing(self, source: VerlSource) -> str:
        """What is not so, with its place; empty if all is."""
        lacking = source.lacks(self.file, self.name, self.code)
        if lacking == [self.name]:
            return f"{self.file} has no {self.name}"
        return f"{self.name} in {self.file} has no {', '.join(lacking)}" if lacking else ""


def _facts(
    without: str, file: str, code_of: Mapping[str, tuple[str, ...]], **details: Any
) -> Iterator[Fact]:
    """A fact for each definition of a file."""
    for name, code in code_of.items():
        yield Fact(file=file, name=name, code=code, without=without, **details)


def _engine_facts(engine: str, cls: str) -> Iterator[Fact]:
    file, run = f"{ENGINES}/{engine}/transformer_impl.py", f"{cls}.forward_backward_batch"
    yield from _facts(
        "losses would not be divided by the number of trained tokens",
        file,
        {run: ("batch_num_tokens=", "dp_size=", "'loss_mask'")},
        engine=engine,
    )
    yield from _facts(
        "workers would cut their own micro-batches",
        file,
        {run: ("prepare_micro_batches(",)},
        engine=engine,
        needed_by=f"padding.{PACKER}",
    )


FSDP = f"{ENGINES}/fsdp/transformer_impl.py"
DENOMINATORS = ("data['dp_size']", "data['batch_num_tokens']", "data['global_batch_size']")
NO_DENOMINATORS = "pads, or rows of other mini-batches, would count in the denominators"
NO_FILTER = "the group filter would compare rows, not sessions"
FACTS: tuple[Fact, ...] = (
    *(
        Fact(file=BASE, name=f"PPOTrainer.{by}", code=(f"self.{method}(",), without=without)
        for method, (by, without) in OVERRIDDEN.items()
    ),
    *_facts(
        "rows would come to workers without pads",
        BASE,
        {"PPOTrainer": tuple(f"self.{call.worker_group}.{call.method}(" for call in CALLS)},
    ),
    *_facts(
        "steps that skip a method would not be noticed",
        BASE,
        {"PPOTrainer.fit": ("'save_checkpoint'", "self.global_steps")},
    ),
    *_facts(
        "the job would have another trainer or agent loop manager than the padded one",
        "trainer/main_ppo.py",
        {"TaskRunnerV1": ("get_trainer_cls(", "'agent_loop_manager_class'")},
    ),
    *_facts(
        "mini-batches and passes would not be the plan's, the learning rate would not change, or a "
        "reference would have its adapter",
        WORKERS,
        {
            "TrainingWorker.train_mini_batch": ("'epochs'", "dataloader_kwargs="),
            "TrainingWorker.train_batch": (
                "self.engine.train_batch(",
                "'update_lr_scheduler'",
                "self.engine.lr_scheduler_step(",
            ),
            "TrainingWorker.infer_batch": ("self.engine.infer_batch(", "'no_lora_adapter'"),
        },
    ),
    *_facts(
        "the plug-in would change another worker than the one that computes",
        WORKERS,
        {
            "ActorRolloutRefWorker.compute_log_prob": ("self.actor.infer_batch(",),
            "ActorRolloutRefWorker.compute_ref_log_prob": ("self.ref.infer_batch(",),
            "ActorRolloutRefWorker.update_actor": ("self.actor.train_mini_batch(",),
        },
    ),
    *_facts(
        NO_DENOMINATORS,
        "workers/utils/losses.py",
        {"ppo_loss": DENOMINATORS, "value_loss": DENOMINATORS},
    ),
    *_facts(
        NO_DENOMINATORS,
        "trainer/distillation/losses.py",
        {"distillation_loss": DENOMINATORS},
        needed_by=DISTILLATION,
    ),
    *_facts(
        "metrics of micro-batches would be counted with equal weights",
        "utils/py_functional.py",
        {"append_to_dict": ("val.init_list(", "data[new_key].append(")},
    ),
    *_facts(
        "workers would have verl's own engines, losses would see pads, and micro-batches would not "
        "be the plan's",
        f"{ENGINES}/base.py",
        {
            "EngineRegistry.get_engine_cls": (f"'{VARIABLE}'",),
            "BaseEngine.train_batch": ("self.forward_backward_batch(", "self.optimizer_step("),
            "BaseEngine.infer_batch": ("self.forward_backward_batch(",),
        },
    ),
    *_engine_facts("fsdp", "FSDPEngine"),
    *_engine_facts("megatron", "MegatronEngine"),
    *_engine_facts("veomni", "VeOmniEngine"),
    # VeOmni's engine inherits it.
    *(
        fact
        for engine in ("fsdp", "veomni")
        for fact in _facts(
            "tokens would be computed, but reported as saved",
            FSDP,
            {
                "FSDPEngineWithLMHead.forward_step": (
                    "self.prepare_model_inputs(",
                    "self.prepare_model_outputs(",
                )
            },
            engine=engine,
            needed_by=f"padding.{SHARING}",
        )
    ),
    *_facts(
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
        engine="megatron",
        needed_by=f"padding.{SHARING}",
    ),
    *_facts(
        "micro-batches would not be timed",
        FSDP,
        {"FSDPEngine.forward_backward_batch": ("self.forward_step(",)},
        engine="fsdp",
        needed_by=TIMING,
    ),
    *_facts(
        "position ids of rows of one length would be misread",
        "utils/tensordict_utils.py",
        {"maybe_fix_3d_position_ids": ("'position_ids'",)},
        needed_by=VISION,
    ),
    *_facts(
        NO_FILTER,
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
    *_facts(
        "the teacher would see only the last row of a session",
        "trainer/ppo/v1/agent_loop_tq.py",
        {"AgentLoopWorkerTQ._agent_loop_postprocess": ("self._compute_teacher_logprobs(",)},
        needed_by=DISTILLATION,
    ),
)
