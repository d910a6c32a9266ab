"""The ``padding`` section of a verl config: typed, frozen, checked when it is made."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, StrictBool, ValidationError
from pydantic.dataclasses import dataclass

from verl_padding.errors import PaddingConfigError, suggestion
from verl_padding.pads.field_kinds import FieldFormat
from verl_padding.plan import STRATEGIES, OptimizerSteps, Packer, Sharing
from verl_padding.version import __version__

logger = logging.getLogger(__name__)

AUTO = "auto"
"""Value of a setting with which a job computes less: on where the job allows it
(``job/savings.py``)."""
MIN_PAD_LENGTH = 2
"""One prompt token and one response token: verl takes a response's log-probs from the token before
it."""


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class PaddingConfig:
    """The settings of ``padding``: how batches are cut, and what pads look like."""

    strategy: Literal["prompt", "rows", "lcm"] = "prompt"
    """What a mini-batch is made of. ``prompt``: an even share of the prompts, with all their rows.
    ``rows``: an even share of the rows, whatever their prompts. ``lcm``: ppo_mini_batch_size x
    rollout.n rows, pads included, in as many optimizer steps as verl takes."""
    optimizer_steps: OptimizerSteps = "configured"
    """Optimizer steps of a batch with ``prompt`` and ``rows``. ``configured``:
    data.train_batch_size / ppo_mini_batch_size. ``by_rows``: one per ppo_mini_batch_size x
    rollout.n rows, about as in verl; with ``prompt`` at most one per prompt."""
    denominator: Literal["rows", "nominal"] = "rows"
    """What the seq-mean loss modes divide by. ``rows``: the mini-batch's rows with a trained token.
    ``nominal``: ppo_mini_batch_size x rollout.n, as in verl."""
    weighting: Literal["row", "session"] = "row"
    """What is weighted equally in a loss. ``row``: rows (in token modes, tokens), as in verl.
    ``session``: sessions, as if each were one row. A row's field ``loss_weight`` multiplies its
    weight."""
    advantages: Literal["row", "session"] = "row"
    """What counts as a sample for estimators. ``row``: each row, as in verl (with GRPO, each
    session). ``session``: each session, its rows one trajectory, with the reward on its last
    trained token."""
    repeated_tokens: Literal["train", "once"] = "train"
    """How often a sampled token is trained that several rows of a session have after the same
    prefix. ``train``: once per row, as in verl. ``once``: only in the first row."""
    baseline: Literal["prompt", "role"] = "prompt"
    """What an estimator compares a sample with. ``prompt``: the other samples of its prompt, as in
    verl. ``role``: those of the same role, which the agent loop puts into each row's
    ``extra_fields["role"]``; the estimator runs once per role."""
    seed: Annotated[int, Field(strict=True, ge=0)] = 0
    """Seed of the planner's shuffle, at least 0, combined with the global step. Used only with
    ``actor.shuffle`` or ``critic.shuffle``."""
    pad_length: Annotated[int, Field(strict=True, ge=MIN_PAD_LENGTH)] | Literal["auto"] = "auto"
    """Tokens of a pad, prompt and response together, at least 2. ``auto``: the fewest that the
    job's engines do not round up. Lengths that they would round up are refused."""
    multimodal: Literal["auto", "empty", "minimal"] = "auto"
    """What pads show the model's vision tower in a batch with images. ``empty``: nothing.
    ``minimal``: the smallest image. ``auto``: what the model's type needs; like ``minimal``, it
    refuses unknown types."""
    fields: Mapping[str, FieldFormat] = dataclasses.field(default_factory=dict)
    """Kinds of your own fields, if neither verl nor their shapes determine them: name -> kind,
    or name -> ``{kind: .., fill: ..}``."""
    cost_model: Literal["tokens", "attention"] = "attention"
    """Cost of a row of L tokens, which the planner balances over the ranks. ``tokens``: L.
    ``attention``: 24576 L + L^2, as in verl."""
    packer: Packer | Literal["auto"] = "verl"
    """What cuts micro-batches by tokens, with dynamic batch sizes. ``verl``: verl's packer, in each
    worker separately. ``plan``: the plan, so that micro-batches cost about the same on all ranks.
    ``auto``: the plan if the job allows it."""
    sharing: Sharing | Literal["auto"] = "off"
    """Whether prefixes that rows of a prompt have in common are computed once. With images, or a
    model in which rows that diverge cannot share, a row shares all of its tokens or none. ``on``
    needs ``packer=plan``, dynamic batch sizes and packed rows. ``auto``: on if the job allows
    it."""
    zero_advantage_rows: Literal["compute", "skip", "auto"] = "compute"
    """What the actor's update does with rows that have no trained token, or advantages of exactly
    0. ``compute``: computes them, as verl does. ``skip``: does not compute them; steps,
    denominators and gradients stay the same. A loss in which such rows have a gradient is refused.
    ``auto``: ``skip`` if the loss allows it."""
    recompute_old_log_probs: StrictBool | Literal["auto"] = True
    """Whether a pass before the update computes the log-probs of the old policy, as in verl.
    Without it, they are those of the update's own forward pass, and the update takes one optimizer
    step. Refused if something else reads them. ``auto``: no pass if nothing else does."""
    record: StrictBool = False
    """Whether a file per step has a line for each row, but not its text.
    ``verl-padding plan`` reads it."""
    version: str = __version__
    """The plug-in's version, for the record. The config groups fill it in; do not set it."""

    @classmethod
    def from_section(cls, section: Any) -> Self:
        """Reads ``config.padding``; a PaddingConfigError if it is not a mapping, or has an unknown
        key or a bad value."""
        if not isinstance(section, Mapping):
            why = "not a mapping, so the config group was not found"
            groups = ", ".join(f"+padding={name}" for name in ("fast", *STRATEGIES))
            fix = f"Choices: {groups}, with verl_padding where the job is started."
            raise PaddingConfigError(f"padding={section!r}: {why}. {fix}")
        values = {str(key): value for key, value in section.items()}
        if isinstance(sharing := values.get("sharing"), bool):
            values["sharing"] = "on" if sharing else "off"  # what YAML makes of them without quotes
        if isinstance(fields := values.get("fields"), Mapping):
            values["fields"] = {str(name): _with_kind(name, each) for name, each in fields.items()}
        if values.get("cost_model") == "model":
            values["cost_model"] = "attention"
            _warn_of_old("cost_model=model", "attention")
        try:
            return cls(**values)
        except ValidationError as error:
            raise PaddingConfigError(_first_refusal(error)) from None


