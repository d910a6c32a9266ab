"""Tokens that rows share, computed once in verl's Megatron engine, give in float64 what each row
gives alone: outputs and gradients.

Ranks are processes with gloo between them; one start has the cases of as many ranks.
"""

import pytest

from tests.support.sharing_ranks import Case, assert_exact, run_cases
from tests.support.tolerance import RELATIVE_FLOAT32, RELATIVE_FLOAT64

pytestmark = [pytest.mark.slow, pytest.mark.megatron, pytest.mark.timeout(1200)]

EXPERTS = {"kind": "qwen3_moe"}
TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
VIRTUAL = "virtual_pipeline_model_parallel_size"
CONTEXT, EXPERT = "context_parallel_size", "expert_model_parallel_size"
WHOLE_EXPERTS = {EXPERT: 2, "expert_tensor_parallel_size": 1}
FULL = (
    "{transformer}.recompute_granularity=full",
    "{transformer}.recompute_method=uniform",
    "{transformer}.recompute_num_layers=1",
)
CORE = (
    "{transformer}.recompute_granularity=selective",
    "++{transformer}.recompute_modules=[core_attn]",
)
# The distributed optimizer leaves a whole gradient on a part of the context parallel ranks alone.
WHOLE_GRADIENTS = ("{engine}.use_distributed_optimizer=false",)
PER_TOKEN = ("+{transformer}.calculate_per_token_loss=true",)
WINDOW = (
    "+{transformer}.window_size=[6,0]",
    "+{transformer}.window_attn_skip_freq=2",
)
FILLED = ("{engine}.pad_to_length=true", "{engine}.pad_to_length_bucket=64")

CASES = {
    1: {
        "one rank": Case(cuts=("prompts", "halves", "all")),
        "awkward cuts": Case(rows="awkward"),
        "random cuts, full recomputation": Case(rows="random", overrides=FULL),
        "core attention computed again": Case(overrides=CORE),
        "experts": Case(**EXPERTS),
        "critic": Case(update="critic"),
        "a sliding window": Case(overrides=WINDOW),
        "another architecture": Case(kind="qwen2"),
    },
    2: {
        "tp2 with sequence parallel": Case(sizes={TENSOR: 2}),
        "tp2 without": Case(sizes={TENSOR: 2}, overrides=("{engine}.sequence_parallel=false",)),
        "tp2, two temperatures": Case(sizes={TENSOR: 2}, temperatures=True),
        "tp2, a loss per token": Case(sizes={TENSOR: 2}, overrides=PER_TOKEN),
        "tp2, buckets": Case(sizes={TENSOR: 2}, overrides=FILLED),
        "tp2, critic": Case(sizes={TENSOR: 2}, update="critic"),
        "pp2, full recomputation": Case(sizes={PIPELINE: 2}, overrides=FULL),
        "dp2": Case(),
        "pp2 vpp2": Case(sizes={PIPELINE: 2, VIRTUAL: 2}, cuts=("prompts", "halves")),
        "tp2 with ep2": Case(sizes=WHOLE_EXPERTS | {TENSOR: 2}, **EXPERTS),
        "cp2, awkward cuts": Case(
            sizes={CONTEXT: 2}, overrides=(*WHOLE_GRADIENTS, *FULL), rows="awkward"
        ),
        "cp2, experts": Case(sizes={CONTEXT: 2}, overrides=WHOLE_GRADIENTS, **EXPERTS),
        "cp2, critic": Case(sizes={CONTEXT: 2}, overrides=WHOLE_GRADIENTS, update="critic"),
    },
    4: {
        "tp2 x cp2": Case(sizes={TENSOR: 2, CONTEXT: 2}, overrides=WHOLE_GRADIENTS),
        "pp2 x cp2": Case(sizes={PIPELINE: 2, CONTEXT: 2}, overrides=WHOLE_GRADIENTS),
        "pp2 x ep2": Case(sizes={PIPELINE: 2} | WHOLE_EXPERTS, **EXPERTS),
    },
}
QUICK = ("tp2 with sequence parallel", "pp2, full recomputation")


@pytest.fixture(scope="module")
def found_by(tmp_path_factory):
    found, folder = {}, tmp_path_factory.mktemp("ranks")

    def run(ranks):
        if ranks not in found:
            found[ranks] = run_cases(CASES[ranks], ranks, folder / str(ranks))
        return found[ranks]

    return run


@pytest.mark.parametrize(
    ("ranks", "name"), [(ranks, name) for ranks, cases in CASES.items() for name in cases]
)
def test_rows_that_share_give_in_float64_what_each_gives_alone(ranks, name, found_by):
    assert_exact(found_by(ranks)[name], RELATIVE_FLOAT64)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 2 * RELATIVE_FLOAT32), ("bfloat16", 2**-5)]
)
def test_so_they_do_in_fewer_digits(dtype, tolerance, tmp_path):
    cases = {name: CASES[2][name] for name in QUICK}
    for found in run_cases(cases, 2, tmp_path / "2", dtype).values():
        assert_exact(found, tolerance)
