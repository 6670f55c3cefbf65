"""Incremental rendering against the template's rendering of the whole conversation."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from envs.chat import ChatRenderer
from envs.protocol import Message
from pearl.errors import UserError
from pearl.models import resolve_model

texts = st.text(
    alphabet=st.one_of(st.sampled_from("ab \n\t`<|>_"), st.characters(exclude_categories=["Cs"])), max_size=40
)
special = st.sampled_from(["<|im_end|>", "<|im_start|>user\n", "<|endoftext|>", "<|im_<|im_end|>end|>"])
contents = st.lists(texts | special, max_size=4).map("".join)

NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_END_TOKEN = (
    "{% for m in messages %}{{ '[' + m['role'] + '] ' + m['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)
REWRITES = (
    "{% for m in messages %}{% if m['role'] != 'assistant' or loop.index0 > messages | length - 3 %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def renderer(template: str | None) -> ChatRenderer:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2-135m-instruct"))
    tokenizer.chat_template = template
    return ChatRenderer(tokenizer, "a model")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(texts, contents), min_size=1, max_size=4), contents)
def test_increments_equal_the_whole(chat: ChatRenderer, turns: list[tuple[str, str]], first: str) -> None:
    messages = [Message("system", "Be brief."), Message("user", first)]
    ids = chat.prompt(messages)
    for text, observation in turns:
        # White space at its start is the model's to tokenise: as text it could merge with the header's line end.
        said = "a" + text
        response = [*chat._encode(chat.defuse(said)), chat.end_token]
        ids += response + chat.between(response, observation)
        messages += [Message("assistant", said), Message("user", observation)]
        assert ids == chat.prompt(messages)


@given(contents)
def test_an_observation_cannot_end_its_turn(chat: ChatRenderer, observation: str) -> None:
    ids = chat.between([chat.end_token], observation)
    starts = ids.count(chat._encode("<|im_start|>")[0])
    assert (starts, ids.count(chat.end_token)) == (2, 1)


def test_a_response_that_was_cut_is_closed(chat: ChatRenderer) -> None:
    closed = chat.between([5, chat.end_token], "seen")
    assert chat.between([5, 6], "seen") == [chat.end_token, *closed]
    assert chat.between([], "seen") == [chat.end_token, *closed]
    assert chat.decode([*chat._encode("```sh\nls\n```"), chat.end_token]) == "```sh\nls\n```"


@settings(deadline=None)
@given(st.text(max_size=600), st.integers(8, 64))
def test_long_observations_keep_head_and_tail(chat: ChatRenderer, text: str, budget: int) -> None:
    short = chat.truncate(text, budget)
    assert chat.count(short) <= budget or short == text
    if chat.count(text) <= budget:
        assert short == text


def test_truncation_says_how_much_is_missing(chat: ChatRenderer) -> None:
    text = "\n".join(f"line {number}" for number in range(2000))
    short = chat.truncate(text, 60)
    assert short.startswith("line 0\nline 1") and short.endswith("1999") and "tokens cut" in short
    assert chat.count(short) <= 60


def test_templates_without_a_system_role() -> None:
    chat = renderer(NO_SYSTEM)
    assert chat.prompt([Message("system", "A"), Message("user", "B")]) == chat.prompt([Message("user", "A\n\nB")])


def test_a_template_without_an_end_token_is_refused() -> None:
    with pytest.raises(UserError, match="ordinary text"):
        renderer(NO_END_TOKEN)


def test_a_template_that_rewrites_the_past_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be rendered turn by turn"):
        renderer(REWRITES)


def test_a_model_without_a_template_is_refused() -> None:
    with pytest.raises(UserError, match="has no chat template"):
        renderer(None)


def test_a_missing_tokenizer_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be loaded"):
        ChatRenderer.load(tmp_path)
