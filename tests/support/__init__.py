"""What tests and benchmarks share: a Ray and a TransferQueue, rows, losses, configs. No test stands here."""
