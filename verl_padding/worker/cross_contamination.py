"""Shows, by computing it, that rows packed beside each other do not see each other: else pads would
change real rows.

Whether a model keeps rows apart that verl packs one behind the other depends on its code, the
attention and the engine; layers that run on from one row into the next, and attention that does not
know where a row begins, fail in silence. A row is computed between two neighbours of one length,
and again with the two exchanged. So it stands at the same place, and the same tokens go through all
layers, experts too: where rows are apart it gets the same numbers, in bfloat16, too, whose rounding
is as large as many a leak. They may differ by what they differ by if the first pass is repeated.
Each rank computes the same rows, so that all take part in the same collectives.

Beginnings and tries are computed at other places, in another order. There a difference by rounding
is a part of the effect of the row's own first token, which another pass changes.

Where rows share tokens, the probe also shows whether rows that branch have the outputs of the rows
alone when what they have in common is computed once. That is no refusal: if they do not, rows of
such a model share only full prefixes.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from verl.utils import tensordict_utils as tu

from verl_padding.errors import Incompatibility, PaddingConfigError
from verl_padding.job.model_config import has_linear_attention
from verl_padding.job.role_engine import ACTOR_MODEL, CRITIC_MODEL
from verl_padding.job.savings import SHARING
from verl_padding.prefix_sharing.engine import BranchesMixedError, find_trie
from verl_padding.prefix_sharing.prefix_trie import TRIE
from verl_padding.worker.training_workers import answer, training_workers, worker_data
from verl_padding.worker.worker_check import INCOMPATIBILITIES

ROW, NEIGHBOUR, LONGER = 16, 16, 8
"""Tokens of the row, of each neighbour, and of what a longer row goes on with."""
ROUNDING, REPEATS = 16, 8
"""A row's outputs differ by chance by this many of float32's epsilons of their size, or this many
times what they differ by in a pass that is repeated."""
LEAK, LEAK_OF_EXPERTS = 0.02, 0.05
"""Part of the effect of a row's first token that a difference by rounding has at most; the latter
where a token may get other experts by rounding, or linear attention other chunks."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of models with a mixture of experts."""
BRANCH_LIMIT = "branch_limit"
"""What the probe answers for each rank: why rows that branch share nothing in one of its models, or
an empty text."""
MIXES = "outputs of rows that diverge are not those of the rows alone"


def check_cross_contamination(axes: Sequence[int], *, shares: bool) -> Callable[[Any], Any]:
    """For verl's ``execute_with_func_generator``: a PaddingConfigError if a model of a worker does
    not keep rows apart.

    Args:
        axes: shape of the axes that position ids have before that of tokens: ``()``, or ``(3,)``
            for M-RoPE.
        shares: whether tokens are to be computed once: a shorter row's outputs have to be those of
            the longer one's beginning then, too, or the answer has an incompatibility, and
            :data:`BRANCH_LIMIT` in it says why rows that branch share nothing.
    """

    def probe(worker: Any) -> Any:
        limit, found = "", []
        for role, training_worker in training_workers(worker).items():
            if _packs_rows(training_worker.engine_config):
                outcome = _probe(role, training_worker, axes, shares)
                if isinstance(outcome, Incompatibility):
                    found.append((SHARING, outcome))
                else:
                    limit = limit or outcome
        return answer(**{INCOMPATIBILITIES: found, BRANCH_LIMIT: limit})

    return probe


def _packs_rows(config: Any) -> bool:
    """Whether an engine puts rows behind each other; with micro-batches of one row each, it does
    not."""
    # A reference has one of the sizes.
    sizes = {config.micro_batch_size_per_gpu, config.infer_micro_batch_size_per_gpu} - {None}
    return bool(config.use_remove_padding and (config.use_dynamic_bsz or sizes != {1}))


