"""What a step changes of SmolLM2-135M's weights, and what it costs to send that instead of all of them.

    python benchmarks/bench_delta.py
    python benchmarks/bench_delta.py --updates 20

AdamW in float32, as the demo has it, trains the model on real text at each learning rate; before and after the last
update the weights are taken in the dtype that servers hold. `coded` is from two versions to the bytes of a request,
`applied` from these to the new weights, whose bits are compared. Seconds are processor time of one thread, and nothing
is sent anywhere.
"""

from __future__ import annotations

import time
from pathlib import Path

import frame
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.weights.delta import RUN_NUMBERS
from megatron_rl.weights.delta_code import INTEGERS, Run, bits_of, decode, encode, pack, put, unpack

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models" / "smollm2-135m-instruct"
LEARNING_RATES = (1e-6, 1e-5)
DTYPES = (torch.bfloat16, torch.float32)
TOKENS = 256

Weights = dict[str, Tensor]


def last_update(model_path: Path, lr: float, updates: int) -> tuple[Weights, Weights]:
    """Return the float32 weights before and after the last of so many updates."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tokens = torch.tensor(AutoTokenizer.from_pretrained(model_path)(text)["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    before: Weights = {}
    for number in range(updates):
        if number == updates - 1:
            before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        start = number * TOKENS % (len(tokens) - TOKENS)
        rows = tokens[None, start : start + TOKENS]
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, {name: weight.detach() for name, weight in model.named_parameters()}


def coded(old: Weights, new: Weights, dtype: torch.dtype) -> bytes:
    runs = []
    for name, tensor in new.items():
        bits, before = bits_of(tensor), bits_of(old[name])
        for start in range(0, len(bits), RUN_NUMBERS):
            change = encode(bits[start : start + RUN_NUMBERS], before[start : start + RUN_NUMBERS])
            if change.places != "none":
                runs.append(Run(name, str(dtype).removeprefix("torch."), tensor.shape, start, change))
    return pack(runs, 1)


def apply(body: bytes, weights: Weights, dtype: torch.dtype) -> None:
    for run in unpack(body)[0]:
        part = weights[run.name].view(-1)[run.start : run.start + run.change.count]
        put(part, *decode(run.change, INTEGERS[dtype.itemsize]), is_added=run.change.values == "added")


def measure(lr: float, before: Weights, after: Weights, dtype: torch.dtype) -> str:
    old, new = ({name: weight.to(dtype) for name, weight in weights.items()} for weights in (before, after))
    nbytes = sum(weight.nbytes for weight in new.values())
    numbers = sum(weight.numel() for weight in new.values())
    changed = sum(int((bits_of(new[name]) != bits_of(old[name])).sum()) for name in new)
    started = time.process_time()
    body = coded(old, new, dtype)
    coded_s = time.process_time() - started
    started = time.process_time()
    apply(body, old, dtype)
    applied_s = time.process_time() - started
    assert all(torch.equal(bits_of(old[name]), bits_of(new[name])) for name in new)
    cells = [f"{lr:g}", str(dtype).removeprefix("torch."), f"{changed / numbers:.2%}", f"{nbytes / 1e6:.1f}"]
    cells += [f"{len(body) / 1e6:.1f}", f"{nbytes / len(body):.1f}", f"{coded_s:.2f}", f"{applied_s:.2f}"]
    return f"| {' | '.join(cells)} |"


def main(argv: list[str] | None = None) -> None:
    parser = frame.parser(__doc__)
    parser.add_argument("--updates", type=int, default=8, help="updates from the pretrained weights (default 8)")
    args = frame.arguments(parser, argv, updates=2)
    with frame.model_of(args, MODEL) as model:
        compare(model, args.updates)


def compare(model: Path, updates: int) -> None:
    torch.set_num_threads(1)
    print(f"{model.name}, update {updates} of AdamW on {TOKENS} tokens each; {frame.Machine()}\n")
    print("| learning rate | dtype | numbers changed | all, MB | changes, MB | times fewer | coded, s | applied, s |")
    print("|---|---|---|---|---|---|---|---|")
    for lr in LEARNING_RATES:
        before, after = last_update(model, lr, updates)
        for dtype in DTYPES:
            print(measure(lr, before, after, dtype), flush=True)


if __name__ == "__main__":
    frame.run(main)
