"""Options for sampling replies, computing rewards, and the inference servers."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.config.import_path import path_of
from megatron_rl.config.rules import (
    Section,
    above,
    at_least,
    import_path,
    is_import_path,
    one_of,
    refuse,
    ruled,
    within,
)


@dataclass(kw_only=True)
class GenerationConfig(Section, name="generation"):
    """Sampling parameters for one reply. If SGLang has a field of the same name, the field has SGLang's meaning."""

    n_samples: int = at_least(1, default=1, hint="ask for one reply or more")
    """Replies sampled per prompt, i.e. the group size. Each reply is a separate request."""
    max_new_tokens: int = at_least(1, default=128, hint="set the longest reply")
    min_new_tokens: int = at_least(0, default=0)
    temperature: float = above(0, default=1.0, hint="for greedy decoding set greedy: true")
    """Sampling temperature."""
    top_p: float = within("(0, 1]", default=1.0, hint="1.0 keeps all tokens")
    """Sample from the most likely tokens, until their probabilities add up to this. RL requires top_k or `supports` =
    computed in addition. Evaluation has its own option, eval.top_p."""
    top_k: int = ruled(
        "must be -1 or at least 1", lambda top_k: top_k == -1 or top_k >= 1, default=-1, hint="-1 keeps all tokens"
    )
    """Sample from the k most likely tokens. In RL, servers then report which tokens each token was sampled from, and
    the trainer's log-probabilities are over these, also for top_p, min_p and min_new_tokens. RL requires -1 or 2 to
    256. Each token of a batch then takes 8 x top_k bytes more."""
    min_p: float = within("[0, 1]", default=0.0, hint="0.0 keeps all tokens")
    """Exclude tokens that are less likely than this fraction of the most likely token's probability. RL requires top_k
    or `supports` = computed in addition."""
    supports: str = one_of("reported", "computed", default="reported")
    """How the trainer learns which tokens top_k, top_p and min_p did not exclude. reported: servers report them, which
    needs top_k. computed: the trainer applies these options to its own logits, in an additional forward pass per step.
    This needs a synchronous run, but neither top_k nor particular servers, and works behind a router. A sampled token
    that the trainer would have excluded is kept (`mismatch/outside_support`)."""
    repetition_penalty: float = within("(0, 2]", default=1.0, hint="1.0 changes nothing")
    """Divide the logits of tokens that the reply already has by this number, or multiply them if they are negative.
    The prompt's tokens do not count, as with SGLang. Each token of a batch then takes 24 x top_k bytes more, or 8 x
    top_k with only the next three options. Without top_k, it takes 16 bytes (or 8) for every token whose logit may
    change: max_new_tokens of them if a penalty is set, plus the tokens with a bias. RL allows at most 1023 of them.
    With SGLang, RL requires that the next two options are 0. These four options hold for evaluations too."""
    frequency_penalty: float = within("[-2, 2]", default=0.0, hint="0.0 changes nothing")
    """Subtract this number from a token's logit for each time that the reply already has the token."""
    presence_penalty: float = within("[-2, 2]", default=0.0, hint="0.0 changes nothing")
    """Subtract this number once from the logits of tokens that the reply already has."""
    logit_bias: dict[int, float] = ruled(
        "must map token ids to numbers from -100 to 100", lambda bias: all(map(is_bias, bias.items())), default={},
        hint="for example {151643: -5.0}",
    )  # fmt: skip
    """Add these numbers to the logits of tokens, after all penalties."""
    greedy: bool = False
    """Always take the most likely token."""
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    seed: int | None = None
    """Sampling seed. null: each request's seed is derived from the run's or, if it has none, chosen by the server."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_new_tokens > self.max_new_tokens:
            self.refuse("min_new_tokens", f"must be in [0, max_new_tokens = {self.max_new_tokens}]; lower it")

    @property
    def support_size(self) -> int:
        """Maximum number of tokens of a support, if servers report supports; else 0."""
        # Twice top_k, because some samplers keep all tokens that are as likely as the last one.
        return 2 * self.top_k if self.supports == "reported" and 1 < self.top_k <= MOST_REPORTED else 0

    @property
    def computed_size(self) -> int:
        """Maximum number of tokens of a support, if the trainer computes supports; else 0."""
        if self.supports != "computed" or (self.top_k == -1 and self.top_p == 1.0 and self.min_p == 0.0):
            return 0
        # The sampled token may be one more than top_k.
        return MOST_COMPUTED if self.top_k == -1 else min(self.top_k + 1, MOST_COMPUTED)

    @property
    def counts_tokens(self) -> bool:
        """True if logits depend on how often the reply already has a token."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def mixes_penalties(self) -> bool:
        """True if logits depend on the order of penalties: of the one that scales and those that are subtracted."""
        return self.repetition_penalty != 1.0 and (self.frequency_penalty != 0.0 or self.presence_penalty != 0.0)

    @property
    def adjustment_size(self) -> int:
        """Number of values that describe the change of a support token's logit (megatron_rl/support.py); 0 if none."""
        if self.repetition_penalty != 1.0:
            return 3
        return int(self.counts_tokens or bool(self.logit_bias))

    @property
    def changed_size(self) -> int:
        """Places of a row for the tokens whose logits change (megatron_rl/support.py); 0 if a support stores them."""
        if not self.adjustment_size or self.support_size or self.computed_size:
            return 0
        return 1 + len(self.logit_bias) + (self.max_new_tokens if self.counts_tokens else 0)

    def unrestricted(self) -> GenerationConfig:
        """Return a copy that samples from the whole distribution at its temperature."""
        return self.new(top_k=-1, top_p=1.0, min_p=0.0, min_new_tokens=0, supports="reported", **UNADJUSTED)

    def new(self, **changes: Any) -> GenerationConfig:
        """Return a copy with some fields replaced, e.g. `gconfig.new(greedy=True)`."""
        return dataclasses.replace(self, **changes)


