"""Rollouts on a CPU: by transformers with requests that repeat, and by vLLM; and their weights."""
