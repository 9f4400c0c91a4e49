"""`python -m megatron_rl.launch` is `megatron-rl launch`."""

from megatron_rl.launch.local import main

main()
