"""Chat rendering, token in, token out: what was rendered once is never tokenised again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envs.protocol import Message
from pearl.errors import UserError

_MARK = "ANSWER-7f3c"
_CUT = "\n[... {} tokens cut ...]\n"
_PROBE = (
    Message("system", "Be brief."),
    Message("user", "First question?"),
    Message("assistant", "First answer."),
    Message("user", "Second question:\n1 + 1"),
)
_PROBE_TURNS = (("```sh\nls\n```", "a.txt  b.txt\nc"), ("Done.", "Is it?"))


class ChatRenderer:
    """Renders the start of a conversation to tokens, and later only what comes between two responses of the model.

    Raises UserError if the model's template renders a turn differently once others follow it: then the tokens that
    the model saw and the template's own rendering of the conversation would not be the same.
    """

    def __init__(self, tokenizer: Any, name: str = "the model") -> None:
        self._tokenizer = tokenizer
        self._name = name
        self._special = sorted(
            {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}, key=len, reverse=True
        )
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(f"{name} has no chat template", "Use an instruction-tuned model, or add a chat_template.")
        self._system = self._takes_system()
        self.end_token: int = self._encode(self._after_response("x"))[0]
        """Ends the assistant's turn. A token of its own in any context, so that what follows can be tokenised alone."""
        if self.end_token not in tokenizer.added_tokens_decoder:
            raise UserError(
                f"the chat template of {name} ends the assistant's turn with ordinary text",
                "Set a chat_template that ends it with a special token at once (as <|im_end|>).",
            )
        self._check()

    @classmethod
    def load(cls, directory: str | Path) -> ChatRenderer:
        """With the tokenizer of a model directory (this imports transformers, which takes seconds)."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except (OSError, ValueError) as error:
            raise UserError(f"the tokenizer of {directory} cannot be loaded ({error})", "Set model.path.") from error
        return cls(tokenizer, str(directory))

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of the conversation so far, up to where the model's turn begins."""
        return self._encode(self._render(messages, generate=True))

    def between(self, response_ids: Sequence[int], observation: str) -> list[int]:
        """Tokens from the end of a response to the start of the next: its closing, the observation, the next header."""
        ids = self._encode(self._after_response(observation))
        return ids[1:] if response_ids and response_ids[-1] == self.end_token else ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a response without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def count(self, text: str) -> int:
        """Tokens of `text`."""
        return len(self._encode(text))

    def truncate(self, text: str, budget: int) -> str:
        """`text` in at most `budget` tokens: its head and its tail."""
        text = text if len(text) <= 64 * budget else text[: 32 * budget] + text[-32 * budget :]
        ids = self._encode(text)
        if len(ids) <= budget:
            return text
        keep = budget
        while keep > 0:
            head, tail = keep - keep // 2, keep // 2
            cut = _CUT.format(len(ids) - keep)
            shorter = self._plain(ids[:head]) + cut + (self._plain(ids[-tail:]) if tail else "")
            over = len(self._encode(shorter)) - budget
            if over <= 0:
                return shorter
            keep -= over
        return self._plain(ids[:budget])

    def defuse(self, text: str) -> str:
        """Break up special tokens that are spelled out in `text`, so that no output can open or close a turn."""
        while any(token in text for token in self._special):
            for token in self._special:
                text = text.replace(token, token[0] + " " + token[1:])
        return text

    def _plain(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids)).replace("\N{REPLACEMENT CHARACTER}", "")

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _after_response(self, observation: str) -> str:
        """The template's text after the assistant's words, in the shortest conversation that has this shape."""
        turns = (Message("user", "x"), Message("assistant", _MARK), Message("user", observation))
        text = self._render(turns, generate=True)
        return text[text.index(_MARK) + len(_MARK) :]

    def _render(self, messages: Sequence[Message], *, generate: bool) -> str:
        turns = [{"role": message.role, "content": self.defuse(message.content)} for message in messages]
        if turns[0]["role"] == "system" and not self._system:
            first, *turns = turns
            turns[0] = {"role": "user", "content": first["content"] + "\n\n" + turns[0]["content"]}
        return self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generate)

    def _takes_system(self) -> bool:
        self._system = True
        try:
            return "Be brief." in self._render(_PROBE[:2], generate=True)
        except Exception:  # templates raise whatever they like
            return False

    def _check(self) -> None:
        """Incremental rendering of a probe conversation against the template's rendering of the whole."""
        messages = list(_PROBE)
        ids = self.prompt(messages)
        for response, observation in _PROBE_TURNS:
            answer = [*self._encode(response), self.end_token]
            ids += answer + self.between(answer, observation)
            messages += [Message("assistant", response), Message("user", observation)]
            if ids != self.prompt(messages):
                raise UserError(
                    f"the chat template of {self._name} cannot be rendered turn by turn",
                    "It writes a turn differently once others follow. Set a chat_template that only appends.",
                )
