"""The plan of a batch: a layout for every worker call, and the figures that score it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from verl_padding.plan.layout import Layout
from verl_padding.plan.prefix_tries import PrefixTries
from verl_padding.plan.strategies import Job


@dataclass(frozen=True, kw_only=True)
class LayoutFigures:
    """What a layout costs, by the job's cost model; pads cost too."""

    imbalance: float
    """Cost of the slowest rank / cost of the mean rank, each summed over the mini-batches; 1 is
    perfect."""
    micro_batches: int | None
    """Micro-batches of a rank, over all mini-batches; None if verl's packer cuts them."""
    packing_efficiency: float | None
    """Computed tokens of real rows / tokens that all ranks' micro-batches could hold; None if
    verl's packer cuts them, or without a token budget."""
    computed_tokens: int
    """Tokens of the real rows that are computed: all of them, or with shared prefixes those of the
    leaves."""
    sharing_factor: float
    """Tokens of the real rows / computed tokens; 1 if nothing is shared."""
    micro_imbalance: float | None
    """As ``imbalance``, but with the slowest rank of each micro-batch, for ranks that wait for each
    other at every one; None if verl's packer cuts them."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """A layout for each worker call, of the same real rows and as many pads as the call needs."""

    job: Job
    """What it was planned for."""
    layouts: Mapping[str, Layout]
    """Layout of each update and inference pass of the job, by its name."""
    figures: Mapping[str, LayoutFigures]
    """Figures of each layout, by its name."""
    tries: PrefixTries | None = None
    """The rows' common prefixes, if known."""
    warnings: tuple[str, ...] = ()
    """What a user should know, such as fewer optimizer steps than configured."""

    @cached_property
    def n_pads(self) -> int:
        """Pads to make: the most that a layout uses."""
        return max((layout.n_pads for layout in self.layouts.values()), default=0)
