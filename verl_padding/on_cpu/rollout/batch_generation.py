"""Generation with transformers for rows of unequal prompts, limits and sampling, many at a time.

What a row samples does not depend on the rows beside it, but for rounding (about 1e-7 in log-probs
of float32).
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel


@dataclass(eq=False)
class Generation:
    """One request, and its response so far: ``token_ids`` and their ``log_probs``.

    Attributes:
        temperature: 0 for greedy.
        stop_ids: tokens that end the response; the token itself is part of it.
        images: what the model's image processor made of the prompt's images, ``pixel_values`` and
            ``image_grid_thw``; the prompt holds their tokens. Empty for text alone.
        seed: equal seeds and equal probabilities draw the same tokens, whatever else is in the
            batch.
    """

    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float = 1.0
    stop_ids: Collection[int] = ()
    seed: int | str = 0
    images: Mapping[str, torch.Tensor] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)

    @property
    def is_finished(self) -> bool:
        has_stopped = any(token in self.stop_ids for token in self.token_ids[-1:])
        return has_stopped or len(self.token_ids) >= self.max_new_tokens


@torch.inference_mode()
def generate(
    model: PreTrainedModel, rows: list[Generation], is_aborted: Callable[[], bool] = lambda: False
) -> None:
    """Gives every row its response, or what there is of it when ``is_aborted``, asked before every
    token, says so."""
    # Padded on the left, so that the next token of every row is in the last column.
    ids_R = [torch.tensor(row.prompt_ids) for row in rows]
    ids, mask = (
        pad_sequence(tensors, batch_first=True, padding_side="left")
        for tensors in (ids_R, [torch.ones_like(ids) for ids in ids_R])
    )
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if seeing := [row.images for row in rows if row.images]:
        inputs |= {name: torch.cat([images[name] for images in seeing]) for name in seeing[0]}
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()

    # transformers takes the likeliest token of each row: the drawn one, once all others are ruled
    # out.
    def sample(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        tokens = _sample(logits.cpu(), rows).to(logits.device)
        return torch.full_like(logits, float("-inf")).scatter(1, tokens[:, None], 0.0)

    def has_ended(*_: torch.Tensor, **__: Any) -> torch.Tensor:
        return torch.tensor([row.is_finished or is_aborted() for row in rows], device=model.device)

    # The model's own would fill in what is left out here: a token that ends all rows, another way
    # to sample.
    limit = max(row.max_new_tokens for row in rows)
    model.generation_config = GenerationConfig(
        max_new_tokens=limit, do_sample=False, pad_token_id=0
    )
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    model.generate(**inputs, logits_processor=[sample], stopping_criteria=[has_ended])


def _sample(logits: torch.Tensor, rows: list[Generation]) -> torch.Tensor:
    """Draws a token for each row, (rows,), from (rows, vocabulary), and writes it into the row if
    that goes on."""
    greedy = torch.tensor([row.temperature == 0 for row in rows])
    temperatures = torch.tensor([row.temperature or 1.0 for row in rows], dtype=torch.float64)
    # In float64, since the sum runs over the whole vocabulary.
    log_probs = (logits.double() / temperatures[:, None]).log_softmax(-1)
    # By the inverse of the distribution function, with one number from each row's own stream: of
    # probabilities 0.2, 0.5 and 0.3, a draw of 0.6 falls into the second.
    cumulative = log_probs.exp().cumsum(-1)
    uniform = torch.tensor([row.random.random() for row in rows], dtype=torch.float64)
    draws = (uniform * cumulative[:, -1])[:, None]
    sampled = torch.searchsorted(cumulative, draws, right=True)[:, 0]
    sampled = sampled.clamp(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy, log_probs.argmax(-1), sampled)
    chosen = log_probs.gather(-1, tokens[:, None])[:, 0]
    for row, token, log_prob in zip(rows, tokens.tolist(), chosen.tolist(), strict=True):
        if not row.is_finished:
            row.token_ids.append(token)
            row.log_probs.append(log_prob)
    return tokens
