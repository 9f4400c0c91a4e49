"""Train a model to write alliterations, with your own prompts, your own reward and the whole loop in Python.

python examples/own_task/train.py [MODEL_FOLDER]
"""

import sys

import megatron_rl as rl

MODEL = sys.argv[1] if len(sys.argv) > 1 else "models/smollm2-135m-instruct"
STEPS, FOLDER = 8, "runs/own_task"


def question(letter):
    text = f"Write a short sentence in which every word begins with the letter {letter}."
    return {"messages": [{"role": "user", "content": text}], "letter": letter}


def share_of_words(completions, letter, **_):
    """Return the reward of one reply. Receives the reply's text, and every field of the prompt by name."""
    words = completions.lower().split()
    return sum(word.startswith(letter) for word in words) / max(len(words), 1)


# To use rows of a file instead: rl.load_prompts("my_rows.jsonl"), with a column `prompt` or `messages`.
held_out, prompts = [question(it) for it in "bmst"], rl.PromptIterator([question(it) for it in "acdefghilnoprw"])
sampling = rl.GenerationConfig(n_samples=8, max_new_tokens=16)
workflow = rl.RLVRWorkflow(share_of_words, sampling, rl.load_tokenizer(MODEL))
policy = rl.MegatronEngine(rl.EngineConfig(model=rl.ModelConfig(path=MODEL), optimizer=rl.OptimizerConfig(lr=1e-5)))
policy.initialize(ft_spec=rl.FinetuneSpec(total_updates=STEPS))
actor = rl.PolicyActor(policy, rl.AlgorithmConfig(advantage="group_norm"), temperature=sampling.temperature)

with rl.start_servers(MODEL, f"{FOLDER}/servers") as servers:
    rollout = rl.RemoteSGLangEngine(servers)
    rollout.initialize()
    print(f"held-out reward before: {rl.mean_reward(rollout.evaluate(held_out, workflow).result()):.2f}")
    for step in range(STEPS):
        batch = rollout.rollout_batch(prompts.next_batch(4), workflow)  # 4 prompts x 8 replies, scored
        actor.compute_advantages(batch)  # how much better each reply is than the others to its prompt
        stats = actor.update([batch])[0]
        policy.update_weights(rollout, policy.get_version())  # the servers continue with the new weights
        print(f"step {step}: reward {rl.mean_reward(batch):.2f}, gradient norm {stats.grad_norm:.2f}")
    print(f"held-out reward after: {rl.mean_reward(rollout.evaluate(held_out, workflow).result()):.2f}")
    policy.save(f"{FOLDER}/final")
    policy.destroy()
    rollout.destroy()
