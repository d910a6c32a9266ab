"""Rows of a micro-batch, by their tokens."""

import torch
from verl.utils.tensordict_utils import list_of_dict_to_tensordict


def rows_of(tokens, **fields):
    """With a field of all rows beside the tokens, by its name."""
    return list_of_dict_to_tensordict(
        [
            {"input_ids": torch.tensor(row), "position_ids": torch.arange(len(row))}
            | {name: values[number] for name, values in fields.items()}
            for number, row in enumerate(tokens)
        ]
    )
