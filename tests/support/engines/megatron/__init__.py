"""verl's Megatron engine without CUDA and without Transformer Engine."""
