"""The worker calls of a local update, and what each requires of the rows that it gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

from verl_padding.errors import PlanError
from verl_padding.plan.cost import up_to_multiple

SyncPoint = Literal["mini_batch", "micro_batch"]
PaddedTo = Literal["row", "micro_batch", "local_batch"]
OptimizerSteps = Literal["configured", "by_rows"]
Packer = Literal["verl", "plan"]
Sharing = Literal["off", "on"]


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a worker call requires, training or not."""

    dp_size: int
    """Data-parallel ranks; each gets the same number of rows."""
    token_budget: int | None = None
    """Most tokens of a micro-batch on one rank; None if micro-batches are cut by rows."""
    micro_batch_rows: int = 1
    """Rows of a micro-batch if micro-batches are cut by rows; unused with a token budget."""
    micro_batch_multiple: int = 1
    """The number of micro-batches of a local mini-batch must be a multiple of this, as a virtual
    pipeline requires."""
    has_pipeline: bool = False
    """Whether micro-batches go through a pipeline: the smallest then come first and last, to fill
    and drain it; otherwise the largest comes first."""
    sync_point: SyncPoint = "micro_batch"
    """Where ranks synchronize: at each micro-batch, where FSDP gathers parameters, or once per
    mini-batch."""
    padded_to: PaddedTo = "row"
    """The length that a row is computed with: its own (the engine packs rows), or that of the
    longest in its micro-batch or local mini-batch. If rows are padded, the token budget counts all
    that a micro-batch computes."""
    bucket_tokens: int = 1
    """An engine that packs rows rounds a micro-batch up to a multiple of this many tokens."""
    token_multiple: int = 1
    """An engine that packs rows rounds the length of each, or of its segment, up to a multiple of
    this many tokens, as ranks that share a row require."""
    min_branch_tokens: int = 1
    """Least tokens of the budget that each row of a trie that branches takes, however few of its
    tokens are computed: linear attention keeps a state between two branches."""
    budget_setting: str = "token_budget"
    """Setting that raises the budget, for messages."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def local_batch_multiple(self) -> int:
        """The rows of a local mini-batch are a multiple of this, so that they fill whole
        micro-batches, or enough of them."""
        rows = self.micro_batch_rows if self.token_budget is None else 1
        return rows * self.micro_batch_multiple

    def min_local_batch_rows(self, n_rows: int) -> int:
        """Rows of the smallest local mini-batches that hold ``n_rows``: an even share, rounded up
        to the local mini-batch's multiple."""
        return up_to_multiple(-(-n_rows // self.dp_size), self.local_batch_multiple)


@dataclass(frozen=True, kw_only=True)
class Pass(Call):
    """A worker call that gets the whole batch and does not train, such as the reference's
    log-probs."""

    as_update: str | None = None
    """Update whose micro-batches the pass reuses where it can
    (:func:`~verl_padding.plan.planner.reuses_layout_of`): an engine then computes the same numbers
    for a row in both, bit by bit. None for micro-batches of its own."""


@dataclass(frozen=True, kw_only=True)
class Update(Call):
    """A worker call that trains: its rows are cut into mini-batches, one optimizer step each."""

    prompts_per_mini_batch: int
    """Prompts of one optimizer step if all prompts of the job have arrived."""
    shuffle: bool = False
    """Whether mini-batches are cut from a permutation drawn with the job's seed, not in the order
    of the batch."""
    drops_zero_advantage: bool = False
    """Whether zero-advantage rows (``Rows.zero_advantage``) are left out of the mini-batches once
    these are cut."""
    mini_batch_setting: str = "prompts_per_mini_batch"
    """Setting of ``prompts_per_mini_batch``, for messages."""


SETTING_FIELDS = {
    "prompts": "prompts_setting",
    "sessions_per_prompt": "sessions_setting",
    "prompts_per_mini_batch": "mini_batch_setting",
    "token_budget": "budget_setting",
}
"""Field -> the one with the name of its setting."""


def check_fields(values: object) -> None:
    """Raises a PlanError if a number is below 1, unless it is the seed, or a name is no choice."""
    kinds = get_type_hints(type(values))
    for name, value in vars(values).items():
        setting = getattr(values, SETTING_FIELDS.get(name, ""), name)
        if type(value) is int and value < 1 and name != "seed":
            raise PlanError(f"{setting}={value}: must be at least 1")
        if get_origin(kinds[name]) is Literal and value not in (choices := get_args(kinds[name])):
            raise PlanError(f"{setting}={value!r}: not one of {', '.join(choices)}")
