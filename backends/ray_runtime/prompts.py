"""From the prompt of a data row to token ids.

* a list of messages goes through the tokenizer's chat template with the generation prompt added;
* any other text is encoded as it stands, with what the tokenizer adds by default (a BOS for many models); an end
  token that it adds is taken off;
* either way there is exactly one BOS where the tokenizer puts one before a text: one that template or text already
  spell out is not doubled, and one that the template forgets is put in front;
* a system message that the template refuses or leaves out is never lost silently: RLF5015.
"""

from __future__ import annotations

from typing import Any

Prompt = str | list[dict[str, Any]]
Chat = list[dict[str, Any]]


class NoSystemRole(Exception):
    """The chat template has no place for a system message."""


def prompt_problem(value: object) -> str | None:
    """Why `value` is no prompt, for a message after `the prompt`."""
    if isinstance(value, str):
        return None if value else "is empty"
    if not isinstance(value, list):
        return f"is {type(value).__name__}, neither a string nor a list of messages"
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            return f"has a message (number {number}) without a string `role` and a string `content`"
    return None if value else "is an empty list of messages"


def chat_of(prompt: Prompt, system: str | None) -> Chat | None:
    """The messages for the chat template, or None for a raw string."""
    if isinstance(prompt, str):
        if system is None:
            return None
        prompt = [{"role": "user", "content": prompt}]
    if system is None or any(message["role"] == "system" for message in prompt):
        return prompt
    return [{"role": "system", "content": system}, *prompt]


def apply_template(tokenizer: Any, chat: Chat) -> str:
    """The text of a chat. Raises NoSystemRole, or whatever the template raises."""
    said = [message["content"].strip() for message in chat if message["role"] == "system"]
    rest = [message for message in chat if message["role"] != "system"]
    try:
        text = _template(tokenizer, chat)
    except Exception as error:
        if said and rest and _works(tokenizer, rest):
            raise NoSystemRole(str(error)) from None
        raise
    if rest and any(words not in text for words in said) and _works(tokenizer, rest):
        if _template(tokenizer, rest) == text:
            raise NoSystemRole("it leaves the message out")
    return text


def encode(tokenizer: Any, text: str, *, raw: bool) -> list[int]:
    """Token ids of a prompt; `raw`: the text has not been through the chat template."""
    ids = list(tokenizer(text, add_special_tokens=raw)["input_ids"])
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is not None:
        while ids[:2] == [bos, bos]:
            ids = ids[1:]
        if not raw and ids[:1] != [bos] and _adds_bos(tokenizer, text):
            ids = [bos, *ids]
    if raw and eos is not None and ids and ids[-1] == eos and not text.endswith(str(tokenizer.eos_token)):
        ids = ids[:-1]  # a prompt that already ends has nothing to be continued
    return ids


def decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def lost_character(tokenizer: Any, text: str, ids: list[int]) -> str | None:
    """The first character that became the unknown or padding token; None when nothing is lost."""
    marks = {tokenizer.unk_token_id: tokenizer.unk_token, tokenizer.pad_token_id: tokenizer.pad_token}
    for mark in (None, tokenizer.bos_token_id, tokenizer.eos_token_id):  # these may stand there by right
        marks.pop(mark, None)
    if not any(mark in ids and token not in text for mark, token in marks.items()):
        return None
    alone = ((character, tokenizer(character, add_special_tokens=False)["input_ids"]) for character in text)
    return next((character for character, own in alone if marks.keys() & set(own)), "?")


def _template(tokenizer: Any, chat: Chat) -> str:
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert isinstance(text, str)
    return text


def _works(tokenizer: Any, chat: Chat) -> bool:
    try:
        _template(tokenizer, chat)
    except Exception:  # templates raise their own kinds
        return False
    return True


def _adds_bos(tokenizer: Any, text: str) -> bool:
    """Whether the tokenizer itself puts a BOS before a text that does not spell one out."""
    return list(tokenizer(text, add_special_tokens=True)["input_ids"][:1]) == [tokenizer.bos_token_id]
