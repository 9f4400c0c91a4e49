"""A reward that random replies earn half of the time. Its process need not load torch for it."""


def even(prompt, completions, prompt_ids, completion_ids, answer, **data):
    """1 for tokens that add up to an even number."""
    return float(sum(completion_ids) % 2 == 0)
