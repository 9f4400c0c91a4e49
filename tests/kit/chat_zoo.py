# ruff: noqa: E501
"""Chat templates that do what those of thirteen model families do, and tokenizers of every kind that families use.

transformers has Jinja drop a line's end that follows a block, so a template writes {{ '\\n' }} there.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is 12 + 30? The answer is 42. Let me think about it: carry one.",
    'system user assistant tool model: {"name": "add", "arguments": {"a": 12, "b": 30}} naïve café, tabs\tand\n\nlines',
]


@dataclass(frozen=True)
class Breed:
    """A family's manner: its template, its special tokens, and what its template has no place for."""

    template: str
    special: tuple[str, ...]
    end: str
    """What ends a reply."""
    eos: str = "<eos>"
    bos: str = "<bos>"
    words: tuple[str, ...] = ()
    """Added tokens that are not special."""
    lacks: frozenset[str] = frozenset()
    """Of: system, developer, tool, thought."""


CALL_XML = (
    "{% for call in m.tool_calls %}<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for name, value in call.function.arguments.items() %}<parameter={{ name }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}"
)
CALL_JSON = (
    "{% for call in m.tool_calls %}{{ '\n' if m.content or not loop.first }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
)
RESULT = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}{{ '\n' }}<tool_response>\n"
    "{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
CHATML = ("<|im_start|>", "<|im_end|>")
LLAMA = ("<|begin|>", "<|start_header|>", "<|end_header|>", "<|eot|>", "<|eom|>")
COMMAND = (
    "<BOS>",
    "<|START_TURN|>",
    "<|END_TURN|>",
    "<|USER|>",
    "<|CHATBOT|>",
    "<|SYSTEM|>",
    "<|RESULT|>",
    "<|ACTION|>",
)
HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>")
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
MISTRAL += ("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
MISTRAL_CALLS = (
    "[TOOL_CALLS]{%s}[{%% for call in m.tool_calls %%}{%% if call.id is not defined or call.id | length != 9 %%}"
    "{{ raise_exception('a call id has 9 characters') }}{%% endif %%}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{{ ', ' if not loop.last }}{%% endfor %%}]</s>"
)


def mistral(space: str, system: str, text: str) -> str:
    """space: behind marks. system: what a first system message becomes. text: a reply's."""
    return (
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}<s>{% for m in messages %}"
        "{% if m.role == 'user' %}{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS]" + space + "{{ tools | tojson }}"
        "[/AVAILABLE_TOOLS]{% endif %}[INST]" + space + "{{ m.content }}[/INST]"
        "{% elif m.tool_calls %}" + MISTRAL_CALLS.replace("{%s}", space).replace("%%", "%") +
        "{% elif m.role == 'assistant' %}" + text + "</s>"
        "{% elif m.role == 'tool' %}{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
        "{{ raise_exception('a call id has 9 characters') }}{% endif %}[TOOL_RESULTS]" + space +
        '{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
        "{% elif m.role == 'system' %}" + system + "{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
    )  # fmt: skip


