"""What the planner refuses."""

from verl_padding.errors import PaddingError


class PlanError(PaddingError, ValueError):
    """Rows or a job that cannot be planned, in one line."""