MOST_REPORTED = 256
"""Maximum top_k for which servers report the tokens that they sampled from."""
MOST_CHANGED = 1024
"""Maximum of GenerationConfig.changed_size in RL."""
MOST_COMPUTED = 512
"""Maximum size of a support that the trainer computes. Tokens that were sampled from more are trained with
log-probabilities over the whole vocabulary."""
TP = ("--tp", "--tp-size", "--tensor-parallel-size")
PP = ("--pp-size", "--pipeline-parallel-size")
DP = ("--dp-size", "--dp", "--data-parallel-size")
ATTENTION_DP = ("--attn-dp-size",)
"""SGLang's option names for tensor, pipeline and data parallelism, and for data parallelism of attention alone."""
LOADED_BYTES_PER_S = 0.2e9
"""Assumed read speed of weights from a file system that many servers read at the same time."""
UNADJUSTED: dict[str, Any] = dict(repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0, logit_bias={})
"""The options of `generation` that change logits, with the values that change none."""
COUNTS_LATE = (
    "SGLang's overlapped scheduler and its speculative decoding count the tokens of a reply late, by how they batch "
    "requests, so nobody knows what the penalties changed"
)
NO_ORDER = (
    "SGLang without its overlapped scheduler applies a repetition_penalty before, between or after the other two "
    "penalties, differently in each process, so nobody knows what they changed"
)
FORGETS_COUNTS = (
    "with rollout.interruption = retract, SGLang forgets which tokens a reply already has when weights are published, "
    "so nobody knows what the penalties changed"
)
URL_RULE = "must be a URL with its scheme, such as http://127.0.0.1:30000; correct it"


def is_bias(entry: tuple[Any, Any]) -> bool:
    token, bias = entry
    is_number = type(bias) in (int, float) and -100 <= bias <= 100  # false for NaN
    return type(token) is int and 0 <= token < 2**31 and is_number


def is_url(text: str) -> bool:
    return re.fullmatch(r"https?://[^/\s]\S*", text) is not None


