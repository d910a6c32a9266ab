"""Generation with transformers where requests join and leave a running batch at every token.

Rows of a batch have prompts of unequal lengths and start at different times, so the slots of the key/value
cache do not agree with positions; nor do they where an image stands for fewer positions than it has tokens.
Every row therefore carries a mask over the slots (True where a slot holds one of its own tokens) and explicit
positions: the log-probs are those of the row alone, up to the rounding of a batched matrix product (about
1e-7 in float32).
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel, TopKLogitsWarper, TopPLogitsWarper
from transformers.cache_utils import DynamicLayer


@dataclass(eq=False)
class Generation:
    """One request and its response so far.

    Attributes:
        prompt_ids: the prompt, at least one token.
        max_new_tokens: at least 1.
        temperature: 0 for greedy.
        top_k: -1 for all tokens.
        top_p: in (0, 1].
        stop_ids: tokens that end the response; the token itself is part of it.
        images: what the model's image processor made of the prompt's images, ``pixel_values`` and ``image_grid_thw``;
            the prompt holds their tokens. Empty for text alone.
        seed: two generations with equal seeds and equal probabilities draw the same tokens, whatever else is
            in the batch.
        token_ids, log_probs: the response; log-probs are those of the distribution that was sampled from.
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

    def __post_init__(self) -> None:
        if not (self.prompt_ids and self.max_new_tokens > 0 and self.temperature >= 0 and 0 < self.top_p <= 1):
            raise ValueError(
                f"cannot generate: a prompt of {len(self.prompt_ids)} tokens, max_new_tokens={self.max_new_tokens}, "
                f"temperature={self.temperature}, top_p={self.top_p}"
            )
        self.random = Random(self.seed)

    @property
    def is_finished(self) -> bool:
        return len(self.token_ids) >= self.max_new_tokens or self.token_ids[-1] in self.stop_ids


