"""`megatron-rl rehearse`: runs the CUDA code path of any rank of a job without GPUs, on tensors without memory."""
