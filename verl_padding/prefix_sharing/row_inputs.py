"""What the outputs of rows depend on, and how far two rows have it in common."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_padding.pads.upsampling import MULTI_MODAL_INPUTS
from verl_padding.plan.cost import Int64s
from verl_padding.plan.prefix_tries import common_prefix_length

INPUT_IDS = "input_ids"
ROUTES = ("routed_experts",)
RECORDED = (*ROUTES, "teacher_ids", "teacher_logprobs")
"""Fields that may differ between rows with the same tokens. They are large, as images are."""
PER_TOKEN = ("position_ids", *RECORDED)
"""Fields beside the tokens that outputs may depend on, one value per token: they must agree up to
where rows branch."""


class RowInputs:
    """What the outputs of rows, on the CPU, may depend on: tokens, images, temperature, and
    :data:`PER_TOKEN`."""

    def __init__(self, data: TensorDict):
        self.ids_R: list[Int64s] = [row.to(torch.int64).numpy() for row in data[INPUT_IDS].unbind()]
        """The tokens of each row."""
        # (tokens, ..); position ids are (.., tokens)
        self._fields_RT = {
            name: [
                _as_array(row.movedim(-1, 0) if name == "position_ids" else row)
                for row in data[name].unbind()
            ]
            for name in PER_TOKEN
            if name in data
        }
        temperature = tu.get(data, "temperature")
        if isinstance(temperature, torch.Tensor):
            temperature = temperature.tolist()
        # Of each row, or one that holds for all.
        is_per_row = isinstance(temperature, Sequence)
        self._temperature_R = temperature if is_per_row else [temperature] * len(self.ids_R)
        self.images_R: list[Mapping[str, Any]] = [
            each or {} for each in tu.get(data, MULTI_MODAL_INPUTS) or [{}] * len(self.ids_R)
        ]
        """Images and sounds of each row, as its processor made them; empty for a row of text."""

    def shared(self, longer: int, shorter: int) -> int:
        """How many of their first tokens two rows may have the same outputs for: 0, or all of one,
        with images."""
        if self._temperature_R[shorter] != self._temperature_R[longer]:
            return 0
        n_shorter, n_longer = len(self.ids_R[shorter]), len(self.ids_R[longer])
        length = common_prefix_length(self.ids_R[shorter], self.ids_R[longer])
        for name, rows in self._fields_RT.items():
            if len(rows[shorter]) != n_shorter or len(rows[longer]) != n_longer:
                return 0  # it covers something else
            # A teacher says nothing of the token after a row's last one: verl fills it in.
            compared = (
                min(length, n_shorter - 1, n_longer - 1) if name.startswith("teacher") else length
            )
            alike = common_prefix_length(rows[shorter][:compared], rows[longer][:compared])
            length = alike if alike < compared else length
        images = self.images_R[shorter], self.images_R[longer]
        if any(images) and not (length == n_shorter and images_begin_alike(*images)):
            return 0
        return length


def images_begin_alike(shorter: Mapping[str, Any], longer: Mapping[str, Any]) -> bool:
    """Whether the images of the shorter row are the first ones of the longer one."""
    if not shorter:
        # A row without an image: all that the other one has must be of its images, and not of the
        # row.
        return all(
            b is None or (isinstance(b, torch.Tensor) and b.dim() > 0) for b in longer.values()
        )
    return shorter.keys() == longer.keys() and all(
        _begins_with(longer[name], shorter[name]) for name in shorter
    )


def _begins_with(longer: Any, shorter: Any) -> bool:
    if not isinstance(shorter, torch.Tensor) or not isinstance(longer, torch.Tensor):
        return shorter is None and longer is None
    return torch.equal(
        shorter, longer[: len(shorter)] if shorter.dim() and longer.dim() else longer
    )


def _as_array(row: torch.Tensor) -> Any:
    # NumPy has no bfloat16; float32 holds each of its numbers.
    return (row.float() if row.dtype == torch.bfloat16 else row).numpy()
