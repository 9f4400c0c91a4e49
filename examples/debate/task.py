"""Questions to debate: which of two products is larger."""

import random


def comparisons(count=200, seed=0):
    numbers = random.Random(seed)
    questions = []
    for _ in range(count):
        a, b, c, d = (numbers.randint(3, 12) for _ in range(4))
        text = f"Which is larger, {a} x {b} or {c} x {d}? End with the value of the larger one."
        questions.append({"messages": [{"role": "user", "content": text}], "answer": str(max(a * b, c * d))})
    return questions
