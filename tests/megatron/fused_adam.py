"""megatron.core as where Transformer Engine's Adam is installed, for a test whose process has none."""

import contextlib

from megatron_rl.tools.rehearsal.te_adam import FusedAdam


@contextlib.contextmanager
def fused_adam():
    """Let megatron.core meanwhile build and load its optimizers as where Transformer Engine is installed."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    changes = [
        (optimizer, {"Adam": FusedAdam, "USING_PYTORCH_OPTIMIZER": False}),
        (distrib_optimizer, {"Adam": FusedAdam, "HAVE_APEX_OR_TE": True, "USING_TE_OPTIMIZER": True}),
    ]
    before = [(module, {name: vars(module)[name] for name in names}) for module, names in changes]
    for module, values in changes:
        vars(module).update(values)
    yield
    for module, values in before:
        vars(module).update(values)
