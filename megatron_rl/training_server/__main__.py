from megatron_rl.life import process_exit
from megatron_rl.training_server.training_command import main

process_exit.run_and_end(main)
