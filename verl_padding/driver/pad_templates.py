"""What the pads of a batch are made from: the job's settings, its model and tokenizer, and the rows' images."""

from __future__ import annotations

from typing import Any

from verl_padding.config import MIN_PAD_LENGTH, PaddingConfig
from verl_padding.job.job_reader import JobReader
from verl_padding.pads.queue import KVBatchMeta
from verl_padding.pads.schema import Schema
from verl_padding.pads.source import find_images
from verl_padding.pads.template import PadTemplate
from verl_padding.pads.vision_families import image_maker


class PadTemplates:
    """Makes the template of each batch's pads.

    Args:
        reader: of the job's config; its model is looked at when the first template is made.
    """

    def __init__(self, reader: JobReader, padding: PaddingConfig):
        self._reader = reader
        self._padding = padding
        self._schema = Schema(padding.fields)

    def of(self, batch: KVBatchMeta, tokenizer: Any) -> PadTemplate:
        """The template for the pads of a batch."""
        # With a vision model, only the rows say whether this batch shows it anything.
        images = find_images(batch) if self._reader.has_vision else None
        maker = image_maker(self._padding.multimodal, self._reader.model_config) if images else None
        image = maker(images) if maker and images else None
        return PadTemplate(
            eos_token_id=_token_of_a_pad(tokenizer),
            length=self._reader.pad_length(1 + len(image.token_ids) if image else MIN_PAD_LENGTH),
            schema=self._schema,
            n_experts=lambda: self._reader.n_experts,
            image=image,
        )


def _token_of_a_pad(tokenizer: Any) -> int:
    """The end-of-sequence token, or any other if the tokenizer has none: only the model reads it."""
    known = [token for token in (tokenizer.eos_token_id, tokenizer.pad_token_id) if token is not None]
    return int(known[0]) if known else 0
