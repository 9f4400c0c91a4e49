"""Objects named in a config by import path, `package.module:name`."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

from megatron_rl.api import RolloutWorkflow
from megatron_rl.config import GenerationConfig, TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def resolve(path: str, *, key: str) -> Any:
    """Return the object that `path` names. ValueError names `key` (where the path was configured), the path and why."""
    module_name, _, name = path.partition(":")
    if not (module_name and name):
        raise ValueError(
            f"{key} = {path!r}: must be an import path package.module:name, "
            "e.g. megatron_rl.rollout.rewards:exact_match."
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{key} = {path!r}: module {module_name} cannot be imported ({error}); check the path, and that its folder "
            "is on PYTHONPATH or its package installed."
        ) from error
    # vars() and not getattr: a misspelt name must not find a submodule by accident of what was imported before.
    names = vars(module)
    if name in names:
        return names[name]
    raise ValueError(f"{key} = {path!r}: module {module_name} has no {name!r}; check the name after the colon.")


def make_workflow(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, gconfig: GenerationConfig
) -> RolloutWorkflow:
    """Build the configured workflow; ValueError where its constructor does not take the arguments."""
    options = config.rollout
    factory = resolve(options.workflow, key="rollout.workflow")
    arguments = {"reward_fn": resolve(options.reward, key="rollout.reward"), "gconfig": gconfig, "tokenizer": tokenizer}
    try:
        inspect.signature(factory).bind(**arguments, **options.workflow_args)
    except TypeError as error:
        raise ValueError(
            f"rollout.workflow = {options.workflow!r}: {error}; its signature is {inspect.signature(factory)} and it "
            f"is called "
            f"with reward_fn, gconfig, tokenizer and rollout.workflow_args = {options.workflow_args}."
        ) from error
    return factory(**arguments, **options.workflow_args)
