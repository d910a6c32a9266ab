"""What the plug-in relies on in verl: a line for each thing, looked up in the source of the verl
that is installed.

A method that verl no longer calls, or a key that it no longer reads, would leave a part of the
plug-in out, and mostly without an error. ``verl_check.py`` refuses what needs a fact that does not
hold; what no source shows, a step does (``driver/receipts.py``).
"""

import ast
from collections.abc import Callable, Iterator

from verl_padding.job.calls import CALLS
from verl_padding.job.fact import ClosedWorld, Code, Fact
from verl_padding.job.savings import PACKER, SHARING
from verl_padding.job.vendor import VARIABLE
from verl_padding.job.verl_losses import ESTIMATORS, POLICY_LOSSES
from verl_padding.job.verl_source import VerlSource

BASE, ENGINES = "trainer/ppo/v1/trainer_base.py", "workers/engine"
WORKERS, LOSSES = "workers/engine_workers.py", "workers/utils/losses.py"
REPLAY, ALGORITHMS = "trainer/ppo/v1/replay_buffer.py", "trainer/ppo/core_algos.py"
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
    "_compute_ref_log_prob": ("_step_once", "a critic would be asked without its adapter"),
    "_compute_advantage": ("_step_once", "rows would have advantages of their own, not sessions"),
    "_compute_metrics": ("fit", "metrics and records would be missing"),
    "_save_checkpoint": ("fit", "a snapshot of TransferQueue would hold trained rows"),
}
"""Method of verl's trainer that the padded ones override -> the method that calls it, and what
would happen otherwise."""
OVERRIDDEN_BY_VERL = {
    f"PPOTrainerSeparateAsync.{name}" for name in ("_setup", "_compute_old_log_prob")
}
"""Those of them that verl's own trainers override, each with a call of super()."""
PLANNED = {f"{call.worker_group}.{call.method}" for call in CALLS}
CALLS_WITHOUT_ROWS = {
    *(f"{group}.save_checkpoint" for group in ("actor_rollout_wg", "critic_wg")),
    *(f"{group}.load_checkpoint" for group in ("actor_rollout_wg", "critic_wg")),
    *(f"{group}.init_model" for group in ("actor_rollout_wg", "ref_policy_wg")),
    *("critic_wg.reset", "critic_wg.set_loss_fn", "worker_group._query_dispatch_info"),
    *(
        f"{group}.{end}_profile"
        for group in ("actor_rollout_wg", "ref_policy_wg", "critic_wg")
        for end in ("start", "stop")
    ),
    *(
        f"actor_rollout_wg.{name}"
        for name in ("save_model_to_cpu", "restore_model_from_cpu", "clear_cpu_model")
    ),
}
"""What verl's trainers call of worker groups beside :data:`PLANNED`."""


def _v1_trainers(source: VerlSource) -> Iterator[ast.Module]:
    for path in sorted((source.root / BASE).parent.glob("trainer_*.py")):
        module = source.module(path.relative_to(source.root).as_posix())
        assert module is not None
        yield module


def worker_calls(source: VerlSource) -> set[str]:
    """``group.method`` of the calls of verl's trainers to worker groups."""
    found = set()
    for module in _v1_trainers(source):
        for node in ast.walk(module):
            match node:
                case ast.Call(func=ast.Attribute(attr=method, value=ast.Attribute(attr=group))):
                    found |= {f"{group}.{method}"} if group.endswith("_wg") else set()
                case ast.Call(func=ast.Attribute(attr=method, value=ast.Name(id="worker_group"))):
                    found.add(f"worker_group.{method}")
    return found


def overridden_by_verl(source: VerlSource) -> set[str]:
    """``Trainer.method`` of what verl's own trainers override of :data:`OVERRIDDEN`."""
    return {
        f"{each.name}.{method.name}"
        for module in _v1_trainers(source)
        for each in module.body
        if isinstance(each, ast.ClassDef) and each.name != "PPOTrainer"
        for method in each.body
        if isinstance(method, ast.FunctionDef) and method.name in OVERRIDDEN
    }


