"""Names of metrics that several modules know: of those that a step logs under ``padding/``, and of
verl's. Others stand where they are logged; docs/reference.md says what each one is.

All suit verl's aggregation over the local updates of a global step (``MetricsAggregator``):
``total`` is summed, ``max`` and ``min`` are extremes, ``timing_s/`` is summed, the rest is
averaged.
"""

# verl's: mean gradient norm of the optimizer steps.
GRAD_NORM = "actor/grad_norm"

REAL_ROWS_TOTAL = "padding/real_rows/total"
PAD_ROWS_TOTAL = "padding/pad_rows/total"

ALL_COMPUTED_TOKENS = "padding/computed_tokens/total"
SAVED_TOKENS = (
    "padding/saved/shared_tokens/total",
    "padding/saved/zero_advantage_tokens/total",
    "padding/saved/old_log_prob_tokens/total",
)
SAVED_PASSES = "padding/saved/passes/total"
SESSION_SCORE = "padding/session/score/mean"

# Of an update.
DROPPED_ROWS = "padding/{update}/left_out_rows/total"
