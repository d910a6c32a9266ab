"""Names of the metrics that a step logs under ``padding/``, and of those of verl that runs are read
by.

They suit verl's aggregation over the local updates of a global step (``MetricsAggregator``):
``total`` is summed, ``max`` and ``min`` are extremes, ``timing_s/`` is summed, the rest is
averaged.
"""

# verl's: mean reward of a row, mean gradient norm of the optimizer steps, seconds of a step.
GRAD_NORM = "actor/grad_norm"
STEP_SECONDS = "timing_s/step"

# Of the step; docs/reference.md says what each one is.
REAL_ROWS_TOTAL = "padding/real_rows/total"
PAD_ROWS_TOTAL = "padding/pad_rows/total"
PAD_ROWS_SHARE = "padding/pad_rows/share"
PAD_TOKENS_TOTAL = "padding/pad_tokens/total"
PAD_TOKENS_SHARE = "padding/pad_tokens/share"
PLAN_SECONDS = "timing_s/padding/plan"
TIMING_SECONDS = "timing_s/padding/timing"
ROWS_SECONDS = "timing_s/padding/rows"
UPSAMPLE_SECONDS = "timing_s/padding/upsample"

# Of what the job does not compute, by the plans of its steps.
ALL_COMPUTED_TOKENS = "padding/computed_tokens/total"
SAVED_TOKENS = (
    "padding/saved/shared_tokens/total",
    "padding/saved/zero_advantage_tokens/total",
    "padding/saved/old_log_prob_tokens/total",
)
SAVED_PASSES = "padding/saved/passes/total"

# Of sessions.
SESSION_SCORE = "padding/session/score/mean"
SESSION_RESPONSE_LENGTH = "padding/session/response_length/mean"
SESSION_ROWS = "padding/session/rows/mean"
SESSION_ROWS_MAX = "padding/session/rows/max"
SESSION_ROWS_QUANTILE = "padding/session/rows/p{percent}"
SESSION_TURNS = "padding/session/num_turns/mean"
SESSIONS_CONFIGURED = "padding/session/configured/total"
SESSIONS_ARRIVED = "padding/session/arrived/total"
SESSIONS_MISSING = "padding/session/missing/total"
SESSIONS_FAILED = "padding/session/failed/total"
SESSIONS_EMPTY = "padding/session/empty/total"

# Of the tokens that padding.repeated_tokens=once has masked.
REPEATED_TOKENS = "padding/repeated_tokens/total"

# Of the rows of an agent's role, with padding.baseline=role.
ROLE_SCORE = "padding/role/{role}/score/mean"
ROLE_ROWS = "padding/role/{role}/rows/total"

# Of prompts and rows.
PROMPTS_WITHOUT_ADVANTAGE = "padding/prompts/without_advantage/share"
ROWS_WITHOUT_ADVANTAGE = "padding/rows/without_advantage/share"
TOKENS_WITHOUT_ADVANTAGE = "padding/rows/without_advantage/tokens_share"
ROW_TOKENS_QUANTILE = "padding/rows/tokens/p{percent}"
ROW_AGE = "padding/rows/age/mean"
ROW_AGE_MAX = "padding/rows/age/max"

# Of an update or a worker call.
OPTIMIZER_STEPS = "padding/{update}/optimizer_steps/total"
LEFT_OUT_ROWS = "padding/{update}/left_out_rows/total"
IDLE_STEPS = "padding/{update}/idle_steps/total"
REAL_ROWS_MIN = "padding/{update}/mini_batch_real_rows/min"
REAL_ROWS_MAX = "padding/{update}/mini_batch_real_rows/max"
UPDATE_PADS = "padding/{update}/pad_rows/total"
IMBALANCE = "padding/{update}/imbalance"
MEASURED_IMBALANCE = "padding/{call}/measured_imbalance"
WAITED_SECONDS = "padding/{call}/waited_seconds"
PREDICTION_ERROR = "padding/{call}/prediction_error"
MICRO_IMBALANCE = "padding/{call}/micro_batch_imbalance"
CALL_MICRO_BATCHES = "padding/{call}/micro_batches"
CALL_PACKING = "padding/{call}/packing_efficiency"
COMPUTED_TOKENS = "padding/{call}/computed_tokens/total"
SHARING_FACTOR = "padding/{call}/sharing_factor"
CALL_SECONDS = "padding/{call}/seconds"
CALL_MEMORY = "padding/{call}/max_memory_allocated_gb"
CALL_MEMORY_RESERVED = "padding/{call}/max_memory_reserved_gb"
