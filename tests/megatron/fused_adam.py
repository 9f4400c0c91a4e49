"""A stand-in for Transformer Engine 2's FusedAdam, which needs a GPU: it keeps what that one keeps, where it keeps it.

The number of updates is in the parameter group, from the first update on, and an option of its own is there too; beside
a parameter are moments only, and loading another name is a KeyError. The numbers are those of torch's fused AdamW.
"""

import contextlib

import torch
from torch.optim.adamw import adamw


class FusedAdam(torch.optim.Optimizer):
    dtypes = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}

    def __init__(self, params, lr, betas, eps, weight_decay, *, adam_w_mode=True, bias_correction=True):
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options | {"bias_correction": bias_correction})
        assert adam_w_mode

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name in state:
                state[name] = state[name].to(self.dtypes[name])

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if not group["params"]:
                continue
            assert group["bias_correction"]
            group["step"] = group.get("step", 0) + 1
            assert type(group["step"]) is int, "the kernel takes no other"
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter] = {name: torch.zeros_like(parameter) for name in self.dtypes}
            moments = [[self.state[parameter][name] for parameter in parameters] for name in self.dtypes]
            adamw(
                parameters,
                [parameter.grad for parameter in parameters],
                *moments,
                [],
                [torch.tensor(group["step"] - 1.0) for _ in parameters],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


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
