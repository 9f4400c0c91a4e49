"""The operators on the CPU beside eager torch: time and extra memory of forward and backward, same inputs, one process.

Usage: python benchmarks/bench_ops_cpu.py [--rows 1024 4096] [--vocab 32000 151936]. Prints a markdown table. Times are
medians of `--repeats`; extra memory is the largest resident size during a run above that before it, gradients of the
logits included, without the logits themselves. "ours" overwrites the logits with their gradient, as the engine does.
"""

import gc
import os
import statistics
import threading
import time

import frame
import psutil
import torch
import torch.nn.functional as F

from megatron_rl.ops import (
    Cut,
    PpoOptions,
    VocabShard,
    fixed_order,
    kept_tokens,
    packed_gae,
    packed_logprobs,
    ppo_loss,
    word_sums,
)
from tests.kit import operators as reference
from tests.kit.operators import lm_head_ppo_loss


def eager_loss(logits, labels, rows, options):
    """Log-probabilities, entropy and PPO as plain torch writes them; float32 arithmetic."""
    log_p = logits.float().log_softmax(-1)
    logprobs = log_p.gather(-1, labels[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return reference.ppo_loss(logprobs, *rows, options, entropy=entropy)


def our_loss(logits, labels, rows, options):
    logprobs, entropy = packed_logprobs(logits, labels, return_entropy=True, inplace_backward=True)
    return ppo_loss(logprobs, *rows, options, entropy=entropy)[0]


def measure(loss, make_logits, labels, rows, repeats):
    """(median seconds, most extra bytes) of forward and backward; fresh logits each time, made outside the clock."""
    options, seconds, extra = PpoOptions(behavior="mask", behavior_high=5.0, entropy_coefficient=0.01), [], 0
    for _ in range(repeats + 1):
        logits = make_logits()
        gc.collect()
        with ResidentPeak() as peak:
            begin = time.perf_counter()
            output = Through.apply(torch.zeros((), requires_grad=True), logits)
            loss(output, labels, rows, options).backward()
            seconds.append(time.perf_counter() - begin)
        extra = max(extra, peak.extra)
        del logits, output
    return statistics.median(seconds[1:]), extra


class Through(torch.autograd.Function):
    """Gives the logits a place in the graph without copying them."""

    @staticmethod
    def forward(ctx, leaf, logits):
        return logits

    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros(()), None


class ResidentPeak:
    """Watches the process's resident size from a second thread."""

    def __enter__(self):
        self.process = psutil.Process(os.getpid())
        self.before = self.most = self.process.memory_info().rss
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.stop.wait(0.001):
            self.most = max(self.most, self.process.memory_info().rss)

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()
        self.extra = self.most - self.before


def logprob_table(arguments):
    print("| T | V | logits | eager s | ours s | times faster | eager extra | ours extra (of the logits) |")
    print("|---|---|---|---|---|---|---|---|")
    for count in arguments.rows:
        for vocab in arguments.vocab:
            for dtype in (torch.float32, torch.bfloat16):
                generator = torch.Generator().manual_seed(0)
                source = torch.randn(count, vocab, generator=generator).mul_(3).to(dtype)
                labels = torch.randint(0, vocab, (count,), generator=generator)
                noise = torch.randn(3, count, generator=generator)
                rows = (noise[0] - 10, noise[0] - 10 + 0.1 * noise[1], noise[2], torch.ones(count, dtype=torch.bool))
                results = [
                    measure(loss, source.clone, labels, rows, arguments.repeats) for loss in (eager_loss, our_loss)
                ]
                (eager, eager_extra), (ours, our_extra) = results
                size = source.numel() * source.element_size()
                print(
                    f"| {count} | {vocab} | {str(dtype)[6:]} | {eager:.3f} | {ours:.3f} | {eager / ours:.1f} | "
                    f"{eager_extra / 2**20:.0f} MB | {our_extra / 2**20:.0f} MB ({100 * our_extra / size:.1f} %) |",
                    flush=True,
                )


def products(hidden, weight, chunk):
    """The three matrix products of a head, bare, into memory that is there: logits, gradients of hidden and weight."""
    rows, columns = min(chunk, len(hidden)), len(weight)
    logits, by_hidden, total = (hidden.new_zeros(size) for size in ((rows, columns), hidden.shape, weight.shape))

    def call():
        for h, out in zip(hidden.split(chunk), by_hidden.split(chunk), strict=True):
            torch.mm(h, weight.T, out=logits[: len(h)])
            torch.mm(logits[: len(h)], weight, out=out)
            total.addmm_(logits[: len(h)].T, h)

    return call


def fresh_products(hidden, weight, chunk):
    """The same, as a step has them: the memory of their results is new each time."""

    def call():
        by_hidden, total = [], torch.zeros_like(weight)
        for h in hidden.split(chunk):
            logits = h @ weight.T
            by_hidden.append(logits @ weight)
            total.addmm_(logits.T, h)

    return call


def head_table(arguments):
    hidden_size, vocab, chunk = (16, 64, 8) if arguments.quick else (576, 49152, 1024)
    print(f"\nHead and policy loss with all gradients, H = {hidden_size}, V = {vocab}, fp32, {chunk} rows a chunk,")
    print("beside three bare products whose results take new memory, as ours do, and whose memory is there:\n")
    print("| T | ours s | bare s | ratio | bare s, memory there | ratio | extra memory |")
    print("|---|---|---|---|---|---|---|")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocab, hidden_size, generator=generator).mul_(0.05).requires_grad_()
    shard, options = VocabShard(0, vocab, vocab), PpoOptions()
    for count in arguments.rows:
        hidden = torch.randn(count, hidden_size, generator=generator).requires_grad_()
        labels, advantages = torch.randint(0, vocab, (count,), generator=generator), torch.randn(count)
        given, extra = (labels, None, None, advantages, options), 0

        def ours(hidden=hidden, given=given):
            lm_head_ppo_loss(hidden, weight, *given, shard=shard, rows_per_chunk=chunk)[0].backward()

        calls = (ours, *(make(hidden.detach(), weight.detach(), chunk) for make in (fresh_products, products)))
        seconds = [[], [], []]
        for _ in range(arguments.repeats + 1):
            for call, column in zip(calls, seconds, strict=True):
                hidden.grad = weight.grad = None
                gc.collect()
                with ResidentPeak() as peak:
                    begin = time.perf_counter()
                    call()
                    column.append(time.perf_counter() - begin)
                extra = max(extra, peak.extra) if call is ours else extra
        taken, fresh, there = (statistics.median(column[1:]) for column in seconds)
        row = (f"{taken:.2f}", f"{fresh:.2f}", f"{taken / fresh:.2f}", f"{there:.2f}", f"{taken / there:.2f}")
        print(f"| {count} | {' | '.join(row)} | {extra / 2**20:.0f} MB |", flush=True)


def gae_table(arguments):
    generator = torch.Generator().manual_seed(0)
    count, length = (4, 8) if arguments.quick else (64, 512)
    lengths, tokens = torch.full((count,), length), count * length
    rewards, values = torch.randn(2, tokens, generator=generator)
    mask = torch.rand(tokens, generator=generator) < 0.8
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    seconds = []
    for function, repeats in ((reference.packed_gae, 1), (packed_gae, 20)):
        times = []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            function(rewards, values, mask, cu_seqlens, discount=0.99, trace_decay=0.95)
            times.append(time.perf_counter() - begin)
        seconds.append(statistics.median(times[1:]))
    print(
        f"\nGAE, {tokens} tokens in {count} sequences: Python loop {seconds[0] * 1e3:.0f} ms, "
        f"ours {seconds[1] * 1e3:.2f} ms, "
        f"{seconds[0] / seconds[1]:.0f} times faster."
    )


def checksum_table(arguments):
    """The sums of a publication's checksum; a plain read and a copy of the same bytes take turns with them."""
    words = torch.arange(1 << (14 if arguments.quick else 25))
    copy, ways = torch.empty_like(words), ("word sums", "plain read", "copy")
    calls = (lambda: word_sums([words]), words.sum, lambda: copy.copy_(words))
    seconds = [[], [], []]
    for _ in range(5 * arguments.repeats + 1):
        for call, column in zip(calls, seconds, strict=True):
            begin = time.perf_counter()
            call()
            column.append(time.perf_counter() - begin)
    medians = [statistics.median(column[1:]) for column in seconds]
    rates = (f"{way} {words.nbytes / s / 1e9:.1f} GB/s" for way, s in zip(ways, medians, strict=True))
    share = 100 * medians[1] / medians[0]
    print(f"\nChecksum, {words.nbytes >> 20} MB: {', '.join(rates)}; {share:.0f} % of a plain read.")


def exact_table(arguments):
    """Compare the operators of rollout.exact with torch's, for shapes of SmolLM2-135M."""
    print("\n| rollout.exact | rows | torch ms | fixed order ms | times slower |\n|---|---|---|---|---|")
    torch.manual_seed(0)
    weight = torch.randn(3072, 576)
    for rows in (1, 32, max(arguments.rows)):
        x = torch.randn(rows, 576)
        calls = {"torch": lambda x=x: x @ weight.T, "ours": lambda x=x: fixed_order.linear(x, weight)}
        print_exact_row("product", rows, calls, arguments.repeats)
    rows = max(arguments.rows)
    q, k, v = torch.randn(rows, 9, 64), torch.randn(rows, 3, 64), torch.randn(rows, 3, 64)
    bounds, heads = torch.tensor([0, rows]), [part.transpose(0, 1)[None] for part in (q, k, v)]
    calls = {
        "torch": lambda: F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True),
        "ours": lambda: fixed_order.attention(q, k, v, bounds, bounds, 0.125),
    }
    print_exact_row("attention", rows, calls, arguments.repeats)


