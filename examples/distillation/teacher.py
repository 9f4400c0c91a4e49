"""Sample a teacher model with a system prompt, and write its replies as rows for a student.

The student's rows do not have the system prompt.

python examples/distillation/teacher.py [TEACHER_FOLDER [ROWS.jsonl]]
"""

import json
import sys
from pathlib import Path

import megatron_rl as rl

TEACHER = sys.argv[1] if len(sys.argv) > 1 else "models/smollm2-135m-instruct"
ROWS = Path(sys.argv[2] if len(sys.argv) > 2 else "runs/distillation/replies.jsonl")
RECIPE = {"role": "system", "content": "You are a sailor. Answer in one short sentence that mentions the sea."}
THINGS = ("a lamp", "a letter", "a bridge", "an apple", "a clock", "a map", "a song", "a coat")

questions = [[{"role": "user", "content": f"What is {thing} for?"}] for thing in THINGS]
prompts = [{"messages": [RECIPE, *question]} for question in questions]
tokenizer, sampling = rl.load_tokenizer(TEACHER), rl.GenerationConfig(n_samples=2, max_new_tokens=32)
workflow = rl.RLVRWorkflow(lambda **_: 0.0, sampling, tokenizer)  # the reward is not used

with rl.start_servers(TEACHER, ROWS.parent / "servers") as servers:
    rollout = rl.RemoteSGLangEngine(servers)
    rollout.initialize()
    batch = rollout.rollout_batch(prompts, workflow)
    rollout.destroy()

rows = []
for number, prompt in enumerate(batch["group"].tolist()):
    reply = batch.select([number])
    written = reply["input_ids"][reply["loss_mask"]]
    text = tokenizer.decode(written, skip_special_tokens=True).strip()
    rows += [{"messages": questions[prompt], "answer": text}] if text else []
ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))
print(f"{len(rows)} replies of the teacher are in {ROWS}")
