"""A program that runs flash-linear-attention's own kernels on the CPU, in Triton's interpreter.

TRITON_INTERPRET=1 python fla_cases.py TREE OUTPUT    # before triton is imported: an interpreter of its own

It pickles the result and gradients of a delta net's kernels and of its plain torch on a tree of TREES:
{form: [tensor]}.
"""

import builtins
import pickle
import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F

from megatron_rl.engine import delta_kernels
from megatron_rl.engine.delta_rule import Chunks, causal_convolution, gated_delta_rule

KEY_HEADS, VALUE_HEADS, KEY_WIDTH, VALUE_WIDTH, KERNEL = 1, 2, 16, 8, 4
CHANNELS = 2 * KEY_HEADS * KEY_WIDTH + VALUE_HEADS * VALUE_WIDTH
TREES = {
    "apart": [[0, 1, -1, 0], [1, 5, -1, 0]],
    # A prompt of a chunk and two rows with two replies, of which one forks again after one row, which is less than the
    # convolution sees; and a sequence of its own.
    "forked": [
        *([0, 66, -1, 0], [66, 1, 0, 66], [67, 5, 1, 67], [72, 2, 1, 67], [74, 3, 0, 66]),
        [77, 4, -1, 0],
    ],
}


def prepare() -> None:
    """Help the interpreter with what it lacks: times of kernels, and methods of the numbers that loops count in."""
    import fla.ops.common.chunk_delta_h as module
    import triton.runtime.autotuner as autotuner
    from triton.runtime import interpreter

    class Number(int):
        def to(self, dtype):
            return interpreter._implicit_cvt(int(self)).to(dtype)

    autotuner.Autotuner._bench = lambda self, *args, config, **options: [0.0]
    module.range = lambda *bounds: map(Number, builtins.range(*map(int, bounds)))


def inputs(rows: int, seed: int) -> list[torch.Tensor]:
    """Convolution's input and weight, decays and betas."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    decay = -F.softplus(draw(rows, VALUE_HEADS))
    beta = draw(rows, VALUE_HEADS).sigmoid()
    return [x.requires_grad_() for x in (draw(rows, CHANNELS), draw(CHANNELS, KERNEL), decay, beta)]


def computed(form: str, segments: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """The result of convolution and rule, and the gradients of their inputs under drawn slopes."""
    rows = int(segments[:, 1].sum())
    x, weight, decay, beta = given = inputs(rows, seed)
    if form == "fla":
        calls = delta_kernels.Calls.of(segments, KERNEL)
        mixed = delta_kernels.convolution(x, weight, calls)
    else:
        calls = Chunks.of(segments)
        mixed = F.silu(causal_convolution(x, weight, calls))
    keys = KEY_HEADS * KEY_WIDTH
    query, key, value = mixed.split([keys, keys, VALUE_HEADS * VALUE_WIDTH], dim=1)
    query, key = (part.unflatten(1, (KEY_HEADS, -1)) for part in (query, key))
    rule = delta_kernels.gated_delta_rule if form == "fla" else gated_delta_rule
    out = rule(query, key, value.unflatten(1, (VALUE_HEADS, -1)), decay, beta, calls)
    slopes = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed + 1))
    return [out.detach(), *torch.autograd.grad((out * slopes).sum(), given)]


def main() -> None:
    warnings.filterwarnings("ignore", message="Triton is not supported on current platform")
    prepare()
    tree, output = sys.argv[1:]
    found = {form: computed(form, torch.tensor(TREES[tree]), seed=3) for form in ("fla", "torch")}
    Path(output).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