def shape_refusal(publication: str, *, replicas: int, stages: int, nodes: int) -> str:
    """Explain why a server of this shape cannot receive weights through `publication`, and how to fix it.

    Returns "" if it can. replicas: copies of the weights, i.e. the data-parallel size without DP attention.
    """
    by_ranks = "SGLang numbers the ranks of a weight update by tensor parallelism alone"
    if replicas > 1 and publication != "disk":
        instead = "take --attn-dp-size instead (before SGLang 0.5.23, add --enable-dp-attention)"
        return f"--dp-size {replicas}: {by_ranks}; {instead}, or set rollout.publication=disk."
    if stages > 1 and publication != "disk":
        return f"--pp-size {stages}: {by_ranks}; take --tp-size alone, or set rollout.publication=disk."
    one_host = {
        "ipc": "one host shares the memory of ipc",
        "delta": "delta has been tried with servers on one host only",
    }
    if nodes > 1 and publication in one_host:
        return f"--nnodes {nodes}: {one_host[publication]}; set rollout.publication=group."
    return ""


def is_part_of_a_recipe(part: dict[str, Any]) -> bool:
    weight = part.get("weight", 1.0)
    weights = weight.values() if isinstance(weight, dict) else [weight]
    is_number = all(isinstance(each, int | float) and math.isfinite(each) for each in weights)
    is_known = set(part) <= {"reward", "weight", "args", "name"} and isinstance(part.get("args", {}), dict)
    return is_known and is_number and is_import_path(str(part.get("reward", "")))