SUPPORTS = {
    "no support": (0, 0, False),
    "support of 20 tokens": (40, 0, False),
    "support of 20, adjusted": (40, 3, False),
    "support of 256 tokens": (512, 0, False),
    "all tokens, 128 changed": (129, 3, True),
}
"""(places, numbers of an adjustment, whether rows are over the whole vocabulary) of each row of the table."""


def supports_of(labels, places, numbers, is_whole, vocab):
    """Random supports of half as many tokens as places, or places for changed tokens, with adjustments."""
    if not places:
        return {}
    first = torch.full_like(labels, -1) if is_whole else labels
    step = vocab // places  # different tokens in each row, none of which is the label
    others = (labels[:, None] + 1 + torch.arange(places - 1) * step) % vocab
    ids = torch.cat([first[:, None], others], 1).int()
    if not is_whole:
        ids[:, places // 2 :] = -1
    found = {"support": ids}
    if numbers:
        found["adjustment"] = torch.rand(len(labels), places, numbers).masked_fill((ids < 0)[:, :, None], 0.0)
    return found


def support_table(arguments):
    """The head with the policy loss and all gradients over supports, in turns with the head over all tokens."""
    hidden_size, vocab, chunk = (16, 1024, 8) if arguments.quick else (576, 49152, 1024)
    rows = max(arguments.rows)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocab, hidden_size, generator=generator).mul_(0.05).requires_grad_()
    hidden = torch.randn(rows, hidden_size, generator=generator).requires_grad_()
    labels, shard = torch.randint(0, vocab, (rows,), generator=generator), VocabShard(0, vocab, vocab)
    given = (labels, None, None, torch.randn(rows), PpoOptions())
    columns = {name: supports_of(labels, *sizes, vocab) for name, sizes in SUPPORTS.items()}

    def head(name):
        hidden.grad = weight.grad = None
        more = columns[name] | {"shard": shard, "rows_per_chunk": chunk}
        lm_head_ppo_loss(hidden, weight, *given, **more)[0].backward()

    @torch.no_grad()
    def compute():
        for some, own in zip(hidden.split(chunk), labels.split(chunk), strict=True):
            kept_tokens(some @ weight.T, own, Cut(top_p=0.9, width=512), shard, 1.0)

    calls = {name: (lambda name=name: head(name)) for name in SUPPORTS} | {"computing supports of top_p": compute}
    seconds = {name: [] for name in calls}
    for _ in range(2 * arguments.repeats + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    print(f"\n| head and policy loss, T = {rows}, H = {hidden_size}, V = {vocab} | s | of the head over all tokens |")
    print("|---|---|---|")
    for name, taken in medians.items():
        print(f"| {name} | {taken:.2f} | {taken / medians['no support']:.2f} |")


def print_exact_row(name, rows, calls, repeats):
    found = {}
    for who, call in calls.items():
        call()
        count = max(1, 256 // rows)
        seconds = []
        for _ in range(max(repeats, 1)):
            begin = time.perf_counter()
            for _ in range(count):
                call()
            seconds.append((time.perf_counter() - begin) / count)
        found[who] = 1000 * statistics.median(seconds)
    ratio = found["ours"] / found["torch"]
    print(f"| {name} | {rows} | {found['torch']:.3f} | {found['ours']:.3f} | {ratio:.2f} |")


def main(argv=None):
    parser = frame.parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--vocab", type=int, nargs="+", default=[32000, 151936])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = frame.arguments(parser, argv, rows=[16], vocab=[64], repeats=1)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.ops.megatron_rl.instruction_set()}, "
        f"median of {arguments.repeats}, {frame.Machine()}\n"
    )
    logprob_table(arguments)
    head_table(arguments)
    gae_table(arguments)
    checksum_table(arguments)
    exact_table(arguments)
    support_table(arguments)


if __name__ == "__main__":
    frame.run(main)
