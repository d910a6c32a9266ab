"""verl's FSDP engines around a whole model in this process, in float64.

What they make of a micro-batch, and of the model's output, is verl's own code; only their start,
which needs a process group, is not. transformers computes norms in float32 whatever a model's dtype
is: they are torch's own here.
"""

import functools
from dataclasses import replace

import torch
from tensordict import NonTensorStack
from torch import nn
from transformers.integrations import flash_attention
from verl.models.transformers.monkey_patch import _ulysses_flash_attention_forward
from verl.utils import tensordict_utils as tu
from verl.utils.torch_functional import entropy_from_logits, entropy_from_logits_with_chunking
from verl.workers.config import FSDPEngineConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.engine.utils import prepare_micro_batches

from benchmarks.one_gpu.rank import rows_of_call
from benchmarks.one_gpu.rows import Row, micro_batch_of, trained_rows
from verl_padding.pads.planned_call import CALL, MINI_BATCH, mini_batches
from verl_padding.prefix_sharing.engine import find_trie
from verl_padding.prefix_sharing.prefix_trie import TRIE
from verl_padding.worker.packed_attention import use_packed_attention
from verl_padding.worker.padded_engine import padded
from verl_padding.worker.plan_packer import follow_plan

__all__ = ["Row", "micro_batch_of", "trained_rows"]

IMAGES = "multi_modal_inputs"


class Whole:
    """An engine whose model is neither sharded nor on a device; it counts the tokens that the model
    computes."""

    def __init__(self, module, **settings):
        self.module = module
        self.engine_config = FSDPEngineConfig(use_torch_compile=False, **settings)
        self.pad_to_length = self.use_ulysses_sp = False
        self._autocast_dtype = torch.float32  # verl's word for no autocast
        self.compute_entropy_from_logits = (
            entropy_from_logits_with_chunking
            if self.engine_config.entropy_from_logits_with_chunking
            else entropy_from_logits
        )
        self.tokens = 0

    def get_data_parallel_group(self):
        return None

    def backward(self, micro_batch, loss):
        """One micro-batch, forwards and backwards, as an engine of one of ``dp_size`` ranks does
        it."""
        value, _ = self.forward_step(micro_batch, loss, forward_only=False)
        (value / micro_batch["dp_size"]).backward()  # FSDP averages gradients over the ranks

    @functools.wraps(FSDPEngineWithLMHead.prepare_model_inputs)
    def prepare_model_inputs(self, micro_batch):
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        self.tokens += inputs["input_ids"].numel()
        return inputs, output_args

    def take_gradient(self):
        """All gradients in one vector, and none is left."""
        parameters = [
            parameter for parameter in self.module.parameters() if parameter.requires_grad
        ]
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        self.module.zero_grad(set_to_none=True)
        return torch.cat([gradient.flatten() for gradient in flat])


class Actor(Whole, FSDPEngineWithLMHead): ...


class Critic(Whole, FSDPEngineWithValueHead): ...


def start_engine(engine, module, *, shares=False, **settings):
    """An engine; if it ``shares``, that of a padded job."""
    if not shares:
        return engine(module, **settings)
    use_packed_attention(module)
    flash_attention._flash_attention_forward = (
        _ulysses_flash_attention_forward  # verl's apply_monkey_patch
    )
    return padded(engine)(module, **settings)


def in_float64(module):
    """The model in float64, norms too."""
    for name, child in module.named_children():
        if type(child).__name__.endswith("RMSNorm"):
            norm = nn.RMSNorm(child.weight.shape[-1], eps=child.variance_epsilon)
            norm.weight = child.weight
            setattr(module, name, norm)
        else:
            in_float64(child)
    return module.double()


def train_as_planned(
    engine,
    rows,
    plan,
    call,
    loss,
    **given,
):
    """Gradient (N,) of each mini-batch, at the weights that are there when it is asked for.

    It is summed over micro-batches and ranks, all of which the engine plays in turn, as verl and
    FSDP do it.

    Args:
        given: what :func:`cut_as_planned` takes.
    """
    for mini_batch in range(plan.layouts[call].n_mini_batches):
        for _, micro_batch in cut_as_planned(rows, plan, call, mini_batch, **given):
            engine.backward(micro_batch, loss)
        yield engine.take_gradient()


