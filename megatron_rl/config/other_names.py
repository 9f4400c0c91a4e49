"""The options here that match those of AReaL, TRL, verl and slime, so that error messages can suggest them.

docs/from_other_trainers.md has them as tables, with the differences.
"""

from __future__ import annotations

PAGE = "docs/from_other_trainers.md"

OTHERS: dict[str, str] = {
    "model.path": "actor_rollout_ref.model.path actor.path hf_checkpoint model_name_or_path",
    "model.dtype": "rollout.dtype bf16",
    "data.train": "train_dataset train_files train_dataset.path prompt_data",
    "data.evaluation": "eval_dataset val_files valid_dataset.path eval_prompt_data",
    "data.shuffle": "shuffle_dataset rollout_shuffle",
    "data.max_prompt_tokens": "max_prompt_length filter_overlong_prompts rollout_max_prompt_len",
    "batch.prompts_per_step": "generation_batch_size train_batch_size train_dataset.batch_size rollout_batch_size",
    "batch.updates_per_step": "steps_per_generation num_iterations ppo_mini_batch_size ppo_epochs ppo_n_minibatches "
    "global_batch_size num_steps_per_rollout",
    "batch.tokens_per_microbatch": "per_device_train_batch_size gradient_accumulation_steps "
    "ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu max_tokens_per_mb max_tokens_per_gpu",
    "generation.n_samples": "num_generations rollout.n gconfig.n_samples group_size n_samples_per_prompt",
    "generation.max_new_tokens": "max_completion_length max_response_length gconfig.max_new_tokens "
    "rollout_max_response_len",
    "generation.temperature": "rollout.temperature gconfig.temperature rollout_temperature",
    "generation.top_p": "rollout.top_p rollout_top_p",
    "generation.top_k": "rollout.top_k",
    "generation.repetition_penalty": "repetition_penalty",
    "algo.advantage": "adv_estimator advantage_estimator",
    "algo.advantage_std": "scale_rewards norm_adv_by_std_in_grpo adv_norm reward_norm",
    "algo.loss": "loss_type importance_sampling_level loss_mode",
    "algo.clip_low": "epsilon clip_ratio_low clip_ratio eps_clip",
    "algo.clip_high": "epsilon_high clip_ratio_high eps_clip_higher eps_clip_high",
    "algo.dual_clip": "delta clip_ratio_c c_clip eps_clip_c",
    "algo.aggregation": "loss_agg_mode",
    "algo.high_entropy_share": "top_entropy_quantile",
    "algo.kl_coefficient": "beta kl_loss_coef kl_coef kl_ctl",
    "algo.kl_in": "use_kl_loss use_kl_in_reward",
    "algo.kl_estimator": "use_bias_correction_kl kl_loss_type kl_penalty",
    "algo.entropy_coefficient": "entropy_coeff entropy_coef",
    "algo.routing_replay": "use_rollout_routing_replay",
    "correction.proximal": "recompute_logprob use_decoupled_loss",
    "correction.weight": "vllm_importance_sampling_correction use_tis",
    "correction.level": "vllm_importance_sampling_mode",
    "correction.high": "vllm_importance_sampling_cap behav_imp_weight_cap",
    "critic.discount": "gamma",
    "critic.trace_decay": "lam gae_lambda",
    "critic.value_clip": "cliprange_value",
    "reward_model.path": "reward_model.model.path",
    "reward_shaping.overlong_penalty": "overlong_reward_penalty",
    "rollout.reward": "reward_funcs custom_reward_function.path custom_reward_function.name custom_rm_path rm_type",
    "rollout.recipe": "reward_weights rm_url",
    "rollout.workflow": "custom_generate_function_path",
    "rollout.backend": "rollout.name",
    "rollout.colocated": "vllm_mode colocate",
    "rollout.cut_off": "mask_truncated_completions",
    "rollout.interruption": "partial_rollout",
    "rollout.max_concurrent_episodes": "max_concurrent_rollouts",
    "rollout.max_staleness": "max_head_offpolicyness async_training",
    "rollout.max_uniform_resamples": "filter_groups dynamic_sampling dynamic_sampling_filter_path",
    "rollout.oversample": "over_sampling_batch_size",
    "rollout.server_count": "rollout_num_gpus",
    "rollout.server_args": "rollout.tensor_model_parallel_size rollout_num_gpus_per_engine sglang_mem_fraction_static",
    "optimizer.lr": "learning_rate optim.lr actor.optimizer.lr",
    "optimizer.schedule": "lr_scheduler_type warmup_style lr_decay_style",
    "optimizer.warmup_updates": "warmup_steps lr_warmup_steps lr_warmup_iters",
    "optimizer.clip_grad": "max_grad_norm optim.clip_grad gradient_clipping",
    "optimizer.weight_decay": "optim.weight_decay",
    "lora.rank": "peft_config lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.targets": "target_modules",
    "parallel.tensor": "tensor_model_parallel_size allocation_mode",
    "parallel.pipeline": "pipeline_model_parallel_size",
    "parallel.context": "context_parallel_size",
    "parallel.expert": "expert_model_parallel_size",
    "parallel.expert_tensor": "expert_tensor_parallel_size",
    "parallel.sequence": "sequence_parallel",
    "run.folder": "output_dir default_local_dir experiment_name trial_name",
    "run.steps": "max_steps total_epochs total_training_steps total_train_epochs total_train_steps num_rollout",
    "run.checkpoint_every_steps": "save_steps save_freq saver.freq_steps recover.freq_steps save_interval",
    "run.evaluate_every_steps": "eval_steps test_freq evaluator.freq_steps eval_interval",
    "eval.samples_per_prompt": "n_samples_per_eval_prompt",
    "telemetry.loggers": "report_to trainer.logger use_wandb",
    "telemetry.project": "wandb_project",
}
OURS: dict[str, str] = {name: key for key, names in OTHERS.items() for name in names.split()}


def ours(key: str) -> str:
    """Return this package's key that matches another trainer's `key`, or '' if there is none.

    Leading sections of `key` are ignored.

    ours("actor_rollout_ref.rollout.n")  # "generation.n_samples"
    """
    parts = key.replace("-", "_").lstrip("_").split(".")
    endings = (".".join(parts[first:]) for first in range(len(parts)))
    return next((OURS[name] for name in endings if name in OURS), "")