def registered_by(decorator: str) -> Callable[[VerlSource], set[str]]:
    """What is registered by a decorator of the algorithms: by a string, or by a member of an
    enumeration, whose names are its values in capitals."""

    def found(source: VerlSource) -> set[str]:
        names = set()
        for node in ast.walk(source.module(ALGORITHMS) or ast.Module([], [])):
            for each in node.decorator_list if isinstance(node, ast.FunctionDef) else []:
                match each:
                    case ast.Call(func=ast.Name(id=by), args=[ast.Constant(value=str(name))]):
                        names |= {name} if by == decorator else set()
                    case ast.Call(func=ast.Name(id=by), args=[ast.Attribute(attr=name)]):
                        names |= {name.lower()} if by == decorator else set()
        return names

    return found


def _engine_facts(engine: str, cls: str) -> Iterator[Fact]:
    file, run = f"{ENGINES}/{engine}/transformer_impl.py", f"{cls}.forward_backward_batch"
    yield Code(
        engine=engine,
        file=file,
        name=run,
        code=("batch_num_tokens=", "dp_size=", "'loss_mask'"),
        without="losses would be divided by another number than that of trained tokens",
    )
    yield Code(
        engine=engine,
        needed_by=f"padding.{PACKER}",
        file=file,
        name=run,
        code=("prepare_micro_batches(",),
        without="workers would cut micro-batches of their own",
        is_silent=False,
    )


