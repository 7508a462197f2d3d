"""Text that arrives token by token is the decoded whole; chat templates render, and hostile or broken ones harm nobody."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from minikv.errors import ModelError
from minikv.model.tokenizer import Tokenizer

TEXT = (
    "naïve café, Größe, ñandú; 日本語のテキスト, 한국어, русский, עברית, العربية; "
    "😀👩\u200d👩\u200d👧🇫🇷 e\u0301a\u0308; the quick brown fox jumps "
) * 3


@pytest.fixture(scope="module")
def library() -> tokenizers.Tokenizer:
    """Byte-level BPE: 256 bytes, some merges (a token may end inside a character), and two special tokens."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|end|>", "<|user|>"]
    trainer = trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    made.train_from_iterator([TEXT], trainer)
    return made


@pytest.fixture(scope="module")
def tokenizer(library: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(library)


def streamed(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [stream.push(token) for token in tokens] + [stream.finish()]


TEXTS = [
    "", " ", "a", "naïve café", "日本語", "👩\u200d👩\u200d👧 and 🇫🇷", "e\u0301\u0302a\u0308", "\ufffd", "\n\t\r\0", "the quick brown fox",
    "\u200d\u200d", "x" * 500, TEXT,
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:20]))
def test_a_text_comes_back_and_arrives_in_pieces_that_are_the_whole(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    pieces = streamed(tokenizer, tokens)
    assert "".join(pieces) == text
    if text != "\ufffd":
        assert "\ufffd" not in "".join(pieces), "half a character was handed out"


@settings(max_examples=300)
@given(st.text(max_size=40))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert "".join(streamed(tokenizer, tokens)) == text


@settings(max_examples=600)
@given(st.lists(st.integers(0, 359), max_size=40))
@example([0, 0, 0])
@example([1])
def test_any_tokens_arrive_as_the_decoded_whole(tokenizer: Tokenizer, tokens: list[int]) -> None:
    """Bytes that are no UTF-8, characters that never end and special tokens included."""
    assert "".join(streamed(tokenizer, tokens)) == tokenizer.decode(tokens)


@settings(max_examples=300)
@given(st.binary(max_size=24))
def test_any_bytes_arrive_as_the_decoded_whole(tokenizer: Tokenizer, raw: bytes) -> None:
    """One token a byte: every way in which UTF-8 can be cut or broken."""
    tokens = [byte_token(tokenizer, byte) for byte in raw]
    assert tokenizer.decode(tokens) == raw.decode("utf-8", "replace")
    assert "".join(streamed(tokenizer, tokens)) == raw.decode("utf-8", "replace")


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    """The token of one byte: the byte-level alphabet writes printable bytes as themselves and the others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [value for value in range(256) if value not in printable]
    character = chr(byte) if byte in printable else chr(256 + other.index(byte))
    token = tokenizer._tokenizer.token_to_id(character)
    assert token is not None
    return token


def test_a_character_is_handed_out_when_its_last_byte_has_come(tokenizer: Tokenizer) -> None:
    tokens = [byte_token(tokenizer, byte) for byte in "aé😀".encode()]
    assert streamed(tokenizer, tokens) == ["a", "", "é", "", "", "", "😀", ""]
    assert streamed(tokenizer, tokens[:-1])[-1] == "\ufffd", "a text that ends inside a character says so at its end"


def test_special_tokens_have_ids_and_no_text(tokenizer: Tokenizer) -> None:
    end = tokenizer._tokenizer.token_to_id("<|end|>")
    words = tokenizer.encode("the quick")
    assert tokenizer.encode("<|end|>the quick") == [end, *words]
    assert tokenizer.decode([end, *words, end]) == "the quick"
    assert "".join(streamed(tokenizer, [end, *words, end, *words])) == "the quickthe quick"
    assert tokenizer.pieces("<|end|>the")[0] == "<|end|>"
    assert "".join(tokenizer.pieces("the quick brown")) == "the quick brown"
    assert tokenizer.vocab_size == tokenizer._tokenizer.get_vocab_size(with_added_tokens=True)


# ---------------------------------------------------------------- folders


def write(folder: Path, library: tokenizers.Tokenizer, config: object = None, template: bytes | None = None) -> Path:
    library.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_bytes(template)
    return folder


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None


def test_a_folders_tokenizer_and_template_are_read(tmp_path: Path, library: tokenizers.Tokenizer) -> None:
    plain = Tokenizer.from_folder(write(tmp_path, library))
    assert plain is not None
    assert plain.decode(plain.encode("日本")) == "日本"
    assert plain.chat_template is None
    config = {"chat_template": "from the config", "eos_token": {"content": "<|end|>"}, "bos_token": "<s>"}
    assert Tokenizer.from_folder(write(tmp_path, library, config)).apply_chat_template([]) == "from the config"
    template = b"{{ bos_token }}{{ eos_token }}"
    assert Tokenizer.from_folder(write(tmp_path, library, config, template)).apply_chat_template([]) == "<s><|end|>"


@pytest.mark.parametrize(
    ("config", "template", "file"),
    [([], None, "tokenizer_config.json"), ("x", None, "tokenizer_config.json"), ({}, b"\xff\xfe", "chat_template.jinja")],
)
def test_a_broken_file_beside_the_tokenizer_is_named(
    tmp_path: Path, library: tokenizers.Tokenizer, config: object, template: bytes | None, file: str
) -> None:
    with pytest.raises(ModelError, match=file):
        Tokenizer.from_folder(write(tmp_path, library, config, template))


@pytest.mark.parametrize("token", [{}, {"content": None}, 5, ["x"], True], ids=str)
def test_an_odd_special_token_does_not_stop_a_model_from_loading(tmp_path: Path, library: tokenizers.Tokenizer, token: object) -> None:
    config = {"eos_token": token, "chat_template": "[{{ messages[0].content }}]"}
    assert Tokenizer.from_folder(write(tmp_path, library, config)).apply_chat_template([{"content": "hi"}]) == "[hi]"


# ---------------------------------------------------------------- chat templates

CHATML = """{% for message in messages %}
    {% if message.role not in ["system", "user", "assistant"] %}
        {{ raise_exception("unknown role " + message.role) }}
    {% endif %}
<|im_start|>{{ message.role }}
{{ message.content | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""


def chat(library: tokenizers.Tokenizer, template: str | None, messages: list | None = None, **variables: object) -> str:
    return Tokenizer(library, template, {"eos_token": "<|end|>"}).apply_chat_template(messages or [], **variables)


def test_messages_become_one_prompt_that_ends_where_the_answer_begins(library: tokenizers.Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Größe?\nñ 😀"}]
    assert chat(library, CHATML, messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGröße?\nñ 😀<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_may_refuse_loop_and_take_variables(library: tokenizers.Tokenizer) -> None:
    with pytest.raises(ModelError, match="unknown role tool"):
        chat(library, CHATML, [{"role": "tool", "content": ""}])
    assert chat(library, "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert chat(library, "{% if thinking %}<think>{% endif %}{{ eos_token }}", thinking=True) == "<think><|end|>"
    with pytest.raises(ModelError, match="no chat template"):
        chat(library, None)


def test_a_message_is_data_and_never_a_template(library: tokenizers.Tokenizer) -> None:
    hostile = "{{ messages.__class__ }}{% for x in y %}"
    assert chat(library, "{{ messages[0].content }}", [{"role": "user", "content": hostile}]) == hostile


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ ''|attr('__class__') }}",
        "{{ ''['__class__'] }}",
        "{{ raise_exception.__globals__ }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ raise_exception.__code__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ '{0.__globals__}'.format_map({'0': raise_exception}) }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ ().__class__ }}",
    ],
)
def test_a_hostile_template_reaches_nothing(library: tokenizers.Tokenizer, template: str) -> None:
    """The sandbox refuses the attribute, or gives an undefined one that prints as nothing."""
    try:
        text = chat(library, template)
    except ModelError:
        return
    assert text == ""


@pytest.mark.parametrize("template", ["{{ messages.append(1) }}", "{{ messages[0].update({'role': 'system'}) }}", "{{ messages.clear() }}"])
def test_a_template_cannot_change_the_messages(library: tokenizers.Tokenizer, template: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ModelError):
        chat(library, template, messages)
    assert messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",
        "{{ ",
        "{% include 'other' %}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ nothing.at.all }}",
        "{{ messages[0]['x'].y }}",
        "{{ range(10 ** 9) | list }}",
        "{{ messages | no_such_filter }}",
        "{{ [] | first + 1 }}",
        "{{ '%d' | format('x') }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_broken_template_is_a_model_error(library: tokenizers.Tokenizer, template: str) -> None:
    with pytest.raises(ModelError, match="does not render"):
        chat(library, template, [{"role": "user", "content": "hi"}])


def test_a_continuation_keeps_the_space_that_the_beginning_of_a_text_would_lose() -> None:
    vocabulary = {"▁The": 0, "▁capital": 1, "▁is": 2, "▁Paris": 3, "▁and": 4}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="▁The"))
    strip = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", 1, 0)]
    )
    inner.decoder = strip
    tokenizer = Tokenizer(inner)
    assert tokenizer.decode([3, 4]) == "Paris and"
    stream = tokenizer.stream(before=[0, 1, 2])
    assert "".join([stream.push(3), stream.push(4), stream.finish()]) == " Paris and"
    alone = tokenizer.stream()
    assert "".join([alone.push(3), alone.push(4), alone.finish()]) == "Paris and"


def test_a_rendered_chat_prompt_gets_its_special_tokens_once() -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "hi": 1}, unk_token="hi"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    inner.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(inner, "{{ bos_token }} {{ messages[0]['content'] }}", {"bos_token": "<s>"})
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert tokenizer.encode(text) == [0, 0, 1]
    assert tokenizer.encode(text, special_tokens=False) == [0, 1]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=False) == text
