"""The sampling of replies, their rewards, and the servers that give them."""

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
    """The sampling of one reply. Field names and meanings are SGLang's where it has the field."""

    n_samples: int = at_least(1, default=1, hint="ask for one reply or more")
    """Replies a workflow asks for per prompt: the group size. Each is a request of its own."""
    max_new_tokens: int = at_least(1, default=128, hint="set the longest reply")
    min_new_tokens: int = at_least(0, default=0)
    temperature: float = above(0, default=1.0, hint="for greedy decoding set greedy: true")
    """Above 0. Greedy decoding is `greedy`, not temperature 0."""
    top_p: float = within("(0, 1]", default=1.0, hint="1.0 keeps all tokens")
    """Below 1 not in RL: the trainer's log-probabilities are over the whole vocabulary. See eval.top_p."""
    top_k: int = ruled(
        "must be -1 or at least 1", lambda top_k: top_k == -1 or top_k >= 1, default=-1, hint="-1 keeps all tokens"
    )
    """-1 keeps all tokens. Others not in RL, as with top_p."""
    greedy: bool = False
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    seed: int | None = None
    """Seed of this request's sampling; None derives one per request where a run has a seed, else the server chooses."""

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
"""SGLang's options for the parts of a server."""
BY_RANKS = "SGLang numbers the ranks of a weight update by tensor parallelism alone"
LOADED_BYTES_PER_S = 0.2e9
"""Of weights, from a file system that many servers read at a time."""
URL_RULE = "must be a URL with its scheme, such as http://127.0.0.1:30000; correct it"


def is_url(text: str) -> bool:
    return re.fullmatch(r"https?://[^/\s]\S*", text) is not None


