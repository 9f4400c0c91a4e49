"""Options for sampling replies, computing rewards, and the inference servers."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.config.given import path_of
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
    """Sampling parameters for one reply. Names and meanings follow SGLang where it has the same field."""

    n_samples: int = at_least(1, default=1, hint="ask for one reply or more")
    """Replies sampled per prompt, i.e. the group size. Each reply is a separate request."""
    max_new_tokens: int = at_least(1, default=128, hint="set the longest reply")
    min_new_tokens: int = at_least(0, default=0)
    temperature: float = above(0, default=1.0, hint="for greedy decoding set greedy: true")
    """Must be above 0. For greedy decoding set `greedy`, not temperature 0."""
    top_p: float = within("(0, 1]", default=1.0, hint="1.0 keeps all tokens")
    """Must be 1.0 in RL: the trainer's log-probabilities cover the whole vocabulary. For evaluation see eval.top_p."""
    top_k: int = ruled(
        "must be -1 or at least 1", lambda top_k: top_k == -1 or top_k >= 1, default=-1, hint="-1 keeps all tokens"
    )
    """-1 keeps all tokens and is required in RL, for the same reason as top_p = 1.0."""
    greedy: bool = False
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    seed: int | None = None
    """Sampling seed of this request. None: derived per request if the run has a seed, else chosen by the server."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_new_tokens > self.max_new_tokens:
            self.refuse("min_new_tokens", f"must be in [0, max_new_tokens = {self.max_new_tokens}]; lower it")

    def new(self, **changes: Any) -> GenerationConfig:
        """Return a copy with some fields replaced, e.g. `gconfig.new(greedy=True)`."""
        return dataclasses.replace(self, **changes)


TP = ("--tp", "--tp-size", "--tensor-parallel-size")
PP = ("--pp-size", "--pipeline-parallel-size")
DP = ("--dp-size", "--dp", "--data-parallel-size")
"""SGLang's option names for tensor, pipeline and data parallelism."""
BY_RANKS = "SGLang numbers the ranks of a weight update by tensor parallelism alone"
LOADED_BYTES_PER_S = 0.2e9
"""Assumed read speed of weights from a file system that many servers read at the same time."""
URL_RULE = "must be a URL with its scheme, such as http://127.0.0.1:30000; correct it"


def is_url(text: str) -> bool:
    return re.fullmatch(r"https?://[^/\s]\S*", text) is not None


def shape_refusal(publication: str, *, replicas: int, stages: int, nodes: int) -> str:
    """Explain why a server of this shape cannot receive weights through `publication`, and how to fix it.

    Returns "" if it can. replicas: copies of the weights, i.e. the data-parallel size without DP attention.
    """
    over_nodes = ("group", "disk", "adapters")
    for option, size, ways, why in (
        ("--dp-size", replicas, ("disk",), f"{BY_RANKS}; add --enable-dp-attention, or set rollout.publication=disk."),
        ("--pp-size", stages, ("disk",), f"{BY_RANKS}; take --tp-size alone, or set rollout.publication=disk."),
        ("--nnodes", nodes, over_nodes, "one host shares the memory of ipc; set rollout.publication=group."),
    ):
        if size > 1 and publication not in ways:
            return f"{option} {size}: {why}"
    return ""


def is_part_of_a_recipe(part: dict[str, Any]) -> bool:
    weight = part.get("weight", 1.0)
    weights = weight.values() if isinstance(weight, dict) else [weight]
    is_number = all(isinstance(each, int | float) and math.isfinite(each) for each in weights)
    is_known = set(part) <= {"reward", "weight", "args", "name"} and isinstance(part.get("args", {}), dict)
    return is_known and is_number and is_import_path(str(part.get("reward", "")))


