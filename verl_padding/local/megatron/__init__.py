"""verl's Megatron engine on a CPU, without CUDA and without Transformer Engine.

May import: errors, job.

What it shows is the logic of engine and bridge: parallel ranks, packed rows, pipelines, gradients, weights. What it
does not show is Transformer Engine's kernels, nccl and low precision.
"""
