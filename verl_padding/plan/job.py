"""The shape of a job: what the worker calls demand of the rows they get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from verl_padding.plan.cost import COST_MODELS, CostModel
from verl_padding.plan.errors import PlanError

Strategy = Literal["prompt", "rows", "lcm"]
Packer = Literal["verl", "plan"]
Meeting = Literal["mini_batch", "micro_batch"]
PaddedTo = Literal["row", "micro_batch", "cell"]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One kind of worker call over the whole batch, such as the log-probs of the reference."""

    dp_size: int
    """Data-parallel ranks; each gets the same number of rows."""

    token_budget: int | None = None
    """Most tokens of a micro-batch on one rank; None where micro-batches are cut by rows."""

    micro_batch_rows: int = 1
    """Rows of a micro-batch where they are cut by rows; unused with a token budget."""

    micro_batch_multiple: int = 1
    """The number of micro-batches of a cell must be a multiple of it, as a virtual pipeline asks."""

    ranks_meet: Meeting = "micro_batch"
    """Where ranks wait for each other: at each micro-batch, for which FSDP gathers parameters, or at its last only."""

    padded_to: PaddedTo = "row"
    """What the engine computes a row as long as: itself (it packs rows), or the longest of its micro-batch or its cell.
    Where it pads, the token budget counts all that a micro-batch computes."""

    bucket_tokens: int = 1
    """An engine that packs rows rounds a micro-batch up to a multiple of so many tokens."""

    cost_model: CostModel | None = None
    """What the ranks of this call are balanced by, if not by the job's."""

    budget_setting: str = ""
    """Setting that raises the budget, for messages."""

    def __post_init__(self) -> None:
        _refuse_below_one(self, "dp_size", "micro_batch_rows", "micro_batch_multiple", "bucket_tokens")
        if self.token_budget is not None:
            _refuse_below_one(self, "token_budget")
        _refuse_unless_one_of("ranks_meet", self.ranks_meet, get_args(Meeting))
        _refuse_unless_one_of("padded_to", self.padded_to, get_args(PaddedTo))

    @property
    def cell_multiple(self) -> int:
        """What the rows of a cell are a multiple of, so that they fill whole micro-batches, or enough of them."""
        rows = self.micro_batch_rows if self.token_budget is None else 1
        return rows * self.micro_batch_multiple


@dataclass(frozen=True, kw_only=True)
class Update(Pass):
    """A worker call that trains: its rows are cut into mini-batches, one optimizer step each."""

    prompts_per_mini_batch: int
    """Prompts of one optimizer step when all prompts of the job have arrived."""

    shuffle: bool = False
    """Cut the mini-batches from a permutation drawn with the job's seed, not in the order of the batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_below_one(self, "prompts_per_mini_batch")


@dataclass(frozen=True, kw_only=True)
class Job:
    """All worker calls of one training step, and how their rows are to be arranged."""

    strategy: Strategy
    """What a mini-batch is made of: whole prompts, rows, or a fixed number of rows as verl has it."""

    prompts: int
    """Prompts configured for the step; fewer may arrive."""

    sessions_per_prompt: int
    """Rollouts of a prompt."""

    updates: Mapping[str, Update]
    """Training calls by name."""

    inference: Mapping[str, Pass]
    """Calls without training, by name."""

    packer: Packer = "verl"
    """Who cuts micro-batches by tokens: verl's packer in the workers, which the plan leaves free, or the plan."""

    row_multiple: int = 1
    """What ``lcm`` pads the rows to a multiple of, beside what its updates ask for."""

    pad_tokens: int = 2
    """Tokens of a pad, prompt and response together."""

    cost_model: str = "attention"
    """Name in ``COST_MODELS``: what the ranks are balanced by, unless a call brings its own."""

    seed: int = 0
    """Of the permutations of updates that shuffle."""

    def __post_init__(self) -> None:
        _refuse_below_one(self, "prompts", "sessions_per_prompt", "row_multiple", "pad_tokens")
        _refuse_unless_one_of("strategy", self.strategy, get_args(Strategy))
        _refuse_unless_one_of("packer", self.packer, get_args(Packer))
        _refuse_unless_one_of("cost_model", self.cost_model, tuple(COST_MODELS))
        if self.seed < 0:
            raise PlanError(f"seed={self.seed}: must be at least 0")
        for name in self.updates:
            if name in self.inference:
                raise PlanError(f"{name!r} names an update and an inference pass: give each its own name")
        for name, update in self.updates.items():
            self._check_update(name, update)
        for name, call in self.calls():
            if call.padded_to != "row" and call.token_budget is not None and self.packer == "verl":
                raise PlanError(
                    f"padded_to={call.padded_to!r} of {name!r}: verl's packer counts the tokens of rows, not what they "
                    "are padded to; choose packer='plan'"
                )
            if call.token_budget is not None and self.pad_tokens > call.token_budget:
                raise PlanError(
                    f"pad_tokens={self.pad_tokens}: a pad does not fit into the {call.token_budget} tokens of a "
                    f"micro-batch of {name!r}; make pads shorter or raise {setting_of(call)}"
                )

    def calls(self) -> Iterator[tuple[str, Pass]]:
        """Every worker call with its name, updates first."""
        yield from self.updates.items()
        yield from self.inference.items()

    def cost_model_of(self, call: Pass) -> CostModel:
        """What the ranks of a call are balanced by."""
        return call.cost_model or COST_MODELS[self.cost_model]

    def mini_batch_rows(self, update: Update) -> int:
        """Rows of a mini-batch when every session is one row."""
        return update.prompts_per_mini_batch * self.sessions_per_prompt

    def _check_update(self, name: str, update: Update) -> None:
        size = update.prompts_per_mini_batch
        if self.strategy == "lcm":
            rows, unit = self.mini_batch_rows(update), update.dp_size * update.cell_multiple
            if rows % unit:
                raise PlanError(
                    f"strategy='lcm': a mini-batch of {name!r} has prompts_per_mini_batch={size} x "
                    f"sessions_per_prompt={self.sessions_per_prompt} = {rows} rows, not a multiple of dp_size="
                    f"{update.dp_size} x {update.cell_multiple} (rows of a micro-batch) = {unit}; change one of them "
                    "or choose strategy prompt or rows"
                )
        elif self.prompts % size:
            divisors = [d for d in range(1, self.prompts + 1) if self.prompts % d == 0]
            below = max((d for d in divisors if d < size), default=1)
            above = min((d for d in divisors if d > size), default=below)
            choices = f"{below}" if above == below else f"{below} or {above}"
            raise PlanError(
                f"prompts_per_mini_batch={size} of {name!r} does not divide prompts={self.prompts}: set it to "
                f"{choices}, or make prompts a multiple of {size}"
            )


def setting_of(call: Pass) -> str:
    """What raises the token budget of a call, in words for a message."""
    return call.budget_setting or "its token_budget"


def _refuse_unless_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise PlanError(f"{name}={value!r}: choose one of {', '.join(choices)}")


def _refuse_below_one(values: object, *names: str) -> None:
    for name in names:
        if getattr(values, name) < 1:
            raise PlanError(f"{name}={getattr(values, name)}: must be at least 1")
