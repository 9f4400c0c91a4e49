"""ReMax as a researcher writes it in a file of their own, with AReaL-lite's names and signatures.

Nothing here knows the layout, the server or the packing.
"""

import asyncio
import uuid

import torch
from tensordict import TensorDict

from megatron_rl import LLMRequest, MegatronEngine, RolloutWorkflow, TrainEngine, gather_logprobs


class ReMaxRLVRWorkflow(RolloutWorkflow):
    def __init__(self, reward_fn, gconfig, tokenizer, enable_thinking=False):
        self.reward_fn, self.gconfig, self.tokenizer, self.enable_thinking = (
            reward_fn,
            gconfig,
            tokenizer,
            enable_thinking,
        )

    async def arun_episode(self, engine, data):
        input_ids = self.tokenizer.apply_chat_template(
            data["messages"],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,  # transformers 5 would return a mapping
            enable_thinking=self.enable_thinking,
        )
        rid = uuid.uuid4().hex  # one rid for both requests, which run at the same time
        sampled, greedy = await asyncio.gather(
            engine.agenerate(LLMRequest(rid=rid, input_ids=input_ids, gconfig=self.gconfig)),
            engine.agenerate(LLMRequest(rid=rid, input_ids=input_ids, gconfig=self.gconfig.new(greedy=True))),
        )

        def score(reply):
            return self.reward_fn(
                prompt=self.tokenizer.decode(input_ids),
                completions=self.tokenizer.decode(reply.output_tokens, skip_special_tokens=True),
                prompt_ids=reply.input_tokens,
                completion_ids=reply.output_tokens,
                **data,
            )

        length = sampled.input_len + sampled.output_len
        result = dict(
            input_ids=torch.tensor(sampled.input_tokens + sampled.output_tokens).unsqueeze(0),
            loss_mask=torch.tensor([0] * sampled.input_len + [1] * sampled.output_len).unsqueeze(0),
            versions=torch.tensor([-1] * sampled.input_len + sampled.output_versions).unsqueeze(0),
            attention_mask=torch.ones(length, dtype=torch.bool).unsqueeze(0),
            rewards=torch.full((1, length), float(score(sampled) - score(greedy))),
        )
        return TensorDict(result, batch_size=[1])


def reinforce_loss_fn(logits, data):
    input_ids = data["input_ids"]
    loss_mask = data["loss_mask"].bool()
    rewards = data["rewards"]
    logprobs = gather_logprobs(logits, torch.roll(input_ids, shifts=-1, dims=-1))
    loss = torch.where(loss_mask, -logprobs * rewards, 0.0)
    return loss.sum() / loss_mask.count_nonzero()


class ReinforceActor:
    def __init__(self, engine: TrainEngine):
        self.engine = engine

    def train_reinforce(self, data):
        self.engine.train()
        return self.engine.train_batch(
            data, loss_fn=reinforce_loss_fn, loss_weight_fn=lambda x: x["loss_mask"].count_nonzero()
        )


class MegatronReinforceActor(MegatronEngine):
    def __init__(self, config):
        super().__init__(config)
        self.actor = ReinforceActor(self)

    def train_reinforce(self, *args, **kwargs):
        return self.actor.train_reinforce(*args, **kwargs)
