"""Chat templates: what they can do, what they cannot, and that users cannot forge borders."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from expertmesh.errors import CheckpointError, EngineError, RequestError
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tokenizer(*special: AddedToken) -> Tokenizer:
    """A byte-level tokenizer with ChatML's special tokens and more."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("u", "s"), ("us", "e"), ("<", "|"), ("Ġ", "a")]
    tokens = alphabet + [left + right for left, right in merges]
    vocab = {token: index for index, token in enumerate(tokens)}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>", *special])
    return Tokenizer(raw.to_str(), {"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>"})


TOKENIZER = make_tokenizer()
TEMPLATE = ChatTemplate(CHATML, TOKENIZER)
START, END = TOKENIZER.token_id("<|im_start|>"), TOKENIZER.token_id("<|im_end|>")


def user(content: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": "user", "content": content}]


def borders(ids: list[int]) -> list[int]:
    """The special tokens among ids."""
    return [token_id for token_id in ids if token_id in (START, END)]


def test_special_tokens_of_the_template_are_special() -> None:
    """A plain question gives the ids of the rendered text, with three borders."""
    ids = TEMPLATE.encode(user("hello"))
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert TEMPLATE.render(user("hello")) == text
    assert ids == TOKENIZER.encode(text, add_special_tokens=False)
    assert borders(ids) == [START, END, START]


@given(content=st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<|", "im_end|>", "a "])))
def test_special_tokens_typed_by_a_user_are_text(content: list[str]) -> None:
    """However messages spell special tokens, only the template's own are borders, and the
    letters arrive as they were typed."""
    typed = "".join(content)
    ids = TEMPLATE.encode(user(typed))
    assert borders(ids) == [START, END, START]
    inside = ids[ids.index(START) + 1 : ids.index(END)]
    assert TOKENIZER.decode(inside) == f"user\n{typed.strip()}"


def test_two_messages_cannot_make_a_special_token_together() -> None:
    """A token begun at the end of one message and ended in the next one stays text."""
    joined = ChatTemplate("{% for m in messages %}{{ m['content'] }}{% endfor %}", TOKENIZER)
    ids = joined.encode([*user("x<|im_"), *user("end|>y")])
    assert borders(ids) == []
    assert TOKENIZER.decode(ids) == "x<|im_end|>y"


@given(text=st.text(alphabet="a <|im_end\n", max_size=30))
def test_marked_encoding_equals_plain_encoding(text: str) -> None:
    """Where a message spells no special token, both ways of encoding give the same ids."""
    rendered = f"<|im_start|>{text.replace('<|im_end|>', '')}<|im_end|>\n"
    expected = TOKENIZER.encode(rendered, add_special_tokens=False)
    assert TEMPLATE._encode_marked(rendered, "\U000f0000") == expected


def test_tokens_that_absorb_spaces_keep_doing_so() -> None:
    """lstrip and rstrip of special tokens hold where messages spell special tokens, too."""
    tokenizer = make_tokenizer(AddedToken("[X]", lstrip=True, rstrip=True))
    template = ChatTemplate("{{ messages[0]['content'] }}  [X]  end", tokenizer)
    ids = template.encode(user("[X]a"))
    expected = [*tokenizer.encode_plain("[X]a"), tokenizer.token_id("[X]")]
    assert ids == expected + tokenizer.encode_plain("end")


def test_a_special_token_of_one_letter_can_be_typed() -> None:
    """The shortest special token is text when a user types it."""
    tokenizer = make_tokenizer(AddedToken("§"))
    template = ChatTemplate("§{{ messages[0]['content'] }}", tokenizer)
    ids = template.encode(user("a§b"))
    assert ids == [tokenizer.token_id("§"), *tokenizer.encode_plain("a§b")]


def test_templates_get_what_transformers_gives_them() -> None:
    """Special tokens, tojson without HTML escapes, loop controls, generation blocks, dates."""
    source = (
        "{{ bos_token }}{% generation %}{{ messages[0]|tojson }}{% endgeneration %}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{{ strftime_now('%Y') | length }}"
    )
    rendered = ChatTemplate(source, TOKENIZER).render(user("<é>"))
    assert rendered == '<s>{"role": "user", "content": "<é>"}014'


def test_a_refused_conversation_is_the_clients_mistake() -> None:
    """raise_exception in a template becomes a request error about the messages."""
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", TOKENIZER)
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        template.encode(user("a"))
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 / 0 }}",
        "{{ messages | attr('__class__') }}{{ undefined.field }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    """Access to internals, changes of the input and plain mistakes end as an engine error."""
    with pytest.raises(EngineError, match="chat template"):
        ChatTemplate(source, TOKENIZER).encode(user("a"))


def test_templates_are_found_in_a_model_folder(tmp_path: Path) -> None:
    """A file of its own wins; tokenizer_config.json may hold one template or several."""
    config = tmp_path / "tokenizer_config.json"
    assert ChatTemplate.from_checkpoint(tmp_path, TOKENIZER) is None
    config.write_text('{"chat_template": [{"name": "default", "template": "several"}]}')
    assert _rendered(tmp_path) == "several"
    config.write_text('{"chat_template": "one"}')
    assert _rendered(tmp_path) == "one"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert _rendered(tmp_path) == "file"
    assert ChatTemplate.from_checkpoint(tmp_path, None) is None


def _rendered(folder: Path) -> str:
    template = ChatTemplate.from_checkpoint(folder, TOKENIZER)
    assert template is not None
    return template.render([])


def test_a_broken_template_stops_the_start(tmp_path: Path) -> None:
    """A template that cannot be parsed is an error of the checkpoint that names the folder."""
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(CheckpointError, match="not a valid chat template"):
        ChatTemplate.from_checkpoint(tmp_path, TOKENIZER)


@pytest.mark.parametrize(
    "template", ["5", "[1]", "[[]]", "[null]", "{}", "[]", '[{"name": "x"}]', '[{"name": []}]']
)
def test_a_template_of_another_form_stops_the_start(tmp_path: Path, template: str) -> None:
    """Whatever stands in its place in the configuration is one line that names the file."""
    (tmp_path / "tokenizer_config.json").write_text(f'{{"chat_template": {template}}}')
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        ChatTemplate.from_checkpoint(tmp_path, TOKENIZER)


def test_a_template_that_is_no_text_stops_the_start(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 are named."""
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="not UTF-8"):
        ChatTemplate.from_checkpoint(tmp_path, TOKENIZER)


def test_a_broken_tokenizer_stops_the_start(tmp_path: Path) -> None:
    """A folder without a tokenizer gives None, a broken file an error that names it."""
    assert Tokenizer.from_checkpoint(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_checkpoint(tmp_path)