FACTS: tuple[Fact, ...] = (
    *(
        Code(file=BASE, name=f"PPOTrainer.{by}", code=(f"self.{method}(",), without=without)
        for method, (by, without) in OVERRIDDEN.items()
    ),
    ClosedWorld(
        kind="methods that verl's trainers override",
        found=overridden_by_verl,
        known=OVERRIDDEN_BY_VERL,
        without="a padded trainer's method might not be called",
    ),
    ClosedWorld(
        kind="calls of verl's trainers to worker groups",
        found=worker_calls,
        known=PLANNED | CALLS_WITHOUT_ROWS,
        needed=PLANNED,
        without="rows would come to workers without pads",
    ),
    Code(
        file=BASE,
        name="PPOTrainer._step_once",
        code=tuple(f"'{call.timer}'" for call in CALLS),
        without="seconds of worker calls would be missing",
    ),
    Code(
        file=BASE,
        name="PPOTrainer.fit",
        code=("'save_checkpoint'", "self.global_steps"),
        without="steps that leave something out would not be noticed",
    ),
    Code(
        file="trainer/main_ppo.py",
        name="TaskRunnerV1",
        code=("get_trainer_cls(", "'agent_loop_manager_class'"),
        without="the job would have another trainer or agent loop manager than the padded one",
    ),
    Code(
        file=WORKERS,
        name="TrainingWorker.train_mini_batch",
        code=("'epochs'", "dataloader_kwargs="),
        without="mini-batches would not be those of the plan",
    ),
    Code(
        file=WORKERS,
        name="TrainingWorker.train_batch",
        code=(
            "self.engine.train_batch(",
            "'update_lr_scheduler'",
            "self.engine.lr_scheduler_step(",
        ),
        without="steps would not be those of the plan, or the learning rate's scheduler would stay",
    ),
    Code(
        file=WORKERS,
        name="TrainingWorker.infer_batch",
        code=("self.engine.infer_batch(", "'no_lora_adapter'"),
        without="passes would not be those of the plan, or those of a reference with its adapter",
    ),
    *(
        Code(
            file=WORKERS,
            name=f"ActorRolloutRefWorker.{method}",
            code=(f"self.{model}.{inner}(",),
            without="the plug-in would change another worker than the one that computes",
        )
        for method, model, inner in (
            ("compute_log_prob", "actor", "infer_batch"),
            ("compute_ref_log_prob", "ref", "infer_batch"),
            ("update_actor", "actor", "train_mini_batch"),
        )
    ),
    *(
        Code(
            file=file,
            name=loss,
            code=("data['dp_size']", "data['batch_num_tokens']", "data['global_batch_size']"),
            needed_by=needed_by,
            without="pads, or rows of other mini-batches, would count in the denominators",
        )
        for file, loss, needed_by in (
            (LOSSES, "ppo_loss", ""),
            (LOSSES, "value_loss", ""),
            ("trainer/distillation/losses.py", "distillation_loss", DISTILLATION),
        )
    ),
    Code(
        file="utils/py_functional.py",
        name="append_to_dict",
        code=("val.init_list(", "data[new_key].append("),
        without="metrics of micro-batches would be counted with equal weights",
    ),
    Code(
        file=f"{ENGINES}/base.py",
        name="EngineRegistry.get_engine_cls",
        code=(f"'{VARIABLE}'",),
        without="workers would have verl's own engines",
        is_silent=False,
    ),
    *(
        Code(
            file=f"{ENGINES}/base.py",
            name=f"BaseEngine.{method}",
            code=code,
            without="losses would see pads, and no micro-batch would be that of the plan",
        )
        for method, code in (
            ("train_batch", ("self.forward_backward_batch(", "self.optimizer_step(")),
            ("infer_batch", ("self.forward_backward_batch(",)),
        )
    ),
    *_engine_facts("fsdp", "FSDPEngine"),
    *_engine_facts("megatron", "MegatronEngine"),
    *_engine_facts("veomni", "VeOmniEngine"),
    *(
        Code(
            engine=engine,
            needed_by=f"padding.{SHARING}",
            file=f"{ENGINES}/fsdp/transformer_impl.py",
            name="FSDPEngineWithLMHead.forward_step",
            code=("self.prepare_model_inputs(", "self.prepare_model_outputs("),
            without="every token would be computed, and said to be saved",
        )
        for engine in ("fsdp", "veomni")  # whose engines inherit it
    ),
    *(
        Code(
            engine="megatron",
            needed_by=f"padding.{SHARING}",
            file=f"{ENGINES}/megatron/transformer_impl.py",
            name=f"MegatronEngineWithLMHead.{method}",
            code=code,
            without="losses would be of other rows than those that share",
        )
        for method, code in (
            ("forward_step", ("next(batch_iter)", "partial(postprocess_micro_batch_func, data=")),
            ("postprocess_micro_batch_func", ("self.prepare_model_outputs(output, data)",)),
        )
    ),
    Code(
        needed_by=TIMING,
        file=f"{ENGINES}/fsdp/transformer_impl.py",
        engine="fsdp",
        name="FSDPEngine.forward_backward_batch",
        code=("self.forward_step(",),
        without="micro-batches would have no time",
    ),
    ClosedWorld(
        kind="files that read position ids of M-RoPE",
        found=lambda source: source.files_with("maybe_fix_3d_position_ids", "workers"),
        known={WORKERS, f"{ENGINES}/base.py", "workers/engine_workers_tinker.py"},
        needed_by=VISION,
        without="position ids of rows of one length would be misread there",
    ),
    Code(
        file=REPLAY,
        name="ReplayBuffer.__init__",
        code=("self.failure_keys",),
        without="sessions that failed would not be counted",
    ),
    *(
        Code(
            file=REPLAY,
            name=f"ReplayBuffer.{name}",
            code=code,
            needed_by=FILTER,
            without="the group filter would compare rows, not sessions",
        )
        for name, code in (
            ("_terminal_eviction_reasons", ("self._dapo_filtered_keys(",)),
            (
                "_dapo_filtered_keys",
                ("self.finished_keys[", "self.partitions[", "self._dapo_classification_cache["),
            ),
        )
    ),
    Code(
        file="trainer/ppo/v1/agent_loop_tq.py",
        name="AgentLoopWorkerTQ._agent_loop_postprocess",
        code=("self._compute_teacher_logprobs(",),
        needed_by=DISTILLATION,
        without="the teacher would be asked about the last row of a session alone",
    ),
    ClosedWorld(
        kind="policy losses",
        found=registered_by("register_policy_loss"),
        known=POLICY_LOSSES,
        needed_by="actor_rollout_ref.actor.policy_loss.loss_mode",
        is_choice=True,
        without="it would be taken for a sum over tokens",
    ),
    ClosedWorld(
        kind="advantage estimators",
        found=registered_by("register_adv_est"),
        known=ESTIMATORS,
        needed_by="algorithm.adv_estimator",
        is_choice=True,
        without="it would be taken for one that compares sessions",
    ),
)
