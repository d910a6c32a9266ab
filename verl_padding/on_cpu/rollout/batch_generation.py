"""Generation with transformers for rows of unequal prompts, limits and sampling, many at a time.

What a row samples does not depend on the rows beside it, but for rounding (about 1e-7 in log-probs
of float32).
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, TopKLogitsWarper, TopPLogitsWarper


@dataclass(eq=False)
class Generation:
    """One request, its response so far (``token_ids`` and their ``log_probs``), or the error in its
    place.

    Attributes:
        temperature: 0 for greedy.
        top_k: -1 for all tokens.
        stop_ids: tokens that end the response; the token itself is part of it.
        images: what the model's image processor made of the prompt's images, ``pixel_values`` and
            ``image_grid_thw``; the prompt holds their tokens. Empty for text alone.
        seed: equal seeds and equal probabilities draw the same tokens, whatever else is in the
            batch.
    """

    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop_ids: Collection[int] = ()
    seed: int | str = 0
    images: Mapping[str, torch.Tensor] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    error: Exception | None = None

    def __post_init__(self) -> None:
        if not (
            self.prompt_ids
            and self.max_new_tokens > 0
            and self.temperature >= 0
            and 0 < self.top_p <= 1
        ):
            raise ValueError(
                f"cannot generate: a prompt of {len(self.prompt_ids)} tokens, "
                f"max_new_tokens={self.max_new_tokens}, temperature={self.temperature}, "
                f"top_p={self.top_p}"
            )
        self.random = Random(self.seed)

    @property
    def is_finished(self) -> bool:
        return len(self.token_ids) >= self.max_new_tokens or not set(
            self.token_ids[-1:]
        ).isdisjoint(self.stop_ids)


@torch.inference_mode()
def generate(
    model: PreTrainedModel, rows: list[Generation], is_aborted: Callable[[], bool] = lambda: False
) -> None:
    """Gives every row its response, or what there is of it when ``is_aborted``, asked before every
    token, says so."""
    slots = max(len(row.prompt_ids) for row in rows)
    ids = torch.tensor([[0] * (slots - len(row.prompt_ids)) + row.prompt_ids for row in rows])
    mask = torch.tensor(
        [[0] * (slots - len(row.prompt_ids)) + [1] * len(row.prompt_ids) for row in rows]
    )
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if seeing := [row.images for row in rows if row.images]:
        inputs |= {name: torch.cat([images[name] for images in seeing]) for name in seeing[0]}
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()

    def sample(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        tokens = _sample(logits, rows)
        return torch.full_like(logits, float("-inf")).scatter(1, tokens[:, None], 0.0)

    def has_ended(*_: torch.Tensor, **__: Any) -> torch.Tensor:
        return torch.tensor([row.is_finished or is_aborted() for row in rows])

    # The model's own would fill in what is left out here: a token that ends all rows, another way
    # to sample.
    longest = max(row.max_new_tokens for row in rows)
    model.generation_config = GenerationConfig(
        max_new_tokens=longest, do_sample=False, pad_token_id=0
    )
    model.generate(**inputs, logits_processor=[sample], stopping_criteria=[has_ended])


def _sample(logits: torch.Tensor, rows: list[Generation]) -> torch.Tensor:
    """Draws a token for each row, (rows,), from (rows, vocabulary), and writes it into the row if
    that goes on."""
    greedy = torch.tensor([row.temperature == 0 for row in rows])
    temperatures = torch.tensor([row.temperature or 1.0 for row in rows], dtype=torch.float64)
    # In float64, since the sum runs over the whole vocabulary.
    logits = logits.double() / temperatures[:, None]
    for logits_of_row, row in zip(logits.split(1), rows, strict=True):
        if row.top_k > 0:
            logits_of_row.copy_(TopKLogitsWarper(row.top_k)(None, logits_of_row))
        if row.top_p < 1:
            logits_of_row.copy_(TopPLogitsWarper(row.top_p)(None, logits_of_row))
    log_probs = logits.log_softmax(-1)
    # By the inverse of the distribution function, with one number from each row's own stream.
    cumulative = log_probs.exp().cumsum(-1)
    draws = (
        torch.tensor([row.random.random() for row in rows], dtype=torch.float64) * cumulative[:, -1]
    )
    sampled = torch.searchsorted(cumulative, draws[:, None], right=True)[:, 0].clamp(
        max=logits.shape[-1] - 1
    )
    tokens = torch.where(greedy, logits.argmax(-1), sampled)
    chosen = log_probs.gather(-1, tokens[:, None])[:, 0]
    for row, token, log_prob in zip(rows, tokens.tolist(), chosen.tolist(), strict=True):
        if not row.is_finished:
            row.token_ids.append(token)
            row.log_probs.append(log_prob)
    return tokens
