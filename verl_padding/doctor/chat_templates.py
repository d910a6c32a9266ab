"""The chat template that turns a job's prompts into tokens, and what comes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_padding.doctor.agent_loops import Loop
from verl_padding.doctor.finding import Finding, in_one_line, ok, warning, wrong
from verl_padding.doctor.loaded_model import LoadedModel, size_of_embedding
from verl_padding.plan.counted import counted

SECONDS = 0.5
"""After which no further prompt is tried."""
FILTER = "data.filter_overlong_prompts"
MODEL_LENGTH = "actor_rollout_ref.rollout.max_model_len"
TEMPLATE = "actor_rollout_ref.model.custom_chat_template"


def template_of_job(config: DictConfig, model: LoadedModel, loops: Sequence[Loop]) -> Iterator[Finding]:
    """Whether there is one, if something of the job needs it."""
    if model.tokenizer.chat_template or getattr(model.processor, "chat_template", None):
        yield ok("chat template", "there")
    elif needed_by := _needs_template(config, loops):
        yield wrong(
            TEMPLATE,
            f"null: {needed_by} puts prompts through a chat template, and the model's tokenizer has none. Set it, or "
            "name a model with one (an instruct model).",
        )


def _needs_template(config: DictConfig, loops: Sequence[Loop]) -> str | None:
    """What of the job certainly puts prompts through the model's chat template; None for nothing."""
    if config.data.filter_overlong_prompts and not config.data.custom_cls.path:
        return f"{FILTER}=true"
    return next((f"the agent loop {loop.name!r}" for loop in loops if loop.applies_template()), None)


@dataclass
class Rendered:
    """What came of putting prompts into tokens."""

    lengths: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    largest: int = 0
    """Of all tokens."""
    with_images: bool = False

    @property
    def tried(self) -> str:
        return counted(len(self.lengths) + len(self.failures), "prompt")


def rendered_prompts(
    config: DictConfig, model: LoadedModel, setting: str, told: str, items: list[dict[str, Any]]
) -> Iterator[Finding]:
    """Puts the prompts into tokens as verl's agent loops do, and says what is to be said of these."""
    if not (model.tokenizer.chat_template or getattr(model.processor, "chat_template", None)):
        return  # told already
    try:
        rendered = _put_into_tokens(config, model, items)
    except ValueError as error:
        yield wrong("actor_rollout_ref.model.path", f"verl's agent loops refuse the model ({in_one_line(error)}).")
        return
    # Tokens of images are not looked up in the embedding of every model.
    known = size_of_embedding(model) if model.processor is None else None
    if known is not None and rendered.largest >= known:
        yield wrong(
            "actor_rollout_ref.model.path",
            f"its tokenizer makes token {rendered.largest} of a prompt, and the model has {known} (vocab_size). Name a "
            "tokenizer and a model that belong together.",
        )
    if rendered.failures and not config.data.filter_overlong_prompts:  # which leaves these prompts out
        number, first = len(rendered.failures), rendered.failures[0]
        of_them = f"{told}: {number} of the first {rendered.tried} cannot be put through the chat template"
        if not rendered.lengths:
            yield wrong(setting, f"{of_them} ({first}). Correct the prompts, or set {TEMPLATE}.")
        else:
            yield warning(setting, f"{of_them} ({first}); their sessions fail.")
    if rendered.lengths:
        yield from _lengths(config, told, rendered)


def _put_into_tokens(config: DictConfig, model: LoadedModel, items: list[dict[str, Any]]) -> Rendered:
    """
    Raises:
        ValueError: verl has no way to write prompts for the model.
    """
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    builder = create_continuous_token_builder(
        model.tokenizer,
        hf_model_type=getattr(model.hf_config, "model_type", None),
        chat_template_kwargs=_plain(config.data.get("apply_chat_template_kwargs")),
        mm_processor_kwargs=_plain(config.data.get("mm_processor_kwargs")),
        processor=model.processor,
    )
    patch = getattr(getattr(model.processor, "image_processor", None), "patch_size", 14)
    rendered, started = Rendered(), perf_counter()
    for item in items:
        images = videos = audios = None
        try:
            if model.processor is not None:
                images, videos, audios = RLHFDataset._process_multi_modal_info(item["raw_prompt"], patch, config.data)
            ids = builder.build_initial_tokens(item["raw_prompt"], images=images, videos=videos, audios=audios)
        except Exception as error:  # of Jinja, of transformers, or of what reads images
            rendered.failures.append(in_one_line(error))
        else:
            rendered.lengths.append(len(ids))
            rendered.largest = max(rendered.largest, *ids, 0)
            rendered.with_images |= bool(images or videos or audios)
        if perf_counter() - started > SECONDS:
            break
    return rendered


def _lengths(config: DictConfig, told: str, rendered: Rendered) -> Iterator[Finding]:
    most, allowed = config.data.max_prompt_length, OmegaConf.select(config, MODEL_LENGTH)
    in_vllm = config.actor_rollout_ref.rollout.name == "vllm" and isinstance(allowed, int)
    if in_vllm and min(min(rendered.lengths), most) >= allowed:
        yield wrong(MODEL_LENGTH, f"{allowed}: each of the first prompts of {told} is as long or longer. Raise it.")
    too_long = sum(length > most for length in rendered.lengths)
    if not too_long or config.data.filter_overlong_prompts:
        return
    of_them = f"{most}: {too_long} of the first {rendered.tried} of {told} are longer"
    if rendered.with_images and too_long == len(rendered.lengths):
        yield wrong("data.max_prompt_length", f"{of_them}, and verl cuts no prompt with images. Raise it.")
    else:
        yield warning(
            "data.max_prompt_length", f"{of_them}: verl cuts off their beginnings. Raise it, or set {FILTER}=true."
        )


def _plain(section: Any) -> dict[str, Any]:
    return dict(OmegaConf.to_container(section, resolve=True)) if isinstance(section, DictConfig) else {}  # type: ignore[arg-type]