def _with_kind(name: Any, value: Any) -> dict[str, Any]:
    """What ``padding.fields`` has of a field: ``response`` is short for ``{kind: response}``."""
    parts = {"kind": None, **value} if isinstance(value, Mapping) else {"kind": value}
    if "role" in parts:
        parts["kind"] = parts.pop("role")
        _warn_of_old(f"fields.{name}.role", "kind")
    return parts


def _warn_of_old(setting: str, new: str) -> None:
    what = f"padding.{setting} is deprecated since 0.4 and will be removed in 0.5"
    logger.warning("verl_padding: %s. Set %s.", what, new)


def _first_refusal(error: ValidationError) -> str:
    """What is wrong with one setting, in a line."""
    first, *_ = errors = error.errors()
    # A setting of several types has an error of each, whose place ends with the type's name.
    depth = len(first["loc"]) if first["loc"][0] == "fields" else 1
    place = first["loc"][:depth]
    setting = f"padding.{'.'.join(map(str, place))}={first['input']!r}"
    if first["type"] == "unexpected_keyword_argument":
        known = PaddingConfig if depth == 1 else FieldFormat
        return f"{setting}: unknown key. {suggestion(str(place[-1]), known.__dataclass_fields__)}"
    needs = [each["msg"] for each in errors if each["loc"][:depth] == place]
    what = " or ".join(need.removeprefix("Input should be ") for need in needs)
    return f"{setting}: must be {what}."
