"""Rows that branch, computed once through linear attention, give what each row gives alone.

verl patches classes of Qwen3.5 with a tower: other models of it run in a process of their own.
"""

import contextlib
import inspect
from functools import partial

import pytest
import torch

from tests.support.engine_in_process import (
    Actor,
    Critic,
    computed,
    off_rows_alone,
    one_micro_batch,
    start_engine,
    trained_rows,
)
from tests.support.fresh_processes import run_fresh
from tests.support.hybrid_models import IMAGE, IMAGE_START, Float64, hybrid_model
from tests.support.losses_on_rows import critic_loss, policy_loss
from tests.support.pages import ROOT
from tests.support.token_tries import awkward_tries, random_tries
from verl_padding.prefix_sharing import linear_attention
from verl_padding.prefix_sharing.engine import BranchesMixedError
from verl_padding.prefix_sharing.prefix_trie import TRIE
from verl_padding.worker.losses import normalize_over_mini_batch


def rows_of(rows, *, axes=0, dtype=torch.float64):
    made = []
    for row in trained_rows(
        {f"r_{n}_0": (ids[:1], ids[1:]) for n, ids in enumerate(rows)}
    ).values():
        fields = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in row.items()
        }
        if axes:
            fields["position_ids"] = fields["position_ids"].expand(axes, -1).contiguous()
        made.append(fields)
    return made


def started(kind, model, *, shares=False, **settings):
    engine = start_engine(kind, model, shares=shares, **settings)
    # As verl's engines find when they start.
    engine.pass_packed_cu_seqlens = "cu_seqlens" in inspect.signature(model.forward).parameters
    if shares:
        engine.keep_rows_apart()
    return engine


class Pair:
    """An engine that shares, and one that computes each row alone."""

    def __init__(self, kind, *, exact=True, is_critic=False, **of_model):
        models = [hybrid_model(kind, is_critic=is_critic, **of_model) for _ in range(2)]
        models = [model.double() if exact else model for model in models]
        engine = Critic if is_critic else Actor
        self.exact, self.sharing = exact, started(engine, models[0], shares=True)
        self.plain = started(engine, models[1])
        self.said = {
            "calculate_entropy": not is_critic,
            "use_fused_kernels": of_model.get("fused", False),
        }
        loss = critic_loss if is_critic else policy_loss
        self.loss = normalize_over_mini_batch(loss("seq-mean-token-mean"))

    def off(self, texts, images=(), **how):
        """How far outputs and the gradient are off those of rows alone."""
        rows = rows_of(texts, dtype=torch.float64 if self.exact else torch.float32, **how)
        for row, shown in zip(rows, images, strict=False):
            row["multi_modal_inputs"] = shown
        with Float64() if self.exact else contextlib.nullcontext():
            return off_rows_alone(self.sharing, self.plain, rows, self.loss, **self.said)

    def assert_exact(self, texts, *images, **how):
        of_outputs, of_gradient = self.off(texts, *images, **how)
        tolerance = 1e-12 if self.exact else 1e-5
        assert of_outputs <= tolerance, f"outputs differ by {of_outputs:.2g}"
        assert of_gradient <= tolerance, f"the gradient differs by {of_gradient:.2g}"


@pytest.fixture(scope="module")
def pair():
    return Pair("qwen3_next")


@pytest.mark.parametrize("name", ["at borders of chunks", "full prefixes", "five deep"])
def test_tries_that_branch_at_awkward_places_are_rows_alone(name, pair):
    pair.assert_exact(awkward_tries()[name])


@pytest.mark.parametrize("seed", range(3))
def test_random_tries_are_rows_alone(seed, pair):
    pair.assert_exact(random_tries(seed))


def test_layers_that_are_computed_again_follow_the_same_trie():
    Pair("qwen3_next", checkpointed=True).assert_exact(random_tries(0))


def test_critics_and_experts_compute_what_they_do_of_rows_alone():
    Pair("qwen3_next", is_critic=True).assert_exact(random_tries(2))
    # transformers chooses experts in float32, in which a model is shipped.
    Pair("qwen3_next_moe", exact=False).assert_exact(random_tries(3))


PATCHED = """
from tests.equivalence.test_linear_attention import *
Pair("qwen3_5", is_critic=True).assert_exact(random_tries(0))
pair = Pair("qwen3_5")
for axes in (0, 4):
    pair.assert_exact(random_tries(3), axes=axes)
    pair.assert_exact(awkward_tries()["five deep"], axes=axes)
Pair("qwen3_5_moe", exact=False).assert_exact(random_tries(3), axes=4)
Pair("qwen3_5", exact=False).assert_exact(*rows_with_images(), axes=4)
for kind, axes in (("qwen3_next", 0), ("qwen3_5", 4)):
    Pair(kind, exact=False, fused=True).assert_exact(random_tries(3), axes=axes)
for is_critic in (False, True):
    test_packed_rows_that_share_nothing_are_apart("qwen3_5", is_critic)
print("exact")
"""


