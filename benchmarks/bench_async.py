"""Samples per second of the same work, synchronous and asynchronous, where generation dominates with a long tail.

    python benchmarks/bench_async.py

The real loop (`megatron_rl.train`, a 0.1 million parameter model on CPU) and real HTTP; the servers' time is modelled
(modelled_server.py), so that two cores suffice, and weights are announced, not sent: a publication is the pause, the
flush, the new version and the resume. Reply lengths are log-normal (sigma 1), drawn beforehand, the same for every row,
and the servers have as many slots as a step has samples, so a synchronous step waits for its longest reply alone. The
decode time is set so that generation takes 80 % of a synchronous step on this machine. A row is a whole run from its
first request to its last update: filling the pipeline, and what is in flight at the end, count against it.

`interrupt`: a publication puts running requests back, and they go on with the new weights (SGLang's retract). `drain`:
it waits for them to finish.

With --records TURNS, only the cost of telemetry.record_steps=on_alarm is measured, at the first of --etas: runs without
and with it take turns.

Below stands what the simulation of `megatron-rl plan` (plan/simulation.py) makes of the same lengths: from the servers'
times and each run's own seconds for everything but the rollout, how long the trainer waits and what the servers do.
"""

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path

import frame
from modelled_server import PREFILL_SPEEDUP

from megatron_rl.tools.plan.simulation import Outcome, Workload, simulate

ROOT = Path(__file__).resolve().parents[1]
PROMPTS, SAMPLES, SERVERS = 16, 4, 2
MEDIAN_TOKENS, LONGEST = 40, 600
CALIBRATION_MS, CALIBRATION_STEPS = 4.0, 8


