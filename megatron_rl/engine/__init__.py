"""Training engines on Megatron-Core, which is made ready for this machine before any module here imports it."""

from megatron_rl import platform

platform.prepare()
