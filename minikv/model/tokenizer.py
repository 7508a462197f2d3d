"""Text to token ids and back.

A model reads numbers. The tokenizer cuts text into pieces from a fixed vocabulary and gives each its number: frequent
words are one token, rare ones several, and in a byte-level vocabulary nothing is unknown. Reading, cutting and joining
is done by the ``tokenizers`` library; here is what a server needs around it: text that arrives token by token, where a
character may be spread over several tokens, and the chat template, which turns a list of messages into one prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import ByteLevel, DecodeStream

from minikv.errors import ModelError


class Tokenizer:
    """A tokenizer.json with its chat template, if it has one."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, chat_template: str | None = None, special: dict[str, str] | None = None) -> None:
        self._tokenizer, self.chat_template, self._special = tokenizer, chat_template, special or {}

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """The tokenizer of a Hugging Face folder; None when it has no tokenizer.json. ModelError for a broken one."""
        file = folder / "tokenizer.json"
        if not file.exists():
            return None
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as wrong:  # the library raises a bare Exception
            raise ModelError(f"{file} is no tokenizer: {wrong}") from None
        tokenizer.no_truncation()  # settings of somebody's training run; a prompt is never cut or filled up
        tokenizer.no_padding()
        config: dict[str, Any] = {}
        file = folder / "tokenizer_config.json"
        try:
            if file.exists():
                config = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(config, dict):
                raise ModelError(f"{file} should hold a JSON object, not a {type(config).__name__}")
            template = config.get("chat_template")
            file = folder / "chat_template.jinja"
            if file.exists():
                template = file.read_text(encoding="utf-8")
        except ModelError:
            raise
        except (OSError, ValueError, RecursionError) as wrong:
            raise ModelError(f"{file} cannot be read: {wrong}") from None
        special = {name: _content(config[name]) for name in ("bos_token", "eos_token") if config.get(name)}
        return cls(tokenizer, template if isinstance(template, str) else None, special)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added special tokens included."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``, with the special tokens that the model expects around a text.

        A prompt from a chat template holds its special tokens already: pass ``special_tokens=False`` for it.
        """
        return list(self._tokenizer.encode(text, add_special_tokens=special_tokens).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``; special tokens are left out."""
        return self._tokenizer.decode(list(token_ids))

    def pieces(self, text: str) -> list[str]:
        """The tokens of ``text`` as text, each by itself: what a figure prints under a sentence."""
        return [self._tokenizer.decode([token], skip_special_tokens=False) for token in self.encode(text)]

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **variables: Any) -> str:
        """One prompt from messages like ``{"role": "user", "content": "..."}``, ending where the model's answer begins.

        Raises ModelError when the folder has no template, or one that does not render. Templates come with a model and
        are not trusted: they run in jinja2's sandbox.
        """
        if self.chat_template is None:
            raise ModelError("this model has no chat template; give the prompt as one text")
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        try:
            template = environment.from_string(self.chat_template, globals={"raise_exception": refuse})
            return template.render({"messages": list(messages), "add_generation_prompt": True} | self._special | variables)
        except Exception as wrong:  # whatever a template does wrong: divide by 0, add text to a number, reach out of the sandbox
            raise ModelError(f"the model's chat template does not render: {wrong}") from None

    def stream(self, before: Sequence[int] = ()) -> TextStream:
        """A decoder for one text that arrives token by token behind the tokens ``before``, which are not repeated."""
        return TextStream(self, before)


class TextStream:
    """Text of a growing sequence of tokens, handed out as soon as it is certain.

    A token may end in the middle of a character; then its text comes with a later token. ``finish`` hands out what is
    left, so that all pieces together are the decoded whole.

    Some tokenizers drop the space at the beginning of a text. A continuation is not the beginning of one, so for them
    the stream starts with the last few tokens of what stood before. (Byte-level tokenizers drop nothing.)
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        byte_level = isinstance(tokenizer._tokenizer.decoder, ByteLevel)
        self._before = [] if byte_level else list(before[-8:])
        self._stream = DecodeStream(ids=self._before, skip_special_tokens=True)
        self._tokens: list[int] = []
        self._given = ""

    def push(self, token: int) -> str:
        """The text that ``token`` makes certain: often its own, sometimes nothing, sometimes more."""
        self._tokens.append(token)
        piece = self._stream.step(self._tokenizer._tokenizer, token) or ""
        self._given += piece
        return piece

    def finish(self) -> str:
        """What was held back: the replacement character for a text that ends inside a character."""
        given = (self._tokenizer.decode(self._before) if self._before else "") + self._given
        whole = self._tokenizer.decode(self._before + self._tokens)
        return whole[len(given) :] if whole.startswith(given) else ""


def _content(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)
