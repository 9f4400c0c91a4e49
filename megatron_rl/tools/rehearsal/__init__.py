"""`megatron-rl rehearse`: runs the CUDA code path of any rank of a job without GPUs, on FakeTensors, which have no
data."""
