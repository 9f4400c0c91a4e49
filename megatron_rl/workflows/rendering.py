"""Produces all token ids for training, sampling and serving: of prompts, replies, and messages that follow a reply.

A prompt and its reply are rendered and tokenized as one text. The prompt's ids must be a prefix of the result, because
a server receives the prompt alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from megatron_rl.config.data_section import TAKEN
from megatron_rl.workflows.messages import (
    THOUGHTS,
    Message,
    normal_call,
    normal_message,
    normal_messages,
    normal_tools,
    shown,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_ARGS, ROW_ARGS = "template_args", "chat_template_kwargs"
"""TEMPLATE_ARGS: key of the run's template arguments in the tokenizer's `init_kwargs`. ROW_ARGS: column with the
template arguments of a data row."""
REPLY, MARK = "THEREPLYSTANDSHERE", "THEMESSAGESTANDSHERE"
"""Placeholders for a reply and for a message's content. No template alters them."""
BEFORE = ("\n", ".", "a")
"""A text that does not begin a prompt is tokenized behind one of these, which stands in for the preceding text."""
TEMPLATE_ERRORS = (TemplateError, ArithmeticError, LookupError, TypeError, AttributeError, ValueError, RecursionError)
"""Exceptions that a template may raise if it does not support the messages."""
WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*(<think>\s*)?\Z")
THOUGHT_END = "</think>"


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase | None, data: dict[str, Any], *, enable_thinking: bool = False
) -> list[int]:
    """Return the ids of a prompt given as `input_ids`, `prompt` or `messages`. ValueError if it cannot be rendered."""
    if "input_ids" in data:
        return [int(token) for token in data["input_ids"]]
    if tokenizer is None:
        raise ValueError(
            f"prompt with keys {sorted(data)}: has no input_ids and the workflow no tokenizer; give one of them."
        )
    return form_of(data, tokenizer, enable_thinking=enable_thinking).opening(data)


def with_replies(
    tokenizer: PreTrainedTokenizerBase, data: dict[str, Any], replies: Sequence[str | Message]
) -> tuple[list[int], ...]:
    """Return the ids of a prompt and of each reply to it. A reply is text, or an assistant message.

    A reply's ids go up to the template's end-of-turn token. If the template writes no such token, the tokenizer's EOS
    is added. ValueError if prompt and reply, tokenized as one text, do not begin with the prompt's ids, or if the
    template drops a part of the reply.
    """
    if "messages" in data:
        return ChatTemplate(tokenizer).with_replies(data, replies)
    texts = [reply for reply in replies if isinstance(reply, str)]
    if len(texts) < len(replies):
        raise ValueError("a reply is a message, and the prompt is text; give the prompt as messages too.")
    return PlainText(tokenizer).with_replies(data, texts)


class PlainText:
    """Tokenizes dialogues that begin with text or ids, without a template: only the messages' content counts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def opening(self, data: dict[str, Any]) -> list[int]:
        if "input_ids" in data:
            return [int(token) for token in data["input_ids"]]
        if "prompt" not in data:
            raise ValueError(f"prompt with keys {sorted(data)}: must have input_ids, prompt or messages.")
        return self._from_the_beginning(data["prompt"])

    def with_replies(self, data: dict[str, Any], replies: Sequence[str]) -> tuple[list[int], ...]:
        prompt, end = self.opening(data), self.tokenizer.eos_token_id
        if "input_ids" in data:
            return prompt, *([*ids_after(self.tokenizer, BEFORE, reply), end] for reply in replies)
        wholes = [self._from_the_beginning(data["prompt"] + reply) for reply in replies]
        for reply, whole in zip(replies, wholes, strict=True):
            if whole[: len(prompt)] != prompt:
                raise ValueError(
                    f"prompt ... {data['prompt'][-20:]!r} and reply {reply[:20]!r} ...: the tokenizer joins the "
                    f"prompt's end to the reply's beginning, so that a server which is sent the prompt alone sees "
                    f"other tokens; move the space between them to the reply's side, or give messages."
                )
        return prompt, *([*whole[len(prompt) :], end] for whole in wholes)

    def following(self, messages: Sequence[Message], reply: Sequence[int]) -> list[int]:
        return ids_after(self.tokenizer, BEFORE, "".join(str(message["content"]) for message in messages))

    def _from_the_beginning(self, text: Any) -> list[int]:
        """Tokenize a text. If it does not begin with the tokenizer's special tokens, such as BOS, add them in front."""
        if not isinstance(text, str):
            raise ValueError(f"prompt = {shown(text)}: must be text.")
        ids = encoded(self.tokenizer, text)
        alone = encoded(self.tokenizer, text, special=True)
        # Keep only the special tokens in front: the text continues, so those at its end do not apply.
        places = [at for at in range(len(alone) - len(ids) + 1) if alone[at : at + len(ids)] == ids]
        if not places:
            return alone
        front = alone[: places[0]]
        return ids if ids[: len(front)] == front else front + ids


