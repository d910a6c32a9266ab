"""Names of the worker calls that are planned, as plans, metrics and messages have them."""

ACTOR, CRITIC = "actor", "critic"
"""Names of the updates in a plan."""
LOG_PROB, REF, VALUES = "log_prob", "ref", "values"
"""Names of the inference passes in a plan."""
