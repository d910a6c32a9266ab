"""The chat template that turns a job's prompts into tokens, and what comes of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.agent_loops import Loop
from verl_padding.doctor.finding import Finding, in_one_line, ok, panics_as_errors, warning, wrong
from verl_padding.doctor.loaded_model import LoadedModel, size_of_embedding
from verl_padding.doctor.token_budgets import MODEL_LENGTH, shortest_rows
from verl_padding.plan.counted import counted

SECONDS = 0.5
"""After which no further prompt is tried."""
SEVERAL = 8
"""Prompts that have to fail before all are said to, where there are as many."""
ARGUMENTS = "data.apply_chat_template_kwargs"
FILTER = "data.filter_overlong_prompts"
ANY_MESSAGE = {"role": "user", "content": "1+1"}
TEMPLATE = "actor_rollout_ref.model.custom_chat_template"


def template_of_job(config: DictConfig, model: LoadedModel, loops: Sequence[Loop]) -> Iterator[Finding]:
    """Whether there is one, if something of the job needs it, and it can be given the job's own arguments."""
    if has_template(model):
        yield _arguments(config, model, loops)
        return
    by_filter = [f"{FILTER}=true"] if config.data.filter_overlong_prompts else []
    # verl writes the prompts of some models itself: DeepSeek-V4 has no template.
    asked = () if loops and _is_written_by_verl(config, model) else loops
    if needed_by := by_filter + [f"the agent loop {loop.name!r}" for loop in asked if loop.is_verls]:
        yield wrong(
            TEMPLATE,
            f"null: {needed_by[0]} puts prompts through a chat template, and the model's tokenizer has none. Set it, "
            "or name a model with one (an instruct model).",
        )
    elif seem := [loop.name for loop in asked if loop.seems_to_apply_template()]:
        yield warning(
            TEMPLATE,
            f"null: the agent loop {seem[0]!r} seems to put prompts through a chat template, and the model's tokenizer "
            "has none. If it does, set it, or name a model with one (an instruct model).",
        )


def _arguments(config: DictConfig, model: LoadedModel, loops: Sequence[Loop]) -> Finding:
    """Whether verl can call the template with what the job adds to the call."""
    try:
        with panics_as_errors():
            _builder(config, model).build_initial_tokens([ANY_MESSAGE])
    except TypeError as error:
        twice = re.search(r"multiple values for (?:keyword )?argument '(\w+)'", str(error))
        if twice and (asked := [loop.name for loop in loops if loop.is_verls or loop.builds_tokens()]):
            setting = f"{ARGUMENTS}.{twice[1]}"
            value = OmegaConf.select(config, setting)
            return wrong(
                setting,
                f"{value}: verl gives the chat template {twice[1]} itself, and every session of the agent loop "
                f"{asked[0]!r} fails ({in_one_line(error)}). Leave it out.",
            )
    except Exception:  # of a template that does not take any message; prompts are tried themselves
        pass
    return ok("chat template", "there")


def has_template(model: LoadedModel) -> bool:
    """Whether the model brings a chat template, or the job sets one."""
    return bool(model.tokenizer.chat_template or getattr(model.processor, "chat_template", None))


def _is_written_by_verl(config: DictConfig, model: LoadedModel) -> bool:
    """Whether verl's agent loops make tokens of a message without a chat template."""
    try:
        with panics_as_errors():
            return bool(_builder(config, model).build_initial_tokens([ANY_MESSAGE]))
    except Exception:  # of verl or of transformers, which has no template to apply
        return False


@dataclass
class Rendered:
    """What came of putting prompts into tokens."""

    lengths: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Of the chat template."""
    unread: list[str] = field(default_factory=list)
    """Failures to read an image."""
    missing: str = ""
    """A package that is not here, "" for none."""
    largest: int = 0
    """Of all tokens."""
    with_images: bool = False

    @property
    def tried(self) -> str:
        return counted(self.number, "prompt")

    @property
    def number(self) -> int:
        return len(self.lengths) + len(self.failures) + len(self.unread)


def rendered_prompts(
    config: DictConfig, model: LoadedModel, setting: str, told: str, items: list[dict[str, Any]], *, prompts: int
) -> Iterator[Finding]:
    """Puts the prompts into tokens as verl's agent loops do, and says what is to be said of these.

    Args:
        prompts: how many there are, of which the items are the first.
    """
    try:
        builder = _builder(config, model)
    except Exception as error:  # of verl, which has no way to write prompts for the model
        yield wrong("actor_rollout_ref.model.path", f"verl's agent loops refuse the model ({in_one_line(error)}).")
        return
    rendered = _put_into_tokens(config, model, builder, items)
    if rendered.missing:
        if config.data.filter_overlong_prompts:
            told_of = f"so {FILTER}=true leaves their prompts out"
            yield warning(
                setting, f"{told}: a package that verl reads them with is not here ({rendered.missing}), {told_of}."
            )
        else:
            yield wrong(
                setting, f"{told}: a package that verl reads them with is not here ({rendered.missing}). Install it."
            )
        return
    # Tokens of images are not looked up in the embedding of every model.
    known = size_of_embedding(model) if model.processor is None else None
    if known is not None and rendered.largest >= known:
        yield wrong(
            "actor_rollout_ref.model.path",
            f"its tokenizer makes token {rendered.largest} of a prompt, and the model has {known} (vocab_size). Name a "
            "tokenizer and a model that belong together.",
        )
    # What fails for some is no reason to call all of them wrong.
    several = rendered.number >= min(SEVERAL, prompts)
    if rendered.unread and not config.data.filter_overlong_prompts:
        yield warning(
            setting,
            f"{told}: of {len(rendered.unread)} of the first {rendered.tried} an image cannot be read "
            f"({rendered.unread[0]}).",
        )
    if rendered.failures and not config.data.filter_overlong_prompts:  # which leaves these prompts out
        number, first = len(rendered.failures), rendered.failures[0]
        of_them = f"{told}: {number} of the first {rendered.tried} cannot be put through the chat template"
        if several and not rendered.lengths and not rendered.unread:
            yield wrong(setting, f"{of_them} ({first}). Correct the prompts, or set {TEMPLATE}.")
        else:
            yield warning(setting, f"{of_them} ({first}); their sessions fail.")
    if rendered.lengths:
        yield from _lengths(config, told, rendered, several=several)
        if several and setting == "data.train_files":
            shortest = min(*rendered.lengths, config.data.max_prompt_length)
            yield from shortest_rows(config, f"the first {rendered.tried} of {told}", shortest)


def tokens_of_template(config: DictConfig, model: LoadedModel) -> Iterator[Finding]:
    """Whether the model knows the tokens of any message; an agent loop of the user's own seems to make such."""
    known = size_of_embedding(model) if model.processor is None else None
    try:
        with panics_as_errors():
            ids = _builder(config, model).build_initial_tokens([ANY_MESSAGE])
    except Exception:  # of a template that takes other messages alone, which the loop may give it
        return
    if known is not None and max(ids, default=0) >= known:
        yield warning(
            "actor_rollout_ref.model.path",
            f"its tokenizer and chat template make token {max(ids)} of any message, and the model has {known} "
            "(vocab_size). If the agent loop uses them, name a tokenizer and a model that belong together.",
        )