class ChatTemplate:
    """Tokenizes dialogues of `messages`, with optional `tools`, by the tokenizer's chat template.

    If the template does not show a message unchanged, ValueError names the role or field.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        enable_thinking: bool = False,
        row_args: Mapping[str, Any] | None = None,
    ) -> None:
        """row_args: template arguments of the dialogue's data row. They override the run's template arguments."""
        self.tokenizer = tokenizer
        self.arguments = {"enable_thinking": enable_thinking} | tokenizer.init_kwargs.get(TEMPLATE_ARGS, {})
        if not tokenizer.chat_template:
            raise ValueError(
                f"model.path = {tokenizer.name_or_path!r}: its tokenizer has no chat template, and the prompts have "
                f"messages; take the instruct version of the model, add chat_template.jinja, or give prompts as text."
            )
        self._check_read(tokenizer.init_kwargs.get(TEMPLATE_ARGS, {}), "data.template_args")
        self.arguments |= self._args_of(row_args)

    def _check_read(self, arguments: Mapping[str, Any], key: str) -> None:
        if not arguments:
            return
        found = self.tokenizer.chat_template
        words = set(WORD.findall(" ".join(found.values()) if isinstance(found, dict) else found))
        if unread := sorted(set(arguments) - words):
            raise ValueError(
                f"{key}.{unread[0]} = {shown(arguments[unread[0]])}: the chat template of "
                f"{self.tokenizer.name_or_path!r} does not read it; leave it out."
            )

    def opening(self, data: dict[str, Any]) -> list[int]:
        """Return the ids of a dialogue's beginning, up to the first reply."""
        messages, tools, arguments = self._read(data)
        self._check_shown(messages, tools, arguments)
        return encoded(self.tokenizer, self._render(messages, tools, arguments, opens_reply=True))

    def with_replies(self, data: dict[str, Any], replies: Sequence[str | Message]) -> tuple[list[int], ...]:
        """Return the ids of the prompt, which all replies share, and of each reply."""
        messages, tools, arguments = self._read(data)
        said = [{"role": "assistant", "content": it} if isinstance(it, str) else normal_message(it) for it in replies]
        for reply in said:
            if reply["role"] != "assistant":
                raise ValueError(f"reply.role = {reply['role']!r}: must be assistant.")
        ways = [arguments]
        set_for_run, set_for_row = self.tokenizer.init_kwargs.get(TEMPLATE_ARGS, {}), data.get(ROW_ARGS) or {}
        if "enable_thinking" not in set_for_run and "enable_thinking" not in set_for_row:
            # A prompt without thinking may end with an empty thought, which contradicts a reply that has one.
            ways.append(arguments | {"enable_thinking": True})
        first_error = None
        for way in ways:
            try:
                for reply in said:
                    self._check_shown([*messages, reply], tools, way, of_reply=True)
                found = [self._prompt_and_reply(messages, tools, way, reply) for reply in said]
            except ValueError as error:
                first_error = first_error or error
                continue
            return found[0][0], *(reply for _, reply in found)
        assert first_error is not None
        raise first_error

    def following(self, messages: Sequence[Message], reply: Sequence[int], calls: Sequence[Message] = ()) -> list[int]:
        """Return the ids between `reply` and the next reply.

        These are the end-of-turn tokens that `reply` lacks, `messages`, and the opening of the next reply.

        calls: the reply's tool calls, whose results are among the messages.
        """
        added, made = answered(normal_messages(list(messages)), [normal_call(call, "tool_calls") for call in calls])
        closing, ids = self._after_reply(self._for_template(added), made)
        # A complete reply already contains its end-of-turn tokens; one that was cut off needs them added.
        for length in range(min(len(closing), len(reply)), 0, -1):
            if list(reply[-length:]) == ids[:length]:
                return ids[length:]
        return ids

    def _read(self, data: dict[str, Any]) -> tuple[list[Message], list[Message] | None, dict[str, Any]]:
        messages = self._for_template(normal_messages(data["messages"]))
        return messages, normal_tools(data.get("tools")), self.arguments | self._args_of(data.get(ROW_ARGS))

    def _args_of(self, given: Any) -> dict[str, Any]:
        """Validate a row's template arguments and return them without those that are None (absent in a data frame)."""
        if given is not None and (not isinstance(given, Mapping) or TAKEN & set(given)):
            raise ValueError(f"{ROW_ARGS} = {shown(given)}: must be an object of the chat template's own arguments.")
        own = {name: value for name, value in (given or {}).items() if value is not None}
        self._check_read(own, ROW_ARGS)
        return own

    def _for_template(self, messages: list[Message]) -> list[Message]:
        """Change the role `developer` to `system` if the template does not know it."""
        if all(message["role"] != "developer" for message in messages) or self._shows_developers:
            return messages
        return [it | {"role": "system"} if it["role"] == "developer" else it for it in messages]

    @cached_property
    def _shows_developers(self) -> bool:
        asked = [{"role": "developer", "content": MARK}, {"role": "user", "content": "question"}]
        try:
            return MARK in self._render(asked, None, self.arguments, opens_reply=True)
        except ValueError:
            return False

    def _check_shown(
        self, messages: list[Message], tools: list[Message] | None, arguments: dict[str, Any], *, of_reply: bool = False
    ) -> None:
        """Raise ValueError, naming role and field, if the template drops a message's content, a call or a tool."""
        marked = [with_marks(message, number) for number, message in enumerate(messages)]
        named = [tool | {"function": tool["function"] | {"name": f"{MARK}T{n}W"}} for n, tool in enumerate(tools or ())]
        try:
            text = self._render(marked, named, arguments, opens_reply=not of_reply)
        except ValueError:
            return  # the template rejects the placeholders; the real text is rendered and checked later
        hidden = [
            (f"messages[{n}].{field}", f" in a message of the role {role}")
            for n, field, role in unshown(messages, text)
        ]
        hidden += [(f"tools[{n}]", "") for n, tool in enumerate(named) if tool["function"]["name"] not in text]
        if hidden:
            field, place = hidden[0]
            raise ValueError(
                f"{field}: the chat template of {self.tokenizer.name_or_path!r} does not show it{place}; give the "
                f"tokenizer a template that does, or write it into another message."
            )

    def _prompt_and_reply(
        self, messages: list[Message], tools: list[Message] | None, arguments: dict[str, Any], reply: Message
    ) -> tuple[list[int], list[int]]:
        prompt = self._render(messages, tools, arguments, opens_reply=True)
        whole = self._render([*messages, reply], tools, arguments, opens_reply=False)
        if not whole.startswith(prompt):
            place = next(at for at, (a, b) in enumerate(zip(prompt, whole + " " * len(prompt), strict=False)) if a != b)
            raise ValueError(
                f"reply {shown(reply['content'])}: the chat template ends the prompt with {prompt[place:][:80]!r}, but "
                f"writes {whole[place:][:80]!r} there once the reply follows, so the model would be trained on a "
                f"prompt that no server sends; set data.template_args or the row's {ROW_ARGS} so that both agree, give "
                f"prompt and reply as text, or remove the row."
            )
        text = whole[len(prompt) :]
        for field, words in spoken(reply):
            if words not in text:
                raise ValueError(
                    f"reply.{field} = {shown(words)}: the chat template of {self.tokenizer.name_or_path!r} does not "
                    f"show it as it is; give the tokenizer a template that does, or leave the row out."
                )
        thinks = THOUGHT_END in reply["content"] or any(reply.get(name, "").strip() for name in THOUGHTS)
        thought = next((words for _, words in spoken(reply)), "") if thinks else ""
        if thought and EMPTY_THOUGHT.search(whole[: whole.index(thought, len(prompt))]):
            raise ValueError(
                f"reply {shown(reply['content'])}: the chat template writes an empty thought in front of the reply's "
                f"own; give the thought in the field that the template reads ({', '.join(THOUGHTS)})."
            )
        if self._turn_end is None:
            text = text.removesuffix(self._closing)
        first, ids = encoded(self.tokenizer, prompt), encoded(self.tokenizer, prompt + text)
        if ids[: len(first)] != first:
            raise ValueError(
                f"reply {shown(reply['content'])}: the tokenizer joins its beginning to the prompt's end "
                f"{prompt[-20:]!r}, so that a server which is sent the prompt alone sees other tokens; begin the reply "
                f"without the white space in front."
            )
        return first, self._up_to_the_end(ids[len(first) :])

    @cached_property
    def _closing(self) -> str:
        """The text that the template writes after the content of a dialogue's last reply."""
        return self._text_after([], REPLY)

    @cached_property
    def _turn_end(self) -> int | None:
        """The first added token that the template writes after a reply; None if it writes none."""
        own = self.tokenizer.added_tokens_decoder
        return next((token for token in encoded(self.tokenizer, self._closing) if token in own), None)

    def _up_to_the_end(self, ids: list[int]) -> list[int]:
        """Cut a reply off after its end-of-turn token, where a model stops; append EOS if it has no such token."""
        end, eos = self._turn_end, self.tokenizer.eos_token_id
        ends = {token for token, added in self.tokenizer.added_tokens_decoder.items() if added.special} | {end, eos}
        start = len(ids)
        while start and (ids[start - 1] in ends or not self.tokenizer.decode(ids[start - 1 : start]).strip()):
            start -= 1
        tail = ids[start:]
        for wanted in ({end}, {eos}, ends):
            for place, token in enumerate(tail, start=start):
                if token in wanted:
                    return ids[: place + 1]
        return [*ids, eos]

    def _after_reply(self, added: list[Message], calls: list[Message]) -> tuple[list[int], list[int]]:
        """Return the ids that close a reply if nothing follows it, and the ids between a reply and the next reply.

        Both are rendered after a short stand-in dialogue. In the real dialogue the template may change earlier replies
        (Qwen3's template drops their thoughts), but generated tokens must stay as they are.
        """
        if calls:
            try:
                return self._after_calls(added, calls)
            except ValueError:
                pass  # the template may show tool results but not calls
        whole = self._text_after(added, REPLY)
        return ids_after(self.tokenizer, [REPLY], self._closing), ids_after(self.tokenizer, [REPLY], whole)

    def _after_calls(self, added: list[Message], calls: list[Message]) -> tuple[list[int], list[int]]:
        """Return what `_after_reply` returns, but for a reply with tool calls.

        The ids do not include the text that ends a call, because the policy writes that.
        """
        ended = ids_after(self.tokenizer, [REPLY], self._text_after([], REPLY, calls))
        ids = ids_after(self.tokenizer, [REPLY], self._text_after(added, REPLY, calls))
        own = len(self._up_to_the_end(ended))
        is_closed = own <= len(ended)  # otherwise the template writes no end after a call
        own -= 1
        if ids[:own] != ended[:own]:
            raise ValueError("the chat template writes a call otherwise when its result follows.")
        return ended[own:] if is_closed else [], ids[own:]

    def _text_after(self, added: list[Message], reply: str, calls: list[Message] | None = None) -> str:
        """Return the text that the template writes after a reply, or after the last argument of its last call."""
        said: Message = {"role": "assistant", "content": "" if calls else reply}
        if calls:
            *others, last = calls
            function = last["function"] | {"arguments": {"text": reply}}
            said["tool_calls"] = [*others, last | {"function": function}]
        before = [{"role": "user", "content": "question"}, said]
        opens = bool(added)
        marked = [with_marks(message, number) for number, message in enumerate(added)]
        shown_text = self._render([*before, *marked], None, self.arguments, opens_reply=opens)
        if hidden := unshown(added, shown_text):
            _, field, role = hidden[0]
            raise ValueError(
                f"the chat template of {self.tokenizer.name_or_path!r} does not show the {field} of a message of the "
                f"role {role} after a reply; give the tokenizer a template that does, or send it as a user's message."
            )
        _, found, text = self._render([*before, *added], None, self.arguments, opens_reply=opens).partition(reply)
        if not found:
            raise ValueError("the tokenizer's chat template does not show the content of an assistant's message.")
        return text

    def _render(
        self, messages: list[Message], tools: list[Message] | None, arguments: dict[str, Any], *, opens_reply: bool
    ) -> str:
        options = {"tokenize": False, "add_generation_prompt": opens_reply}
        try:
            return str(self.tokenizer.apply_chat_template(messages, tools=tools or None, **options, **arguments))
        except TEMPLATE_ERRORS as error:
            roles = " ".join(str(message.get("role")) for message in messages)
            raise ValueError(
                f"the tokenizer's chat template refuses messages of the roles {roles}: {error}; give it a template "
                f"that takes them."
            ) from error


