"""Advantages, losses, and the actor that combines them. Pure tensor maths: no process groups, no Megatron."""
