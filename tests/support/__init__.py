"""What tests share: rows, losses, trainers, workers, whole jobs, engines on a CPU; no tests."""