def form_of(
    data: dict[str, Any], tokenizer: PreTrainedTokenizerBase, *, enable_thinking: bool = False
) -> PlainText | ChatTemplate:
    if "messages" not in data:
        return PlainText(tokenizer)
    return ChatTemplate(tokenizer, enable_thinking=enable_thinking, row_args=data.get(ROW_ARGS))


def spoken(reply: Message) -> list[tuple[str, str]]:
    """Return (field, text) for each of a reply's thoughts, and for its other text.

    A thought inside the content has an entry of its own.
    """
    thought, _, words = reply["content"].rpartition(THOUGHT_END)
    parts = [(name, reply.get(name, "")) for name in THOUGHTS]
    parts += [("content", thought.rpartition("<think>")[2]), ("content", words)]
    return [(field, part.strip()) for field, part in parts if part.strip()]


def marks(message: Message, number: int) -> list[tuple[str, str]]:
    """Return (field, unique placeholder) for each field of a message that a template must show.

    number: the message's number in the dialogue.
    """
    found = [("content", f"{MARK}{number}W")] if message["content"].strip() else []
    calls = range(len(message.get("tool_calls", ())))
    return found + [(f"tool_calls[{call}]", f"{MARK}{number}C{call}W") for call in calls]


def unshown(messages: list[Message], text: str) -> list[tuple[int, str, str]]:
    """Return (message's number, field, role) for each part of the messages that a rendered text does not show.

    A part is not shown if its placeholder (see `with_marks`) is missing in `text`.
    """
    each = [(number, message["role"], marks(message, number)) for number, message in enumerate(messages)]
    return [(number, field, role) for number, role, parts in each for field, mark in parts if mark not in text]


