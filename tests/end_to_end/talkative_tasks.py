"""Prompts, a reward and an agent for runs of the talkative model, as a user would write them."""

import json
import urllib.request


def questions(count=8):
    return [{"messages": [{"role": "user", "content": f"What is {number}/7?"}]} for number in range(count)]


def vowels(completions, **_):
    """The share of vowels: hardly two replies have the same."""
    return sum(letter in "aeiouAEIOU" for letter in completions) / max(len(completions), 1)


def goes_back(base_url, api_key, data):
    """An agent that asks, goes on, goes back to the first reply and goes on in another way."""

    def ask(messages):
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as answer:
            return json.load(answer)["choices"][0]["message"]

    begun = [*data["messages"], ask(data["messages"])]
    for said in ("and?", "or?"):
        ask([*begun, {"role": "user", "content": said}])
