"""Advantages, losses and the actor that strings them together. Tensor maths only: no process groups, no Megatron."""