def cut_as_planned(
    rows,
    plan,
    call,
    mini_batch,
    *,
    token_budget,
    factor_R=None,
    divides_by_rows=True,
    drops_rows=False,
    **said,
):
    """The micro-batches of all ranks of a mini-batch, each with the keys of its rows, None for a
    pad.

    Args:
        factor_R: of each row, if rows weigh differently.
        divides_by_rows: whether losses that weigh rows divide by those of the mini-batch.
        drops_rows: whether the update may leave rows out.
        said: non-tensor data of every micro-batch, beside what each update says.
    """
    layout, keys, fields = plan.layouts[call], list(rows), list(rows.values())
    data = rows_of_call(rows, plan, call)
    trained_R = [int(row["response_mask"].sum()) for row in fields]
    tokens_R = [int(row["loss_mask"].sum()) for row in fields]
    steps = mini_batches(
        layout, trained_R, tokens_R, divides_by_rows=divides_by_rows, drops_rows=drops_rows
    )
    shape = {
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": token_budget,
        "sp_size": 1,
        "dp_size": layout.dp_size,
        "batch_num_tokens": sum(tokens_R[row] for row in layout.rows_M[mini_batch]),
        CALL: replace(data[CALL], factor_R=factor_R),
        MINI_BATCH: steps[mini_batch],
    }
    tu.assign_non_tensor(data, **COMMON | shape | said)
    n_rows, before = sum(layout.local_batch_rows_M), sum(layout.local_batch_rows_M[:mini_batch])
    for rank, local_batch in enumerate(layout.local_batches[mini_batch]):
        of_rank = [rank * n_rows + before + place for place in range(len(local_batch))]
        held = tu.index_select_tensor_dict(data, of_rank)
        micro_batches, places = follow_plan(prepare_micro_batches)(held)
        assert places is not None
        for micro_batch, local_places in zip(micro_batches, places, strict=True):
            numbers = (local_batch[place] for place in local_places)
            yield [keys[row] if row < len(rows) else None for row in numbers], micro_batch


def one_micro_batch(rows, of, *, shared=False, **said):
    """Some rows as one micro-batch of a mini-batch of the rows ``of``, with their trie if what they
    share is computed once."""
    tensors = [{name: row[name] for name in row if name != IMAGES} for row in rows]
    data = micro_batch_of(tensors)
    if IMAGES in rows[0]:
        data[IMAGES] = NonTensorStack(*(row[IMAGES] for row in rows))
    shape = {"dp_size": 1, "batch_num_tokens": loss_tokens(of), "global_batch_size": len(of)}
    tu.assign_non_tensor(data, **COMMON | shape | said)
    if shared:
        trie = find_trie(data, may_branch=True)
        assert trie.tokens < sum(len(row["input_ids"]) for row in rows)
        tu.assign_non_tensor_data(data, TRIE, trie)
    return data


def computed(engine, loss, micro_batches):
    """Outputs (T,) of all tokens but for the last of each row, whose output is of no token; and the
    gradient (N,)."""
    found = {}
    for data in micro_batches:
        value, output = engine.forward_step(data, loss, forward_only=False)
        (value / data["dp_size"]).backward()
        for name, values in output["model_output"].items():
            found.setdefault(name, []).extend(row[:-1].detach() for row in values.unbind())
    return {name: torch.cat(rows) for name, rows in found.items()}, engine.take_gradient()


def off_rows_alone(sharing, plain, rows, loss, **said):
    """How far an engine that computes once what rows share is off one that computes each row alone:
    outputs by their values, and the gradient relative to its norm."""
    got, gradient = computed(sharing, loss, [one_micro_batch(rows, rows, shared=True, **said)])
    alone = [one_micro_batch([row], rows, **said) for row in rows]
    want, wanted = computed(plain, loss, alone)
    assert got.keys() == want.keys()
    assert wanted.norm() > 1e-3
    output_error = max(float((got[name] - want[name]).abs().max()) for name in want)
    return output_error, float((gradient - wanted).norm() / wanted.norm())


COMMON = {"temperature": 1.0, "use_remove_padding": True, "calculate_entropy": True}
"""What verl's trainer and workers say to every update."""


def loss_tokens(rows):
    return int(sum(row["loss_mask"].sum() for row in rows))