SPLIT = (
    "{% set thought = m.reasoning_content if m.reasoning_content is string else "
    "(m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content else '') %}"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') if m.reasoning_content is not string else m.content %}"
)
QWEN3 = (
    TOOLS + "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    + RESULT
    + "{% elif m.role == 'assistant' %}"
    + SPLIT
    + "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n"
    "{{ said.lstrip('\n') }}{% else %}{{ said }}{% endif %}" + CALL_JSON + "<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
ZOO: dict[str, Breed] = {
    "qwen2.5": Breed(
        TOOLS
        + "{% for m in messages %}{% if m.role == 'tool' %}"
        + RESULT
        + "{% elif m.role in ['system', 'user', 'assistant'] %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}"
        + CALL_JSON
        + "{% endif %}<|im_end|>\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        CHATML,
        "<|im_end|>",
        lacks=frozenset({"developer", "thought"}),
    ),
    "qwen3": Breed(QWEN3, CHATML, "<|im_end|>", words=("<think>", "</think>", "<tool_call>", "</tool_call>")),
    "qwen3-coder": Breed(
        TOOLS
        + "{% for m in messages %}{% if m.role == 'tool' %}"
        + RESULT
        + "{% elif m.role in ['system', 'user'] or not "
        "m.tool_calls %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% else %}<|im_start|>assistant\n"
        "{% if m.content | trim %}{{ m.content | trim }}\n{% endif %}"
        + CALL_XML
        + "<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        CHATML,
        "<|im_end|>",
        words=("<tool_call>", "</tool_call>"),
        lacks=frozenset({"thought"}),
    ),
    "glm-4.5": Breed(
        "[gMASK]<sop>{% if tools %}<|system|>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
        "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
        "{% elif m.role == 'system' %}<|system|>\n{{ m.content }}{% elif m.role == 'tool' %}"
        "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}{{ '\n' }}<tool_response>\n"
        "{{ m.content }}\n</tool_response>{% elif m.role == 'assistant' %}<|assistant|>"
        + SPLIT
        + "{% if loop.index0 > ns.last and thought %}{{ '\n' }}<think>{{ thought.strip() }}</think>"
        "{% else %}{{ '\n' }}<think></think>{% endif %}{% if said.strip() %}{{ '\n' }}{{ said.strip() }}{% endif %}"
        "{% for call in m.tool_calls or [] %}{{ '\n' }}<tool_call>{{ call.function.name }}\n"
        "{% for name, value in call.function.arguments.items() %}<arg_key>{{ name }}</arg_key>\n<arg_value>"
        "{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
        "{{ '\n<think></think>' if enable_thinking is defined and not enable_thinking }}{% endif %}",
        ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>"),
        "<eos>",
        words=("<think>", "</think>", "<tool_call>", "</tool_call>"),
        lacks=frozenset({"developer"}),
    ),
    "llama-3.1": Breed(
        "<|begin|>{% for m in messages %}{% if m.role == 'tool' %}<|start_header|>ipython<|end_header|>\n\n"
        "{{ m.content | tojson }}<|eot|>{% elif m.tool_calls %}"
        "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
        "<|start_header|>assistant<|end_header|>\n\n"
        '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
        "<|eot|>{% else %}<|start_header|>{{ m.role }}<|end_header|>\n\n"
        "{% if tools and m.role == 'user' and loop.index0 < 2 %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
        "{% endif %}{{ m.content | trim }}<|eot|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start_header|>assistant<|end_header|>\n\n{% endif %}",
        LLAMA,
        "<|eot|>",
        lacks=frozenset({"thought"}),
    ),
    "mistral-v3": Breed(
        mistral(" ", "{{ raise_exception('no system message') }}", " {{ m.content | trim }}"),
        MISTRAL,
        "</s>",
        eos="</s>",
        bos="<s>",
        lacks=frozenset({"system", "developer", "thought"}),
    ),
    "mistral-v11": Breed(
        mistral("", "[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]", "{{ m.content }}"),
        MISTRAL,
        "</s>",
        eos="</s>",
        bos="<s>",
        lacks=frozenset({"developer", "thought"}),
    ),
    "gpt-oss": Breed(
        "{% if tools %}<|start|>system<|message|>{{ tools | tojson }}<|end|>{% endif %}{% set ns = namespace(call=none) %}"
        "{% for m in messages %}{% if m.role in ['system', 'developer'] %}<|start|>developer<|message|>{{ m.content }}<|end|>"
        "{% elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% elif m.role == 'tool' %}"
        "{% if ns.call is none %}{{ raise_exception('a result without a call') }}{% endif %}"
        "<|start|>functions.{{ ns.call }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
        "{% elif m.tool_calls %}{% if m.content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>"
        "{% endif %}{% set ns.call = m.tool_calls[0].function.name %}<|start|>assistant to=functions.{{ ns.call }}"
        "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}"
        "{% if m.thinking and loop.last %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
        "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        HARMONY,
        "<|return|>",
        eos="<|return|>",
        lacks=frozenset({"thought"}),  # in reasoning_content
    ),
    "deepseek-r1": Breed(
        "<bos>{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}<|User|>{{ m.content }}"
        "{% elif m.role == 'assistant' and not m.tool_calls %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<eos>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}",
        ("<|User|>", "<|Assistant|>"),
        "<eos>",
        words=("<think>", "</think>"),
        lacks=frozenset({"developer", "tool", "thought", "reply"}),
    ),
    "phi-3.5": Breed(
        "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% else %}<eos>{% endif %}",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<|end|>",
        lacks=frozenset({"developer", "tool", "thought"}),
    ),
    "gemma": Breed(
        "<bos>{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}{% for m in messages %}"
        "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ("<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        lacks=frozenset({"system", "developer", "tool", "thought"}),
    ),
    "command-r": Breed(
        "<BOS>{% if tools %}<|START_TURN|><|SYSTEM|>{{ tools | tojson }}<|END_TURN|>{% endif %}"
        "{% for m in messages %}<|START_TURN|>{% if m.role == 'user' %}<|USER|>{{ m.content }}{% elif m.role == 'system' %}"
        "<|SYSTEM|>{{ m.content }}{% elif m.role == 'tool' %}<|RESULT|>{{ m.content }}{% elif m.role == 'assistant' %}<|CHATBOT|>"
        "{{ m.content.strip() }}{% if m.tool_calls %}<|ACTION|>[{% for call in m.tool_calls %}{{ call.function | tojson }}"
        "{{ ', ' if not loop.last }}{% endfor %}]<|ACTION|>{% endif %}{% endif %}<|END_TURN|>{% endfor %}"
        "{% if add_generation_prompt %}<|START_TURN|><|CHATBOT|>{% endif %}",
        COMMAND,
        "<|END_TURN|>",
        bos="<BOS>",
        lacks=frozenset({"developer", "thought"}),
    ),
    "hermes": Breed(
        TOOLS
        + "{% for m in messages %}{% if m.role == 'tool' %}"
        + RESULT
        + "{% elif m.role == 'assistant' and m.tool_calls %}"
        "<|im_start|>assistant\n{{ m.content }}"
        + CALL_JSON
        + "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        CHATML,
        "<|im_end|>",
        lacks=frozenset({"thought"}),
    ),
}
KINDS = ("byte BPE", "Metaspace always", "Metaspace first", "Metaspace never", "Unigram", "words")


def make_tokenizer(breed: Breed, kind: str = "byte BPE", *, adds: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Train a small tokenizer for a family. adds: what it puts around a text by itself, of "bos" and "eos"."""
    special = list(dict.fromkeys(["<pad>", "<unk>", breed.bos, breed.eos, *breed.special]))
    if kind == "byte BPE":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet)
    elif kind == "words":
        made = Tokenizer(models.WordLevel(unk_token="<unk>"))
        made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        trainer = trainers.WordLevelTrainer(special_tokens=special)
    else:
        scheme = "always" if kind == "Unigram" else kind.partition(" ")[2]
        made = Tokenizer(models.Unigram() if kind == "Unigram" else models.BPE(byte_fallback=False))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        made.decoder = decoders.Metaspace(prepend_scheme=scheme)
        alphabet = sorted(set("".join(CORPUS)) | set("\n\t<>[]/|_=#"))
        common = {"special_tokens": special, "initial_alphabet": alphabet, "vocab_size": 400}
        is_unigram = kind == "Unigram"
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **common) if is_unigram else trainers.BpeTrainer(**common)
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens([AddedToken(word, special=False, normalized=False) for word in breed.words])
    if adds:
        ids = [(token, made.token_to_id(token)) for token in (breed.bos, breed.eos)]
        form = f"{breed.bos + ' ' if 'bos' in adds else ''}$A{' ' + breed.eos if 'eos' in adds else ''}"
        made.post_processor = processors.TemplateProcessing(single=form, special_tokens=ids)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=breed.bos,
        eos_token=breed.eos,
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=list(breed.special),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = breed.template
    return tokenizer
