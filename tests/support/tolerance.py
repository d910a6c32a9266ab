"""The tolerances of the project, written once."""

RELATIVE_FLOAT64 = 1e-12
RELATIVE_FLOAT32 = 1e-6
LOG_PROB_AGREEMENT = 1e-5  # rollout against trainer, float32, absolute

RELATIVE_METRIC = 2e-5  # metrics of float32 losses, some steps of AdamW after a common start

# AdamW divides a gradient by its own size: without this, elements whose gradient is all but zero
# move by their rounding errors.
ADAM_EPS = "override_optimizer_config.eps=1e-5"