class ContinuousBatch:
    """The running rows of a model on a CPU, advanced one token at a time.

    Args:
        model: a causal language model with full attention; its weights must not change between `step` calls
            while rows are running.
        max_rows: rows that run together; the others wait in the order they came.
        max_prefill_tokens: rows x longest prompt of one prefill; a longer prompt is prefilled alone.
    """

    def __init__(self, model: PreTrainedModel, *, max_rows: int = 1024, max_prefill_tokens: int = 16384) -> None:
        self._model = model
        self._max_rows = max_rows
        self._max_prefill_tokens = max_prefill_tokens
        self._waiting: deque[Generation] = deque()
        self._rows: list[Generation] = []
        # keys and values (rows, heads, slots, dim) per layer, in a cache that transformers can extend
        self._cache: Any = None
        self._mask = torch.zeros(0, 0, dtype=torch.bool)  # (rows, slots)
        self._next_ids = torch.zeros(0, dtype=torch.long)  # (rows,) sampled, not yet in the cache
        self._positions = torch.zeros(0, 1, dtype=torch.long)  # (rows, 1) of those

    def __len__(self) -> int:
        """Rows that run or wait."""
        return len(self._rows) + len(self._waiting)

    def add(self, generation: Generation) -> None:
        self._waiting.append(generation)

    def drain(self) -> list[Generation]:
        """Takes every unfinished row out, with the tokens it has so far."""
        unfinished = [*self._rows, *self._waiting]
        self._waiting.clear()
        self._keep([])
        return unfinished

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """One more token for every row. Returns: the rows that are finished, which leave the batch."""
        if self._rows:
            self._decode()
        while joining := self._next_to_join():
            self._prefill(joining)
        finished = [row for row in self._rows if row.is_finished]
        if finished:
            self._keep([index for index, row in enumerate(self._rows) if not row.is_finished])
        return finished

    def _next_to_join(self) -> list[Generation]:
        joining: list[Generation] = []
        longest = 0
        while self._waiting and len(self._rows) + len(joining) < self._max_rows:
            longest = max(longest, len(self._waiting[0].prompt_ids))
            if joining and longest * (len(joining) + 1) > self._max_prefill_tokens:
                break
            joining.append(self._waiting.popleft())
        return joining

    def _decode(self) -> None:
        self._mask = pad(self._mask, (0, 1), value=True)
        output = self._model(
            input_ids=self._next_ids[:, None],
            attention_mask=self._mask,
            # also one position for all axes of M-RoPE: models with it accept (rows, 1)
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        self._positions = self._positions + 1
        self._next_ids = _sample(output.logits[:, -1], self._rows)

    def _prefill(self, joining: list[Generation]) -> None:
        lengths = torch.tensor([len(row.prompt_ids) for row in joining])
        slots = int(lengths.max())
        mask = torch.arange(slots)[None] < lengths[:, None]  # filled from the left: no query without a key
        ids = torch.zeros(len(joining), slots, dtype=torch.long)
        ids[mask] = torch.tensor([token for row in joining for token in row.prompt_ids])
        cache = DynamicCache(config=self._model.config)
        if any(type(layer) is not DynamicLayer for layer in cache.layers):
            raise NotImplementedError("only models with full attention in every layer can be batched here")
        seeing = [row.images for row in joining if row.images]
        images = {name: torch.cat([inputs[name] for inputs in seeing]) for name in (seeing[0] if seeing else ())}
        positions, next_positions = self._prompt_positions(ids, mask, images)
        hidden = self._model.base_model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            **images,
        ).last_hidden_state
        last = hidden[torch.arange(len(joining)), lengths - 1]
        next_ids = _sample(self._model.get_output_embeddings()(last), joining)
        if not self._rows:
            self._cache, self._mask, self._next_ids, self._positions = cache, mask, next_ids, next_positions
        else:
            self._join(cache, mask)
            self._next_ids = torch.cat([self._next_ids, next_ids])
            self._positions = torch.cat([self._positions, next_positions])
        self._rows = [*self._rows, *joining]

    def _prompt_positions(
        self, ids: torch.Tensor, mask: torch.Tensor, images: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of the prompts, (rows, slots) or with images (3, rows, slots); the next of each row, (rows, 1).

        An image has fewer positions than tokens.
        """
        lengths = mask.sum(1, keepdim=True)
        if not images:
            return torch.arange(ids.shape[1])[None].expand(len(ids), -1), lengths
        inner = self._model.base_model
        if not hasattr(inner, "get_rope_index"):
            raise NotImplementedError(f"images work only with models that have M-RoPE, not with {type(inner).__name__}")
        positions, lead = inner.get_rope_index(
            input_ids=ids,
            mm_token_type_ids=(ids == self._model.config.image_token_id).int(),
            image_grid_thw=images["image_grid_thw"],
            attention_mask=mask,
        )
        return positions, lengths + lead

    def _join(self, cache: Any, mask: torch.Tensor) -> None:
        """Appends rows; the shorter side gets empty slots on its left, where a later `_keep` removes them."""
        slots = max(self._mask.shape[1], mask.shape[1])
        left, right = slots - self._mask.shape[1], slots - mask.shape[1]
        for mine, theirs in zip(self._cache.layers, cache.layers, strict=True):
            mine.keys = torch.cat([pad(mine.keys, (0, 0, left, 0)), pad(theirs.keys, (0, 0, right, 0))])
            mine.values = torch.cat([pad(mine.values, (0, 0, left, 0)), pad(theirs.values, (0, 0, right, 0))])
        self._mask = torch.cat([pad(self._mask, (left, 0)), pad(mask, (right, 0))])

    def _keep(self, kept: list[int]) -> None:
        """Drops all other rows, and the slots that no remaining row uses."""
        self._rows = [self._rows[index] for index in kept]
        if not kept:
            self._cache = None
            return
        rows = torch.tensor(kept)
        mask = self._mask[rows]
        used = mask.any(0).nonzero()[:, 0]
        for layer in self._cache.layers:
            layer.keys = layer.keys[rows][:, :, used]
            layer.values = layer.values[rows][:, :, used]
        self._mask, self._next_ids, self._positions = mask[:, used], self._next_ids[rows], self._positions[rows]


def _sample(logits: torch.Tensor, rows: list[Generation]) -> torch.Tensor:
    """Draws a token for each row and writes it, with its log-prob, into the row.

    Args:
        logits: (rows, vocabulary).

    Returns: (rows,) the tokens.
    """
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
    # By the inverse of the distribution function, with one number from each row's own stream: what a row
    # draws does not depend on its neighbours.
    cumulative = log_probs.exp().cumsum(-1)
    draws = torch.tensor([row.random.random() for row in rows], dtype=torch.float64) * cumulative[:, -1]
    sampled = torch.searchsorted(cumulative, draws[:, None], right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy, logits.argmax(-1), sampled)
    chosen = log_probs.gather(-1, tokens[:, None])[:, 0]
    for row, token, log_prob in zip(rows, tokens.tolist(), chosen.tolist(), strict=True):
        row.token_ids.append(token)
        row.log_probs.append(log_prob)
    return tokens