@dataclass(kw_only=True)
class RolloutConfig(Section, name="rollout"):
    """Workflow and rewards of the episodes, the servers that generate replies, and how far sampling may run ahead."""

    workflow: str = import_path(default="megatron_rl.workflows:RLVRWorkflow")
    """Import path of a RolloutWorkflow. It is constructed with reward_fn, gconfig, tokenizer and workflow_args."""
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward: str = import_path(default="megatron_rl.rewards:exact_match")
    """Import path of `reward(prompt, completions, prompt_ids, completion_ids, **data)`. It returns a float, or a dict
    of parts whose sum is the reward. Python code may also pass the function itself, from a module or from the running
    program."""
    recipe: list[dict[str, Any]] = field(default_factory=list)
    """Weighted sum of rewards, replacing `reward`. Entries: `{reward: import path, weight: 1.0, args: {}, name: NAME}`.
    NAME defaults to the part of the path after the colon.

    The mean of each part is reported as the metric `rollout/reward/NAME`.
    """
    reward_workers: int = at_least(1, default=4)
    """Maximum number of worker processes that compute rewards at the same time, per rollout process."""
    servers: list[str] = ruled(f"each {URL_RULE}", lambda urls: all(map(is_url, urls)), default=[])
    """URLs of running SGLang or embedded servers. Empty: start `server_count` servers of `backend` on this host."""
    registry: str = ""
    """Shared folder in which servers register for this run. Servers may join and leave during the run.

    Start them with `megatron-rl serve MODEL --register FOLDER --run NAME`, where NAME is the last part of run.folder.
    The run begins once `server_count` servers have registered, and starts none itself.
    """
    router: str = ruled(URL_RULE, lambda url: not url or is_url(url), default="")
    """URL of an SGLang router (sglang-router 0.3), which picks a server per request. The run registers its servers
    there."""
    backend: str = one_of("auto", "embedded", "sglang", default="auto")
    """embedded, sglang or auto. auto uses sglang if CUDA is available, and embedded otherwise."""
    server_count: int = at_least(1, default=1)
    server_restarts: int = at_least(0, default=3, hint="0 restarts none")
    """How often a server that died or hangs is restarted before the run gives up on it. Applies to servers that the run
    started. The count is reset once a server stays up."""
    health_timeout_s: float = above(0, "seconds", default=120.0)
    """Seconds without a sign of life after which a server counts as hung and gets no more requests.

    A server that this run started is killed and restarted if it does not answer /health_generate for this long.
    """
    server_args: list[str] = field(default_factory=list)
    """Extra command-line arguments for each started server, such as its parallelism: `[--tp, 8]`.

    Slurm's launcher spreads a server over several nodes if it needs more GPUs than one node has. Quantized weights
    cannot be updated. Servers with `--pp-size`, or with `--dp-size` but no `--enable-dp-attention`, support
    publication=disk only.
    """
    token_file: str = ""
    """File with mode 600 that holds the servers' access token. It is created if it does not exist.

    Empty: the file `token` in run.folder, or RUN.token in the registry folder. Give the same file to servers that you
    start yourself (`megatron-rl serve --token-file`). For a server with SGLang's --api-key, the file must contain that
    key.
    """
    devices: list[str] = field(default_factory=list)
    """GPUs of this host for the started servers, as in CUDA_VISIBLE_DEVICES. Each server takes as many as its --tp.

    Empty: `megatron-rl launch` chooses them. Without it, `colocated` servers take the first GPUs of their node, and
    other servers see the same GPUs as the trainer's first rank.
    """
    colocated: bool = False
    """Trainer and started servers take turns on the same devices. Servers hold no weights and no KV cache while the
    trainer works; the trainer's models wait in host memory while servers generate. Synchronous runs only.

    With several nodes, each node has the same share of the `server_count` servers, and no server spans two nodes.
    """
    max_concurrent_episodes: int = at_least(1, default=256)
    max_staleness: int = at_least(0, default=0, hint="0 is synchronous")
    """Maximum number of policy versions between sampling and training; 0 is synchronous. A step publishes one version,
    regardless of its number of updates."""
    stale: str = one_of("drop", "mask", "keep", default="drop")
    """What to do with a group if one of its tokens exceeds max_staleness when it is due for training. drop: discard it
    and sample its prompt again. mask: do not train those tokens, and drop a group that has no others. keep: train them.
    This is rare, because the admission of episodes already limits staleness; it affects replies that take longer than
    max_staleness steps."""
    cut_off: str = one_of("train", "mask", default="train")
    """What to do with replies cut off at generation.max_new_tokens, and dialogues that outgrew their context. train:
    train them with the reward they earned. mask: do not train them, but still count them in the group's statistics
    (overlong filtering, arXiv 2503.14476). A prompt with nothing left to train is replaced by another one."""
    max_uniform_resamples: int = within("[0, 50]", default=0, hint="DAPO takes 10")
    """Dynamic sampling (DAPO): replace groups whose rewards are all equal with groups of other prompts. The limit is
    this many times the groups of a step; groups beyond it are trained unchanged. 0 replaces none. Refused together with
    anything that learns from such groups: a teacher, a KL term, positive trajectories or marked tokens."""
    oversample: float = within("[1, 2]", default=1.0)
    """Oversampling factor of synchronous runs: a step starts this factor times the episodes that it needs, and trains
    on the first ones to finish. The next step begins with the prompts of the unfinished episodes, and waits for them.
    With `stale` = mask or keep, their replies resume where they stopped. With `stale` = drop they restart, because drop
    trains no token of an earlier version."""
    interruption: str = one_of("abort", "retract", "in_place", default="retract")
    """What happens to running replies when new weights arrive. All of them continue afterwards.

    abort: end them and send their tokens again as a new request. retract: put them back into the server's queue.
    in_place: pause them and keep their KV cache, which was computed with the old weights.
    """
    part_tokens: int = at_least(0, "tokens", default=0, hint="0 requests whole replies")
    """Request a reply in parts of at most this many tokens. Each part is a request to the server that holds the KV
    cache of the parts before. If a server dies, only the current part is lost. A reply without parts would have to
    start over. Meant for replies that take minutes. Replies with `generation.stop`, a JSON schema or a forced tool are
    always requested whole."""
    max_cache_age: int = at_least(0, default=0)
    """Number of weight publications that a server's prefix cache may survive; 0 flushes it at each one."""
    request_timeout_s: float = above(0, "seconds", default=600.0)
    """Timeout for a reply of at most 6,000 tokens, and proportionally longer for longer replies. The default allows for
    10 tokens per second. Time without a server, or with paused servers, does not count.

    A server that returns no reply at all for this long must first generate one test token before it gets more requests.
    """
    control_timeout_s: float = above(0, "seconds", default=60.0)
    """Timeout for a server's pause, continue or flush command. A hanging command delays a publication this long."""
    start_timeout_s: float = above(0, "seconds", default=300.0)
    """Timeout for starting a server, and for requests that load or compare all or part of its weights. It is extended
    if the weights take longer to read at 0.2 GB per second."""
    publication: str = one_of("group", "ipc", "delta", "disk", "adapters", default="group")
    """How new weights reach the servers. `group`: a process group (NCCL or gloo). `ipc`: memory shared with a rank on
    the same host (CUDA IPC or /dev/shm), which is the first rank, or with `colocated` one rank of each node. `delta`:
    only the changes since the last publication, over HTTP, for slow links. `disk`: a folder under run.folder.
    `adapters`: such a folder with only the `lora` adapters, which servers apply on top of the model's own weights.

    Servers listed in `servers` must be able to read that folder. For adapters they must be started with --enable-lora,
    --max-lora-rank and --lora-target-modules. delta keeps a copy of the weights on the first rank's host. An SGLang
    server that this run does not start then needs megatron_rl installed and the option --custom-weight-loader
    megatron_rl.weights.sglang_loaders.load_changes.
    """
    bucket_bytes: int = at_least(1 << 20, "bytes", default=1 << 28, hint="1073741824 suits models above 10B")
    """Bytes of weights that a rank sends at a time with `group` and `ipc`. A sending rank holds two such buckets, one
    being filled and one in flight. A server's rank holds one bucket per sender. Each bucket costs one request to every
    server."""
    episode_attempts: int = at_least(1, default=3)
    """Attempts of an episode before its prompt is given up and counted as failed."""
    max_infrastructure_failures: float = within("(0, 1]", default=0.5, hint="1 never stops the run")
    """Largest share of recent sample attempts that may fail with an InfrastructureFailure: a container, service, worker
    or server is gone, and the policy is not at fault. Recent means the last 256 attempts, or those of the last minute
    if that is more. Above this share the run stops and names the failures; it can be resumed from there."""
    journal_replies: bool = False
    """For runs with checkpoints: a killed run also keeps finished replies of unfinished episodes, not only finished
    groups.

    Useful for long replies and many turns. The journal doubles in size.
    """

    def __post_init__(self) -> None:
        # Before the fields' own rules, which accept only import paths: Python code may pass functions here.
        self.reward = path_of(self.reward, key="rollout.reward")
        for number, part in enumerate(self.recipe):
            key = f"rollout.recipe[{number}]"
            if "reward" in part:
                self.recipe[number] = part = {**part, "reward": path_of(part["reward"], key=f"{key}.reward")}
            if not is_part_of_a_recipe(part):
                form = (
                    "{reward: package.module:name} with, if you like, weight: a number or those of its parts, args: {} "
                )
                form += "and name"
                refuse(key, part, f"must be {form}")
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
            rule = "must be abort with rollout.publication = adapters: SGLang changes none that replies under way have"
            self.refuse("interruption", rule)
        if self.oversample > 1 and self.max_staleness > 0:
            self.refuse("oversample", "must be 1 where max_staleness > 0, which runs ahead as it is")
        if self.colocated:
            self._refuse_colocation_that_cannot_be()
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
        """Raise ValueError for combinations that work only without GPUs."""
        if self.colocated and self.publication == "group":
            raise ValueError(
                "rollout.publication = 'group': NCCL takes a GPU once, and rollout.colocated = true has a server on "
                "the trainer's; set rollout.publication=ipc."
            )

    def check_share(self, nodes: int, gpus: int) -> None:
        """Raise ValueError if the colocated servers cannot be split evenly over several nodes with `gpus` GPUs each."""
        each, rest = divmod(self.server_count, nodes)
        if nodes > 1 and (rest or (gpus and each * self.gpus_per_server > gpus)):
            raise ValueError(
                f"rollout.server_count = {self.server_count}: with rollout.colocated = true each of {nodes} nodes of "
                f"{gpus} GPUs starts as many, of --tp({self.gpus_per_server}) GPUs. The node's first rank hands them "
                f"their weights and starts them again, so none is on several; correct it, or give servers nodes of "
                f"their own."
            )
        if nodes > 1 and self.devices:
            self.refuse("devices", f"must be left out with {nodes} nodes: servers share the first GPUs of each")

    def check_servers(self) -> None:
        """Raise ValueError for server_args that make weight updates impossible."""
        for option in ("--quantization", "--modelopt-quant", "--torchao-config"):
            if (value := self.server_option(option)) and value != "unquant":
                raise ValueError(
                    f"rollout.server_args: {option} {value}: quantizes the servers' weights, into which a run "
                    f"publishes others in model.dtype; leave it out."
                )
        parts, ranks = self._server_size(DP), self._server_size(TP)
        if self.has_dp_attention and ranks % parts:
            raise ValueError(
                f"rollout.server_args: --dp-size {parts}: DP attention shares out the --tp {ranks} ranks, and "
                f"{ranks} / {parts} is no whole number; correct one of them."
            )
        replicas = 1 if self.has_dp_attention else parts
        stages, nodes = self._server_size(PP), self.nodes_per_server
        if why := shape_refusal(self.publication, replicas=replicas, stages=stages, nodes=nodes):
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
        """GPUs per server over all its nodes: --tp x --pp in server_args, times --dp unless DP attention is enabled."""
        gpus = self._server_size(TP) * self._server_size(PP)
        return gpus if self.has_dp_attention else gpus * self._server_size(DP)

    @property
    def nodes_per_server(self) -> int:
        """Value of --nnodes in server_args; 0 if it is not given."""
        return self._server_size(("--nnodes",)) if self.server_option("--nnodes") else 0

    @property
    def has_dp_attention(self) -> bool:
        return "--enable-dp-attention" in self.server_args

    @property
    def attention_replicas(self) -> int:
        """Data-parallel attention replicas within one server: --dp-size if DP attention is enabled, otherwise 1."""
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
        """Return the value of the last of these options in server_args (`--tp 2` or `--tp=2`); None if missing."""
        found = None
        for word, following in itertools.zip_longest(self.server_args, self.server_args[1:]):
            name, equals, value = word.partition("=")
            # No early return: the server's own parser lets a later option override an earlier one.
            if name in names:
                found = value if equals else following
        return found


@dataclass(kw_only=True)
class ReuseConfig(Section, name="reuse"):
    """Training solved groups again in addition to each step's fresh groups. Reused tokens keep their log-probabilities
    and policy versions, and `correction` reweights them. The staleness limit applies to fresh groups only."""

    groups_per_step: int = at_least(0, default=0, hint="0 reuses none")
    """Maximum number of groups reused per step over all ranks, in addition to batch.prompts_per_step. 0 reuses none."""
    buffer_groups: int = at_least(1, default=256)
    """Buffer size in groups, over all ranks. It keeps each prompt's newest solved group and evicts the oldest first."""
    max_age_steps: int = at_least(1, default=16)
    """Maximum age of a reused group in steps. The journal keeps its files for that many more steps."""
    solved_reward: float = 1.0
    """A group counts as solved if a sample has at least this reward, and the rewards are not all equal."""