def shape_refusal(publication: str, *, replicas: int, stages: int, nodes: int) -> str:
    """Say why a server of this shape cannot be sent weights in this way, with the remedy; empty where it can.

    replicas: copies of the weights, its data-parallel size without DP attention.
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
    """Episodes: their workflow and rewards, the servers that reply, and how far sampling may run ahead."""

    workflow: str = import_path(default="megatron_rl.workflows:RLVRWorkflow")
    """Import path of a RolloutWorkflow; it is called with reward_fn, gconfig, tokenizer and workflow_args."""
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward: str = import_path(default="megatron_rl.rewards:exact_match")
    """Import path of `reward(prompt, completions, prompt_ids, completion_ids, **data) -> float`, or a dict of the parts
    whose sum it is; in Python also the function itself, of a module or of the program that runs."""
    recipe: list[dict[str, Any]] = field(default_factory=list)
    """A weighted sum of rewards in its place. Each is `{reward: import path, weight: 1.0, args: {}, name: its own}`.

    Every part has its mean as the metric `rollout/reward/NAME`.
    """
    reward_workers: int = at_least(1, default=4)
    """Processes in which each head's rewards are computed, at most so many at a time."""
    servers: list[str] = ruled(f"each {URL_RULE}", lambda urls: all(map(is_url, urls)), default=[])
    """URLs of running SGLang (or embedded) servers; empty starts `server_count` of `backend` on this host."""
    registry: str = ""
    """Folder, shared with the servers, in which those of this run register: they may come and go while it lasts.

    `megatron-rl serve MODEL --register FOLDER --run NAME`, where NAME is the last part of run.folder. The run starts
    once `server_count` are there; none are started.
    """
    router: str = ruled(URL_RULE, lambda url: not url or is_url(url), default="")
    """URL of an SGLang router (sglang-router 0.3) that picks a server for each request; it is told which there are."""
    backend: str = one_of("auto", "embedded", "sglang", default="auto")
    """embedded, sglang, or auto: sglang where CUDA is, embedded where it is not."""
    server_count: int = at_least(1, default=1)
    server_restarts: int = at_least(0, default=3, hint="0 restarts none")
    """Restarts of a started server that died or hangs, before it is given up. A server that lasts is forgiven them."""
    health_timeout_s: float = above(0, "seconds", default=120.0)
    """A server that gives no sign of life for so long hangs, and gets no more requests.

    One that this run started and that does not answer /health_generate for so long is killed and restarted.
    """
    server_args: list[str] = field(default_factory=list)
    """Further command-line arguments of each started server, such as its shape: `[--tp, 8]`.

    Slurm's launcher starts one with more GPUs than a node over several. Quantized weights take no new ones; servers
    with `--pp-size`, or with `--dp-size` and no `--enable-dp-attention`, take them from a disk alone.
    """
    token_file: str = ""
    """File of mode 600 with the token that the servers ask for; made where there is none.

    Empty: `token` in run.folder, or with a registry RUN.token there. Servers that a user starts are given the same file
    (`megatron-rl serve --token-file`); one with SGLang's --api-key expects that key to be in it.
    """
    devices: list[str] = field(default_factory=list)
    """GPUs of this host for the started servers, as CUDA_VISIBLE_DEVICES names them: as many for each as its --tp.

    Empty: `megatron-rl launch` chooses them. Otherwise servers that are `colocated` take the first of their node, and
    others see what the trainer's first rank sees.
    """
    colocated: bool = False
    """Started servers and trainer take turns on the same devices: servers have no weights and no cache while the
    trainer works, and its models wait in host memory while they generate. Synchronous runs.

    On several nodes each has the same number of the `server_count` servers, and none is on two.
    """
    max_concurrent_episodes: int = at_least(1, default=256)
    max_staleness: int = at_least(0, default=0, hint="0 is synchronous")
    """Most policy versions between sampling and training; 0 is synchronous. A step publishes one version, whatever its
    number of updates."""
    stale: str = one_of("drop", "mask", "keep", default="drop")
    """A group with a token older than that when it would be trained: drop (its prompt is sampled again), mask (such
    tokens are not trained) or keep. Admission makes them rare: replies that take longer than the steps they span."""
    cut_off: str = one_of("train", "mask", default="train")
    """Replies that generation.max_new_tokens has cut off, and dialogues that have outgrown their context: train, with
    what they earned, or mask. Masked ones still count in what a group's others are compared with (overlong filtering,
    arXiv 2503.14476); a prompt of which nothing else is left is replaced by another."""
    max_uniform_resamples: int = within("[0, 50]", default=0, hint="DAPO takes 10")
    """Dynamic sampling (DAPO): groups without variance of rewards are replaced by those of other prompts, at most so
    many times a step's groups; the rest is trained as it is. Refused where something else trains such groups: a
    teacher, a KL term, positive trajectories, marked tokens. 0 replaces none."""
    oversample: float = within("[1, 2]", default=1.0)
    """Synchronous runs: start so many episodes for each that a step takes, and train the first ones to finish. The
    others' prompts are the first of the next step, which waits for them. With `stale` = mask or keep their replies go
    on where they were; with drop, which trains no token of an earlier version, they begin anew."""
    interruption: str = one_of("abort", "retract", "in_place", default="retract")
    """The fate of replies under way when new weights come. All go on with them afterwards.

    abort ends them and sends what they have again; retract puts them back into the server's queue; in_place freezes
    them with the keys of the old weights.
    """
    part_tokens: int = at_least(0, "tokens", default=0, hint="0 asks for whole replies")
    """Ask for a reply in parts of at most so many tokens, each a request to the server that has the keys of the parts
    before it: a server that dies takes no more of a reply than the part under way, where a whole one begins anew. For
    replies of minutes. Those with `generation.stop`, a JSON schema or a forced tool are asked for whole."""
    max_cache_age: int = at_least(0, default=0)
    """Publications that a server's prefix cache may outlive; 0 flushes it at each."""
    request_timeout_s: float = above(0, "seconds", default=600.0)
    """For a reply of at most 6,000 tokens; one that may be longer has as much more time, so that 10 tokens a second do.
    Time without a server, or while servers are paused, does not count.

    A server that gives no reply at all for so long has to generate a token before it is asked for more.
    """
    control_timeout_s: float = above(0, "seconds", default=60.0)
    """For a command to a server: to pause, to go on, to flush its cache. One that hangs delays a publication by it."""
    start_timeout_s: float = above(0, "seconds", default=300.0)
    """For a server to start, and for what loads or compares its weights, or a part of them. Weights of more bytes than
    can be read by then at 0.2 GB a second have as much more time."""
    publication: str = one_of("group", "ipc", "delta", "disk", "adapters", default="group")
    """The way of new weights to the servers: `group`, a process group (NCCL or gloo); `ipc`, memory that servers share
    with a rank on their host (CUDA IPC, or /dev/shm): the first one, or where `colocated` that of each node; `delta`,
    what changed since the last time, over HTTP, for slow links; `disk`, a folder under run.folder; or `adapters`, such
    a folder with those of `lora` alone, which servers compute beside the model's own weights.

    Servers that are given in `servers` must be able to read that folder, and for adapters be started with
    --enable-lora, --max-lora-rank and --lora-target-modules. delta keeps a copy of the weights on the host of the first
    rank; an SGLang that this run does not start needs megatron_rl installed and to be started with
    --custom-weight-loader megatron_rl.weights.sglang_loaders.load_changes.
    """
    bucket_bytes: int = at_least(1 << 20, "bytes", default=1 << 28, hint="1073741824 is well for tens of billions")
    """Weights that a rank sends at a time, over `group` and `ipc`. A rank that sends has two such buckets, one being
    filled and one on its way, and a rank of a server one of each sender. A bucket costs a request to every server."""
    episode_attempts: int = at_least(1, default=3)
    """Tries of an episode before its prompt is given up and counted."""
    max_infrastructure_failures: float = within("(0, 1]", default=0.5, hint="1 goes on whatever fails")
    """Share of the newest tries of samples, of 256 or those of the last minute where these are more, that may fail with
    an InfrastructureFailure: a container, a service, a worker, a server is gone, and the policy is not at fault. With
    more the run stops and names them; it is resumed where it was."""
    journal_replies: bool = False
    """Runs with checkpoints: a killed run keeps the finished replies of unfinished episodes too, not only whole groups.

    For long replies and many turns. The journal doubles in size.
    """

    def __post_init__(self) -> None:
        # Before the fields' own rules, which know import paths alone: Python code may give the functions themselves.
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
            # The value is not shown: errors end up in logs.
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
        """Raise ValueError for what works without GPUs only."""
        if self.colocated and self.publication == "group":
            raise ValueError(
                "rollout.publication = 'group': NCCL takes a GPU once, and rollout.colocated = true has a server on "
                "the trainer's; set rollout.publication=ipc."
            )

    def check_share(self, nodes: int, gpus: int) -> None:
        """Raise ValueError where several nodes, each of `gpus` GPUs, cannot have as many servers that share them."""
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
        """Raise ValueError for server_args with which servers cannot be sent new weights."""
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
        """Return a copy in which start_timeout_s is what this model's weights take, where that is more."""
        nbytes = sum(file.stat().st_size for file in Path(model_folder).glob("*.safetensors"))
        return dataclasses.replace(self, start_timeout_s=max(self.start_timeout_s, nbytes / LOADED_BYTES_PER_S))

    @property
    def starts_servers(self) -> bool:
        """True if the run starts its servers itself."""
        return not (self.servers or self.registry)

    @property
    def weights(self) -> dict[str, float]:
        """The weights of a reward's parts where the recipe has any: by the name in the recipe, or NAME/PART."""
        found: dict[str, float] = {}
        for part in self.recipe:
            name, weight = part.get("name", str(part["reward"]).partition(":")[2]), part.get("weight", 1.0)
            found |= (
                {f"{name}/{key}": own for key, own in weight.items()} if isinstance(weight, dict) else {name: weight}
            )
        return found

    @property
    def gpus_per_server(self) -> int:
        """SGLang's --tp x --pp in server_args, on all its nodes; times --dp, where that is not DP attention's."""
        gpus = self._server_size(TP) * self._server_size(PP)
        return gpus if self.has_dp_attention else gpus * self._server_size(DP)

    @property
    def nodes_per_server(self) -> int:
        """SGLang's --nnodes in server_args; 0 where it is not given."""
        return self._server_size(("--nnodes",)) if self.server_option("--nnodes") else 0

    @property
    def has_dp_attention(self) -> bool:
        return "--enable-dp-attention" in self.server_args

    @property
    def attention_replicas(self) -> int:
        """Parts of a server with all of attention's weights and with their own replies: --dp-size with DP attention."""
        return self._server_size(DP) if self.has_dp_attention else 1

    def _server_size(self, names: tuple[str, ...]) -> int:
        given = self.server_option(*names) or "1"
        if not given.isdecimal() or int(given) < 1:
            raise ValueError(f"rollout.server_args: {names[0]} {given}: must be a number of at least 1; correct it.")
        return int(given)

    @property
    def server_gpus(self) -> int:
        """GPUs of all started servers together."""
        return self.server_count * self.gpus_per_server

    def server_option(self, *names: str) -> str | None:
        """The value of the last of these options in server_args, which counts: `--tp 2` or `--tp=2`."""
        found = None
        for word, following in itertools.zip_longest(self.server_args, self.server_args[1:]):
            name, equals, value = word.partition("=")
            # No return: a later one overrides it, as the server's own parser has it.
            if name in names:
                found = value if equals else following
        return found


@dataclass(kw_only=True)
class ReuseConfig(Section, name="reuse"):
    """Solved groups that are trained again, beside each step's fresh ones: the tokens' own log-probabilities and
    versions stay, and `correction` weighs them. The bound on staleness holds for fresh groups."""

    groups_per_step: int = at_least(0, default=0, hint="0 reuses none")
    """Groups on top of batch.prompts_per_step, over all ranks, as far as the buffer has them. 0 reuses none."""
    buffer_groups: int = at_least(1, default=256)
    """Groups that are kept, over all ranks: of a prompt the newest that was solved; the oldest go first."""
    max_age_steps: int = at_least(1, default=16)
    """Steps after which a group is not reused any more. The journal keeps its files for so much longer."""
    solved_reward: float = 1.0
    """A group is solved where a sample has at least this reward, and not all samples have the same."""