def _builder(config: DictConfig, model: LoadedModel) -> Any:
    """What verl's agent loops make tokens of messages with."""
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    with panics_as_errors():
        return create_continuous_token_builder(
            model.tokenizer,
            hf_model_type=getattr(model.hf_config, "model_type", None),
            chat_template_kwargs=_plain(config.data.get("apply_chat_template_kwargs")),
            mm_processor_kwargs=_plain(config.data.get("mm_processor_kwargs")),
            processor=model.processor,
        )


def _put_into_tokens(config: DictConfig, model: LoadedModel, builder: Any, items: list[dict[str, Any]]) -> Rendered:
    from verl.utils.dataset.rl_dataset import RLHFDataset

    patch = getattr(getattr(model.processor, "image_processor", None), "patch_size", 14)
    rendered, started = Rendered(), perf_counter()
    for item in items:
        images = videos = audios = None
        failures = rendered.unread
        try:
            if model.processor is not None and shows_something(item):
                images, videos, audios = RLHFDataset._process_multi_modal_info(item["raw_prompt"], patch, config.data)
            failures = rendered.failures
            with panics_as_errors():
                ids = builder.build_initial_tokens(item["raw_prompt"], images=images, videos=videos, audios=audios)
        except ImportError as error:
            rendered.missing = in_one_line(error)
            break
        except Exception as error:  # of what reads images, of Jinja, of transformers, or of Rust's tokenizers
            failures.append(in_one_line(error))
        else:
            rendered.lengths.append(len(ids))
            rendered.largest = max(rendered.largest, *ids, 0)
            rendered.with_images |= bool(images or videos or audios)
        if perf_counter() - started > SECONDS:
            break
    return rendered


def shows_something(item: dict[str, Any]) -> bool:
    """Whether a prompt has an image, a video or audio."""
    return any(part.get("type") != "text" for part in parts_of(item))


def is_costly(item: dict[str, Any]) -> bool:
    """Whether a prompt has a video or audio, which take seconds, or something that is elsewhere."""
    return any(
        part.get("type") in ("video", "audio", "video_url", "audio_url", "input_audio")
        or any(_is_elsewhere(value) for key, value in part.items() if key != "text")
        for part in parts_of(item)
    )


def _is_elsewhere(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_is_elsewhere, value.values()))
    return isinstance(value, str) and "://" in value[:20]


def parts_of(item: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of messages that are lists of these."""
    messages = item.get("raw_prompt")
    contents = (
        [each.get("content") for each in messages if isinstance(each, dict)] if isinstance(messages, list) else []
    )
    return [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]


def _lengths(config: DictConfig, told: str, rendered: Rendered, *, several: bool) -> Iterator[Finding]:
    most, allowed = config.data.max_prompt_length, OmegaConf.select(config, MODEL_LENGTH)
    in_vllm = config.actor_rollout_ref.rollout.name == "vllm" and isinstance(allowed, int)
    if several and in_vllm and min(min(rendered.lengths), most) >= allowed:
        yield wrong(MODEL_LENGTH, f"{allowed}: each of the first prompts of {told} is as long or longer. Raise it.")
    too_long = sum(length > most for length in rendered.lengths)
    if not too_long or config.data.filter_overlong_prompts:
        return
    of_them = f"{most}: {too_long} of the first {rendered.tried} of {told} are longer"
    if rendered.with_images and too_long == len(rendered.lengths):
        if several:
            yield wrong("data.max_prompt_length", f"{of_them}, and verl cuts no prompt with images. Raise it.")
    else:
        yield warning(
            "data.max_prompt_length", f"{of_them}: verl cuts off their beginnings. Raise it, or set {FILTER}=true."
        )


def _plain(section: Any) -> dict[str, Any]:
    return dict(OmegaConf.to_container(section, resolve=True)) if isinstance(section, DictConfig) else {}  # type: ignore[arg-type]
