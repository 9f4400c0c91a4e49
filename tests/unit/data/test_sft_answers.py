"""Answers: read from a column or from a dialogue, checked, bounded, and as training takes them."""

import json

import pytest
from transformers import AutoTokenizer

from megatron_rl.config import GenerationConfig, load_config
from megatron_rl.data.sft_rows import ReplyRows, load_replies
from megatron_rl.data.tokens import load_tokenizer, prompt_lengths

TINY = "configs/models/count_tiny"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }},{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
"""A turn is its role's first letter and its text; an answer begins behind another a."""


@pytest.fixture
def tokenizer():
    found = AutoTokenizer.from_pretrained(TINY)
    found.chat_template = TEMPLATE
    return found


@pytest.fixture
def load(tmp_path, tokenizer):
    """Read rows as a run's data.train: what `load_replies` makes of them."""

    def load(*rows, held_out=(), **settings):
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (tmp_path / "held_out.jsonl").write_text("\n".join(map(json.dumps, held_out)))
        config = {"model.path": TINY, "data.train": tmp_path / "rows.jsonl", "supervised.answer": "answer"}
        config |= {"data.evaluation": tmp_path / "held_out.jsonl"} if held_out else {}
        (tmp_path / "empty.yaml").write_text("run: {steps: 1}")
        loaded = load_config(tmp_path / "empty.yaml", [f"{key}={value}" for key, value in (config | settings).items()])
        return load_replies(loaded, tokenizer, context=16)

    return load


def texts(tokenizer, batch):
    """The whole of each sequence, and what of it is trained."""
    lengths = batch.lengths.tolist()
    parts = zip(batch["input_ids"].split(lengths), batch["loss_mask"].split(lengths), strict=True)
    return [(tokenizer.decode(ids), tokenizer.decode(ids[mask])) for ids, mask in parts]


def test_answer_follows_its_prompt_and_ends_as_a_model_ends_it(load, tokenizer):
    eos = tokenizer.eos_token
    rows, _ = load({"prompt": "0110?", "answer": "2"}, {"prompt": "1?", "answer": 1})
    batch = rows.batch([1, 0, 1])
    assert texts(tokenizer, batch) == [(f"1?1{eos}", f"1{eos}"), (f"0110?2{eos}", f"2{eos}"), (f"1?1{eos}", f"1{eos}")]
    assert batch["group"].tolist() == [0, 1, 2], "a row that is taken twice is two"


def test_column_and_form_of_the_prompt_are_the_rows_own(load, tokenizer):
    eos, settings = tokenizer.eos_token, {"supervised.answer": "solution"}
    row = {"messages": [{"role": "user", "content": "11?"}], "solution": "2", "answer": "3"}
    ids = tokenizer("10?", add_special_tokens=False)["input_ids"]
    rows, held_out = load(row, held_out=[{"input_ids": ids, "solution": "1"}], **settings)
    assert texts(tokenizer, rows.batch([0])) == [(f"u11?,a2{eos}", f"2{eos}")]
    assert texts(tokenizer, held_out["held_out"]) == [(f"10?1{eos}", f"1{eos}")]


def test_last_message_of_a_dialogue_is_the_answer_to_those_before(load, tokenizer):
    eos, settings = tokenizer.eos_token, {"supervised.answer": "messages"}
    turns = [("user", "1?"), ("assistant", "1"), ("user", "11?"), ("assistant", "2")]
    dialogue = [{"role": role, "content": text} for role, text in turns]
    rows, _ = load({"messages": dialogue}, **settings)
    assert texts(tokenizer, rows.batch([0])) == [(f"u1?,a1,u11?,a2{eos}", f"2{eos}")], "the template is applied once"


USER, ANSWER = {"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}


@pytest.mark.parametrize(
    ("column", "row", "message"),
    [
        (
            "answer",
            {"prompt": "1?"},
            "row 2: answer = None: must be the answer that supervised",
        ),
        ("answer", {"prompt": "1?", "answer": " "}, "row 2: answer = ' ': must be .* give every row one"),
        ("answer", {"prompt": "1?", "answer": ["1"]}, r"row 2: answer = \['1'\]: must be the answer"),
        ("answer", {"prompt": "1?" * 7, "answer": "10"}, "row 2: has 17 tokens, more than the model's context of 16"),
        ("messages", {"prompt": "1?"}, "row 2: the last of 0 messages is None: .* name the column that has it"),
        ("messages", {"messages": "1?"}, "row 2: the last of 0 messages is None"),
        ("messages", {"messages": [ANSWER]}, "row 2: the last of 1 messages is .* after at least one other"),
        ("messages", {"messages": [ANSWER, USER]}, "row 2: the last of 2 messages is {'role': 'user'.* an assistant's"),
        (
            "messages",
            {"messages": [USER, ANSWER | {"content": ""}]},
            "row 2: the last of 2 .* message with text or tool calls",
        ),
        ("messages", {"messages": [USER, "1"]}, "row 2: the last of 2 messages is '1'"),
    ],
)
def test_row_without_an_answer_is_named(column, row, message, load):
    good = {"answer": {"prompt": "1?", "answer": "1"}, "messages": {"messages": [USER, ANSWER]}}[column]
    with pytest.raises(ValueError, match=f"data.train, {message}"):
        load(good, row, **{"supervised.answer": column})
    with pytest.raises(ValueError, match=f"evaluation held_out, {message}"):
        load(good, held_out=[good, row], **{"supervised.answer": column})


def test_rows_with_more_tokens_than_the_bound_are_left_out(load, tokenizer):
    answers = [{"prompt": "1?", "answer": "1" * count} for count in (1, 9, 3, 2, 40)]
    # A prompt of 2, the answer, and the token that ends it: 4, 12, 6, 5 and 43, which does not fit the context either.
    rows, held_out = load(*answers, held_out=answers[:2], **{"data.max_tokens": 5})
    assert [row["answer"] for row in rows.rows] == ["1", "11"] and rows.left_out == 3
    assert len(held_out["held_out"]) == 2, "what is measured is not changed"
    with pytest.raises(ValueError, match="data.max_tokens = 3: all 5 prompts of data.train have more; raise it"):
        load(*answers, **{"data.max_tokens": 3})
    with pytest.raises(ValueError, match="row 5: has 43 tokens, .* leave it out \\(data.max_tokens does"):
        load(*answers)


def test_longer_reply_of_a_pair_counts(load):
    settings = {"supervised.answer": "", "preference.loss": "dpo"}
    pairs = [{"prompt": "1?", "chosen": "1", "rejected": "0" * count} for count in (1, 4, 2)]
    rows, _ = load(*pairs, **settings, **{"data.max_tokens": 5})
    assert [row["rejected"] for row in rows.rows] == ["0", "00"] and rows.left_out == 1


def test_bound_of_the_prompt_is_that_of_what_comes_before_the_answer(load):
    dialogues = [{"messages": [USER | {"content": "1" * count}, ANSWER | {"content": "1" * 6}]} for count in (2, 4)]
    settings = {"supervised.answer": "messages", "data.max_prompt_tokens": 5}
    rows, _ = load(*dialogues, **settings)  # u11,a
    assert rows.rows == dialogues[:1] and rows.left_out == 1


def test_tokenizer_that_cannot_end_an_answer_is_refused(load, tokenizer):
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=f"model.path = '{TINY}': its tokenizer has no end-of-sequence token"):
        load({"prompt": "1?", "answer": "1"})


def test_rows_of_other_trainers_are_taken_as_they_are(load, tokenizer):
    eos, asked, right, wrong = tokenizer.eos_token, [USER], [ANSWER], [ANSWER | {"content": "0"}]
    forms = [
        {"messages": asked, "chosen": "1", "rejected": "0"},
        {"prompt": asked, "chosen": right, "rejected": wrong},  # TRL's conversational form
        {"prompt": None, "messages": asked, "chosen": right[0], "rejected": wrong[0]},  # as Arrow fills a column
        {"chosen": asked + right, "rejected": asked + wrong},  # with an implicit prompt
        {"prompt": "1?", "chosen": asked + right, "rejected": asked + wrong},
        {"messages": asked, "input_ids": None, "chosen": [ANSWER | {"tool_calls": None}], "rejected": wrong},
    ]
    rows, _ = load(*forms, **{"supervised.answer": "", "preference.loss": "dpo"})
    for number in range(len(forms)):
        assert texts(tokenizer, rows.batch([number])) == [(f"u1?,a1{eos}", f"1{eos}"), (f"u1?,a0{eos}", f"0{eos}")]
    rows, _ = load({"prompt": asked, "completion": right}, **{"supervised.answer": "completion"})
    assert texts(tokenizer, rows.batch([0])) == [(f"u1?,a1{eos}", f"1{eos}")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": 1.5, "answer": "1"}, "prompt 2: prompt = 1.5: must be text, or a list of messages"),
        ({"prompt": {"role": "user"}, "answer": "1"}, "prompt 2: prompt = {'role': 'user'}: must be text"),
        ({"input_ids": [1, 2.5], "answer": "1"}, "prompt 2: input_ids has 2.5: must be token ids"),
        ({"messages": [USER], "answer": [USER]}, "row 2: answer = .*: must be the answer"),
        ({"messages": [USER], "answer": [ANSWER, ANSWER]}, "row 2: answer = .*: must be the answer"),
        (
            {"messages": [{"role": "user"}, {"content": "1"}], "answer": "1"},
            r"row 2: messages\[1\] = .*: must be an object",
        ),
        ({"prompt": "1?", "answer": [ANSWER]}, "row 2: a reply is a message, and the prompt is text"),
    ],
)
def test_row_in_no_form_is_named(row, message, load):
    with pytest.raises(ValueError, match=message):
        load({"prompt": "1?", "answer": "1"}, row)


