"""The kinds that a field of a row can have, and those of the fields that verl writes."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """How a field's length follows the row. Its values are what ``padding.fields`` takes."""

    PROMPT = "prompt"
    """One value per prompt token."""
    RESPONSE = "response"
    """One value per response token."""
    SEQUENCE = "sequence"
    """One value per token of prompt and response."""
    POSITIONS = "positions"
    """Position ids, (tokens,), (3, tokens) or (4, tokens)."""
    ROW = "row"
    """One value of a fixed shape per row."""
    OBJECT = "object"
    """Any other value: a pad gets the empty value of its type, or None if the type has none."""
    MULTIMODAL = "multimodal"
    """Images and videos as the model takes them, name -> tensor."""

    def tokens(self, prompt: int, response: int) -> int | None:
        """Tokens of a field in a row of ``prompt`` + ``response``; None for a kind that does not
        follow the row."""
        lengths = {Kind.PROMPT: prompt, Kind.RESPONSE: response}
        whole = prompt + response if self in (Kind.SEQUENCE, Kind.POSITIONS) else None
        return lengths.get(self, whole)


FOUND_BY_LENGTH = (Kind.PROMPT, Kind.RESPONSE, Kind.SEQUENCE)
"""Kinds that an unknown field may have if its lengths fit."""


class Fill(Enum):
    """A pad's values. The members' values are what ``padding.fields`` takes."""

    ZERO = "zero"
    ONE = "one"
    EOS = "eos"
    """The tokenizer's end-of-sequence id."""
    ROUTES = "routes"
    """Distinct experts for each token, (tokens, layers, top-k), spread evenly over those up to the
    highest in the rows that pads are made from."""


@dataclass(frozen=True)
class FieldFormat:
    kind: Kind
    fill: Fill = Fill.ZERO


RESPONSE_FIELDS = (
    # written by verl's agent loop (trainer/ppo/v1/agent_loop_tq.py)
    "response_mask",
    "loss_mask",
    "rm_scores",
    "rollout_log_probs",
    # written by verl's trainer (trainer/ppo/v1/trainer_base.py), response only. Workers write
    # `entropy` and `values` for the whole sequence first; the trainer overwrites them before an
    # update reads them.
    "old_log_probs",
    "ref_log_prob",
    "entropy",
    "values",
    "advantages",
    "returns",
    "token_level_rewards",
    "rollout_is_weights",
)
KNOWN_FIELDS: Mapping[str, FieldFormat] = {
    **dict.fromkeys(RESPONSE_FIELDS, FieldFormat(Kind.RESPONSE)),
    # written by verl's agent loop
    "prompts": FieldFormat(Kind.PROMPT, Fill.EOS),
    "responses": FieldFormat(Kind.RESPONSE, Fill.EOS),
    "input_ids": FieldFormat(Kind.SEQUENCE, Fill.EOS),
    "attention_mask": FieldFormat(Kind.SEQUENCE, Fill.ONE),
    "position_ids": FieldFormat(Kind.POSITIONS),
    "multi_modal_inputs": FieldFormat(Kind.MULTIMODAL),
    "routed_experts": FieldFormat(Kind.SEQUENCE, Fill.ROUTES),
    "teacher_ids": FieldFormat(Kind.SEQUENCE, Fill.EOS),
    "teacher_logprobs": FieldFormat(Kind.SEQUENCE),
    # written by a user's agent loop (pads/loss_weighting.py)
    "loss_weight": FieldFormat(Kind.ROW),
    # written by verl's data set (utils/dataset/rl_dataset.py)
    "dummy_tensor": FieldFormat(Kind.ROW),
    # written by verl's workers, whole sequence
    "log_probs": FieldFormat(Kind.SEQUENCE),
}
