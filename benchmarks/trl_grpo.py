"""TRL's side of bench_vs_trl.py: steps of GRPOTrainer, one JSON line each. Runs in TRL's environment, without ours.

Settings are TRL's defaults but for: float32, no gradient checkpointing (both faster on a CPU), nothing logged or saved.
"""

import json
import sys
import time
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class EndAt(LogitsProcessor):
    """Forbids the end of sequence until reply i has `lengths[i]` tokens with it, and then demands it."""

    def __init__(self, lengths: list[int], prompt_tokens: int, eos_ids: list[int]) -> None:
        self.lengths, self.prompt_tokens, self.eos_ids = torch.tensor(lengths), prompt_tokens, eos_ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.eos_ids] = -torch.inf
        last = self.lengths == input_ids.shape[1] - self.prompt_tokens + 1
        scores[last] = -torch.inf
        scores[last, self.eos_ids[0]] = 0.0
        return scores


class Measured(TrainerCallback):
    """Seconds of each step from the end of the one before."""

    def __init__(self) -> None:
        self.generation_s = 0.0
        self.tokens = 0

    def on_train_begin(self, *_, **__) -> None:
        self.mark = time.perf_counter()

    def on_step_end(self, *_, **__) -> None:
        now = time.perf_counter()
        print(json.dumps({"step": now - self.mark, "rollout": self.generation_s, "tokens": self.tokens}), flush=True)
        self.mark, self.generation_s, self.tokens = now, 0.0, 0


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])
    measured = Measured()

    def reward(prompts, completions, completion_ids, answer, reply_tokens, **_) -> list[float]:
        group = settings["samples"]
        wanted = [tokens for row in reply_tokens[::group] for tokens in row]
        assert [len(ids) for ids in completion_ids] == wanted, "TRL's replies do not have the lengths asked for"
        measured.tokens = sum(wanted)
        return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]

    replies = settings["prompts"] * settings["samples"]
    config = GRPOConfig(
        output_dir=settings["folder"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=replies,
        num_generations=settings["samples"],
        max_completion_length=settings["longest"],
        max_steps=settings["steps"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        beta=0.0,
        shuffle_dataset=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
    )
    data = load_dataset("json", data_files=settings["data"], split="train", cache_dir=settings["folder"])
    trainer = GRPOTrainer(settings["model"], reward, config, train_dataset=data, callbacks=[measured])
    generate, step = trainer.model.generate, iter(range(settings["steps"]))

    def timed_generate(input_ids: torch.Tensor, **kwargs):
        first = next(step) * settings["prompts"]
        rows = data.select(i % len(data) for i in range(first, first + settings["prompts"]))
        lengths = [tokens for row in rows["reply_tokens"] for tokens in row]
        end_at = EndAt(lengths, input_ids.shape[1], trainer.eos_token_ids)
        begin = time.perf_counter()
        result = generate(input_ids=input_ids, logits_processor=LogitsProcessorList([end_at]), **kwargs)
        measured.generation_s += time.perf_counter() - begin
        return result

    trainer.model.generate = timed_generate
    trainer.train()


if __name__ == "__main__":
    main()
