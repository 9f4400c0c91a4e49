"""Plans a run before it starts: batch sizes, memory and step time. Imports neither megatron nor CUDA."""