@dataclass(kw_only=True)
class RolloutConfig(Section, name="rollout"):
    """Workflow and rewards of episodes, the servers, and how far sampling may run ahead of training."""

    workflow: str = import_path(default="megatron_rl.workflows:RLVRWorkflow")
    """Import path of a RolloutWorkflow class. Its arguments are reward_fn, gconfig, tokenizer and workflow_args."""
    workflow_args: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments for the workflow."""
    reward: str = import_path(default="megatron_rl.rewards:exact_match")
    """Import path of a function `reward(prompt, completions, prompt_ids, completion_ids, **data)`. It returns a float,
    or a dict of parts whose sum is the reward. Python code that starts a run may also pass the function itself."""
    recipe: list[dict[str, Any]] = field(default_factory=list)
    """Rewards whose weighted sum replaces `reward`, each as `{reward: import path, weight: 1.0, args: {}, name: NAME}`.
    The metric `rollout/reward/NAME` is the mean of that reward. NAME is by default the path's part after the colon."""
    reward_workers: int = at_least(1, default=4)
    """Maximum number of worker processes that compute rewards at the same time, for each rollout process."""
    servers: list[str] = ruled(f"each {URL_RULE}", lambda urls: all(map(is_url, urls)), default=[])
    """URLs of running SGLang or embedded servers. Empty: start `server_count` servers of `backend` on this host."""
    registry: str = ""
    """Shared folder in which servers register for this run. The run itself starts none, and begins once `server_count`
    servers have registered. Servers may join and leave later. Start each with `megatron-rl serve MODEL --register
    FOLDER --run NAME`, where NAME is the last part of run.folder."""
    router: str = ruled(URL_RULE, lambda url: not url or is_url(url), default="")
    """URL of an SGLang router (sglang-router 0.3), which picks a server per request. The run registers its servers."""
    backend: str = one_of("auto", "embedded", "sglang", default="auto")
    """Kind of the servers that the run starts. auto: sglang if CUDA is available, and embedded otherwise."""
    server_count: int = at_least(1, default=1)
    exact: bool = False
    """Trainer and servers compute the same bits, so that `mismatch/equal` is 1 for replies of the current weights. Use
    this to look for errors, as a step takes longer. It needs a CPU, `backend` embedded, model.dtype float32 and a model
    without experts, and neither tensor nor context parallelism nor adapters."""
    server_restarts: int = at_least(0, default=3, hint="0 restarts none")
    """Maximum number of restarts of a server that the run started and that died or hangs. After that, the run gives up
    on the server. Once a server has run for ten minutes, its earlier restarts no longer count."""
    health_timeout_s: float = above(0, "seconds", default=120.0)
    """Seconds without a sign of life (an answer to /health_generate) after which a server counts as hung and gets no
    more requests. If this run started the server, it is killed and restarted."""
    server_args: list[str] = field(default_factory=list)
    """Extra command-line arguments for each server that the run starts, such as its parallelism: `[--tp, 8]`. If a
    server needs more GPUs than one node has, Slurm's launcher spreads it over several nodes. Arguments that quantize
    weights are refused, because quantized weights cannot be updated. `--pp-size`, and `--dp-size` that is not for DP
    attention, need publication = disk."""
    token_file: str = ""
    """File of mode 600 with the servers' access token, created if it does not exist. Empty: `token` in run.folder or,
    with `registry`, RUN.token in that folder, where RUN is the last part of run.folder. Give the same file to servers
    that you start yourself (`megatron-rl serve --token-file`), or start SGLang with --api-key and the file's key."""
    devices: list[str] = field(default_factory=list)
    """GPUs of this host for the started servers, as in CUDA_VISIBLE_DEVICES. Each server takes as many as its
    parallelism in server_args needs. Empty: `megatron-rl launch` chooses them. Without `launch`, `colocated` servers
    take the first GPUs of their node, and other servers see those of the trainer's first rank."""
    colocated: bool = False
    """Trainer and started servers take turns on the same devices. While the trainer works, servers hold no weights and
    no KV cache. While servers generate, the trainer's models wait in host memory. Only synchronous runs can be
    colocated. The `server_count` servers are split evenly among several nodes, and none spans two of them."""
    max_concurrent_episodes: int = at_least(1, default=256)
    """Maximum number of episodes in progress in each rollout process. A data-parallel replica has one process."""
    max_staleness: int = at_least(0, default=0, hint="0 is synchronous")
    """Maximum number of policy versions between sampling and training; 0 is synchronous. A step publishes one version,
    regardless of its number of updates."""
    stale: str = one_of("drop", "mask", "keep", default="drop")
    """Treatment of a finished group if some of its tokens are older than max_staleness allows, because a reply took
    longer than that many steps. drop: discard the group and sample its prompt again. mask: train only the newer tokens
    of the group, and drop a group without newer tokens. keep: train all tokens."""
    cut_off: str = one_of("train", "mask", default="train")
    """Treatment of replies cut off at generation.max_new_tokens, and of dialogues that outgrew their context. train:
    train them with the reward they earned. mask: do not train them, but count them in their group's statistics
    (overlong filtering, arXiv 2503.14476). A prompt whose group has nothing left to train is replaced."""
    max_uniform_resamples: int = within("[0, 50]", default=0, hint="DAPO takes 10")
    """Dynamic sampling (DAPO): replace groups whose rewards are all equal with groups of other prompts, at most this
    many times the step's number of groups. Beyond this limit they are trained. 0 replaces none. The option is refused
    if something learns from groups with equal rewards, such as a teacher, a KL term or marked tokens."""
    oversample: float = within("[1, 2]", default=1.0)
    """Oversampling factor of synchronous runs. A step starts this factor times the episodes that it needs, and trains
    on the first ones to finish. The next step begins with the prompts of the others, and waits for them. Their replies
    resume where they stopped if `stale` is mask or keep, and start over if it is drop."""
    interruption: str = one_of("abort", "retract", "in_place", default="retract")
    """How running replies are interrupted for new weights, after which they continue. abort: end the requests, and
    send the tokens so far again in new ones. retract: put the replies back into the server's queue. in_place: pause the
    replies and keep their KV cache, which was computed with the old weights."""
    part_tokens: int = at_least(0, "tokens", default=0, hint="0 requests whole replies")
    """Request a long reply in several parts of at most this many tokens, from the server that holds the KV cache of the
    earlier parts. If a server dies, only the current part is lost, not the whole reply. Parts are meant for replies
    that take minutes. Replies with `generation.stop`, a JSON schema or a forced tool are always requested whole."""
    max_cache_age: int = at_least(0, default=0)
    """Number of publications that a server's prefix cache may survive. 0 flushes the cache at each publication."""
    request_timeout_s: float = above(0, "seconds", default=600.0)
    """Timeout for replies of at most 6,000 tokens, proportionally longer for a larger generation.max_new_tokens. The
    default allows for 10 tokens per second. Time without a server, or with paused servers, does not count. A server
    that returns no reply within the timeout must generate a test token before it gets more requests."""
    control_timeout_s: float = above(0, "seconds", default=60.0)
    """Timeout for pausing a server, letting it continue or flushing its cache. If it hangs, publications wait."""
    start_timeout_s: float = above(0, "seconds", default=300.0)
    """Timeout for starting a server, and for loading or comparing all or part of its weights. If it takes longer to
    read the weights at an assumed 0.2 GB per second, the timeout is that time."""
    publication: str = one_of("group", "ipc", "delta", "disk", "adapters", default="group")
    """How new weights reach the servers. `group`: through a process group (NCCL or gloo). `ipc`: through memory that
    the run's first rank or, with `colocated`, one rank of each node shares with the servers on its host (CUDA IPC or
    /dev/shm). `delta`: over HTTP, and only the changes since the last publication, for slow links; the first rank's
    host keeps a copy of the weights. `disk`: through a folder under run.folder. `adapters`: through such a folder too,
    but only the `lora` adapters, which servers apply on top of the model. What `servers` need that the run does not
    start: with `disk` and `adapters`, access to the folder; with `adapters`, also the options --enable-lora,
    --max-lora-rank and --lora-target-modules; with `delta`, in case of SGLang, an installed megatron_rl and the option
    --custom-weight-loader megatron_rl.weights.sglang_loaders.load_changes."""
    bucket_bytes: int = at_least(1 << 20, "bytes", default=1 << 28, hint="1073741824 suits models above 10B")
    """With `group` and `ipc`, size of a bucket, the weights that a rank sends at a time. A sending rank holds two
    buckets, a server's rank one per sender. Each bucket costs one request to every server."""
    episode_attempts: int = at_least(1, default=3)
    """Maximum number of attempts at an episode. After that, its prompt is given up and counted as failed."""
    max_infrastructure_failures: float = within("(0, 1]", default=0.5, hint="1 never stops the run")
    """Largest share of recent attempts at a sample that may fail with an InfrastructureFailure, because a container,
    service, worker or server is gone. Recent means the last 256 attempts or, if there were more, those of the last
    minute. Above this share the run stops and names the failures. It can then be resumed."""
    journal_replies: bool = False
    """For runs with checkpoints: also write finished replies of unfinished episodes to the journal, so that a killed
    run keeps them, and not only finished groups. Useful for long replies and many turns, but doubles the journal."""

    def __post_init__(self) -> None:
        # Before the fields' own rules, which accept only import paths: Python code may pass functions here.
        self.reward = path_of(self.reward, key="rollout.reward")
        for number, part in enumerate(self.recipe):
            key = f"rollout.recipe[{number}]"
            if "reward" in part:
                self.recipe[number] = part = {**part, "reward": path_of(part["reward"], key=f"{key}.reward")}
            if not is_part_of_a_recipe(part):
                may_have = "weight: a number or those of its parts, args: {} and name"
                refuse(key, part, f"must be {{reward: package.module:name}} with, if you like, {may_have}")
        super().__post_init__()
        if self.registry and self.servers:
            self.refuse("registry", "must be empty where rollout.servers names them; give one of the two")
        if any("api-key" in argument for argument in self.server_args):
            # The value is not shown, because errors end up in logs.
            rule = "names a key, which every user of the host could see; put it into the file rollout.token_file"
            refuse("rollout.server_args", "...", rule)
        if self.interruption == "in_place" and self.max_cache_age == 0:
            rule = "must be at least 1 with rollout.interruption = in_place, which keeps the cache"
            self.refuse("max_cache_age", rule)
        if self.publication == "adapters" and self.interruption != "abort":
            rule = "must be abort with rollout.publication = adapters: SGLang changes no adapter that a reply uses"
            self.refuse("interruption", rule)
        if self.oversample > 1 and self.max_staleness > 0:
            self.refuse("oversample", "must be 1 where max_staleness > 0, which runs ahead as it is")
        if self.colocated:
            self._refuse_colocation_that_cannot_be()
        if self.exact and (self.backend == "sglang" or not self.starts_servers):
            why = f"rollout.backend = {self.backend}" if self.starts_servers else "servers that the run does not start"
            self.refuse("exact", f"needs embedded servers that the run starts, and there is {why}; leave it out")
        if self.devices and not (self.starts_servers and len(self.devices) == self.server_gpus):
            servers = f"rollout.server_count({self.server_count}) x --tp({self.gpus_per_server}) GPUs for servers"
            self.refuse("devices", f"must name {servers} that this run starts; name as many, or leave the key out")

    def _refuse_colocation_that_cannot_be(self) -> None:
        for key in ("servers", "registry", "router"):
            if value := getattr(self, key):
                rule = f"needs servers that this run starts, and rollout.{key} = {value!r}; empty it"
                self.refuse("colocated", rule)
        if self.max_staleness > 0:
            both = f"trainer and servers take turns, and rollout.max_staleness = {self.max_staleness} has both work at"
            self.refuse("colocated", f"{both} once; set it to 0, or give servers devices of their own")
        if self.publication in ("delta", "adapters"):
            rule = f"servers keep no weights that rollout.publication = {self.publication} could change; set it to ipc"
            self.refuse("colocated", rule)

    def check_for_gpus(self) -> None:
        """Raise ValueError for options that do not work on GPUs."""
        if self.exact:
            self.refuse("exact", "computes on a CPU alone, and this machine has GPUs; leave it out")
        if self.colocated and self.publication == "group":
            rule = "NCCL takes a GPU once, and rollout.colocated = true has a server on the trainer's"
            self.refuse("publication", f"{rule}; set rollout.publication=ipc")

    def check_share(self, nodes: int, gpus: int) -> None:
        """Raise ValueError if the colocated servers cannot be split evenly over several nodes with `gpus` GPUs each."""
        share, rest = divmod(self.server_count, nodes)
        if nodes > 1 and (rest or (gpus and share * self.gpus_per_server > gpus)):
            each = f"each of {nodes} nodes of {gpus} GPUs starts as many, of --tp({self.gpus_per_server}) GPUs"
            why = "hands them their weights and starts them again, so none is on several"
            rule = f"with rollout.colocated = true {each}, and the node's first rank {why}"
            self.refuse("server_count", f"{rule}; correct it, or give servers nodes of their own")
        if nodes > 1 and self.devices:
            self.refuse("devices", f"must be left out with {nodes} nodes: servers share the first GPUs of each")

    def check_servers(self) -> None:
        """Raise ValueError for server_args that make weight updates impossible."""
        for option in ("--quantization", "--modelopt-quant", "--torchao-config"):
            if (value := self.server_option(option)) and value != "unquant":
                rule = "quantizes the servers' weights, into which a run publishes others in model.dtype"
                raise ValueError(f"rollout.server_args: {option} {value}: {rule}; leave it out.")
        parts, ranks = self.attention_replicas, self._server_size(TP)
        if ranks % parts:
            option = "--attn-dp-size" if self.server_option(*ATTENTION_DP) else "--dp-size"
            rule = f"DP attention shares out the --tp {ranks} ranks, and {ranks} / {parts} is no whole number"
            raise ValueError(f"rollout.server_args: {option} {parts}: {rule}; correct one of them.")
        if self._server_size(ATTENTION_DP) > 1 and self._server_size(DP) > 1:
            both = f"--attn-dp-size {parts} with --dp-size {self._server_size(DP)}"
            raise ValueError(f"rollout.server_args: {both}: SGLang takes one of them; leave --dp-size out.")
        replicas = 1 if self.has_dp_attention else self._server_size(DP)
        shape = {"replicas": replicas, "stages": self._server_size(PP), "nodes": self.nodes_per_server}
        if why := shape_refusal(self.publication, **shape):
            raise ValueError(f"rollout.server_args: {why}")

    def with_time_for(self, model_folder: str | Path) -> RolloutConfig:
        """Return a copy with start_timeout_s raised, if needed, to the time that loading this model's weights takes."""
        nbytes = sum(file.stat().st_size for file in Path(model_folder).glob("*.safetensors"))
        return dataclasses.replace(self, start_timeout_s=max(self.start_timeout_s, nbytes / LOADED_BYTES_PER_S))

    @property
    def starts_servers(self) -> bool:
        """True if the run starts its servers itself."""
        return not (self.servers or self.registry)

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the recipe's reward parts. Keys are names in the recipe, or NAME/PART for rewards with parts."""
        found: dict[str, float] = {}
        for part in self.recipe:
            name, weight = part.get("name", str(part["reward"]).partition(":")[2]), part.get("weight", 1.0)
            found |= (
                {f"{name}/{key}": own for key, own in weight.items()} if isinstance(weight, dict) else {name: weight}
            )
        return found

    @property
    def gpus_per_server(self) -> int:
        """GPUs per server over all its nodes: --tp x --pp in server_args, times --dp unless for attention alone."""
        gpus = self._server_size(TP) * self._server_size(PP)
        return gpus if self.has_dp_attention else gpus * self._server_size(DP)

    @property
    def nodes_per_server(self) -> int:
        """Value of --nnodes in server_args; 0 if it is not given."""
        return self._server_size(("--nnodes",)) if self.server_option("--nnodes") else 0

    @property
    def has_dp_attention(self) -> bool:
        return self._server_size(ATTENTION_DP) > 1 or "--enable-dp-attention" in self.server_args

    @property
    def attention_replicas(self) -> int:
        """Data-parallel attention replicas of one server: --attn-dp-size, or --dp-size with --enable-dp-attention."""
        if (parts := self._server_size(ATTENTION_DP)) > 1:
            return parts
        return self._server_size(DP) if self.has_dp_attention else 1

    def _server_size(self, names: tuple[str, ...]) -> int:
        given = self.server_option(*names) or "1"
        if not given.isdecimal() or int(given) < 1:
            raise ValueError(f"rollout.server_args: {names[0]} {given}: must be a number of at least 1; correct it.")
        return int(given)

    @property
    def server_gpus(self) -> int:
        """Total GPUs of all started servers."""
        return self.server_count * self.gpus_per_server

    def server_option(self, *names: str) -> str | None:
        """Return the value of the last of these options in server_args (`--tp 2` or `--tp=2`); None if missing.

        A later option overrides an earlier one, as in the server's own parser.
        """
        for word, following in reversed([*itertools.zip_longest(self.server_args, self.server_args[1:])]):
            name, equals, value = word.partition("=")
            if name in names:
                return value if equals else following
        return None


@dataclass(kw_only=True)
class ReuseConfig(Section, name="reuse"):
    """Solved groups are trained again, in addition to each step's fresh groups, to which alone rollout.max_staleness
    applies. Reused tokens keep their log-probabilities and policy versions, and `correction` reweights them."""

    groups_per_step: int = at_least(0, default=0, hint="0 reuses none")
    """Maximum number of groups reused per step over all ranks, in addition to the batch.prompts_per_step fresh ones."""
    buffer_groups: int = at_least(1, default=256)
    """Size of the buffer of solved groups, over all ranks. The buffer keeps the newest solved group of each prompt. If
    it is full, the oldest groups are removed first."""
    max_age_steps: int = at_least(1, default=16)
    """Maximum age of a reused group in steps. The journal keeps its files for this many more steps."""
    solved_reward: float = 1.0
    """A group counts as solved if at least one sample has this reward or more, and the rewards are not all equal."""
