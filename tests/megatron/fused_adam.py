"""megatron.core as where Transformer Engine is installed, for a test whose process has none."""

import contextlib
import functools
import sys

from tests.kit.transformer_engine import load_on_cpu


@functools.cache
def adam():
    """Transformer Engine's own Adam. megatron.core does not find the package afterwards."""
    load_on_cpu()
    from transformer_engine.pytorch.optimizers import FusedAdam

    for name in [name for name in sys.modules if name.partition(".")[0].startswith("transformer_engine")]:
        del sys.modules[name]
    return FusedAdam


@contextlib.contextmanager
def fused_adam():
    """Let megatron.core meanwhile build and load its optimizers as where Transformer Engine is installed."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    changes = [
        (optimizer, {"Adam": adam(), "USING_PYTORCH_OPTIMIZER": False}),
        (distrib_optimizer, {"Adam": adam(), "HAVE_APEX_OR_TE": True, "USING_TE_OPTIMIZER": True}),
    ]
    before = [(module, {name: vars(module)[name] for name in names}) for module, names in changes]
    for module, values in changes:
        vars(module).update(values)
    yield
    for module, values in before:
        vars(module).update(values)