def with_marks(message: Message, number: int) -> Message:
    words = dict(marks(message, number))
    marked = message | ({"content": words["content"]} if "content" in words else {})
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": {"text": words[f"tool_calls[{place}]"]}}}
            for place, call in enumerate(calls)
        ]
    return marked


def answered(messages: list[Message], calls: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """Return messages and calls in which each tool result has the id of a call.

    Missing ids and calls are made up. If there are no tool results, no calls are returned.
    """
    known, made, named = {call.get("id") for call in calls}, list(calls), []
    for number, message in enumerate(messages):
        if message["role"] == "tool":
            identity = message.get("tool_call_id") or f"call{number:05}"  # some templates require nine characters
            message = message | {"tool_call_id": identity}
            if identity not in known:
                function = {"name": message.get("name", "tool"), "arguments": {}}
                made.append({"id": identity, "type": "function", "function": function})
        named.append(message)
    return named, made if any(message["role"] == "tool" for message in messages) else []


def ids_after(tokenizer: PreTrainedTokenizerBase, before: Iterable[str], text: str) -> list[int]:
    """Return the ids that `text` has when another text precedes it.

    That text is the first of `before` whose own ids stay the same when `text` follows it. If there is none, `text` is
    tokenized alone.
    """
    for other in before:
        try:
            first, ids = encoded(tokenizer, other), encoded(tokenizer, other + text)
        except ValueError:  # a small vocabulary may lack it
            continue
        if ids[: len(first)] == first:
            return ids[len(first) :]
    return encoded(tokenizer, text)


def encoded(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = False) -> list[int]:
    """Tokenize a text. ValueError if the tokenizer rejects it. special: True to add the special tokens around it."""
    try:
        # Lone surrogates, which JSON can contain, are replaced: tokenizers reject them.
        text = text.encode("utf-8", "replace").decode("utf-8")
        return list(tokenizer(text, add_special_tokens=special)["input_ids"])
    except Exception as error:  # tokenizers raise no specific class
        raise ValueError(f"the tokenizer of {tokenizer.name_or_path!r} cannot take {shown(text)}: {error}.") from error
