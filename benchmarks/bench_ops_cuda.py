"""The operators on one CUDA device beside eager torch and torch.compile, and beside what the memory allows.

Usage: python benchmarks/bench_ops_cuda.py [--rows 4096 16384] [--vocab 32000 128256 151936]. Prints markdown. Times are
medians of CUDA events over three rotated inputs; bandwidth counts each logit read once forward, and read and written
once backward; "of copy" is against a device-to-device copy measured in the same run.
"""

import argparse
import statistics

import torch

from megatron_rl.ops import PpoOptions, packed_gae, packed_logprobs, ppo_loss
from megatron_rl.ops.library import ops


def median_us(function, inputs, repeats=30):
    for i in range(5):
        function(inputs[i % len(inputs)])
    times = []
    for i in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function(inputs[i % len(inputs)])
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def copy_bandwidth():
    source = [torch.randn(1 << 28, device="cuda") for _ in range(3)]
    target = torch.empty_like(source[0])
    return 2 * source[0].nbytes / median_us(target.copy_, source) / 1e3  # GB/s


def eager(logits, labels):
    log_p = logits.float().log_softmax(-1)
    return log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def logprob_table(arguments):
    copy = copy_bandwidth()
    print(f"Copy: {copy:.0f} GB/s read and written.\n")
    rate = "us | GB/s | of copy"
    print(f"| T | V | logits | forward {rate} | backward in place {rate} | eager forward us | compiled forward us |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    compiled = torch.compile(eager)
    for count in arguments.rows:
        for vocab in arguments.vocab:
            for dtype in (torch.bfloat16, torch.float32):
                inputs = [torch.randn(count, vocab, device="cuda").to(dtype) for _ in range(3)]
                labels = torch.randint(0, vocab, (count,), device="cuda")
                gradients = torch.randn(2, count, device="cuda")
                forward = median_us(lambda x, y=labels: packed_logprobs(x, y, return_entropy=True), inputs)
                partials = ops.logprob_partials(inputs[0], labels, 1.0, None, 0, vocab)
                _, entropy, peak, log_sum = ops.logprob_finish(
                    inputs[0], partials, labels, 1.0, None, 0, vocab, vocab, False
                )
                rest = (labels, peak, log_sum, entropy, *gradients, 1.0, None, 0, vocab)
                backward = median_us(lambda x, rest=rest: ops.logprob_grad_(x, *rest), inputs)
                others = [median_us(lambda x, f=f, y=labels: f(x, y), inputs, 10) for f in (eager, compiled)]
                size = inputs[0].nbytes
                print(
                    f"| {count} | {vocab} | {str(dtype)[6:]} | {forward:.0f} | {size / forward / 1e3:.0f} | "
                    f"{100 * size / forward / 1e3 / copy:.0f} % | {backward:.0f} | {2 * size / backward / 1e3:.0f} | "
                    f"{100 * 2 * size / backward / 1e3 / copy:.0f} % | {others[0]:.0f} | {others[1]:.0f} |",
                    flush=True,
                )


def token_table():
    tokens = 32768
    columns = [torch.randn(tokens, device="cuda") for _ in range(5)]
    mask = torch.rand(tokens, device="cuda") < 0.7
    cu_seqlens = torch.arange(0, tokens + 1, 512, device="cuda")
    options = PpoOptions(behavior="mask", behavior_high=5.0, kl_coefficient=0.1)

    def loss(own):
        return ppo_loss(own, columns[1], columns[2], columns[3], mask, options, ref_logprobs=columns[4])

    def advantages(rewards):
        return packed_gae(rewards, columns[1], mask, cu_seqlens, discount=0.99, trace_decay=0.95)

    print("\n| 32768 tokens | us a call | us a replayed graph |")
    print("|---|---|---|")
    for name, function in (("ppo_loss with gradient and statistics", loss), ("packed_gae, 64 sequences", advantages)):
        called = median_us(function, columns[:1])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function(columns[0])
        print(f"| {name} | {called:.1f} | {median_us(lambda _, g=graph: g.replay(), [None]):.1f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--vocab", type=int, nargs="+", default=[32000, 128256, 151936])
    arguments = parser.parse_args()
    logprob_table(arguments)
    token_table()
