"""Plans of a run before anything is started: batch algebra, memory and time. Imports neither megatron nor CUDA."""