def _probe(
    role: str, training_worker: Any, axes: Sequence[int], shares: bool
) -> str | Incompatibility:
    """Refuses a model that does not keep rows apart; returns why rows that branch share nothing,
    empty if they may share what is before, or why no rows may share."""
    compute = partial(_outputs, training_worker, axes=axes)
    text = training_worker.model_config.hf_config.get_text_config()
    passes = list(_rows(text.vocab_size))
    outputs = [found for rows in passes if (found := compute(rows)) is not None]
    in_trie, limit = None, (shares and training_worker.engine.branch_limit) or ""
    if shares and not limit:
        try:
            in_trie = compute(passes[0], shares=True)
        except BranchesMixedError:
            limit = MIXES  # where all layers have run, with their collectives
    if not outputs:
        # Ranks that share rows have no outputs of their own, but all of them take part in each
        # pass.
        return limit
    one, exchanged, changed, again = outputs
    own, leak = _distance(one[1], changed[1]), _distance(one[1], exchanged[1])
    has_experts = any(getattr(text, name, None) for name in EXPERTS)
    rounds_more = has_experts or has_linear_attention(text.to_dict())
    leak_limit = (LEAK_OF_EXPERTS if rounds_more else LEAK) * own
    size = float(one[1].abs().mean())
    rounding = max(
        ROUNDING * torch.finfo(torch.float32).eps * size, REPEATS * _distance(one[1], again[1])
    )
    # Of the model as it was loaded; Megatron's, a list of stages, has none of its own.
    loaded = getattr(training_worker.engine.module, "config", text).get_text_config()
    model = (
        f"{type(training_worker.engine).__name__}, model_type={text.model_type},"
        f" attn_implementation={loaded._attn_implementation}"
    )
    if not leak <= min(rounding, leak_limit):  # nor where it is no number
        section = CRITIC_MODEL if role == "critic" else ACTOR_MODEL
        raise PaddingConfigError(
            f"{section}.use_remove_padding=True: packed rows see each other in the {role} model "
            f"({model}: other neighbours change a row's outputs by {leak:.2g}, its own first token "
            f"by {own:.2g}). Set it to False, or choose another model or attention."
        )
    if not shares:
        return ""
    # At another place, the row is computed in another order: no less than a part of the effect.
    beginning = _distance(one[1], one[3][: len(one[1])])
    if not beginning <= leak_limit:
        why = (
            f"in the {role} model, a row's outputs change in a longer row that begins with it (by "
            f"{beginning:.2g}; its first token changes them by {own:.2g})"
        )
        return Incompatibility(model, why, "Set padding.sharing=off, or choose another model.")
    if in_trie is None:
        return limit
    return "" if max(map(_distance, one, in_trie)) <= leak_limit else MIXES


def _rows(vocab_size: int) -> Iterator[list[torch.Tensor]]:
    """The rows of each pass: a row beside two neighbours, with these exchanged, with another first
    token, and once more as in the first, each before two longer rows that begin with it, and then
    part."""
    draws = torch.Generator().manual_seed(0)
    # No token of an image is among these.
    low, high = min(16, vocab_size // 4), min(vocab_size, 200)
    sizes = (ROW, LONGER, NEIGHBOUR, NEIGHBOUR)
    row, rest, *around = (torch.randint(low, high, (n,), generator=draws) for n in sizes)
    other = torch.cat([(row[:1] - low + 1) % (high - low) + low, row[1:]])
    for (before, after), each in zip(
        (around, around[::-1], around, around), (row, row, other, row), strict=True
    ):
        yield [before, each, after, *(torch.cat([each, end]) for end in (rest, rest.flip(0)))]


def _outputs(
    training_worker: Any, rows: list[torch.Tensor], *, axes: Sequence[int], shares: bool = False
) -> list[torch.Tensor] | None:
    """What the engine computes for each row of a micro-batch, but for the last token; None on a
    rank that has no outputs."""
    micro_batch_size, rows = len(rows), rows * _schedule_multiple(training_worker.engine)
    ones = [torch.ones_like(ids) for ids in rows]
    positions = [torch.arange(len(ids)).expand(*axes, len(ids)).contiguous() for ids in rows]
    masks = [mask[1:] for mask in ones]
    data = worker_data(
        rows,
        position_ids=positions,
        attention_mask=ones,
        loss_mask=masks,
        response_mask=masks,
    )
    off = dict.fromkeys(("compute_loss", "calculate_entropy", "use_dynamic_bsz"), False)
    tu.assign_non_tensor(data, temperature=1.0, micro_batch_size_per_gpu=micro_batch_size, **off)
    if shares:
        # The micro-batches are alike, and so are their tries.
        one = tu.index_select_tensor_dict(data, list(range(micro_batch_size)))
        tu.assign_non_tensor_data(data, TRIE, find_trie(one, may_branch=True))
    output = training_worker.infer_batch(data)
    if output is None:
        return None
    found = output["log_probs"] if "log_probs" in output else output["values"]
    return [
        line.detach().float().cpu()[: len(ids) - 2]
        for line, ids in zip(found.unbind(), rows, strict=True)
    ]


def _schedule_multiple(engine: Any) -> int:
    """Megatron's interleaved schedule takes multiples of this many micro-batches."""
    stages = getattr(engine.engine_config, "virtual_pipeline_model_parallel_size", None) or 1
    return engine.tf_config.microbatch_group_size_per_vp_stage if stages > 1 else 1


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Mean absolute difference."""
    return float((a - b).abs().mean())
