"""Training engines on Megatron-Core. Importing this package prepares megatron.core for this machine first."""

from megatron_rl import platform

platform.prepare()
