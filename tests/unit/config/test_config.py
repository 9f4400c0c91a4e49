"""Every option, and what a wrong one says: the dotted key, the value found, the rule and the way out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from megatron_rl.config import (
    AlgorithmConfig,
    CriticConfig,
    GenerationConfig,
    ParallelConfig,
    RolloutConfig,
    TrainConfig,
    load_config,
)
from megatron_rl.config.loading import SECTIONS
from megatron_rl.config.resume_rules import ON_RESUME, changes_at_resume, saved_form
from megatron_rl.tools.option_pages import described_options

CONFIGS = Path(__file__).parents[3] / "configs"

OUR_KEYS = {
    "model": ["path", "init", "dtype", "transformer_impl", "flash_attention", "shared_keys", "delta_kernel"],
    "parallel": ["tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor", "sequence"],
    "optimizer": [
        "lr",
        "min_lr",
        "schedule",
        "warmup_updates",
        "weight_decay",
        "beta1",
        "beta2",
        "eps",
        "clip_grad",
        "distributed",
        "overlap",
        "megatron",
    ],
    "lora": ["rank", "alpha", "targets", "path"],
    "draft": ["kind", "tokens", "tokens_per_pass", "depths", "lr"],
    "batch": [
        "prompts_per_step",
        "updates_per_step",
        "tokens_per_microbatch",
        "allow_longer_sequences",
        "share_prompts",
    ],
    "generation": [
        "n_samples",
        "max_new_tokens",
        "min_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "supports",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "greedy",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "seed",
    ],
    "algo": [
        "advantage",
        "advantage_args",
        "advantage_mean",
        "advantage_std",
        "advantage_clip",
        "loss",
        "loss_args",
        "clip_low",
        "clip_high",
        "dual_clip",
        "aggregation",
        "aggregation_length",
        "high_entropy_share",
        "high_entropy_level",
        "kl_coefficient",
        "kl_estimator",
        "kl_in",
        "kl_target",
        "kl_horizon",
        "positive_weight",
        "positive_reward",
        "entropy_coefficient",
        "entropy_target",
        "entropy_step",
        "routing_replay",
    ],
    "reward_shaping": ["cut_off_share", "overlong_buffer", "overlong_penalty", "per_token", "running", "clip"],
    "correction": [
        "proximal",
        "weight",
        "level",
        "low",
        "high",
        "negative_bound",
        "reject",
        "reject_level",
        "reject_bound",
        "alarm",
    ],
    "critic": [
        "model",
        "parallel",
        "optimizer",
        "discount",
        "trace_decay",
        "level",
        "decoupled",
        "length_factor",
        "value_clip",
        "warmup_steps",
    ],
    "reward_model": ["path", "parallel", "coefficient"],
    "teacher": ["path", "servers", "token_file", "hint", "by_source", "coefficient", "kl_in", "top_k"],
    "demonstrations": ["weight", "source", "source_args", "answer", "rows_per_step"],
    "preference": ["loss", "loss_args"],
    "supervised": ["answer"],
    "rollout": [
        "workflow",
        "workflow_args",
        "reward",
        "recipe",
        "reward_workers",
        "servers",
        "registry",
        "router",
        "backend",
        "server_count",
        "exact",
        "server_restarts",
        "health_timeout_s",
        "server_args",
        "token_file",
        "devices",
        "colocated",
        "max_concurrent_episodes",
        "max_staleness",
        "stale",
        "cut_off",
        "max_uniform_resamples",
        "oversample",
        "interruption",
        "part_tokens",
        "max_cache_age",
        "request_timeout_s",
        "control_timeout_s",
        "start_timeout_s",
        "publication",
        "bucket_bytes",
        "episode_attempts",
        "max_infrastructure_failures",
        "journal_replies",
    ],
    "reuse": ["groups_per_step", "buffer_groups", "max_age_steps", "solved_reward"],
    "data": [
        "train",
        "train_args",
        "evaluation",
        "evaluation_args",
        "template_args",
        "shuffle",
        "max_prompt_tokens",
        "max_tokens",
        "success_rates",
        "success_band",
        "sampling",
        "least_chance",
    ],
    "eval": ["sets", "samples_per_prompt", "temperature", "top_p"],
    "warm_start": ["updates", "prompts_per_update", "lr", "stop_at_reward", "check_every_updates", "folder"],
    "run": [
        "folder",
        "import_from",
        "seed",
        "steps",
        "evaluate_every_steps",
        "save_every_steps",
        "save_at_end",
        "checkpoint_every_steps",
        "keep_checkpoints",
        "grace_s",
        "phase_timeout_s",
        "most_skipped_updates",
        "threads_per_rank",
        "offload",
    ],
    "telemetry": ["loggers", "project", "prometheus", "samples_logged", "trace_steps", "record_steps"],
}
"""A new option is a decision: add it here too, say in the change which two runs need different values, and decide in
config/resume_rules.py whether a resumed run may change it."""

SMALLEST = "model: {path: some/model}\ndata: {train: prompts.jsonl}\ngeneration: {n_samples: 8}\n"


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def load(write):
    """Load the smallest valid config with overrides."""
    return lambda *overrides: load_config(write(SMALLEST), list(overrides))


def test_options_are_the_listed_ones():
    found = {name: [f.name for f in dataclasses.fields(section)] for name, section in SECTIONS.items()}
    nested = {f"{name}.parallel": OUR_KEYS["parallel"] for name in ("critic", "reward_model")}
    nested |= {"critic.optimizer": OUR_KEYS["optimizer"]}
    assert found == OUR_KEYS | nested
    assert [f.name for f in dataclasses.fields(TrainConfig)] == [*OUR_KEYS, "megatron"]


def test_rules_of_a_resume_are_about_options():
    keys = {f"{name}.{f.name}" for name, section in SECTIONS.items() for f in dataclasses.fields(section)}
    assert ON_RESUME.keys() <= keys - SECTIONS.keys()
    taken = keys - SECTIONS.keys() - ON_RESUME.keys()
    assert len(taken) == 191, "give a new option a rule in resume_rules.py, or count it here: its new value is taken"


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ([], ["model.dtype=bfloat16"], "model.dtype = 'bfloat16': the checkpoint 'step-3' has 'float32', and a run"),
        ([], ["optimizer.lr=1e-4"], "optimizer.lr = 0.0001: the checkpoint 'step-3' has 1e-06, and a run keeps it"),
        ([], ["run.seed=2"], "run.seed = 2: the checkpoint 'step-3' has 1, and a run keeps it from its start"),
        ([], ["algo.advantage=gae"], "algo.advantage = 'gae': the checkpoint .*, and only gae has a critic; give the"),
        (["lora.rank=4"], ["lora.rank=8"], "lora.rank = 8: the checkpoint 'step-3' has 4"),
        (["warm_start.updates=3"], [], "warm_start.updates = 0: the checkpoint 'step-3' has 3"),
        (
            ["optimizer.schedule=linear"],
            ["optimizer.schedule=linear", "run.steps=7"],
            "run.steps = 7: the checkpoint 'step-3' has 100, and optimizer.schedule = linear was laid out for as many",
        ),
        (
            ["algo.advantage=gae", "critic.optimizer.schedule=cosine"],
            ["algo.advantage=gae", "critic.optimizer.schedule=cosine", "batch.updates_per_step=2"],
            "batch.updates_per_step = 2: .* critic.optimizer.schedule = cosine was laid out",
        ),
        (["algo.advantage=gae"], ["algo.advantage=gae", "critic.optimizer.lr=1e-5"], "^critic.optimizer.lr = 1e-05: "),
    ],
)
def test_an_option_that_a_resume_cannot_change_is_refused_by_name(before, now, words, load):
    with pytest.raises(ValueError, match=words):
        changes_at_resume(saved_form(load(*before)), load(*now), "step-3")


@pytest.mark.parametrize(
    ("before", "now", "lines"),
    [
        ([], [], []),
        (
            [],
            ["optimizer.beta1=0.8", "batch.prompts_per_step=32", "run.steps=7"],
            [
                "changed since the checkpoint: optimizer.beta1 = 0.8 (was 0.9), batch.prompts_per_step = 32 (was 64), "
                "run.steps = 7 (was 100)"
            ],
        ),
        (
            ["algo.kl_target=0.1", "algo.kl_in=reward", "algo.kl_coefficient=0.1"],
            ["algo.kl_target=0.1", "algo.kl_in=reward", "algo.kl_coefficient=0.2", "model.init=random"],
            [
                "changed since the checkpoint, and without effect in a run that has begun: "
                "model.init = 'random' (was 'hf'), algo.kl_coefficient = 0.2 (was 0.1)"
            ],
        ),
        ([], ["megatron.a=1"], ["changed since the checkpoint: megatron = {'a': 1} (was {})"]),
    ],
)
def test_a_resumed_run_says_which_options_were_changed(before, now, lines, load):
    assert changes_at_resume(saved_form(load(*before)), load(*now), "step-3") == lines


def test_a_checkpoint_that_lacks_a_newer_option_can_be_resumed(load):
    saved = saved_form(load())
    del saved["optimizer"]["eps"], saved["reuse"]
    saved["optimizer"]["an_option_that_was_removed"] = 3
    assert changes_at_resume(saved, load("optimizer.eps=1e-6"), "step-3") == []


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.name)
def test_every_config_in_the_repository_is_valid(path):
    config = load_config(path)
    assert config.run.folder == f"runs/{path.stem}"
    assert config.data.evaluation, "a config that ships with the repository measures held-out prompts"


def test_smallest_config_and_overrides_with_their_types(load):
    config = load("batch.prompts_per_step=4", "optimizer.lr=1e-5", 'generation.stop=["\\n"]', "parallel.sequence=null")
    assert config.model.path == "some/model" and config.batch.prompts_per_step == 4
    assert config.optimizer.lr == 1e-5 and config.generation.stop == ["\n"] and config.parallel.sequence is None
    assert isinstance(config, TrainConfig) and isinstance(config.generation, GenerationConfig)


@pytest.mark.parametrize(
    "text", ["a #1", "#1", "007", "1e3", "yes", "a: b", "[a]", " a ", "2024-01-01", "0x10", "- a", "*x", "a, b", "1_0"]
)
def test_a_text_on_the_command_line_stays_as_it_is(text, load):
    assert load(f"run.folder={text}").run.folder == text
    assert load(f"run.folder='{text}'").run.folder == text


def test_what_looks_like_a_comment_on_the_command_line_is_part_of_the_value(load):
    assert load("data.train_args.name=a #1", "data.train_args.tag=#2").data.train_args == {"name": "a #1", "tag": "#2"}
    assert load("data.train_args.name='a' ", "data.train_args.rate=1e-5").data.train_args == {"name": "a", "rate": 1e-5}


def test_override_wins_over_the_file_and_the_last_override_over_the_first(write):
    path = write(SMALLEST + "run: {steps: 5}\n")
    assert load_config(path).run.steps == 5
    assert load_config(path, ["run.steps=6", "run.steps=7"]).run.steps == 7


def test_config_survives_being_written_and_read(load, write):
    config = load("megatron.num_layers_at_start_in_bf16=1", "data.train_args.split=train")
    assert load_config(write(config.to_yaml())) == config


def test_megatron_section_is_passed_through(load):
    assert load("megatron.some_new_field=3").megatron == {"some_new_field": 3}


@pytest.mark.parametrize(
    "settings,expected",
    [
        ([], True),
        (["model.transformer_impl=local"], False),
        (["model.transformer_impl=local", "model.flash_attention=TE"], True),
        (["model.transformer_impl=local", "megatron.moe_router_fusion=true"], True),
        (["model.transformer_impl=local", "megatron.moe_router_fusion=false"], False),
        (["model.transformer_impl=local", "optimizer.megatron.use_precision_aware_optimizer=true"], True),
        (
            [
                "model.transformer_impl=local",
                "algo.advantage=gae",
                "critic.optimizer.megatron.use_precision_aware_optimizer=true",
            ],
            True,
        ),
    ],
)
def test_local_layers_need_no_transformer_engine_unless_another_option_asks_for_it(load, settings, expected):
    assert load(*settings).may_use_transformer_engine is expected


def test_engine_config_is_cut_out_of_the_config(load):
    config = load("parallel.tensor=2", "batch.tokens_per_microbatch=512", "run.seed=9")
    assert config.actor.model is config.model and config.actor.parallel.tensor == 2
    assert (config.actor.tokens_per_microbatch, config.actor.seed) == (512, 9)


def test_critic_has_the_policys_model_unless_it_names_one(load):
    options = ("algo.advantage=gae", "critic.parallel.tensor=2", "critic.optimizer.lr=1e-5", "model.init=random")
    config = load(*options)
    assert config.critic_engine.model is config.model and config.has_critic
    assert (config.critic_engine.parallel.tensor, config.critic_engine.optimizer.lr) == (2, 1e-5)
    assert (config.actor.parallel.tensor, config.actor.optimizer.lr) == (1, 1e-6)
    named = load(*options, "critic.model=some/critic", "model.dtype=bfloat16").critic_engine.model
    assert (named.path, named.init, named.dtype) == ("some/critic", "hf", "bfloat16")
    with pytest.raises(ValueError, match=r"tensor\(2\) .* does not divide the world size 3"):
        config.check_world_size(3)


def test_critic_and_reward_model_take_from_the_policy_what_they_leave_out(load):
    policy = ("parallel.tensor=2", "parallel.pipeline=2", "optimizer.lr=3e-6", "optimizer.weight_decay=${optimizer.lr}")
    own = ("critic.parallel.pipeline=4", "critic.optimizer.lr=1e-5")
    found = load("algo.advantage=gae", "reward_model.path=judge", *policy, *own)
    assert (found.critic.parallel.tensor, found.critic.parallel.pipeline) == (2, 4)
    assert found.critic.optimizer == dataclasses.replace(found.optimizer, lr=1e-5)
    assert found.critic.optimizer.weight_decay == 3e-6
    assert found.reward_model.parallel == found.parallel
    assert load(*policy).critic == CriticConfig(), "without a critic there is nothing to set"


def test_reward_model_has_a_folder_and_a_layout_of_its_own(load):
    config = load("reward_model.path=some/judge", "reward_model.parallel.pipeline=2", "model.init=random")
    engine = config.reward_engine
    assert (engine.model.path, engine.model.init, engine.parallel.pipeline) == ("some/judge", "hf", 2)
    with pytest.raises(ValueError, match=r"pipeline\(2\) .* does not divide the world size 3"):
        config.check_world_size(3)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        # The key is unknown.
        ("batch.prompt_per_step=4", r"batch.prompt_per_step = 4: unknown key; did you mean batch.prompts_per_step\?"),
        ("algo.clip=0.2", "algo.clip = 0.2: unknown key; did you mean algo.clip_"),
        ("optimiser.lr=1", r"optimiser = .*: unknown key; did you mean optimizer\?"),
        ("run.zzz=1", "run.zzz = 1: unknown key; the keys here are folder, import_from, seed"),
        ("run=3", "run = 3: must be a section with keys folder, import_from"),
        ("run.steps", "override 'run.steps': must be key=value"),
        # The type is wrong.
        ("batch.prompts_per_step=many", "batch.prompts_per_step = 'many': .*many.*; correct it in"),
        ("optimizer.lr=fast", "optimizer.lr = 'fast': "),
        ("run.save_at_end=7.5", "run.save_at_end = 7.5: "),
        ("generation.stop=3", "generation.stop = 3: "),
        # The value is out of range.
        ("model.init=zeros", "model.init = 'zeros': must be hf or random"),
        ("model.dtype=float16", "model.dtype = 'float16': must be float32 or bfloat16"),
        ("model.transformer_impl=te", "model.transformer_impl = 'te': must be auto, transformer_engine or local"),
        ("parallel.tensor=0", "parallel.tensor = 0: must be at least 1; 1 disables the axis"),
        ("parallel.pipeline=-1", "parallel.pipeline = -1: must be at least 1"),
        ("parallel.sequence=true", "parallel.sequence = True: needs parallel.tensor > 1"),
        ("optimizer.lr=0", r"optimizer.lr = 0.0: must be above 0; RL of a language model starts near 1e-6"),
        ("optimizer.min_lr=1", r"optimizer.min_lr = 1.0: must be in \[0, optimizer.lr = 1e-06\]"),
        ("optimizer.schedule=step", "optimizer.schedule = 'step': must be constant, linear or cosine"),
        ("optimizer.warmup_updates=-1", "optimizer.warmup_updates = -1: must be at least 0"),
        ("optimizer.weight_decay=-0.1", "optimizer.weight_decay = -0.1: must be at least 0"),
        ("optimizer.beta1=1", r"optimizer.beta1 = 1.0: must be in \[0, 1\)"),
        ("optimizer.beta2=-1", r"optimizer.beta2 = -1.0: must be in \[0, 1\)"),
        ("optimizer.eps=0", "optimizer.eps = 0.0: must be above 0"),
        ("optimizer.clip_grad=-1", "optimizer.clip_grad = -1.0: must be at least 0; 0 turns clipping off"),
        ("optimizer.overlap=true", "optimizer.overlap = True: hides .*; set optimizer.distributed=true too"),
        ("batch.prompts_per_step=0", "batch.prompts_per_step = 0: must be at least 1"),
        ("batch.updates_per_step=0", "batch.updates_per_step = 0: must be at least 1"),
        ("batch.tokens_per_microbatch=0", "batch.tokens_per_microbatch = 0: must be at least 1"),
        ("generation.n_samples=0", "generation.n_samples = 0: must be at least 1; ask for one reply or more"),
        ("generation.max_new_tokens=0", "generation.max_new_tokens = 0: must be at least 1"),
        ("generation.min_new_tokens=999", r"generation.min_new_tokens = 999: must be in \[0, max_new_tokens = 128\]"),
        (
            "generation.temperature=0",
            "generation.temperature = 0.0: must be above 0; for greedy decoding set greedy: true",
        ),
        ("generation.top_p=0", r"generation.top_p = 0.0: must be in \(0, 1\]; 1.0 keeps all tokens"),
        ("generation.top_k=0", "generation.top_k = 0: must be -1 or at least 1; -1 keeps all tokens"),
        ("generation.repetition_penalty=0", r"generation.repetition_penalty = 0.0: must be in \(0, 2\]; 1.0 changes"),
        ("generation.frequency_penalty=3", r"generation.frequency_penalty = 3.0: must be in \[-2, 2\]; 0.0 changes"),
        ("generation.presence_penalty=-3", r"generation.presence_penalty = -3.0: must be in \[-2, 2\]; 0.0 changes"),
        ("generation.logit_bias={5: 101}", r"generation.logit_bias = \{5: 101.0\}: must map token ids to numbers from"),
        ("generation.logit_bias={-5: 1}", r"generation.logit_bias = \{-5: 1.0\}: must map token ids to numbers from"),
        (
            "generation.logit_bias={5: nan}",
            "generation.logit_bias = .*: must map token ids to numbers from -100",
        ),
        ("generation.logit_bias={five: 1}", "generation.logit_bias"),
        ("algo.advantage=rlo", "algo.advantage = 'rlo': must be one of group_norm, .*, or an import path"),
        ("algo.advantage=':a'", "algo.advantage = ':a': must be one of group_norm"),
        ("algo.advantage_mean=all", "algo.advantage_mean = 'all': must be none, group, batch or empty"),
        ("algo.advantage_std=all", "algo.advantage_std = 'all': must be none, group, batch or empty"),
        ("algo.advantage_clip=-1", "algo.advantage_clip = -1.0: must be at least 0"),
        ("algo.loss=dpo", "algo.loss = 'dpo': must be one of ppo_clip, gspo"),
        ("preference.loss=ppo", "preference.loss = 'ppo': must be one of dpo, ipo, kto, simpo, bradley_terry"),
        ("algo.dual_clip=1", r"algo.dual_clip = 1.0: must be 0 \(off\), or above 1"),
        (
            "algo.aggregation=mean",
            "algo.aggregation = 'mean': must be token_mean, .*sequence_sum or constant",
        ),
        ("algo.aggregation=constant", "algo.aggregation_length = 0: must be at least 1 with algo.aggregation = const"),
        ("algo.aggregation_length=8", "algo.aggregation_length = 8: .*and 0 elsewhere"),
        ("algo.high_entropy_share=0", r"algo.high_entropy_share = 0.0: must be in \(0, 1\]"),
        ("algo.high_entropy_level=group", "algo.high_entropy_level = 'group': must be batch or sequence"),
        ("algo.kl_in=advantage", "algo.kl_in = 'advantage': must be loss or reward"),
        ("algo.kl_target=1", "algo.kl_target = 1.0: .*above 0 with algo.kl_in = reward"),
        ("algo.kl_horizon=0", "algo.kl_horizon = 0.0: must be above 0 trajectories"),
        ("algo.entropy_target=-1", "algo.entropy_target = -1.0: must be at least 0"),
        ("algo.entropy_step=0", "algo.entropy_step = 0.0: must be above 0"),
        ("reward_shaping.cut_off_share=1.5", r"reward_shaping.cut_off_share = 1.5: must be in \[0, 1\]"),
        ("reward_shaping.overlong_buffer=-1", "reward_shaping.overlong_buffer = -1: must be at least 0 tokens"),
        ("reward_shaping.overlong_penalty=0", "reward_shaping.overlong_penalty = 0.0: must be above 0"),
        ("reward_shaping.running=mean", "reward_shaping.running = 'mean': must be none, std or mean_std"),
        ("reward_shaping.clip=-1", "reward_shaping.clip = -1.0: must be at least 0"),
        ("algo.clip_low=1.1", r"algo.clip_low = 1.1: must be in \(0, 1\]; PPO's is 0.2"),
        ("algo.clip_high=0.1", "algo.clip_high = 0.1: must be at least clip_low = 0.2"),
        ("algo.kl_coefficient=-1", "algo.kl_coefficient = -1.0: must be at least 0"),
        ("algo.kl_estimator=k4", "algo.kl_estimator = 'k4': must be k1, k2, k3 or unbiased"),
        ("algo.entropy_coefficient=-1", "algo.entropy_coefficient = -1.0: must be at least 0"),
        ("teacher.kl_in=reward", "teacher.kl_in = 'reward': must be advantage or loss"),
        ("demonstrations.weight=-1", "demonstrations.weight = -1.0: must be at least 0"),
        ("demonstrations.rows_per_step=0", "demonstrations.rows_per_step = 0: must be at least 1"),
        (
            "demonstrations.source=a.jsonl",
            "demonstrations.weight = 0.0: demonstrations.source = 'a.jsonl' would not",
        ),
        ("teacher.top_k=-1", "teacher.top_k = -1: must be at least 0"),
        ("teacher.coefficient=0", "teacher.coefficient = 0.0: must be above 0"),
        ("critic.discount=0", r"critic.discount = 0.0: must be in \(0, 1\]; 1 discounts nothing"),
        ("critic.trace_decay=1.5", r"critic.trace_decay = 1.5: must be in \[0, 1\]"),
        ("critic.level=word", "critic.level = 'word': must be token or turn"),
        ("critic.value_clip=-1", "critic.value_clip = -1.0: must be at least 0; 0 sets no bound"),
        ("critic.warmup_steps=-1", "critic.warmup_steps = -1: must be at least 0"),
        ("critic.optimizer.rate=1", "critic.optimizer.rate = 1: unknown key"),
        ("critic.parallel.tensor=0", "^critic.parallel.tensor = 0: must be at least 1"),
        ("critic.optimizer.lr=-1", "^critic.optimizer.lr = -1.0: "),
        ("correction.weight=cap", "correction.weight = 'cap': must be off, clamp or mask"),
        ("correction.proximal=guess", "correction.proximal = 'guess': must be recompute, loglinear or behavior"),
        ("correction.level=group", "correction.level = 'group': must be token, sequence or product"),
        ("correction.reject=k4", "correction.reject = 'k4': must be off, k1, k2 or k3"),
        ("correction.reject_level=batch", "correction.reject_level = 'batch': must be token, mean, sum or max"),
        ("correction.reject_bound=-1", "correction.reject_bound = -1.0: must be at least 0"),
        (
            "correction.reject=k3",
            "correction.reject_bound = 0.0: must be above 0 with correction.reject = k1, k2 or k3",
        ),
        ("correction.reject_bound=1", "correction.reject_bound = 1.0: must be above 0 with .* and 0 without"),
        ("correction.high=0.5", "correction.high = 0.5: must be at least 1"),
        ("correction.low=2", r"correction.low = 2.0: must be in \[0, 1\]"),
        ("correction.alarm=-1", "correction.alarm = -1.0: must be at least 0"),
        ("rollout.workflow=RLVR", "rollout.workflow = 'RLVR': must be an import path package.module:name"),
        ("rollout.reward=':a'", "rollout.reward = ':a': must be an import path package.module:name"),
        ("run.import_from=[my-project]", r"run.import_from = \['my-project'\]: each must be a module's name"),
        ("run.import_from=[rewards.py:length]", "run.import_from = .*each must be a module's name"),
        ("rollout.server_args=[--admin-api-key=k]", "rollout.server_args = '...': names a key, .*rollout.token_file"),
        ("rollout.backend=vllm", "rollout.backend = 'vllm': must be auto, embedded or sglang"),
        ("rollout.recipe=[{reward: exact}]", r"rollout.recipe\[0\] = .*must be .reward: package.module:name"),
        ("rollout.reward_workers=0", "rollout.reward_workers = 0: must be at least 1"),
        ("rollout.server_count=0", "rollout.server_count = 0: must be at least 1"),
        ("rollout.publication=rdma", "rollout.publication = 'rdma': must be group, ipc, delta, disk or adapters"),
        ("rollout.max_concurrent_episodes=0", "rollout.max_concurrent_episodes = 0: must be at least 1"),
        ("parallel.virtual_pipeline=2", "parallel.virtual_pipeline = 2: needs parallel.pipeline > 1"),
        ("rollout.max_staleness=-1", "rollout.max_staleness = -1: must be at least 0; 0 is synchronous"),
        ("rollout.max_uniform_resamples=-1", r"rollout.max_uniform_resamples = -1: must be in \[0, 50\]"),
        ("rollout.oversample=3", r"rollout.oversample = 3.0: must be in \[1, 2\]"),
        ("rollout.stale=resample", "rollout.stale = 'resample': must be drop, mask or keep"),
        ("rollout.request_timeout_s=0", "rollout.request_timeout_s = 0.0: must be above 0 seconds"),
        ("rollout.start_timeout_s=0", "rollout.start_timeout_s = 0.0: must be above 0 seconds"),
        ("rollout.episode_attempts=0", "rollout.episode_attempts = 0: must be at least 1"),
        (
            "rollout.max_infrastructure_failures=0",
            r"rollout.max_infrastructure_failures = 0.0: must be in \(0, 1\]",
        ),
        (
            "data={train: mixture, train_args: {a: {source: a.jsonl, weigth: 3}}}",
            "data.train_args.a = .*must have source, and may have args and weight",
        ),
        (
            "data={train: mixture, train_args: {a: {source: a.jsonl}, b: {source: b.jsonl, weight: 5000}}}",
            "data.train_args.a.weight = 1.0: has none of every 1000 prompts beside the others' weights; raise it",
        ),
        ("rollout.recipe=[{reward: 'a:b', weight: {c: x}}]", r"rollout.recipe\[0\] = .*weight: a number or those of"),
        ("rollout.recipe=[{reward: 'a:b', weight: .nan}]", r"rollout.recipe\[0\] = .*weight: a number"),
        ("eval.sets={a: {source: a.jsonl, arg: {}}}", "eval.sets = .*must map names to .source: ..., args: ...."),
        ("data.max_prompt_tokens=-1", "data.max_prompt_tokens = -1: must be at least 0; 0 keeps all"),
        ("data.template_args={tools: []}", "data.template_args = .*: must be arguments of the model's chat template"),
        ("data.sampling=some", "data.sampling = 'some': must be all, band, failures or variance"),
        ("data.least_chance=0", r"data.least_chance = 0.0: must be in \(0, 1\]"),
        ("data.success_band=[0.2,0.8]", r"data.success_band = \[0.2, 0.8\]: .* or data.sampling = band"),
        ("data.max_tokens=-1", "data.max_tokens = -1: must be at least 0; 0 keeps all"),
        ("data.max_tokens=9", "data.max_tokens = 9: .* the prompts of RL bring none; set data.max_prompt_tokens"),
        ("warm_start.updates=-1", "warm_start.updates = -1: must be at least 0; 0 skips the warm start"),
        ("warm_start.prompts_per_update=0", "warm_start.prompts_per_update = 0: must be at least 1"),
        ("warm_start.lr=0", "warm_start.lr = 0.0: must be above 0"),
        ("warm_start.stop_at_reward=0", r"warm_start.stop_at_reward = 0.0: must be in \(0, 1\]"),
        ("warm_start.check_every_updates=0", "warm_start.check_every_updates = 0: must be at least 1"),
        ("run.steps=0", "run.steps = 0: must be at least 1"),
        ("draft.kind=medusa", "draft.kind = 'medusa': must be none, eagle or mtp"),
        ("draft.tokens=0", "draft.tokens = 0: must be at least 1"),
        ("draft.tokens_per_pass=0", "draft.tokens_per_pass = 0: must be at least 1"),
        ("draft.depths=0", "draft.depths = 0: must be at least 1; 1 trains the first guess alone"),
        ("draft.lr=0", "draft.lr = 0.0: must be above 0"),
        ("run.evaluate_every_steps=-1", "run.evaluate_every_steps = -1: must be at least 0"),
        ("run.save_every_steps=-1", "run.save_every_steps = -1: must be at least 0"),
        ("run.threads_per_rank=-1", "run.threads_per_rank = -1: must be at least 0"),
        ("telemetry.record_steps=[often]", "telemetry.record_steps = .'often'.: each must be a step's number from 0"),
        ("telemetry.record_steps=every 0", "telemetry.record_steps = .'every 0'.: each must be a step's number"),
    ],
)
def test_wrong_option_is_refused_with_the_way_out(load, override, message):
    with pytest.raises(ValueError, match=message):
        load(override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.servers=[http://a]", "rollout.registry=b"],
            "rollout.registry = 'b': must be empty where rollout.ser",
        ),
        (
            ["rollout.publication=adapters", "rollout.interruption=abort"],
            "rollout.publication = 'adapters': lora.rank = 0 trains the whole model; set lora.rank",
        ),
        (
            ["lora.path=runs/a/final/adapter"],
            "lora.path = 'runs/a/final/adapter': lora.rank = 0 trains the whole model; set lora.rank",
        ),
        (
            ["rollout.publication=adapters", "lora.rank=4"],
            "rollout.interruption = 'retract': must be abort with rollout.publication = adapters",
        ),
        (
            [
                *(
                    "draft.kind=eagle",
                    "rollout.backend=sglang",
                    "generation.frequency_penalty=0.5",
                    "generation.top_k=64",
                ),
                *("rollout.server_args=[--disable-overlap-schedule]", "rollout.interruption=abort"),
            ],
            "draft.kind = 'eagle': while SGLang decodes .* count tokens too late; .*or rollout.backend=embedded",
        ),
        (
            ["draft.kind=eagle", "rollout.publication=adapters", "rollout.interruption=abort", "lora.rank=4"],
            "draft.kind = 'eagle': rollout.publication = adapters sends only .*set rollout.publication=group",
        ),
        (
            ["lora.rank=4", "warm_start.updates=3"],
            "warm_start.updates = 3: trains the weights that lora.rank = 4 freezes",
        ),
        (
            ["rollout.max_staleness=1", "rollout.oversample=1.5"],
            r"rollout.oversample = 1.5: .*1 where max_staleness > 0",
        ),
        (
            ["rollout.max_uniform_resamples=10", "generation.n_samples=1", "algo.advantage=reinforce"],
            "rollout.max_uniform_resamples = 10: .*every group is uniform",
        ),
        *(
            (
                [f"generation.{name}={value}"],
                f"generation.{name} = {value}: .*all of it; set generation.top_k=256 or less too.* set it to {whole}. "
                f"Evaluations",
            )
            for name, value, whole in (("top_p", 0.9, 1.0), ("min_p", 0.1, 0.0), ("min_new_tokens", 4, 0))
        ),
        (
            ["generation.frequency_penalty=0.5", "generation.logit_bias={5: 1}", "generation.max_new_tokens=1023"],
            "frequency_penalty = 0.5: .* room for 1023 .*, and 1 biases and generation.max_new_tokens = 1023 need 1024",
        ),
        (
            ["generation.logit_bias={5: 1}", "rollout.router=http://h:1", "rollout.servers=[http://h:2]"],
            "logit_bias = .* has not been tried; set it to {}, or leave rollout.router out",
        ),
        *(
            (
                [f"generation.{name}={value}", "teacher.path=t"],
                f"generation.{name} = {shown}: a teacher's distribution is .*to {to}, or leave the teacher out",
            )
            for name, value, shown, to in (
                *((f"{kind}_penalty", 0.5, 0.5, 0.0) for kind in ("frequency", "presence")),
                ("repetition_penalty", 1.5, 1.5, 1.0),
                ("logit_bias", "{5: 1}", r"\{5: 1.0\}", r"\{\}"),
            )
        ),
        (
            ["generation.top_k=20", "generation.presence_penalty=0.5", "rollout.backend=sglang"],
            "generation.presence_penalty = 0.5: SGLang's overlapped .*add --disable-overlap-schedule to rollout",
        ),
        (
            [
                *("generation.top_k=20", "generation.repetition_penalty=1.1", "rollout.backend=sglang"),
                "rollout.server_args=[--disable-overlap-schedule]",
            ],
            "generation.repetition_penalty = 1.1: with rollout.interruption = retract.*set rollout.interruption=abort",
        ),
        (
            [
                *("generation.top_k=20", "generation.repetition_penalty=1.1", "generation.frequency_penalty=0.1"),
                *("rollout.backend=sglang", "rollout.server_args=[--disable-overlap-schedule]"),
            ],
            "generation.repetition_penalty = 1.1: .*differently in each process.*; set it to 1, or the others to 0",
        ),
        *(
            (["generation.supports=computed", "generation.top_p=0.9", *options], words)
            for options, words in (
                (
                    ["teacher.path=t"],
                    "supports = 'computed': a teacher's .*leave top_k, top_p and min_p out, or the teacher",
                ),
                (["generation.min_new_tokens=3"], "generation.min_new_tokens = 3: the trainer computes .*set it to 0"),
                (["generation.logit_bias={5: 1}"], r"logit_bias = \{5: 1.0\}: the trainer .*=reported and .*top_k=256"),
                (["rollout.max_staleness=1"], "computed': .* rollout.max_staleness = 1 allows .*; set it to 0"),
                (["rollout.oversample=1.5", "rollout.stale=mask"], "stale = mask allows .*; set rollout.stale=drop"),
                (
                    ["reuse.groups_per_step=1", "run.checkpoint_every_steps=1", "correction.weight=clamp"],
                    "supports = 'computed': .* reuse.groups_per_step = 1 allows .*; set it to 0",
                ),
            )
        ),
        (["generation.greedy=true"], "generation.greedy = True: .*set it to false. Evaluations have eval.top_p"),
        (["generation.top_k=1"], "generation.top_k = 1: .*set it from 2 to 256, or to -1"),
        (["generation.top_k=257"], "generation.top_k = 257: .*lower it to that, or set it to -1"),
        (["generation.top_k=20", "teacher.path=t"], "generation.top_k = 20: a teacher's .*set it to -1, or leave the"),
        (
            ["generation.top_k=20", "rollout.router=http://h:1", "rollout.servers=[http://h:2]"],
            "generation.top_k = 20: rollout.router passes on .*set it to -1, or leave rollout.router out",
        ),
        *(
            (["rollout.max_uniform_resamples=2", *options], "max_uniform_resamples = 2: .*, and " + named)
            for options, named in (
                (["teacher.path=t"], "a teacher trains them"),
                (["teacher.path=t", "teacher.kl_in=loss", "algo.advantage=none"], "algo.advantage = none trains"),
                (["algo.kl_coefficient=0.01"], "algo.kl_coefficient = 0.01 trains them; set it to 0"),
                (["algo.kl_coefficient=0.01", "algo.kl_in=reward"], "algo.kl_coefficient = 0.01"),
                (["algo.positive_weight=0.1"], "algo.positive_weight = 0.1"),
                (["algo.entropy_coefficient=0.1"], "algo.entropy_coefficient = 0.1"),
                (["algo.entropy_target=0.1"], "algo.entropy_target = 0.1"),
                (["algo.advantage=gae"], "algo.advantage = gae"),
                (["algo.advantage=reinforce++"], r"algo.advantage = reinforce\+\+"),
                (["algo.advantage=gdpo"], "algo.advantage = gdpo"),
                (["algo.advantage_mean=batch"], "algo.advantage_mean = batch"),
                (["demonstrations.weight=0.1"], "demonstrations.weight = 0.1"),
                (["reward_model.path=m"], "reward_model.path = 'm'"),
            )
        ),
        (
            ["reuse.groups_per_step=2"],
            "reuse.groups_per_step = 2: the buffer's groups are those of the journal.*set that, or leave the key out",
        ),
        (
            ["reuse.groups_per_step=2", "run.checkpoint_every_steps=5"],
            "reuse.groups_per_step = 2: .*correction.weight = off counts it .*set correction.weight=clamp or mask",
        ),
        (
            ["rollout.journal_replies=true"],
            "rollout.journal_replies = True: .*run.checkpoint_every_steps = 0 .*keeps no journal",
        ),
        (
            ["batch.prompts_per_step=2", "batch.updates_per_step=17"],
            "batch.updates_per_step = 17: .* 2 x 8 trajectories, and every update needs one at least; lower it",
        ),
        (
            ["algo.routing_replay=experts", "rollout.backend=sglang", "rollout.max_staleness=1"],
            "algo.routing_replay = 'experts': with rollout.interruption = 'retract' .*set rollout.interruption=abort",
        ),
        (
            ["algo.routing_replay=experts", "rollout.backend=sglang", "teacher.path=policy", "teacher.hint=h"],
            "algo.routing_replay = 'experts': a teacher that is the policy itself reads prompts for which no server",
        ),
        (
            ["algo.routing_replay=experts_and_weights", "rollout.servers=[http://a]"],
            "algo.routing_replay = 'experts_and_weights': SGLang tells experts alone, .*set it to experts, or leave",
        ),
        (
            ["generation.n_samples=1"],
            "generation.n_samples = 1: algo.advantage = group_norm .* raise it, or set algo.advantage=reinforce",
        ),
        (
            ["algo.kl_in=reward", "algo.kl_estimator=unbiased"],
            "algo.kl_estimator = 'unbiased': must be k1, k2, k3, or, with algo.kl_in = loss, unbiased",
        ),
        (
            ["algo.dual_clip=3", "algo.loss=cispo"],
            "algo.dual_clip = 3.0: .* with algo.loss = ppo_clip or gspo",
        ),
        (
            ["algo.advantage=gae", "algo.advantage_args={discount: 0.9}"],
            "algo.advantage_args = .*: gae's options are critic.discount",
        ),
        (
            ["reward_shaping.overlong_buffer=129"],
            "reward_shaping.overlong_buffer = 129: every reply of generation.max_new_tokens = 128 would be overlong",
        ),
        (
            [
                *("algo.advantage=remax", "rollout.workflow=megatron_rl.workflows:ReMaxWorkflow"),
                "reward_model.path=judge",
            ],
            "reward_model.path = 'judge': scores trajectories, .* set rollout.workflow_args.keep_greedy=true",
        ),
        (["algo.advantage=none"], "algo.advantage = 'none': learns from no reward, .* set teacher.path"),
        (["teacher.path=a", "teacher.servers=[b]"], r"teacher.servers = \['b'\]: teacher.path = 'a' is a teacher too"),
        (["teacher.path=policy"], "teacher.path = 'policy': the policy's own log-probabilities are no signal"),
        (
            ["teacher.servers=[a]", "teacher.kl_in=loss"],
            "teacher.kl_in = 'loss': servers score the sampled tokens alone",
        ),
        (["teacher.path=a", "teacher.top_k=5"], "teacher.top_k = 5: advantages know the sampled token alone; set"),
        (
            ["demonstrations.weight=0.1", "supervised.answer=answer"],
            "demonstrations.weight = 0.1: supervised.answer = 'answer' is set, and demonstrations are mixed into",
        ),
        (
            ["demonstrations={weight: 0.1, source: a, rows_per_step: 1}", "batch.updates_per_step=2"],
            "demonstrations.rows_per_step = 1: each of batch.updates_per_step = 2 needs one at least",
        ),
        (
            ["data.template_args={enable_thinking: true}", "rollout.workflow_args={enable_thinking: false}"],
            "data.template_args.enable_thinking = True: rollout.workflow_args.enable_thinking is False; leave one",
        ),
        (["teacher.hint=so"], "teacher.hint = 'so': nobody reads it; set teacher.path"),
        (["teacher.by_source={a: {path: b, servers: [c]}}"], "teacher.by_source = .*: must map sources to {path: ...}"),
        (["teacher.by_source={a: {path: policy}}"], "teacher.by_source.a.path = 'policy': the policy's own log-prob"),
        (["teacher.by_source={a: {path: b}}", "teacher.path=c"], "teacher.by_source = .*: each source's own path"),
        (
            ["teacher.servers=[a]", "generation.temperature=0.7"],
            "generation.temperature = 0.7: teacher servers compute log-probabilities at temperature 1",
        ),
        (
            ["critic.optimizer.lr=1e-5"],
            "critic: algo.advantage = 'group_norm' has no critic, .* set algo.advantage=gae, or leave the section out",
        ),
        (
            ["algo.advantage=gae", "run.steps=3", "critic.warmup_steps=3"],
            "critic.warmup_steps = 3: the policy would not be trained in any of the run.steps = 3; lower it",
        ),
        (
            ["run.steps=3", "optimizer.warmup_updates=4"],
            r"optimizer.warmup_updates = 4: the policy has only .* x batch.updates_per_step = 3 updates; lower it",
        ),
        (
            ["algo.advantage=gae", "run.steps=4", "critic.warmup_steps=2", "optimizer.warmup_updates=3"],
            r"\(run.steps - critic.warmup_steps\) x batch.updates_per_step = 2 updates; lower it",
        ),
        (
            ["supervised.answer=solution", "preference.loss=dpo"],
            "supervised.answer = 'solution': preference.loss = 'dpo' is set too, .*; leave one of them out",
        ),
        (
            ["correction.reject=k3", "correction.reject_bound=1", "correction.proximal=behavior"],
            "correction.reject = 'k3': correction.proximal = behavior makes every estimate 0; set it to off",
        ),
        *(
            (
                [*shares, f"{section}.megatron.optimizer_cpu_offload=true", "algo.advantage=gae"],
                rf"^{section}.megatron.optimizer_cpu_offload = True: with {shares[0].partition('=')[0]} = true the "
                "whole engine moves to the host .*; leave it out, or set",
            )
            for shares in (["run.offload=true"], ["rollout.colocated=true", "rollout.publication=ipc"])
            for section in ("optimizer", "critic.optimizer")
        ),
        (
            ["correction.weight=mask", "correction.proximal=behavior"],
            "correction.weight = 'mask': correction.proximal = behavior makes every weight 1; set it to off",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(load, overrides, message):
    with pytest.raises(ValueError, match=message):
        load(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [["rollout.backend=sglang"], ["rollout.publication=adapters", "rollout.interruption=abort", "lora.rank=4"]],
)
def test_a_layer_that_no_server_decodes_with_learns_with_any_server_and_publication(load, overrides):
    assert load("draft.kind=mtp", *overrides).actor.draft.kind == "mtp"


def test_cispo_can_have_no_lower_bound_and_any_upper_one_as_in_its_paper(load):
    for high in (0.28, 4.0):
        algo = load("algo.loss=cispo", "algo.clip_low=1", f"algo.clip_high={high}").algo
        assert (algo.clip_low, algo.clip_high) == (1.0, high)
    with pytest.raises(ValueError, match="clip_high = 0.0: must be at least clip_low = 1.0, or above 0"):
        load("algo.loss=cispo", "algo.clip_low=1", "algo.clip_high=0")


def test_remax_takes_a_workflow_of_whatever_name(load):
    config = load("algo.advantage=remax", "rollout.workflow=mine:GreedyBaseline", "run.import_from=[mine]")
    assert config.rollout.workflow == "mine:GreedyBaseline"


def test_computed_supports_of_the_whole_vocabulary_are_checked_as_if_nothing_were_computed(load):
    computed = "generation.supports=computed"
    load(computed, "rollout.max_staleness=1")
    load(computed, "generation.frequency_penalty=0.5", "generation.logit_bias={5: 1}")
    with pytest.raises(ValueError, match="generation.min_new_tokens = 3: replies would be sampled from a part"):
        load(computed, "generation.min_new_tokens=3")


@pytest.mark.slow
def test_boundaries_are_allowed(load):
    load("batch.prompts_per_step=2", "batch.updates_per_step=16")
    load("generation.n_samples=2")
    load("run.steps=4", "optimizer.warmup_updates=4")
    load("generation.n_samples=1", "supervised.answer=solution", "data.max_tokens=9")
    load("parallel.tensor=2", "parallel.sequence=true")
    load("generation.n_samples=1", "algo.advantage=remax", "rollout.workflow=megatron_rl.workflows:ReMaxWorkflow")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {train: p.jsonl}\n", "model.path: has no value; set it in .* or as model.path=... on the command line"),
        ("model: {path: m}\n", "data.train: has no value"),
        ("- a\n- b\n", "must hold sections such as model:, batch: and run:, not a list"),
    ],
)
def test_incomplete_file_is_refused(write, text, message):
    with pytest.raises(ValueError, match=message):
        load_config(write(text + "generation: {n_samples: 2}\n" if text.startswith(("data", "model")) else text))


def test_file_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"config = 'configs/nothing.yaml': no such file; give a config file"):
        load_config("configs/nothing.yaml")


def test_layout_must_divide_the_world():
    ParallelConfig(tensor=2, pipeline=2).check_world_size(8)
    with pytest.raises(ValueError) as error:
        ParallelConfig(tensor=2, pipeline=3).check_world_size(4)
    assert str(error.value) == (
        "parallel: tensor(2) x pipeline(3) x context(1) = 6 ranks per replica, which does not divide the world size 4. "
        "Lower one of them, or start a multiple of 6 ranks, e.g. torchrun --nproc-per-node 6."
    )
    ParallelConfig(tensor=2, pipeline=2, expert=2).check_world_size(4)
    with pytest.raises(ValueError, match=r"expert\(4\) x expert_tensor\(2\) x pipeline\(1\) = 8 ranks hold all"):
        ParallelConfig(expert=4, expert_tensor=2).check_world_size(4)


@pytest.mark.parametrize(
    ("tensor", "sequence", "expected"), [(1, None, False), (2, None, True), (2, False, False), (2, True, True)]
)
def test_sequence_parallelism_follows_the_tensor_axis(tensor, sequence, expected):
    assert ParallelConfig(tensor=tensor, sequence=sequence).sequence_parallel is expected


def test_changed_copy_is_checked_and_leaves_the_original():
    sampled = GenerationConfig(n_samples=4)
    assert sampled.new(greedy=True, n_samples=1).greedy and not sampled.greedy and sampled.n_samples == 4
    with pytest.raises(ValueError, match="generation.top_p = 2.0"):
        sampled.new(top_p=2.0)


def test_overrides_set_a_value_and_can_empty_it(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(
        "model: {path: m}\ngeneration: {n_samples: 2}\n"
        "data: {train: 'a:b', train_args: {split: train}, evaluation: 'a:b'}\n"
    )
    config = load_config(path, ["data.train_args={}", "data.evaluation=", "generation.stop=[a,b]"])
    assert (config.data.train_args, config.data.evaluation, config.generation.stop) == ({}, "", ["a", "b"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"run: {steps: 1", "x.yaml', line 1, column 15: not YAML"),
        (b"run:\n\tsteps: 1", "x.yaml', line 2, column 1: not YAML .*cannot start any token.*correct that line"),
        (b"run:\n  steps: 1\n  steps: 2", "x.yaml', line 3, column 3: not YAML .found duplicate key steps"),
        (b"run: !!python/object/apply:os.getcwd []", "x.yaml', line 1, column 6: not YAML"),
        (b"[" * 5000, "x.yaml': is nested too deeply"),
        (b"run: &a [*a]", "x.yaml': cannot be read .its aliases write out to"),
        (b"run: {seed: %s}" % (b"9" * 6000), "x.yaml': cannot be read .Exceeds the limit"),
        (b"run: {folder: \xff}", "x.yaml': cannot be read .'utf-8'"),
    ],
)
def test_broken_file_is_one_line_with_its_place(tmp_path, text, message):
    (tmp_path / "x.yaml").write_bytes(text)
    with pytest.raises(ValueError, match=message) as refused:
        load_config(tmp_path / "x.yaml")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_aliases_that_multiply_are_refused_before_they_fill_the_memory(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    (tmp_path / "x.yaml").write_text("\n".join(lines))
    with pytest.raises(ValueError, match="its aliases write out to 1,234,567,"):
        load_config(tmp_path / "x.yaml")


@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:SECRET_KEY}",
        "x-${oc.env:SECRET_KEY,none}",
        "${oc.decode:'1'}",
        "${${run.steps}:SECRET_KEY}",
        "\\${oc.env:SECRET_KEY}",
        "${ oc.env : SECRET_KEY }",
        "${oc.env:\n  SECRET_KEY}",
        "${.steps}",
    ],
)
def test_environment_does_not_get_into_a_config(load, tmp_path, monkeypatch, value):
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    (tmp_path / "x.yaml").write_text(json.dumps({"run": {"folder": value}, "model": {"path": "m"}}))
    with pytest.raises(ValueError, match="only another key of the config can stand in braces"):
        load_config(tmp_path / "x.yaml")
    with pytest.raises(ValueError, match="run.folder") as refused:
        load(f"run.folder={value}")
    assert "hunter2" not in str(refused.value)


def test_a_key_may_repeat_what_another_says_but_not_be_built_of_keys_that_are_built(load):
    assert load("run.seed=7", "run.folder=runs/seed-${run.seed}").run.folder == "runs/seed-7"
    with pytest.raises(ValueError, match="run.folder = '.*': telemetry.project is itself made of another key"):
        load("telemetry.project=${run.seed}", "run.folder=${telemetry.project}${telemetry.project}")
    with pytest.raises(ValueError, match="run.folder = '.*': Interpolation key 'run.nothing' not found"):
        load("run.folder=${run.nothing}")


def test_single_value_is_a_list_of_one(load):
    assert load("run.import_from=my_rewards").run.import_from == ["my_rewards"]
    assert load("telemetry.trace_steps=3").telemetry.trace_steps == [3]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("generation.stop=[a", "override 'generation.stop=.a': its value is not YAML"),
        ("..=3", "override '..=3': must be key=value"),
        ("=3", "override '=3': must be key=value"),
        ("run.import_from=megatron_rl.run.run_checkpoints", "what megatron_rl offers to configs needs no entry"),
        ("run.import_from=[mine,megatron_rl]", "what megatron_rl offers to configs needs no entry"),
    ],
)
def test_broken_override_is_one_line(load, override, message):
    with pytest.raises(ValueError, match=message) as refused:
        load(override)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "localhost", "ftp://host:1", "http://"])
def test_server_without_scheme_is_named_before_it_is_asked(url):
    with pytest.raises(ValueError, match=r"rollout.servers = .*must be a URL with its scheme"):
        RolloutConfig(servers=["http://127.0.0.1:30000/", url])
    with pytest.raises(ValueError, match=r"rollout.router = .*must be a URL with its scheme"):
        RolloutConfig(router=url)


def test_every_option_is_described_with_its_default_its_rule_and_the_text_below_it():
    described = {(it.section, it.key): it for it in described_options()}
    top = {name: keys for name, keys in OUR_KEYS.items() if "." not in name}
    assert list(described) == [(name, key) for name, keys in top.items() for key in keys] + [("", "megatron")]
    steps, tracing = described["run", "keep_checkpoints"], described["telemetry", "trace_steps"]
    assert (steps.type, steps.default, steps.rule) == ("int", "2", "must be at least 1")
    assert steps.doc == "Number of newest checkpoints to keep." and tracing.default == "[]"
    assert described["model", "path"].default == "required" and described["critic", "optimizer"].default == ""


def test_steps_to_record_are_numbers_and_periods(load):
    telemetry = load("telemetry.record_steps=[3, every 10]").telemetry
    assert [step for step in range(25) if telemetry.records(step, step + 1)] == [0, 3, 10, 20]
    assert telemetry.records(4, 11) and not telemetry.records(4, 10) and telemetry.records(21, float("inf"))
    assert (
        load().telemetry.record_steps == ["on_alarm"] and load("telemetry.record_steps=[]").telemetry.record_steps == []
    )


def test_servers_of_a_large_model_had_five_minutes_to_read_it(tmp_path):
    with (tmp_path / "model-00001.safetensors").open("wb") as file:
        file.truncate(470 * 10**9)  # of 235 billion parameters in bfloat16; on this disk it takes no room
    assert RolloutConfig().with_time_for(tmp_path).start_timeout_s == 2350
    assert RolloutConfig(start_timeout_s=3600).with_time_for(tmp_path).start_timeout_s == 3600
    assert RolloutConfig(start_timeout_s=60).with_time_for(tmp_path / "none").start_timeout_s == 60


def test_gdpo_has_the_recipes_weights():
    recipe = [{"reward": "a:b", "weight": 2.0, "name": "c"}, {"reward": "a:d", "weight": {"e": 0.5}}, {"reward": "a:f"}]
    config = TrainConfig(
        algo=AlgorithmConfig(advantage="gdpo"),
        rollout=RolloutConfig(recipe=recipe),
        generation=GenerationConfig(n_samples=2),
    )
    assert config.advantage_args == {"weights": {"c": 2.0, "d/e": 0.5, "f": 1.0}}
