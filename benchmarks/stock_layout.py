"""How stock verl 0.9 pads a batch and lays it out, the latter by its own functions, to compare with
a plan."""

from collections.abc import Sequence

# Before verl imports transformers, and by it torchvision.
import verl_padding.on_cpu  # noqa: F401
from verl_padding.plan import padded_rows


def pad_tokens_of_verl() -> int:
    """Tokens of each pad of stock verl."""
    # Not at the top: verl chooses its platform when it is imported.
    from verl.trainer.ppo.padding_utils import SYNTHETIC_PADDING_SEQ_LEN

    return int(SYNTHETIC_PADDING_SEQ_LEN)


def verl_layout(
    tokens_R: Sequence[int], *, dp_size: int, mini_batch_rows: int, token_budget: int
) -> list[list[list[list[int]]]]:
    """Rows of the micro-batches of each mini-batch and rank; numbers from the number of real rows
    on are pads. ``dp_size`` divides ``mini_batch_rows``."""
    local_batches_MD, pads = deal_as_verl(
        tokens_R, dp_size=dp_size, mini_batch_rows=mini_batch_rows
    )
    padded_R = [*tokens_R, *[pad_tokens_of_verl()] * pads]
    return [
        pack_as_verl(local_batches_D, padded_R, token_budget)
        for local_batches_D in local_batches_MD
    ]


def deal_as_verl(
    tokens_R: Sequence[int], *, dp_size: int, mini_batch_rows: int
) -> tuple[list[list[list[int]]], int]:
    """Rows of each mini-batch and rank, and the number of pads, by verl's ``_balance_batch``: pads
    go behind the rows up to a multiple of both sizes; ranks are balanced over the whole batch, and
    each rank's rows sorted and cut into mini-batches in their order."""
    import torch
    from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

    # 100 rows with mini-batches of 48: 144 rows, 44 of them pads, in 3 mini-batches.
    total = padded_rows(len(tokens_R), dp_size, mini_batch_rows)
    pads = total - len(tokens_R)
    padded = torch.tensor([*tokens_R, *[pad_tokens_of_verl()] * pads], dtype=torch.int64)
    # As a list, not a tensor as in verl: that gives the same partitions many times faster.
    workload = calculate_workload(padded).tolist()
    chunks = get_seqlen_balanced_partitions(workload, k_partitions=dp_size, equal_size=True)
    local_batch = mini_batch_rows // dp_size
    return [
        [chunk[first : first + local_batch] for chunk in chunks]
        for first in range(0, total // dp_size, local_batch)
    ], pads


def pack_as_verl(
    local_batches_D: Sequence[Sequence[int]], tokens_R: Sequence[int], token_budget: int
) -> list[list[list[int]]]:
    """Micro-batches of each rank's local mini-batch, by verl's own packer. verl's ranks agree, by
    collectives, on the first number of micro-batches that works on all of them."""
    import torch
    from tensordict import TensorDict
    from verl.utils.seqlen_balancing import rearrange_micro_batches

    def pack(local_batch: Sequence[int], at_least: int) -> list[list[int]]:
        rows = [torch.zeros(tokens_R[row], dtype=torch.int8) for row in local_batch]
        data = TensorDict(
            {"input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)},
            batch_size=len(local_batch),
        )
        _, places_K = rearrange_micro_batches(
            data, max_token_len=token_budget, min_num_micro_batch=at_least
        )
        return [[local_batch[place] for place in places] for places in places_K]

    # Ranks that come to 3 and 4 micro-batches alone both try 4, and so on until they agree.
    sizes = {1}
    while True:
        bins_DK = [pack(local_batch, at_least=max(sizes)) for local_batch in local_batches_D]
        sizes = set(map(len, bins_DK))
        if len(sizes) == 1:
            return bins_DK
