"""A stand-in for Transformer Engine's FusedAdam that keeps the same state in the same places.

A parameter group has the additional option `bias_correction` and, from the first update on, the step count. A
parameter's state has two moments and, with `master_weights`, a main weight. Loading a state with another name raises
KeyError.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rl.tools.rehearsal.te_kernels import adam_


class FusedAdam(torch.optim.Optimizer):
    """AdamW that updates lists of tensors. States are float32, bfloat16, or float16 with one scale per tensor."""

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options | {"bias_correction": bias_correction})
        assert adam_w_mode and bias_correction and not (store_param_remainders or capturable)
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": master_weight_dtype}
        self._scales: dict[Tensor, dict[str, Tensor]] = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        assert set_to_none
        for group in self.param_groups:
            for parameter in group["params"]:
                setattr(parameter, "decoupled_grad" if self.use_decoupled_grad else "grad", None)

    # -- state --------------------------------------------------------------------------------------------------------

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        assert not store_param_remainders
        for name in ("exp_avg", "exp_avg_sq"):
            self._make_state(param, name).zero_()
        if self.master_weights:
            self.set_scaled_state(param, "master_param", param.clone().detach().float())

    def _make_state(self, param: Tensor, name: str) -> Tensor:
        self.state[param][name] = made = torch.empty_like(param, dtype=self.dtypes[name])
        if made.dtype is not torch.float32:
            one = torch.ones(1, dtype=torch.float32, device=param.device)
            self._scales.setdefault(param, {})[name] = one
        return made

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        """Return a state in float32: the state itself if it is float32, otherwise a copy."""
        state = self.state[param][state_name]
        assert state.dtype is self.dtypes[state_name]
        unscaled = state.float()
        return unscaled.mul_(self._scales[param][state_name]) if state.dtype is torch.float16 else unscaled

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        if state_name not in self.state[param]:
            self._make_state(param, state_name)
        self._round_into(param, state_name, unscaled_state)

    def _round_into(self, param: Tensor, name: str, unscaled: Tensor) -> None:
        state = self.state[param][name]
        if state.dtype is not torch.float16:
            state.copy_(unscaled.to(state.dtype))
            return
        low, high = torch.aminmax(unscaled)
        scale = self._scales[param][name]
        scale.copy_(torch.maximum(-low, high) / (torch.finfo(torch.float16).max / 2))
        state.copy_(unscaled.mul_(torch.where(scale > 0, scale.reciprocal(), 0.0)))

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict with all states in float32."""
        found = super().state_dict()
        for number, parameter in self._numbered(found):
            state = found["state"].get(number, {})
            found["state"][number] = {name: self.get_unscaled_state(parameter, name) for name in state}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for number, parameter in self._numbered(state_dict):
            if number in state_dict["state"]:
                self.state[parameter] = {}
                for name, value in state_dict["state"][number].items():
                    self.set_scaled_state(parameter, name, value.float())

    def _numbered(self, state_dict: dict[str, Any]) -> list[tuple[int, Tensor]]:
        groups = zip(state_dict["param_groups"], self.param_groups, strict=True)
        return [pair for saved, own in groups for pair in zip(saved["params"], own["params"], strict=True)]

    # -- update -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            assert type(group["step"]) is int, "the kernel takes no other"
            self._update(group)

    def _update(self, group: dict[str, Any]) -> None:
        parameters, gradients = [], []
        states: dict[str, list[Tensor]] = {"exp_avg": [], "exp_avg_sq": [], "master_param": []}
        for parameter in group["params"]:
            if not self.state[parameter]:
                self.initialize_state(parameter, False)
            gradient = vars(parameter).get("decoupled_grad") if self.use_decoupled_grad else parameter.grad
            if gradient is None:
                continue
            parameters.append(parameter)
            gradients.append(gradient)
            for name in self.state[parameter]:
                states[name].append(self.get_unscaled_state(parameter, name))
        if not parameters:
            return
        settings = group["lr"], *group["betas"], group["eps"], group["step"], group["weight_decay"]
        adam_(parameters, gradients, *states.values(), *settings)
        for name, values in states.items():
            if self.dtypes[name] is not torch.float32:
                for parameter, value in zip(parameters, values, strict=False):
                    self._round_into(parameter, name, value)