def write_inputs(folder: Path, steps: int) -> None:
    """A model folder with room for the longest reply, and prompts with the lengths of their replies."""
    source, model = ROOT / "configs/models/count_tiny", folder / "model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_text((source / name).read_text())
    config = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": 1024}
    (model / "config.json").write_text(json.dumps(config))
    rng = random.Random("lengths")
    rows = [
        {"prompt": f"{number:08b}?"[-9:], "answer": "none", "reply_tokens": [length(rng) for _ in range(SAMPLES)]}
        for number in range(PROMPTS * (steps + 12))
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def simulated(folder: Path, *, eta: int, decode_ms: float, steps: int, measured: dict) -> Outcome:
    """What the plan's simulation says of a run that interrupts, whose trainer works as long as it was measured to."""
    rows = map(json.loads, (folder / "prompts.jsonl").read_text().splitlines())
    slots, one_s = PROMPTS * SAMPLES // SERVERS, decode_ms / 2000
    work = Workload(
        servers=SERVERS,
        slots=slots,
        token_s=lambda replies, tokens: one_s * (1 + replies / slots),
        read_s=one_s / PREFILL_SPEEDUP,
        prompt_tokens=9,
        groups=(row["reply_tokens"] for row in rows),
        groups_per_step=PROMPTS,
        groups_at_once=PROMPTS * (eta + 1),
        max_staleness=eta,
        update_s=measured["seconds"] * (1 - measured["waited"]) / steps - measured["publish_s"],
        publish_s=measured["publish_s"],
    )
    return simulate(work, steps=steps)


def length(rng: random.Random) -> int:
    return min(LONGEST, max(1, round(MEDIAN_TOKENS * rng.lognormvariate(0, 1))))


def run(folder: Path, *, eta: int, drains: bool, decode_ms: float, steps: int, records: str = "[on_alarm]") -> dict:
    """Start servers and a training process; return what the latter measured. records: telemetry.record_steps."""
    ports = [free_port() for _ in range(SERVERS)]
    serve = [sys.executable, ROOT / "benchmarks/modelled_server.py", "--slots", PROMPTS * SAMPLES // SERVERS]
    serve += ["--decode-ms", decode_ms, *(["--drains"] if drains else [])]
    servers = [subprocess.Popen([str(part) for part in [*serve, "--port", port]]) for port in ports]
    settings = {"eta": eta, "steps": steps, "servers": [f"http://127.0.0.1:{port}" for port in ports]}
    settings |= {"inputs": str(folder), "folder": tempfile.mkdtemp(dir=folder), "records": records}
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
    try:
        for port in ports:
            wait_for(port)
        command = [sys.executable, __file__, "--child", json.dumps(settings)]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    finally:
        for server in servers:
            server.kill()
            server.wait()
    if done.returncode != 0:
        sys.exit(f"eta {eta} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def wait_for(port: int) -> None:
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.1)
    raise TimeoutError(f"no server at port {port}")


def train_and_measure(settings: dict) -> None:
    """The training process: runs the real loop and prints one line of JSON."""
    from megatron_rl.config import load_config
    from megatron_rl.rollout.groups import trained_versions
    from megatron_rl.run import rl_run
    from megatron_rl.run.rollouts import Rollouts
    from megatron_rl.train import train

    ages: Counter[int] = Counter()
    stats = []

    class Announced(Rollouts):
        """Tells the servers of a version without sending it."""

        def publish(self):
            version = self.engine.get_version()
            self.process.pause()
            for loaded in self.process.load_folder("modelled", version).values():
                loaded.result()
            self.process.finish_update(version)
            self.process.resume()

    class Measured(rl_run.RLRun):
        """Counts the ages of what is trained, and keeps the servers' counts after the last step."""

        def next_batch(self, step):
            batch = super().next_batch(step)
            ages.update((self.engine.get_version() - trained_versions(batch)).tolist())
            return batch

        def log(self, step, *args):
            super().log(step, *args)
            if step == settings["steps"] - 1:
                for url in settings["servers"]:
                    with urllib.request.urlopen(f"{url}/stats") as answer:
                        stats.append(json.load(answer))

    rl_run.RLRun, rl_run.Rollouts = Measured, Announced
    inputs, folder = Path(settings["inputs"]), Path(settings["folder"])
    overrides = {
        "model.path": inputs / "model",
        "data.train": inputs / "prompts.jsonl",
        "data.train_args": "{}",
        "data.evaluation": "",
        "data.evaluation_args": "{}",
        "data.shuffle": "false",
        "warm_start.updates": 0,
        "warm_start.folder": "",
        "generation.n_samples": SAMPLES,
        "generation.max_new_tokens": LONGEST,
        "run.import_from": "[fixed_lengths]",
        "rollout.workflow": "fixed_lengths:FixedLengths",
        "rollout.servers": json.dumps(settings["servers"]),
        "rollout.max_staleness": settings["eta"],
        "batch.prompts_per_step": PROMPTS,
        "batch.updates_per_step": 1,
        "optimizer.lr": 1e-6,
        "run.steps": settings["steps"],
        "run.folder": folder,
        "run.save_at_end": "false",
        "telemetry.record_steps": settings["records"],
        "run.checkpoint_every_steps": 1000,  # records for alarms are kept for runs with checkpoints; none is due
    }
    train(load_config(ROOT / "configs/count_grpo.yaml", [f"{key}={value}" for key, value in overrides.items()]))
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["kind"] == "step"]
    seconds = sum(step["time/step"] for step in steps)
    result = {
        "seconds": seconds,
        "samples": sum(step["batch/trajectories"] for step in steps),
        "waited": sum(step["time/rollout"] for step in steps) / seconds,
        "others_s": statistics.median(step["time/step"] - step["time/rollout"] for step in steps[1:]),
        "publish_s": statistics.median(step["time/publish"] for step in steps[1:]),
        "step_s": statistics.median(step["time/step"] for step in steps[1:]),
        "record_s": statistics.median(step.get("time/record", 0.0) for step in steps[1:]),
        "rollout_s": statistics.median(step["time/rollout"] for step in steps[1:]),
        "dropped": sum(step["rollout/episodes_stale"] for step in steps),
        "slots_used": sum(s["slot_s"] for s in stats)
        / sum(s["elapsed_s"] for s in stats)
        / (PROMPTS * SAMPLES / SERVERS),
        "decoding": sum(s["busy_s"] for s in stats) / sum(s["elapsed_s"] for s in stats),
        "ages": {str(age): count for age, count in sorted(ages.items())},
    }
    print(json.dumps(result))


def compare_records(folder: Path, args: argparse.Namespace, machine: frame.Machine) -> None:
    """Print the time of a step without records and with those for alarms, which take turns."""
    kinds = {"without records": "[]", "with records for alarms": "[on_alarm]"}
    rows: dict[str, list[dict]] = {label: [] for label in kinds}
    options = {"eta": args.etas[0], "drains": False, "decode_ms": args.decode_ms, "steps": args.steps}
    for turn in range(args.records):
        for label in list(kinds) if turn % 2 == 0 else list(kinds)[::-1]:
            rows[label].append(run(folder, records=kinds[label], **options))
            print(f"{label}: {rows[label][-1]['step_s'] * 1e3:.1f} ms a step", file=sys.stderr, flush=True)
    print(
        f"{PROMPTS} prompts x {SAMPLES} samples a step, eta {args.etas[0]}, {args.records} runs of {args.steps} steps "
        f"of each kind in turns, medians, {args.decode_ms:.1f} ms a full decode step; {machine}"
    )
    print(f"{'':<26}{'ms a step':>10}{'ms recording':>14}{'share of the step':>19}")
    for label, runs in rows.items():
        step_s, record_s = (statistics.median(run[name] for run in runs) for name in ("step_s", "record_s"))
        print(f"{label:<26}{step_s * 1e3:>10.1f}{record_s * 1e3:>14.2f}{record_s / step_s:>19.2%}")


def main(argv: list[str] | None = None) -> None:
    parser = frame.parser(__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--etas", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--records", type=int, default=0, metavar="TURNS", help="measure the cost of records alone")
    parser.add_argument("--decode-ms", type=float, help="of a full decode step; measured if left out")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = frame.arguments(parser, argv, steps=2, etas=[1], decode_ms=0.1)
    if args.child:
        return train_and_measure(json.loads(args.child))

    machine, rows = frame.Machine(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, args.steps)
        if args.decode_ms is None:
            first = run(folder, eta=0, drains=False, decode_ms=CALIBRATION_MS, steps=CALIBRATION_STEPS)
            args.decode_ms = CALIBRATION_MS * 4 * first["others_s"] / first["rollout_s"]
        if args.records:
            return compare_records(folder, args, machine)
        cases = [("synchronous", 0, False)]
        cases += [
            (f"eta {eta}, {how}", eta, how == "drain")
            for how in ("interrupt", *([] if args.quick else ["drain"]))
            for eta in args.etas
        ]
        for label, eta, drains in cases:
            rows.append((label, run(folder, eta=eta, drains=drains, decode_ms=args.decode_ms, steps=args.steps)))
            print(f"{label}: {rows[-1][1]['seconds']:.1f} s", file=sys.stderr, flush=True)
        options = {"decode_ms": args.decode_ms, "steps": args.steps}
        plans = [
            (label, simulated(folder, eta=eta, measured=row, **options))
            for (label, eta, drains), (_, row) in zip(cases, rows, strict=True)
            if not drains
        ]

    print(
        f"{PROMPTS} prompts x {SAMPLES} samples a step, {args.steps} steps, reply lengths log-normal (median "
        f"{MEDIAN_TOKENS}, sigma 1, at most {LONGEST}), {SERVERS} servers of {PROMPTS * SAMPLES // SERVERS} slots, "
        f"{args.decode_ms:.1f} ms a full decode step; {machine}"
    )
    print(f"{'':<20}{'samples/s':>10}{'ratio':>7}{'trainer idle':>14}{'slots idle':>12}{'servers idle':>14}", end="")
    print(f"{'dropped':>9}  staleness of trained tokens")
    base = rows[0][1]
    for label, row in rows:
        rate, ages = row["samples"] / row["seconds"], row["ages"]
        ratio = rate / (base["samples"] / base["seconds"])
        print(f"{label:<20}{rate:>10.1f}{ratio:>7.2f}{row['waited']:>14.0%}{1 - row['slots_used']:>12.0%}", end="")
        shares = "  ".join(f"{age}: {count / sum(ages.values()):.0%}" for age, count in ages.items())
        print(f"{1 - row['decoding']:>14.0%}{row['dropped']:>9.0f}  {shares}")
    print("as simulated by the plan")
    for label, plan in plans:
        rate, ratio = PROMPTS * SAMPLES / plan.step_s, plans[0][1].step_s / plan.step_s
        idle = f"{plan.wait_s / plan.step_s:>14.0%}{1 - plan.slots:>12.0%}{1 - plan.busy:>14.0%}"
        print(f"{label:<20}{rate:>10.1f}{ratio:>7.2f}{idle}")


if __name__ == "__main__":
    frame.run(main)
