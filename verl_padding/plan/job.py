"""The shape of a job: all worker calls of a training step, and how their rows are to be
arranged."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from verl_padding.plan.calls import Call, Pass, StepShape, check_fields
from verl_padding.plan.errors import PlanError
from verl_padding.plan.strategies import STRATEGIES

Packer = Literal["verl", "plan"]
Sharing = Literal["off", "on"]


@dataclass(frozen=True, kw_only=True)
class Job(StepShape):
    """All worker calls of one training step, and how their rows are arranged."""

    strategy: str
    """Name in ``STRATEGIES``: what a mini-batch is made of."""
    inference: Mapping[str, Pass]
    """Calls without training, by name."""
    packer: Packer = "verl"
    """What cuts micro-batches by tokens: verl's packer in the workers, or the plan."""
    sharing: Sharing = "off"
    """``on``: common prefixes of a micro-batch's rows are computed once."""
    may_branch: bool = True
    """Whether rows that branch share the tokens before; if not, a row shares all of its tokens or
    none."""
    pad_tokens: int = 2
    """Tokens of a pad, prompt and response together."""
    cost_model: str = "attention"
    """Name in ``COST_MODELS``: the cost by which ranks are balanced, unless a call has its
    own."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.sharing != "off" and self.packer != "plan":
            raise PlanError(
                f"padding.sharing={self.sharing!r} with padding.packer={self.packer!r}: only the "
                "plan keeps rows that share together; choose padding.packer='plan'"
            )
        assert self.updates.keys().isdisjoint(self.inference), "each call has a name of its own"
        for name in self.updates:
            STRATEGIES[self.strategy].check(self, name)
        for name, call in self.calls():
            if call.token_budget is None:
                continue
            if call.padded_to != "row" and self.packer == "verl":
                raise PlanError(
                    f"padded_to={call.padded_to!r} of {name!r}: verl's packer counts the tokens "
                    "of rows without their padding; choose padding.packer='plan'"
                )
            if self.pad_tokens > call.token_budget:
                raise PlanError(
                    f"padding.pad_length={self.pad_tokens}: a pad does not fit into the "
                    f"{call.token_budget} tokens of a micro-batch of {name!r}; make pads shorter "
                    f"or raise {call.budget_setting}"
                )

    def calls(self) -> Iterator[tuple[str, Call]]:
        """Every worker call with its name, updates first."""
        yield from self.updates.items()
        yield from self.inference.items()
