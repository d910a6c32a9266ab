"""What the planner refuses. All errors are ValueErrors with a message of one line."""

from verl_padding.errors import PaddingError


class PlanError(PaddingError, ValueError):
    """Rows or a job that cannot be planned."""


class RowTooLongError(PlanError):
    """A row does not fit into the token budget of a worker call."""


class NoRealRowError(PlanError):
    """There is nothing to train on."""
