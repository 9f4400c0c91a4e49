"""`megatron-rl rehearse`: any rank of a job of any size runs its CUDA path here, on tensors without memory."""
