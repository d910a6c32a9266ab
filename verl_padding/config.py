"""The ``padding`` section of a verl config: typed, frozen, checked when it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from verl_padding import __version__
from verl_padding.errors import PaddingConfigError
from verl_padding.pads.roles import FieldRole, Fill, Role
from verl_padding.plan import COST_MODELS, STRATEGIES, Packer

Denominator = Literal["rows", "nominal"]
Weighting = Literal["row", "session"]
Multimodal = Literal["auto", "empty", "minimal"]

CHOICES = "choices"
"""Key of a field's metadata: what it takes, where its type does not say it."""
MIN_PAD_LENGTH = 2
"""One prompt token and one response token: verl takes a response's log-probs from the token before it."""


def choice_of(names: Iterable[str], *, default: str) -> Any:
    """A field whose choices are the names of a registry."""
    return dataclasses.field(default=default, metadata={CHOICES: tuple(names)})


@dataclass(frozen=True, kw_only=True)
class PaddingConfig:
    """How batches are cut into mini-batches and what the pads look like."""

    strategy: str = choice_of(STRATEGIES, default="prompt")
    """What a mini-batch is made of. ``prompt``: ppo_mini_batch_size prompts, all rows of a prompt together. ``rows``:
    an even share of the rows, without regard to prompts. ``lcm``: ppo_mini_batch_size x rollout.n rows, pads among
    them, and as many steps as that takes, as in verl. With the first two the optimizer steps of a batch are the
    configured ones."""

    denominator: Denominator = "rows"
    """What the seq-mean loss modes divide by: the real ``rows`` of the mini-batch, or the ``nominal``
    ppo_mini_batch_size x rollout.n, as in verl."""

    weighting: Weighting = "row"
    """What weighs the same in the actor's seq-mean losses: a ``row``, as in verl, or a ``session``, however many rows
    it was split into."""

    seed: int = 0
    """Seeds the planner's shuffle (``actor.shuffle``, ``critic.shuffle``), together with the global step. From 0 on;
    without a shuffle nothing is drawn."""

    pad_length: int | Literal["auto"] = "auto"
    """Tokens of a pad, prompt and response together, from 2 on. ``auto`` takes the fewest that the job's engines do not
    round up; a number that they would round up is refused."""

    multimodal: Multimodal = "auto"
    """What pads show the vision tower of a model: nothing (``empty``), the smallest image (``minimal``), or what the
    model's type needs so that the tower runs on every rank (``auto``, which refuses a type that it does not know). Of
    no meaning for models without one."""

    fields: Mapping[str, FieldRole] = dataclasses.field(default_factory=dict)
    """Roles of fields of your own that neither verl nor their shapes explain: name -> role, or
    ``{role: .., fill: ..}``."""

    cost_model: str = choice_of((*COST_MODELS, "model"), default="attention")
    """What the planner balances over the ranks, for a row of L tokens: ``tokens`` (L), ``attention`` (24576 L + L^2, as
    verl), or the operations that the ``model`` of each role takes, by its Hugging Face config."""

    packer: Packer = "verl"
    """Who cuts micro-batches by tokens: ``verl`` in the workers, each rank its own rows, or the ``plan``, which makes
    micro-batches cost the same on all ranks. Without dynamic batch sizes there is nothing to choose."""

    version: str = __version__
    """The plug-in's version, for the record: the config groups fill it in where the trainer is made. Not to be set."""

    def __post_init__(self) -> None:
        for key, choices in choices_by_setting().items():
            _refuse_unless_one_of(key, getattr(self, key), choices)
        _refuse_unless_int_at_least("seed", self.seed, 0)
        if self.pad_length != "auto":
            _refuse_unless_int_at_least("pad_length", self.pad_length, MIN_PAD_LENGTH, ", or auto")

    @classmethod
    def from_section(cls, section: Any) -> PaddingConfig:
        """Reads ``config.padding``; ``None`` (no such section) gives the defaults.

        Raises:
            PaddingConfigError: the section is not a mapping, holds an unknown key or a bad value.
        """
        if section is None:
            return cls()
        if not isinstance(section, Mapping):
            raise PaddingConfigError(
                f"padding={section!r}: not a mapping, so the config group was not found. Choices: "
                f"+padding={', +padding='.join(STRATEGIES)}, with verl_padding installed where the "
                "job is started."
            )
        known = [field.name for field in dataclasses.fields(cls)]
        for key in section:
            if key not in known:
                raise PaddingConfigError(f"padding.{key}={section[key]!r}: unknown key. Choices: {', '.join(known)}.")
        values = {str(key): value for key, value in section.items()}
        if "fields" in values:
            values["fields"] = _read_fields(values["fields"])
        return cls(**values)


def choices_by_setting() -> dict[str, tuple[str, ...]]:
    """Choices of each setting that has some and nothing beside them."""
    hints = get_type_hints(PaddingConfig)
    found = {}
    for field in dataclasses.fields(PaddingConfig):
        of_type = get_args(hints[field.name]) if get_origin(hints[field.name]) is Literal else ()
        if choices := field.metadata.get(CHOICES, of_type):
            found[field.name] = choices
    return found


def _read_fields(section: Any) -> dict[str, FieldRole]:
    """``padding.fields``: name -> role, or name -> {role: .., fill: ..}."""
    if not isinstance(section, Mapping):
        raise PaddingConfigError(
            f"padding.fields={section!r}: not a mapping. Name a field and its role, such as "
            "+padding.fields.my_weights=response."
        )
    return {str(name): _read_field(f"fields.{name}", value) for name, value in section.items()}


def _read_field(key: str, value: Any) -> FieldRole:
    parts = value if isinstance(value, Mapping) else {"role": value}
    for part in parts:
        if part not in ("role", "fill"):
            raise PaddingConfigError(f"padding.{key}.{part}={parts[part]!r}: unknown key. Choices: role, fill.")
    _refuse_unless_one_of(key, parts.get("role"), tuple(role.value for role in Role))
    fill = parts.get("fill", Fill.ZERO.value)
    _refuse_unless_one_of(f"{key}.fill", fill, tuple(fill.value for fill in Fill))
    return FieldRole(Role(parts["role"]), Fill(fill))


def _refuse_unless_one_of(key: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise PaddingConfigError(f"padding.{key}={value!r}: not a choice. Choices: {', '.join(choices)}.")


def _refuse_unless_int_at_least(key: str, value: object, least: int, otherwise: str = "") -> None:
    # bool is an int to Python, not to a user.
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PaddingConfigError(f"padding.{key}={value!r}: must be a whole number of at least {least}{otherwise}.")
