"""``verl-padding doctor`` on rollouts, engines, devices and the values that are passed on to them."""

import pytest

from tests.support.jobs_for_doctor import (
    AGENT,
    FLAG,
    Machine,
    Reasons,
    assert_told,
    contents_of,
    findings_of,
    with_settings,
)
from tests.support.verl_config import DYNAMIC, compose_job
from verl_padding.doctor import packages
from verl_padding.doctor.devices import devices_of_job
from verl_padding.doctor.passed_on import TEMPLATE, values_for_rollout, values_passed_on
from verl_padding.doctor.settings import misspelt_settings
from verl_padding.doctor.token_budgets import longest_rows
from verl_padding.job import engines_on_cpu
from verl_padding.job.composition import JobArguments
from verl_padding.job.summary import planned_job

pytestmark = pytest.mark.usefixtures("no_ray_cluster")


ON_GPUS = (
    "trainer.device=cuda",
    "trainer.n_gpus_per_node=8",
    "ray_kwargs.ray_init.num_gpus=null",
    "ray_kwargs.ray_init.num_cpus=null",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.dtype=bfloat16",
)


def no_vllm(machine: Machine) -> list[str]:
    machine.lacks("vllm")
    return ["actor_rollout_ref.rollout.name=vllm"]


def no_such_rollout(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.rollout.name=vlllm"]


def no_megatron(machine: Machine) -> list[str]:
    machine.lacks("megatron")
    return ["actor_rollout_ref.actor.strategy=megatron"]


def no_logger(machine: Machine) -> list[str]:
    return ["trainer.logger=[console,clearml]"]


def no_cuda(machine: Machine) -> list[str]:
    machine.patch.delenv("VERL_PLATFORM")
    return ["trainer.device=cuda"]


def no_platform(machine: Machine) -> list[str]:
    machine.patch.delenv("VERL_PLATFORM")
    return []


def fewer_cpus_than_verl_asks_for(machine: Machine) -> list[str]:
    return ["ray_kwargs.ray_init.num_cpus=6"]


def a_logger_without_its_key(machine: Machine) -> list[str]:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        machine.patch.delenv(name, raising=False)
    machine.patch.setenv("NETRC", f"{machine.folder}/netrc")
    return ["trainer.logger=[console,wandb]"]


def a_rollout_of_more_devices_than_there_are(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.rollout.tensor_model_parallel_size=4", "actor_rollout_ref.rollout.data_parallel_size=2"]


def a_ray_cluster_of_another_size(machine: Machine) -> list[str]:
    machine.patch.delenv("RAY_ADDRESS")
    return ["+ray_kwargs.ray_init.address=10.0.0.1:6379"]


def a_ray_cluster_that_the_environment_names(machine: Machine) -> list[str]:
    machine.patch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    return []


def no_such_format_of_numbers(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.actor.fsdp_config.model_dtype=float23"]


def an_optimizer_that_torch_lacks(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.actor.optim.optimizer=AdamW8bit"]


def an_optimizer_of_no_module(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.actor.optim.optimizer_impl=bitsandbytes_.optim"]


def one_beta(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.actor.optim.betas=[0.9]"]


def fewer_than_no_loaders(machine: Machine) -> list[str]:
    return ["data.dataloader_num_workers=-1"]


def no_agent_loop_worker(machine: Machine) -> list[str]:
    return [f"{AGENT}.num_workers=0"]


def an_argument_that_ray_does_not_know(machine: Machine) -> list[str]:
    return ["+ray_kwargs.ray_init.num_cpu=8", "+ray_kwargs.ray_init._system_config={}"]


def traces_without_their_package(machine: Machine) -> list[str]:
    machine.lacks("weave")
    return ["actor_rollout_ref.rollout.trace.backend=weave"]


def a_queue_without_storage(machine: Machine) -> list[str]:
    return ["transfer_queue.backend.SimpleStorage.num_data_storage_units=0"]


def a_seed_that_is_no_number(machine: Machine) -> list[str]:
    return ["data.seed=first"]


def prompts_ahead_that_are_not_counted(machine: Machine) -> list[str]:
    mode = "trainer.v1.colocate_async"
    return ["trainer.v1.trainer_mode=colocate_async", f"{mode}.num_warmup_batches=null"]


def groups_of_ranks_that_leave_one_out(machine: Machine) -> list[str]:
    ray = "ray_kwargs.ray_init"
    ranks = ["trainer.n_gpus_per_node=4", f"{ray}.num_cpus=16", f"{ray}.num_gpus=4"]
    return [*ranks, "actor_rollout_ref.actor.fsdp_config.fsdp_size=3"]


def a_storage_that_is_misspelt(machine: Machine) -> list[str]:
    return ["transfer_queue.backend.storage_backend=SimpleStore"]


def a_step_to_profile(machine: Machine) -> list[str]:
    return ["global_profiler.steps=2"]


def rewards_of_no_number_of_workers(machine: Machine) -> list[str]:
    return ["reward.num_workers=null"]


def no_number_of_epochs(machine: Machine) -> list[str]:
    return ["trainer.total_epochs=null"]


def weights_that_are_never_carried(machine: Machine) -> list[str]:
    return ["trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=0"]


def a_number_in_the_environment(machine: Machine) -> list[str]:
    return ["+ray_kwargs.ray_init.runtime_env.env_vars.MY_RETRIES=3"]


def flash_attention_on_a_cpu(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2"]


def heads_that_ranks_cannot_share(machine: Machine) -> list[str]:
    machine.patch.setattr(packages, "is_module", lambda name: True)
    return [
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
        "trainer.n_gpus_per_node=4",
        "ray_kwargs.ray_init.num_cpus=20",
        "data.train_batch_size=8",
    ]


CARRIER = "actor_rollout_ref.rollout.checkpoint_engine.backend"


def heads_that_ranks_of_a_row_cannot_share(machine: Machine) -> list[str]:
    return [
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size=4",
        "trainer.n_gpus_per_node=4",
        "ray_kwargs.ray_init.num_cpus=20",
        "data.train_batch_size=8",
    ]


def prompts_longer_than_the_rollout_takes(machine: Machine) -> list[str]:
    return ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.max_model_len=8"]


def a_carrier_of_weights_that_is_misspelt(machine: Machine) -> list[str]:
    return [
        "trainer.v1.trainer_mode=separate_async",
        "actor_rollout_ref.rollout.nnodes=1",
        f"{CARRIER}=ncclx",
    ]


def a_carrier_of_weights_between_gpus(machine: Machine) -> list[str]:
    return [*a_carrier_of_weights_that_is_misspelt(machine)[:-1], f"{CARRIER}=nccl"]


def kernels_for_gpus_on_a_cpu(machine: Machine) -> list[str]:
    model = "actor_rollout_ref.model"
    return [f"{model}.use_fused_kernels=true", f"{model}.fused_kernel_options.impl_backend=triton"]


def a_project_that_wandb_refuses(machine: Machine) -> list[str]:
    machine.patch.setattr(packages, "is_module", lambda name: True)
    machine.patch.setenv("WANDB_MODE", "offline")
    return ["trainer.logger=[console,wandb]", "trainer.project_name=agents/letters"]


def fewer_devices_for_ray_than_verl_asks_for(machine: Machine) -> list[str]:
    rollout = "actor_rollout_ref.rollout"
    return ["trainer.v1.trainer_mode=separate_async", f"{rollout}.nnodes=4", f"{rollout}.n_gpus_per_node=2"]


CANNOT_START: Reasons = {
    kernels_for_gpus_on_a_cpu: (
        "actor_rollout_ref.model.fused_kernel_options.impl_backend",
        "triton: its kernels are for GPUs alone. Set it to torch.",
    ),
    a_project_that_wandb_refuses: ("trainer.project_name", "agents/letters: wandb refuses a project with / in its"),
    fewer_devices_for_ray_than_verl_asks_for: (
        "ray_kwargs.ray_init.num_gpus",
        "8: verl asks Ray for 10, one for each rank of the trainer and of a rollout of its own",
    ),
    a_carrier_of_weights_between_gpus: (
        CARRIER,
        "nccl: verl cannot use it here (No module named 'cupy'). Leave it out: +local=cpu has one.",
    ),
    a_carrier_of_weights_that_is_misspelt: (
        CARRIER,
        "ncclx: verl cannot use it here (Checkpoint engine ncclx not registered, registered backends: ",
    ),
    no_vllm: ("actor_rollout_ref.rollout.name", "vllm: vllm is not installed here"),
    no_such_rollout: ("actor_rollout_ref.rollout.name", "vlllm: "),
    no_megatron: ("actor_rollout_ref.actor.strategy", "megatron: megatron-core is not installed here"),
    no_logger: ("trainer.logger", "clearml: clearml is not installed here"),
    no_cuda: ("trainer.device", "cuda: torch "),
    no_platform: ("VERL_PLATFORM", "not set, but trainer.device=cpu"),
    a_logger_without_its_key: ("WANDB_API_KEY", "not set, and there is no key of `wandb login`"),
    fewer_cpus_than_verl_asks_for: (
        "ray_kwargs.ray_init.num_cpus",
        "6: verl asks Ray for at least 7 CPUs (3 for each of 2 ranks, and one)",
    ),
    a_rollout_of_more_devices_than_there_are: (
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "a replica of the rollout takes 8 devices, and the job has",
    ),
    a_ray_cluster_of_another_size: ("ray_kwargs.ray_init.num_cpus", "joins a Ray cluster (10.0.0.1:6379) cannot say"),
    a_ray_cluster_that_the_environment_names: (
        "RAY_ADDRESS",
        "10.0.0.1:6379: the job joins this Ray cluster, and cannot say how large it is (ray_kwargs.ray_init.num_cpus=",
    ),
    no_such_format_of_numbers: (
        "actor_rollout_ref.actor.fsdp_config.model_dtype",
        "float23: no format of numbers that verl knows. Choose fp32, bf16 or fp16.",
    ),
    an_optimizer_that_torch_lacks: (
        "actor_rollout_ref.actor.optim.optimizer",
        "AdamW8bit: torch.optim has no such optimizer",
    ),
    an_optimizer_of_no_module: (
        "actor_rollout_ref.actor.optim.optimizer_impl",
        "bitsandbytes_.optim: there is no such module",
    ),
    one_beta: ("actor_rollout_ref.actor.optim.betas", "[0.9]: must be two numbers"),
    fewer_than_no_loaders: ("data.dataloader_num_workers", "-1: too few. Set it to 0 or more."),
    no_agent_loop_worker: (f"{AGENT}.num_workers", "0: too few. Set it to 1 or more."),
    an_argument_that_ray_does_not_know: (
        "ray_kwargs.ray_init.num_cpu",
        "8: ray.init() takes no such argument. Did you mean num_cpus?",
    ),
    traces_without_their_package: ("actor_rollout_ref.rollout.trace.backend", "weave: weave is not installed here"),
    a_queue_without_storage: ("transfer_queue.backend.SimpleStorage.num_data_storage_units", "0: too few"),
    a_seed_that_is_no_number: ("data.seed", "first: a whole number is needed"),
    prompts_ahead_that_are_not_counted: ("trainer.v1.colocate_async.num_warmup_batches", "null: has to be set."),
    groups_of_ranks_that_leave_one_out: (
        "actor_rollout_ref.actor.fsdp_config.fsdp_size",
        "3: does not divide the job's 4 ranks, of which verl makes groups of this size",
    ),
    a_storage_that_is_misspelt: (
        "transfer_queue.backend.storage_backend",
        "SimpleStore: TransferQueue knows no such storage. Choices: SimpleStorage, ",
    ),
    a_step_to_profile: ("global_profiler.steps", "2: verl looks for each step in a list. Write [2]"),
    rewards_of_no_number_of_workers: ("reward.num_workers", "null: has to be set."),
    no_number_of_epochs: ("trainer.total_epochs", "null: has to be set."),
    weights_that_are_never_carried: ("trainer.v1.separate_async.parameter_sync_step", "0: too few. Set it to 1"),
    a_number_in_the_environment: (
        "ray_kwargs.ray_init.runtime_env.env_vars.MY_RETRIES",
        "3: Ray takes texts only. Put it in quotes",
    ),
    flash_attention_on_a_cpu: (
        "actor_rollout_ref.model.override_config.attn_implementation",
        "flash_attention_2: it has no kernels for a CPU. Set it to sdpa.",
    ),
    heads_that_ranks_cannot_share: (
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "4: so many ranks share the attention heads of the model, and the model has 2",
    ),
    heads_that_ranks_of_a_row_cannot_share: (
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
        "4: so many ranks share the attention heads of a row, and the model has 2",
    ),
    prompts_longer_than_the_rollout_takes: ("actor_rollout_ref.rollout.max_model_len", "8: each of the first prompts"),
}
"""Why a job cannot start, or cannot end its first step -> the setting that is told, and part of what is."""


@pytest.mark.parametrize("reason", CANNOT_START, ids=lambda reason: reason.__name__)
def test_a_job_that_cannot_start_here_is_told_with_the_setting_that_is_why(reason, composed, machine):
    assert_told(contents_of(composed, reason(machine)), *CANNOT_START[reason])


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("actor_rollout_ref.rollout.gpu_memory_utilization=50", "50: a share of a GPU's memory"),
        ("actor_rollout_ref.rollout.dtype=float23", "float23: no format of numbers of the rollout. Choose auto, half"),
    ],
)
def test_a_value_that_vllm_refuses_is_told(override, told, composed):
    found = list(values_for_rollout(with_settings(composed, ["actor_rollout_ref.rollout.name=vllm", override])))
    setting = override.split("=")[0]
    assert [each for each in found if (each.verdict, each.subject) == ("wrong", setting) and told in each.told], found


TURN = "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}"
SPOKEN = TURN + "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (SPOKEN, ""),
        (SPOKEN.replace("endgeneration", "endspeech"), "no template of Jinja (Encountered unknown tag 'endspeech'"),
        (SPOKEN.replace("{% endfor %}", ""), "no template of Jinja (Unexpected end of template."),
    ],
    ids=["with the answers marked", "of a tag that there is not", "without its end"],
)
def test_a_template_is_read_as_transformers_reads_it(template, told, composed):
    found = list(values_passed_on(with_settings(composed, [f"{TEMPLATE}='{template}'"])))
    said = [each.told for each in found if each.subject == TEMPLATE]
    assert len(said) == bool(told), said
    assert all(told in each for each in said), said


PARALLEL = "actor_rollout_ref.rollout.tensor_model_parallel_size"
ASYNC, PLAIN, ALONE = "separate_async", "sync", "actor_rollout_ref.hybrid_engine=false"
ON_RANKS = "a replica of the rollout takes {} devices, and the job has 4 (trainer.n_gpus_per_node x trainer.nnodes)"
BESIDE = "a replica of the rollout takes {} devices, and there are {} for those beside the trainer"


def _apart(**sizes: int) -> list[str]:
    """Prompts that are read, and answers that are written, on ranks of their own."""
    return [
        f"actor_rollout_ref.rollout.disaggregation.{name}={size}" for name, size in {"enabled": True, **sizes}.items()
    ]


@pytest.mark.parametrize(
    ("mode", "own", "tensor", "more", "told"),
    [
        (ASYNC, 8, 8, [ALONE], []),
        (f"padded_{ASYNC}", 8, 8, [ALONE], []),
        (ASYNC, 8, 8, [], [ON_RANKS.format(8)]),
        (PLAIN, 8, 8, [ALONE], [ON_RANKS.format(8)]),
        ("of_ones_own", 8, 8, [ALONE], []),
        (ASYNC, 1, 2, [ALONE], [BESIDE.format(2, 1)]),
        (ASYNC, 1, 2, [], [BESIDE.format(2, 1)]),
        (PLAIN, 1, 2, [], []),
        (ASYNC, 8, 2, [ALONE, *_apart(decode_replicas=3)], []),
        (ASYNC, 8, 2, [ALONE, *_apart(decode_replicas=4)], [BESIDE.format(10, 8)]),
        (PLAIN, 1, 1, _apart(decode_tensor_model_parallel_size=4), [ON_RANKS.format(5)]),
    ],
)
def test_the_devices_of_a_replica_are_counted_where_verl_makes_one(mode, own, tensor, more, told, composed):
    section = "actor_rollout_ref.rollout"
    settings = [f"trainer.v1.trainer_mode={mode}", "trainer.n_gpus_per_node=4", f"{PARALLEL}={tensor}", *more]
    config = with_settings(composed, [*settings, f"{section}.nnodes=1", f"{section}.n_gpus_per_node={own}"])
    found = [each.told for each in devices_of_job(config, "cpu") if "a replica of the rollout" in each.told]
    assert len(found) == len(told), found
    assert all(part in each for part, each in zip(told, found, strict=True)), found


@pytest.mark.parametrize(("ranks", "mode", "more"), [(6, PLAIN, []), (6, ASYNC, [ALONE]), (8, PLAIN, [])])
def test_ranks_that_do_not_make_up_whole_replicas_are_told_where_they_have_some(ranks, mode, more, composed):
    settings = [f"trainer.v1.trainer_mode={mode}", f"trainer.n_gpus_per_node={ranks}", f"{PARALLEL}=4", *more]
    told = [each for each in devices_of_job(with_settings(composed, settings), "cpu") if each.subject == PARALLEL]
    assert len(told) == (ranks == 6 and not more), told
    assert all("cut the 6 ranks of the trainer" in each.told and "divides 6" in each.told for each in told)


def test_no_device_at_all_is_told_and_nothing_of_replicas(composed):
    config = with_settings(composed, ["trainer.n_gpus_per_node=0"])
    assert not [each for each in devices_of_job(config, "cpu") if "a replica of" in each.told]
    assert [each.told for each in values_passed_on(config) if each.subject == "trainer.n_gpus_per_node"] == [
        "0: too few. Set it to 1 or more."
    ]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("actor_rollout_ref.rollout.n=0", "0: too few. Set it to 1 or more."),
        ("actor_rollout_ref.rollout.temperature=-1", "-1: too few. Set it to 0 or more."),
        ("actor_rollout_ref.rollout.top_p=1.2", "1.2: must be above 0 and at most 1"),
        ("actor_rollout_ref.actor.optim.lr=-0.001", "-0.001: too few"),
        ("data.max_response_length=0", "0: too few"),
        ("data.val_batch_size=-1", "-1: too few"),
        ("trainer.total_epochs=0", "0: the job would end before its first step"),
        ("trainer.total_training_steps=0", "0: the job would end before its first step"),
        ("+ray_kwargs.ray_init.runtime_env.working_dir=/nowhere", "/nowhere: there is no such folder, and Ray copies"),
    ],
)
def test_a_value_that_no_job_can_have_is_told(override, told, composed):
    found = list(values_passed_on(with_settings(composed, [override])))
    setting = override.lstrip("+").split("=")[0]
    assert [each for each in found if (each.verdict, each.subject) == ("wrong", setting) and told in each.told], found


@pytest.fixture
def gpus(monkeypatch) -> None:
    """A machine of eight GPUs with all packages, as far as the doctor can see."""
    import torch

    monkeypatch.delenv("VERL_PLATFORM")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(packages, "is_module", lambda module: True)


@pytest.mark.parametrize(
    ("overrides", "matter"),
    [
        ([], []),
        (["trainer.n_gpus_per_node=16"], ["trainer.n_gpus_per_node"]),
        (
            [
                "reward.reward_model.enable=true",
                "reward.reward_model.enable_resource_pool=true",
                "reward.reward_model.nnodes=1",
                "reward.reward_model.n_gpus_per_node=8",
                "reward.reward_model.rollout.name=vllm",
                "reward.reward_model.model_path=${actor_rollout_ref.model.path}",
            ],
            ["trainer.n_gpus_per_node"],
        ),
    ],
    ids=["eight", "sixteen", "eight, and eight of a reward model"],
)
@pytest.mark.usefixtures("composed_once")
def test_devices_of_all_pools_are_counted(overrides, matter, job, gpus):
    found = findings_of(*job, FLAG, *ON_GPUS, *overrides)
    assert [finding.subject for finding in found if finding.verdict == "wrong"] == matter, found


def test_verls_loggers_are_known():
    from verl.utils.tracking import Tracking

    from verl_padding.doctor.packages import LOGGERS

    assert set(LOGGERS) == {*Tracking.supported_backend, "tracking"}


@pytest.mark.parametrize("engine", ["megatron", "veomni", "torchtitan"])
def test_a_job_of_another_engine_is_looked_at_to_its_end(engine, job):
    found = findings_of(*job, FLAG, f"model_engine={engine}")
    assert not [finding.subject for finding in found if finding.told == "could not be looked at"]
    subjects = {finding.subject for finding in found}
    assert subjects >= {"actor_rollout_ref.actor.strategy", "data.train_batch_size", "verl's trainer"}


@pytest.mark.parametrize(
    ("installed", "told"),
    [
        (None, "veomni: veomni is not installed here. In an environment of its own: pip install --no-deps veomni=="),
        ("9.9", "veomni: veomni 9.9: on a CPU, parts of it are replaced by others that were written for "),
        (engines_on_cpu.TRIED["veomni"]["veomni"], "veomni"),
    ],
)
def test_veomni_on_a_cpu_is_looked_for_and_its_version_is_one_that_was_tried(installed, told, job, monkeypatch):
    is_module = packages.is_module
    monkeypatch.setattr(packages, "is_module", lambda name: bool(installed) if name == "veomni" else is_module(name))
    monkeypatch.setattr(engines_on_cpu, "version", lambda package: installed)
    on_veomni = ["+local=cpu_veomni" if override.startswith("+local=") else override for override in job]
    found = {finding.subject: finding for finding in findings_of(*on_veomni, FLAG)}
    finding = found["actor_rollout_ref.actor.strategy"]
    assert finding.told.startswith(told)
    assert finding.verdict == ("ok" if told == "veomni" else "wrong")
    assert found["engine of the actor"].told == "veomni, 2 ranks"


@pytest.mark.parametrize("missing", ["megatron.core", "mbridge"])
def test_megatron_on_a_cpu_is_installed_by_the_extra_that_pins_it(missing, job, monkeypatch):
    engine = ("megatron.core", "mbridge")
    is_module = packages.is_module
    monkeypatch.setattr(packages, "is_module", lambda name: name != missing and (name in engine or is_module(name)))
    on_megatron = ["+local=cpu_megatron" if override.startswith("+local=") else override for override in job]
    found = {finding.subject: finding for finding in findings_of(*on_megatron)}
    told = found["actor_rollout_ref.actor.strategy"].told
    assert told.startswith(f"megatron: {missing.replace('.', '-')} is not installed here. ")
    assert told.endswith("pip install '.[megatron-cpu]'")


def test_megatron_on_gpus_takes_a_bridge_and_transformer_engine_too(composed, monkeypatch):
    monkeypatch.setattr(packages, "is_module", lambda name: False)
    on_gpus = ["trainer.device=cuda", "actor_rollout_ref.actor.strategy=megatron"]
    bridges = {False: "megatron-bridge", True: "mbridge"}
    for vanilla, bridge in bridges.items():
        settings = [*on_gpus, f"actor_rollout_ref.actor.megatron.vanilla_mbridge={str(vanilla).lower()}"]
        found = packages.packages_of_job(with_settings(composed, settings))
        told = [finding.told for finding in found if finding.subject == "actor_rollout_ref.actor.strategy"]
        wanted = ("megatron-core", bridge, "transformer-engine[pytorch]")
        assert told == [f"megatron: {name} is not installed here. pip install {name}" for name in wanted]


@pytest.mark.parametrize("engine", ["megatron", "veomni"])
def test_a_setting_of_an_engine_that_is_not_chosen_is_told_with_what_chooses_it(engine, job):
    setting = f"actor_rollout_ref.actor.{engine}.tensor_size"
    found = {finding.subject: finding.told for finding in findings_of(*job, FLAG, f"{setting}=2")}
    assert found["overrides"].startswith(f"{setting}: of {engine}'s engine, and the job has the config of another one.")
    assert f"Add model_engine={engine}, and actor_rollout_ref.actor.strategy={engine} where" in found["overrides"]
    found = {finding.subject: finding.told for finding in findings_of(*job, f"model_engine={engine}", f"{setting}=2")}
    assert "model_engine" not in found["overrides"]


CONTEXT = [f"actor_rollout_ref.{role}.megatron.context_parallel_size=4" for role in ("actor", "ref")]


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ([], 1),
        (["actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"], 2),
        (["model_engine=megatron", *CONTEXT], 4),
    ],
)
def test_a_short_budget_is_told_as_it_is_set_with_what_would_be_enough_there(sizes, ranks):
    budget = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    longest = ("data.max_prompt_length=2000", "data.max_response_length=2000")
    config = compose_job(*DYNAMIC, FLAG, *sizes, *longest, f"{budget}=512")
    (told,) = [each.told for each in longest_rows(config, planned_job(config, "sync")) if each.subject == budget]
    shared = f" on each of {ranks} ranks that share a row" if ranks > 1 else ""
    assert told.startswith(f"512{shared}: below data.max_prompt_length")
    assert told.endswith(f"Raise it to {4000 // ranks}.")


@pytest.mark.parametrize(
    ("allowed", "longest"), [("null", 4000), (6000, 4000), (4000, 4000), (3000, 3000), (1001, 1001)]
)
def test_a_budget_need_hold_no_row_that_is_longer_than_the_rollout_allows(allowed, longest):
    budget, length = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "actor_rollout_ref.rollout.max_model_len"
    lengths = ("data.max_prompt_length=2000", "data.max_response_length=2000", f"{length}={allowed}")
    for short in (longest - 1, longest):
        config = compose_job(*DYNAMIC, FLAG, *lengths, f"{budget}={short}")
        told = {each.subject: each.told for each in longest_rows(config, planned_job(config, "sync"))}
        assert (budget in told) == (short < longest)
        if budget in told:
            assert told[budget].endswith(f"Raise it to {longest}.")


def test_a_setting_that_verls_class_of_a_section_has_and_its_yaml_has_not_is_no_slip():
    given = ("+critic.ppo_infer_max_token_len_per_gpu=9000", "+critic.ppo_infer_max_token_len_per_gpus=9000")
    (slip,) = misspelt_settings(JobArguments(overrides=given))
    assert slip.subject == "critic.ppo_infer_max_token_len_per_gpus"
