"""Training engines on Megatron-Core. Importing this package first prepares megatron.core for this machine."""

from megatron_rl import platform

platform.prepare()
