"""How stock verl 0.9 lays a batch out, computed by its own functions, to compare with a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from verl_padding.errors import PaddingDataError
from verl_padding.plan import padded_rows

VERL_PAD_TOKENS = 128
"""Tokens of a pad of verl 0.9 (``SYNTHETIC_PADDING_SEQ_LEN``)."""

Track = Callable[[Iterable[int]], Iterable[int]]


@dataclass(frozen=True, kw_only=True)
class VerlLayout:
    """Rows of each mini-batch, rank and micro-batch; numbers from the number of real rows on are pads."""

    micro_batches_MD: list[list[list[list[int]]]]
    """Row numbers of the micro-batches of each mini-batch and rank."""
    tokens_R: list[int]
    """Tokens of each row, pads behind the real rows."""


def refuse_what_verl_refuses(n_rows: int, *, dp_size: int, mini_batch_rows: int, token_budget: int) -> None:
    """Refuses a batch at which verl's ``train_mini_batch`` or ``rearrange_micro_batches`` would stop.

    Raises:
        PaddingDataError: ranks cannot share a mini-batch evenly, or a pad is longer than a micro-batch.
    """
    if mini_batch_rows % dp_size:
        raise PaddingDataError(
            f"--compare: stock verl cannot share the {mini_batch_rows} rows of a mini-batch (--mini-batch x --n) "
            f"evenly over --dp {dp_size}. Change one of the three, or leave --compare out."
        )
    if n_rows % mini_batch_rows and token_budget < VERL_PAD_TOKENS:
        raise PaddingDataError(
            f"--compare: a pad of stock verl has {VERL_PAD_TOKENS} tokens, more than --budget {token_budget}. Raise "
            "--budget to as many, or leave --compare out."
        )


def deal_as_verl(tokens_R: Sequence[int], *, dp_size: int, mini_batch_rows: int) -> tuple[list[list[list[int]]], int]:
    """Rows of each mini-batch and rank, and the number of pads.

    verl's ``_balance_batch``: pads behind the rows up to a multiple of both sizes, ranks balanced over the whole batch,
    each rank's rows sorted and cut into mini-batches in their order. ``mini_batch_rows`` is a multiple of ``dp_size``.
    """
    import torch
    from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

    total = padded_rows(len(tokens_R), dp_size, mini_batch_rows)
    padded = torch.tensor([*tokens_R, *[VERL_PAD_TOKENS] * (total - len(tokens_R))], dtype=torch.int64)
    # As a list, not a tensor as in verl: that gives the same partitions many times faster.
    workload = calculate_workload(padded).tolist()
    chunks = get_seqlen_balanced_partitions(workload, k_partitions=dp_size, equal_size=True)
    cell = mini_batch_rows // dp_size
    cells_MD = [
        [chunk[step * cell : (step + 1) * cell] for chunk in chunks] for step in range(total // mini_batch_rows)
    ]
    return cells_MD, total - len(tokens_R)


def pack_as_verl(cells_D: Sequence[Sequence[int]], tokens_R: Sequence[int], token_budget: int) -> list[list[list[int]]]:
    """Micro-batches of each rank's cell, by verl's own packer.

    verl's ranks agree, by collectives, on the first number of micro-batches that works on all of them; here the
    packer is asked again until all ranks answer with the same number.
    """
    import torch
    from tensordict import TensorDict
    from verl.utils.seqlen_balancing import rearrange_micro_batches

    def pack(cell: Sequence[int], at_least: int) -> list[list[int]]:
        rows = [torch.zeros(tokens_R[row], dtype=torch.int8) for row in cell]
        data = TensorDict({"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, batch_size=len(cell))
        _, places_K = rearrange_micro_batches(data, max_token_len=token_budget, min_num_micro_batch=at_least)
        return [[cell[place] for place in places] for places in places_K]

    n_bins = 1
    while True:
        bins_DK = [pack(cell, n_bins) for cell in cells_D]
        most = max(map(len, bins_DK))
        if all(len(bins) == most for bins in bins_DK):
            return bins_DK
        n_bins = most


def verl_layout(
    tokens_R: Sequence[int],
    *,
    dp_size: int,
    mini_batch_rows: int,
    token_budget: int,
    track: Track = lambda steps: steps,
) -> VerlLayout:
    """The whole layout; ``track`` wraps the numbers of the mini-batches, for a progress bar: verl's packer is slow."""
    cells_MD, pads = deal_as_verl(tokens_R, dp_size=dp_size, mini_batch_rows=mini_batch_rows)
    padded = [*tokens_R, *[VERL_PAD_TOKENS] * pads]
    packed = [pack_as_verl(cells_MD[step], padded, token_budget) for step in track(range(len(cells_MD)))]
    return VerlLayout(micro_batches_MD=packed, tokens_R=padded)
