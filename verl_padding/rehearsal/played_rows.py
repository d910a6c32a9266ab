"""What the rows of played sessions say: how many a session has, where they part, and what a trainer would miss."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from reprlib import Repr
from typing import Any

import torch
from omegaconf import DictConfig

from verl_padding.config import PaddingConfig
from verl_padding.errors import PaddingError
from verl_padding.pads.schema import Schema
from verl_padding.pads.template import PadTemplate
from verl_padding.plan.row_keys import session_of_key
from verl_padding.rehearsal.sessions import TRAIN, VAL, PlayedRow, Sessions

SHORT = Repr()
SHORT.maxstring = 160
AROUND = 8
"""Tokens that are shown on each side of the place where two rows part."""
AS_LONG_AS_RESPONSES = ("response_mask", "rollout_log_probs", "rm_scores")


def description(played: Sessions) -> Iterator[str]:
    """Lines that say what the sessions are like."""
    rows = played.of(TRAIN)
    sessions = Counter(session_of_key(row.key) for row in rows)
    sizes = sorted(Counter(sessions.values()).items())
    per_session = ", ".join(f"{size} ({count} sessions)" for size, count in sizes)
    yield f"{len(rows)} rows of {len(sessions)} sessions ({played.replies} replies); rows a session: {per_session}"
    if not rows:
        return
    prompts, responses = (sorted(len(row.fields[name]) for row in rows) for name in ("prompts", "responses"))
    trained = sum(int(row.fields["response_mask"].sum()) for row in rows)
    yield (
        f"tokens: prompts {prompts[0]} to {prompts[-1]}, responses {responses[0]} to {responses[-1]}, "
        f"{trained} of {sum(responses)} response tokens are trained"
    )
    rewards = Counter(round(float(row.fields["rm_scores"].sum()), 3) for row in rows if "rm_scores" in row.fields)
    yield "rewards: " + ", ".join(f"{reward:g} ({count} rows)" for reward, count in sorted(rewards.items()))
    if validated := played.of(VAL):
        yield f"validation: {len(validated)} rows"
    for field in ("prompts", "responses"):
        yield f"first {field[:-1]}: {SHORT.repr(played.tokenizer.decode(rows[0].fields[field]))}"
    yield from _partings(rows, played.tokenizer)


def _partings(rows: Sequence[PlayedRow], tokenizer: Any) -> Iterator[str]:
    """Where rows of a session that could go on from each other do not, once for each kind of place."""
    examples: dict[str, list[str]] = {}
    for one, other in pairwise(rows):
        if session_of_key(one.key) != session_of_key(other.key):
            continue
        a, b = (row.fields["input_ids"].tolist() for row in (one, other))
        shared = next((place for place, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), None)
        kind, example = "begins with all of the row before it", ""
        if shared is not None:
            where = "prompt" if shared < len(one.fields["prompts"]) else "response"
            kind = f"parts from the row before it in that one's {where}"
            texts = (repr(tokenizer.decode(ids[max(0, shared - AROUND) : shared + AROUND])) for ids in (a, b))
            example = f" (row {other.key.rpartition('_')[2]}, token {shared}: {' / '.join(texts)})"
        examples.setdefault(kind, []).append(example)
    for kind, of_kind in examples.items():
        yield f"{len(of_kind)} rows: a row {kind}{of_kind[0]}"


def problems(played: Sessions, config: DictConfig) -> Iterator[str]:
    """What the rest of a job reads of rows and would not find, or would silently misread."""
    rows = played.of(TRAIN)
    found: Counter[str] = Counter()
    needed = ["num_turns", "response_mask", "responses", "rm_scores"]
    needed += ["rollout_log_probs"] if config.actor_rollout_ref.rollout.calculate_log_probs else []
    for row in rows:
        found.update(f"rows have no {name}, which verl's trainer reads" for name in needed if name not in row.fields)
        if row.tag["min_global_steps"] is None:
            found["rows have no extra_fields['min_global_steps'], by which verl's trainer tells their age"] += 1
        length = len(row.fields["responses"])
        for name in AS_LONG_AS_RESPONSES:
            value = row.fields.get(name)
            if isinstance(value, torch.Tensor) and len(value) != length:
                found[f"rows have a {name} of {len(value)} tokens beside a response of {length}"] += 1
    for message, count in found.items():
        yield f"{count} of {len(rows)} {message}"
    if _template_renders_nothing(rows, played.tokenizer):
        yield "the chat template renders different messages to the same prompt: their content does not reach the model"
    yield from _fields_without_role(rows, config, played.tokenizer)


def _template_renders_nothing(rows: Sequence[PlayedRow], tokenizer: Any) -> bool:
    """Whether the template makes the same of different messages, which nothing else would report."""
    first = [row.fields for row in rows if row.key.endswith("_0")]
    messages = {str(fields.get("raw_prompt")): fields.get("raw_prompt") for fields in first}
    prompts = {tuple(fields["prompts"].tolist()) for fields in first}
    if len(prompts) > 1 or len(messages) < 2 or not tokenizer.chat_template:
        return False
    options = {"tokenize": False, "add_generation_prompt": True}
    return len({tokenizer.apply_chat_template(each, **options) for each in messages.values()}) == 1


def _fields_without_role(rows: Sequence[PlayedRow], config: DictConfig, tokenizer: Any) -> Iterator[str]:
    """What a padded job would refuse: a field that no pad can be made for."""
    if config.get("padding") is None or not rows:
        return
    padding = PaddingConfig.from_section(config.padding)
    template = PadTemplate(eos_token_id=tokenizer.eos_token_id or 0, length=8, schema=Schema(padding.fields))
    for name in dict.fromkeys(name for row in rows for name in row.fields):
        try:
            template.fields([row.fields for row in rows if name in row.fields], [name])
        except PaddingError as refusal:
            yield str(refusal)