def test_number_that_a_data_frame_lacks_is_no_answer(load, tokenizer):
    with pytest.raises(ValueError, match="row 1: answer = nan: must be the answer"):
        ReplyRows("k", [{"prompt": "1?", "answer": float("nan")}], tokenizer, column="answer", setting="s", context=9)


def test_token_beyond_the_models_vocabulary_is_refused_with_its_row(load, tokenizer):
    rows = [{"prompt": "1?", "answer": "1"}, {"input_ids": [3, 500], "answer": "1"}]
    asked = {"column": "answer", "setting": "s", "context": 9}
    with pytest.raises(ValueError, match="k, row 2: has the token id 500, and the model's vocabulary has 48"):
        ReplyRows("k", rows, tokenizer, vocab=48, **asked)
    with pytest.raises(ValueError, match="k, row 1: has the token id .*, and the model's vocabulary has 3"):
        ReplyRows("k", rows, tokenizer, vocab=3, **asked)
    with pytest.raises(ValueError, match="data.train, prompt 2: has the token id 500"):
        prompt_lengths("data.train", rows, tokenizer, GenerationConfig(max_new_tokens=1), context=9, vocab=48)


def test_template_arguments_of_the_config_reach_answers_and_prompts(load, tokenizer, tmp_path):
    template = TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] }}{{ '?' if loud }}")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    loud = load_tokenizer(str(tmp_path), {"loud": True})
    rows = ReplyRows("k", [{"messages": [USER, ANSWER]}], loud, column="messages", setting="s", context=16)
    assert texts(loud, rows.batch([0]))[0][0].startswith("u1??,a1")
    with pytest.raises(ValueError, match="data.template_args.quiet = True: the chat template of .* does not read it"):
        ReplyRows("k", [{"messages": [USER, ANSWER]}], load_tokenizer(str(tmp_path), {"quiet": True}),
                   column="messages", setting="s", context=16)  # fmt: skip
