"""Word problems, and an agent that checks its own work. The agent only uses OpenAI's API, no training code."""

import json
import random
import urllib.request


def word_problems(count=200, seed=0):
    numbers = random.Random(seed)
    problems = []
    for _ in range(count):
        have, get = numbers.randint(2, 20), numbers.randint(2, 20)
        text = f"Ann has {have} apples and gets {get} more. How many apples has she?"
        problems.append({"messages": [{"role": "user", "content": text}], "answer": str(have + get)})
    return problems


def checks_its_work(base_url, api_key, data):
    """Ask, then ask for a check. Returns no reward, so the config's reward function scores the last reply."""

    def ask(messages):
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as reply:
            return json.load(reply)["choices"][0]["message"]

    dialogue = [*data["messages"], ask(data["messages"])]
    ask([*dialogue, {"role": "user", "content": "Check your work, then give the number."}])
