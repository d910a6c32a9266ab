"""Exactness on one GPU, without vLLM and flash-attn: ``pytest -m gpu tests/gpu/test_one_gpu.py``,
four minutes."""

import json
import math
import subprocess
import sys

import pytest
import torch

from benchmarks.one_gpu import whole_job
from tests.equivalence.test_sharing_on_megatron import CASES
from tests.support.flash_attention_on_cpu import flash_attn_varlen_func as reference
from tests.support.pages import ROOT
from tests.support.sharing_ranks import assert_exact, run_cases
from verl_padding.worker.varlen_attention import flash_attn_varlen_func, has_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="takes a GPU"),
]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("window", [(-1, -1), (63, 63)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads_of_keys", [2, 14])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_gives_what_flash_attn_documents(dtype, heads_of_keys, causal, window, scale):
    ends = [
        torch.tensor(each, dtype=torch.int32) for each in ([0, 100, 140, 141], [0, 100, 400, 700])
    ]
    draw = torch.Generator().manual_seed(0)
    shapes = [(141, 14, 64), (700, heads_of_keys, 64), (700, heads_of_keys, 64)]
    states = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
    weights = torch.randn(141, 14, 64, generator=draw).to(dtype)

    def outputs_and_gradients(attend, dtype, device):
        inputs = [each.to(device, dtype).requires_grad_() for each in states]
        out = attend(
            *inputs,
            *(each.to(device) for each in ends),
            100,
            300,
            causal=causal,
            window_size=window,
            softmax_scale=scale,
        )
        gradients = torch.autograd.grad(out, inputs, weights.to(device, dtype))
        return [each.double().cpu() for each in (out, *gradients)]

    assert has_kernel(states[0].cuda())
    found = outputs_and_gradients(flash_attn_varlen_func, dtype, "cuda")
    wanted = outputs_and_gradients(reference, torch.float64, "cpu")
    for ours, exact in zip(found, wanted, strict=True):
        assert (ours - exact).norm() <= 0.02 * exact.norm()


def test_gradients_of_pads_tries_and_skipped_rows_are_those_of_rows_alone(tmp_path):
    command = [sys.executable, "-m", "benchmarks.one_gpu", "exact", "--out", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]  # the check of packed rows raises
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    of_cases = [line for line in lines if line["what"] == "gradient"]
    assert len(of_cases) == 3 * 2 * 4
    alone = {
        (line["model"], line["dtype"]): line["off_float32"]
        for line in of_cases
        if line["gradient_of"] == "rows alone"
    }
    for line in of_cases:
        case = line["model"], line["dtype"]
        if line["gradient_of"] == "zero-advantage rows skipped":
            assert line["off_rows_computed"] < (1e-5 if case[1] == "fp32" else 0.01)
        else:
            assert line["off_float32"] <= max(1e-5, 1.1 * alone[case])
            assert line["off_rows_alone"] < (1e-5 if case[1] == "fp32" else 0.02)


@pytest.mark.megatron
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_rows_that_share_on_megatron_are_as_each_alone(dtype, tolerance, tmp_path):
    """Of layers without Transformer Engine, whose kernels take none of float32."""
    found = run_cases(CASES[1], 1, tmp_path / "1", dtype, platform="nvidia")
    for of_case in found.values():
        assert_exact(of_case, tolerance)


def test_a_whole_job_trains_by_torchs_kernel(tmp_path):
    steps = whole_job.run(tmp_path)
    assert len(steps) == whole_job.STEPS
    for step in steps:
        assert all(math.isfinite(value) for value in step.values())
        assert step["actor/grad_norm"] > 0
        assert step["training/rollout_probs_diff_max"] < 0.2, (
            "rollout and trainer have other weights"
        )
        assert step["padding/actor/sharing_factor"] > 2