def rows_with_images():
    """Rows that begin with all of another, image and all; and one with another image, of the same
    tokens."""
    draw = torch.Generator().manual_seed(0)
    grid = torch.tensor([[1, 4, 4]])
    first, other = (
        {"pixel_values": torch.randn(16, 96, generator=draw), "image_grid_thw": grid}
        for _ in range(2)
    )
    context = [5, 6, IMAGE_START, *[IMAGE] * 4, 7, 8, 9]
    rows = [context, [*context, *range(20, 60)], [*context, *range(20, 130)]]
    return [*rows, rows[1]], [first, first, first, other]


@pytest.mark.slow
def test_so_do_models_with_a_tower_and_fused_heads_which_verl_patches():
    run = run_fresh(PATCHED, platform="cpu", folder=ROOT)
    assert run.stdout.endswith("exact\n"), run.stderr[-3000:]


def packed_rule(rule):
    """transformers' rule, called as fla's: pieces one behind the other, with a state of each."""

    def rule_of_pieces(query, key, value, g, beta, *, cu_seqlens, cu_seqlens_cpu, **kwargs):
        states, lengths = kwargs.pop("initial_state"), cu_seqlens.diff().tolist()
        assert len(query) == 1
        assert int(cu_seqlens_cpu[-1]) == query.shape[1] == sum(lengths)
        assert states is None or len(states) == len(lengths)
        parts = zip(*(part.split(lengths, 1) for part in (query, key, value, g, beta)), strict=True)
        begins = [None] * len(lengths) if states is None else states.split(1)
        done = [
            rule(q, k, v, g=decay, beta=strength, initial_state=state, **kwargs)
            for (q, k, v, decay, strength), state in zip(parts, begins, strict=True)
        ]
        out, ends = zip(*done, strict=True)
        return torch.cat(out, 1), None if ends[0] is None else torch.cat(ends)

    return rule_of_pieces


def test_kernels_are_called_as_fla_and_causal_conv1d_are():
    pair = Pair("qwen3_next")
    model = hybrid_model("qwen3_next").double()
    for layer in linear_attention.linear_layers(model):
        layer.chunk_gated_delta_rule = packed_rule(layer.chunk_gated_delta_rule)
        layer.causal_conv1d_fn = lambda x, weight, bias=None, activation=None, seq_idx=None: (
            linear_attention.causal_conv1d(x, weight, bias, activation)
        )
    pair.sharing = started(Actor, model, shares=True)
    for seed in (0, 3):
        pair.assert_exact(random_tries(seed))


def test_a_bucket_that_is_filled_up_changes_nothing():
    pair = Pair("qwen3_next")
    bucket = {"pad_to_length": True, "pad_to_length_bucket": 64}
    pair.sharing = started(Actor, hybrid_model("qwen3_next").double(), shares=True, **bucket)
    for name, value in (bucket | {"ulysses_sequence_parallel_size": 1}).items():
        setattr(pair.sharing, name, value)
    pair.assert_exact(random_tries(4))


def test_a_layer_that_does_not_follow_ends_the_job():
    pair = Pair("qwen3_next")
    layer = next(linear_attention.linear_layers(pair.sharing.module))
    rule = partial(inspect.unwrap(layer.chunk_gated_delta_rule))
    setattr(rule, TRIE, True)  # as if it did
    layer.chunk_gated_delta_rule = rule
    with pytest.raises(BranchesMixedError, match="2 of 3 layers"):
        pair.off(random_tries(9))


@pytest.mark.parametrize(("kind", "is_critic"), [("qwen3_next", True), ("qwen3_5_text", False)])
def test_packed_rows_that_share_nothing_are_apart(kind, is_critic):
    pair = Pair(kind, is_critic=is_critic)
    rows = rows_of(random_tries(1))
    packed = [one_micro_batch(rows, rows, **pair.said)]
    each_alone = [one_micro_batch([row], rows, **pair.said) for row in rows]
    with Float64():
        together, gradient = computed(pair.sharing, pair.loss, packed)
        alone, wanted = computed(pair.plain, pair.loss, each_alone)
        leaking, _ = computed(pair.plain, pair.loss, packed)
    for name, want in alone.items():
        assert (together[name] - want).abs().max() <= 1e-12
        assert (leaking[name] - want).abs().max() > 1e-3, "verl keeps rows apart by itself"
    assert (gradient - wanted).norm() <= 1e-12 * wanted.norm()
