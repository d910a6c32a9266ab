"""The probe of packed rows: models that keep rows apart pass, in any precision, and those that do
not are refused.

verl's own engine packs the rows and reads the outputs; only its start, which needs a process group,
is not verl's.
"""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from verl.utils import tensordict_utils as tu

from tests.support.engine_in_process import Actor, start_engine
from verl_padding.errors import PaddingConfigError
from verl_padding.worker import packed_attention, varlen_attention
from verl_padding.worker.cross_contamination import BRANCH_LIMIT, check_cross_contamination
from verl_padding.worker.worker_check import INCOMPATIBILITIES

SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CLEAN = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {"query_pre_attn_scalar": 16},
    "qwen3_moe": EXPERTS | {"num_experts": 8, "decoder_sparse_step": 1},
}
LINEAR = {"num_key_heads": 2, "num_value_heads": 2, "key_head_dim": 16, "value_head_dim": 16}
LEAKING = {
    "lfm2": {"block_ff_dim": 128, "full_attn_idxs": [1]},
    "qwen3_next": EXPERTS
    | {f"linear_{name}": size for name, size in LINEAR.items()}
    | {
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
}
"""Families whose layers run on from row to row, or whose attention by torch is not told where a row
begins."""


class Trainee:
    """A training worker whose engine holds a whole model."""

    def __init__(self, model: torch.nn.Module, shares: bool):
        dtype = str(model.dtype).removeprefix("torch.")
        self.engine = start_engine(
            Actor, model, shares=shares, use_remove_padding=True, dtype=dtype
        )
        self.engine_config = self.engine.engine_config
        self.engine_config.use_remove_padding = True
        self.model_config = SimpleNamespace(hf_config=model.config)
        self.passes = 0

    def infer_batch(self, data):
        self.passes += 1
        self.micro_batch_size = tu.get_non_tensor_data(data, "micro_batch_size_per_gpu", None)
        self.lengths = data["input_ids"].offsets().diff().tolist()
        tu.assign_non_tensor(data, use_remove_padding=True, use_fused_kernels=False)
        with torch.no_grad():
            _, output = self.engine.forward_step(data, None, forward_only=True)
        return tu.get_tensordict(output["model_output"])


def training_worker(family: str, dtype: torch.dtype, shares: bool = False, **settings) -> Trainee:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | settings)
    attention = "eager" if family in EAGER else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return Trainee(model.to(dtype).eval(), shares)


EAGER = {"gpt_oss", "bloom"}


def probe(of: Trainee, shares: bool = False, passes: int | None = None) -> bool:
    """Whether rows that branch may share."""
    answer = check_cross_contamination((), shares=shares)(of)
    assert of.passes == ((5 if shares else 4) if passes is None else passes)
    if incompatibilities := answer.non_tensor_batch[INCOMPATIBILITIES][0]:
        raise PaddingConfigError(str(incompatibilities))
    return not answer.non_tensor_batch[BRANCH_LIMIT].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", CLEAN)
def test_models_that_keep_rows_apart_pass(family, dtype):
    probe(training_worker(family, dtype, shares=True, **CLEAN[family]), shares=True)


class Interleaved(Trainee):
    """An engine whose schedule takes micro-batches by three."""

    def infer_batch(self, data):
        assert len(data) == 3 * tu.get_non_tensor_data(data, "micro_batch_size_per_gpu", None)
        return super().infer_batch(data)


def test_a_schedule_gets_as_many_micro_batches_as_it_takes():
    model = training_worker("llama", torch.float32).engine.module
    of = Interleaved(model, shares=False)
    object.__setattr__(of.engine_config, "virtual_pipeline_model_parallel_size", 2)
    of.engine.tf_config = SimpleNamespace(microbatch_group_size_per_vp_stage=3)
    probe(of)


class Stages(list):
    """What Megatron's engine has in place of a model: a list of stages, here of one."""

    def __call__(self, *args, **inputs):
        return self[0](*args, **inputs)


def test_an_engine_with_a_list_of_stages_is_probed_too():
    family = next(iter(CLEAN))
    of = training_worker(family, torch.float32, **CLEAN[family])
    of.engine.module = Stages([of.engine.module])
    probe(of)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", LEAKING)
def test_models_that_do_not_are_refused_with_what_to_set(family, dtype):
    with pytest.raises(PaddingConfigError, match=rf"^critic.model.use_remove.*{family}"):
        probe(training_worker(family, dtype, **LEAKING[family]))


QWEN3_5 = {name: size for name, size in LEAKING["qwen3_next"].items() if name not in EXPERTS}
QWEN3_5.pop("shared_expert_intermediate_size")
HYBRIDS = {"qwen3_next": LEAKING["qwen3_next"], "qwen3_5_text": QWEN3_5}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", HYBRIDS)
def test_linear_attention_that_takes_rows_one_by_one_passes(family, dtype):
    for shares in (False, True):
        of = training_worker(family, dtype, shares=True, **HYBRIDS[family])
        packed_attention.patch_attention_of(of.engine)
        assert probe(of, shares=shares)


def test_a_model_whose_rows_depend_on_later_tokens_may_not_share():
    of = training_worker("llama", torch.float32)
    of.engine.branch_limit = None  # as an engine that shares has it
    norm = of.engine.module.model.norm

    def sees_later_tokens(_, inputs, output):
        ids = of.lengths  # each row gets a part of its own last token
        ends = torch.tensor(ids).cumsum(0) - 1
        return output + 0.5 * output[:, ends.repeat_interleave(torch.tensor(ids))]

    norm.register_forward_hook(sees_later_tokens)
    probe(of)
    of.passes = 0
    with pytest.raises(PaddingConfigError, match="sharing"):
        probe(of, shares=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_moe"])
def test_rows_that_branch_may_share_where_outputs_are_those_of_rows_alone(
    family, dtype, monkeypatch
):
    of = training_worker(family, dtype, shares=True, **CLEAN[family])
    assert probe(of, shares=True)
    # As if each query saw all of its path.
    attend = varlen_attention._attend_in_row

    def attend_to_all(q, k, v, window, *how):
        return attend(q, k, v, window if len(q) == len(k) else (-1, -1), *how)

    monkeypatch.setattr(varlen_attention, "_attend_in_row", attend_to_all)
    of.passes = 0
    assert not probe(of, shares=True)


def test_rows_that_are_not_packed_are_not_probed():
    of = training_worker("bloom", torch.float32, **LEAKING["bloom"])
    config = of.engine_config
    config.use_remove_padding = False
    probe(of, passes=0)
    config.use_remove_padding = True
    config.use_dynamic_bsz, config.infer_micro_batch_size_per_gpu = False, 1
    for of_updates in (1, None):  # a reference has no updates
        config.micro_batch_size_per_gpu = of_updates
        probe(of, passes=0)
    config.infer_micro_batch_size_per_gpu = 2
    with pytest.raises(PaddingConfigError, match="bloom"):
        probe(of)
