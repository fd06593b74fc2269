"""What a chat promises: the ids of the rendered text, loss on the answers alone, conversations side by side."""

import json
import sys
from datetime import date

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from chat_words import HI, ID, LONG, MARKED, PLAIN, WORDS, marked, said, write_template, write_words

from jdp.data import mixture, open_tokenizer, text_data
from jdp.data.text.chat import with_template


@pytest.fixture
def folder(tmp_path):
    return write_words(tmp_path / "model")


def write_rows(folder, *conversations, column="messages", name="chats.jsonl"):
    path = folder.parent / name
    path.write_text("".join(json.dumps({column: each}) + "\n" for each in conversations))
    return path


def opened(folder, *conversations, length=16, **options):
    """Return the data of some conversations; one more is held out (the one of the lowest hash)."""
    return text_data(write_rows(folder, *conversations), length=length, tokenizer=str(folder), format="chat", **options)


def tokens_of(folder, conversation, **options):
    """Return a conversation's tokens, each with True if it is learnt."""
    chat = with_template(open_tokenizer(str(folder)), options.get("template"), None)
    stored = chat.tokenize([json.dumps(conversation).encode()], lambda number: "row").ids
    return [(WORDS[token >> 1], bool(token & 1)) for token in stored.tolist()]


BY_HAND = [
    (HI, "<s> <u> hi <e> <a> there* bye* <e>*"),
    (LONG, "<s> <u> so <e> <a> there* <e>* <u> why why <e> <a> bye* <e>*"),
    ([said("system", "so"), *HI], "<s> <u> so <e> <u> hi <e> <a> there* bye* <e>*"),
    ([*HI, said("user", "why")], "<s> <u> hi <e> <a> there* bye* <e>* <u> why <e>"),
    ([HI[1], said("user", "why")], "<s> <a> there* bye* <e>* <u> why <e>"),
    ([said("user", "hi"), said("assistant", "")], "<s> <u> hi <e> <a> <e>*"),
]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize(("conversation", "expected"), BY_HAND)
def test_the_answers_and_their_ends_are_learnt(folder, template, conversation, expected):
    write_template(folder, template)
    assert tokens_of(folder, conversation) == marked(expected)


def test_a_generation_tag_in_a_comment_is_none(folder):
    write_template(folder, "{# {% generation %} #}" + PLAIN)
    assert tokens_of(folder, HI) == marked(BY_HAND[0][1])


def test_a_generation_block_is_taken_as_it_stands(folder):
    write_template(folder, MARKED.replace("<e>{% endgeneration %}", "{% endgeneration %}<e>"))
    assert tokens_of(folder, HI) == marked("<s> <u> hi <e> <a> there* bye* <e>")


def test_a_sample_has_weight_where_the_target_is_learnt(folder):
    data = opened(folder, HI, LONG, length=24, heldout_fraction=0.3)
    [(side, row)] = [(s, s[0]) for s in (data.train, data.heldout) if s[0]["segments"].sum() == 7]  # HI's 7 pairs
    assert len(side) == 1
    found = {name: row[name][:7].tolist() for name in row}
    ids = [ID[word] for word, _ in marked("<s> <u> hi <e> <a> there bye <e>")]
    assert found == {
        "tokens": ids[:-1],
        "targets": ids[1:],
        "segments": [1] * 7,
        "weights": [0, 0, 0, 0, 1, 1, 1],
    }
    assert not any(row[name][7:].any() for name in row)


def test_text_is_encoded_as_a_whole(tmp_path):
    """A pair of bytes that a template joins is one token; it is learnt, as it holds a character of the answer."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, ":": 1, "b": 2, ":b": 3, "é": 4, "<e>": 5}, [(":", "b")]))
    bpe.add_special_tokens(["<e>"])
    bpe.save(str(tmp_path / "tokenizer.json"))
    write_template(
        tmp_path, "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% endfor %}".replace("m.role[0]", "'a'")
    )
    chat = with_template(open_tokenizer(str(tmp_path)), None, None)
    conversation = json.dumps([said("user", "éa"), said("assistant", "ba")]).encode()
    stored = chat.tokenize([conversation], lambda number: "row").ids  # a:éaa:ba
    assert [(token >> 1, token & 1) for token in stored.tolist()] == [
        (0, 0),
        (1, 0),
        (4, 0),
        (0, 0),
        (0, 1),
        (3, 1),
        (0, 1),
    ]
    whole = open_tokenizer(str(tmp_path)).encode("a:éaa:ba")
    assert np.array_equal(stored >> 1, whole)


def test_rows_of_any_table_and_of_sharegpt_are_the_same(folder):
    chats = [[said("user", f"{a} {b}"), said("assistant", "bye")] for a in WORDS[4:8] for b in WORDS[4:8]]
    data = opened(folder, *chats, heldout_fraction=0.3)
    names = {"user": "human", "assistant": "gpt"}
    shared = [[{"from": names[m["role"]], "value": m["content"]} for m in chat] for chat in chats]
    path = write_rows(folder, *shared, column="conversations", name="shared.jsonl")
    table = pyarrow.table({"id": range(16), "messages": [[{**m, "name": None} for m in chat] for chat in chats]})
    pyarrow.parquet.write_table(table, folder.parent / "chats.parquet")
    for source in (path, folder.parent / "chats.parquet"):
        other = text_data(source, length=16, tokenizer=str(folder), format="chat", heldout_fraction=0.3)
        assert other.fingerprint == data.fingerprint
    other = write_rows(folder, *chats, column="turns", name="turns.jsonl")
    with pytest.raises(
        ValueError, match=r'must have the field "messages" or "conversations"; given .*turns.jsonl, line 1'
    ):
        text_data(other, length=16, tokenizer=str(folder), format="chat")
    named = text_data(other, length=16, tokenizer=str(folder), format="chat", field="turns", heldout_fraction=0.3)
    assert named.fingerprint == data.fingerprint


def many(count=60):
    words = np.random.default_rng(0).choice(WORDS[4:], (count, 8))
    return [[said("user", " ".join(row[:5])), said("assistant", " ".join(row[5:]))] for row in words.tolist()]


def test_conversations_are_whole_and_apart(folder):
    """Every conversation is one segment; none is on two sides, and files of tokens hold the same as memory."""
    chats = many()
    data = opened(folder, *chats, length=40, heldout_fraction=0.3)
    found = []
    for side in (data.train, data.heldout):
        for row in map(side.__getitem__, range(len(side))):
            for segment in range(1, row["segments"].max() + 1):
                at = row["segments"] == segment
                found.append(" ".join(WORDS[token] for token in (row["tokens"][at][0], *row["targets"][at])))
                assert row["weights"][at].tolist() == [0] * 8 + [1] * 4
    written = [f"<s> <u> {question['content']} <e> <a> {answer['content']} <e>" for question, answer in chats]
    assert sorted(found) == sorted(written)
    assert len(data.train) < 24 and data.whole and data.documents == 60  # three conversations fit into a row
    in_files = opened(folder, *chats, length=40, heldout_fraction=0.3, in_files=True)
    assert in_files.folder is not None and in_files.fingerprint == data.fingerprint
    assert " of the others learnt" in str(data) and data.train.learnt == pytest.approx(1 / 3)


@pytest.mark.parametrize("in_files", [False, True])
def test_what_has_no_answer_is_left_out_and_counted(folder, capsys, in_files):
    odd = [[said("user", "hi")], [], [said("system", "so")]]
    data = opened(folder, *odd, *many(), heldout_fraction=0.3, in_files=in_files)
    assert "3 of 63 conversations are left out: there is no answer of the assistant in them" in capsys.readouterr().err
    assert data.documents == 60 and data.fingerprint == opened(folder, *many(), heldout_fraction=0.3).fingerprint
    with pytest.raises(ValueError, match=r"chat must have answers to learn; given .*, 3 conversations"):
        opened(folder, *odd, in_files=in_files)


def test_long_conversations_are_cut_and_counted(folder, capsys):
    """Pieces of a question alone are left out."""
    long = [said("user", "why " * 40), said("assistant", "bye " * 10)]
    data = opened(folder, long, *many(), length=16, heldout_fraction=0.01)
    assert "1 of 61 conversations have more than 16 tokens and are cut" in capsys.readouterr().err
    rows = [side[index] for side in (data.train, data.heldout) for index in range(len(side))]
    assert all(row["weights"].any() for row in rows)
    assert sum(int(row["weights"].sum()) for row in rows) == 60 * 4 + 11


def test_a_few_conversations_are_held_out_whole(folder, capsys):
    data = opened(folder, HI, LONG, heldout_fraction=0.01)
    assert data.whole and (len(data.train), len(data.heldout)) == (1, 1)
    assert "too few samples for heldout_fraction = 0.01, so 1 of 2 held out" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"heldout_fraction must leave conversations on both sides; given 0.0001"):
        opened(folder, *many(), heldout_fraction=0.0001, in_files=True)


def test_a_template_has_what_transformers_gives_it(folder):
    template = (
        "{% for m in messages %}\n    {% if m.role == 'tool' %}{% break %}{% endif %}\n"
        "{{ {'a': m.content, 'é<': [1]} | tojson }} {{ m.name }}{% endfor %}"
        "|{{ eos_token }}|{{ pad_token }}|{{ tools is none }}|{{ strftime_now('%d %b %Y') }}"
    )
    write_template(folder, template)
    chat = with_template(open_tokenizer(str(folder)), None, date(2026, 11, 26))
    text = chat.template.render([said("user", "hi") | {"name": "Bo"}, said("tool", "so")], "row")
    assert text == '{"a": "hi", "é<": [1]} Bo|<e>||True|26 Nov 2026'
    other = with_template(open_tokenizer(str(folder)), None, date(2026, 11, 27))
    assert chat.identity != other.identity


def test_a_template_of_its_own_file_comes_first(folder, tmp_path):
    (folder / "chat_template.jinja").write_text(PLAIN.replace("<u>", "why "))
    assert tokens_of(folder, HI)[1] == ("why", False)
    (tmp_path / "mine.jinja").write_text(PLAIN.replace("<u>", "so "))
    assert tokens_of(folder, HI, template=str(tmp_path / "mine.jinja"))[1] == ("so", False)


def test_the_templates_of_a_list_have_names(folder):
    write_template(folder, [{"name": "tool_use", "template": "no"}, {"name": "default", "template": PLAIN}])
    assert tokens_of(folder, HI) == marked(BY_HAND[0][1])


def test_a_prompt_is_a_users_message(folder):
    data = opened(folder, HI, LONG)
    assert [WORDS[token] for token in data.prompt("why ?")] == ["<s>", "<u>", "why", "?", "<e>", "<a>"]
    assert data.decode(data.encode("why ?")) == "why ?"


def test_chats_are_mixed_with_chats_alone(folder):
    parts = [opened(folder, *many(), heldout_fraction=0.3), opened(folder, HI, LONG)]
    both = mixture([(part, 1) for part in parts])
    assert both.prompt("why").tolist() == parts[0].prompt("why").tolist() and both.answer_end == ID["<e>"]
    (folder.parent / "a.txt").write_text("hi there " * 50)
    text = text_data(folder.parent / "a.txt", length=16, tokenizer=str(folder), packing="documents")
    assert text.prompt("why").tolist() == [ID["why"]] and text.answer_end is None
    with pytest.raises(ValueError, match="must have one tokenizer"):
        mixture([(parts[0], 1), (text, 1)])


FORGETS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<a>{{ m.content if loop.last else 'so' }}<e>{% else %}<u>"
    "{{ m.content }}<e>{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
SETTINGS = r"given \S+model/tokenizer_config.json"
TEMPLATES = {
    "raises": (
        "{{ raise_exception('roles must alternate') }}",
        rf"{SETTINGS} with \S+chats.jsonl, line 1: roles must alternate; leave the row out",
    ),
    "undefined": ("{{ messages[7].role }}", rf"{SETTINGS} with \S+chats.jsonl, line 1: list object has no element 7"),
    "reads": (
        "{{ bos_token }}\n{% include '/etc/passwd' %}",
        rf"must read no other file; {SETTINGS}: line 2 does \(include\)",
    ),
    "imports": ("{% import 'x' as y %}", rf"must read no other file; {SETTINGS}: line 1 does \(import\)"),
    "is no template": ("{% for m in messages %}", rf"one of jinja2; {SETTINGS}: line 1: Unexpected end of template"),
    "reaches out": ("{{ ''.__class__.__mro__ }}", "line 1: access to attribute '__class__' of 'str' object is unsafe"),
    "changes": ("{{ messages.append(1) }}", "line 1: access to attribute 'append' of 'list' object is unsafe"),
    "is endless": ("{% for i in range(10 ** 9) %}{% endfor %}", "line 1: Range too big"),
    "forgets": (
        FORGETS,
        rf"{SETTINGS}, which writes message 2 of \S+chats.jsonl, line 1 in another way.*\{{% generation %\}}",
    ),
    "is missing": (
        None,
        r"needs a chat template; given \S+tokenizer.json, and beside it neither a chat_template.jinja",
    ),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_a_template_that_cannot_be_used_is_named(folder, case):
    template, message = TEMPLATES[case]
    write_template(folder, template)
    with pytest.raises(ValueError, match=message):
        opened(folder, LONG, HI)


ROWS = {
    "text": ("hi", r"messages must be a list of .*; given 'hi' in \S+chats.jsonl, line 2: fix it"),
    "null": (None, "given None in .*line 2"),
    "no message": ([1], "given 1 in .*line 2"),
    "no content": ([{"role": "user"}], "given {'role': 'user'} in .*line 2"),
    "no call": ([said("assistant", None) | {"tool_calls": []}], "all text; given .* in .*line 2"),
    "parts": ([{"role": "user", "content": [{"type": "text"}]}], "all text; given .* in .*line 2"),
    "unknown role": (
        [said("User", "hi")],
        r"a message's role must be one of .*; given 'User' in \S+chats.jsonl, line 2.*did you mean.*user",
    ),
    "surrogate": ([said("user", "\ud800")], "half a surrogate pair, .*line 2"),
}


@pytest.mark.parametrize("case", ROWS)
def test_a_row_that_is_no_conversation_is_named(folder, case):
    row, message = ROWS[case]
    with pytest.raises(ValueError, match=message):
        opened(folder, HI, row)


def test_jinja2_is_asked_for(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ValueError, match=r"tokenizer.json needs the package jinja2.*: pip install '\.\[hf\]'"):
        opened(folder, HI, LONG)


CALLS = (
    "{{ tools | length if tools else '?' }}{% for m in messages %}{{ '<a>' if m.role == 'assistant' else '<u>' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments | length }}{% endfor %}"
    "{{ m.content if m.content is not none }}<e>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
CALL = said("assistant", None) | {"tool_calls": [{"function": {"name": "why", "arguments": {"so": "bye"}}}]}
TOOLS = [{"type": "function", "function": {"name": "why", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_template_gets_tools_and_the_calls_of_them(folder, tools, kind):
    """A call without content is an answer as any other; nulls of Arrow's tables are left out of its arguments."""
    write_template(folder, CALLS)
    rows = [{"messages": [HI[0], CALL, said("tool", "bye"), HI[1]], "tools": tools}, {"messages": HI, "tools": None}]
    rows[1]["messages"] = [said("user", "why"), CALL | {"tool_calls": [{"function": {"arguments": {"hi": "so"}}}]}]
    rows[1]["messages"][1]["tool_calls"][0]["function"]["name"] = "there"
    path = folder.parent / f"calls.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    data = text_data(path, length=24, tokenizer=str(folder), format="chat", heldout_fraction=0.5)
    learnt = sorted(
        " ".join(WORDS[t] for t in side[0]["targets"][side[0]["weights"] == 1]) for side in (data.train, data.heldout)
    )
    assert learnt == ["there ? <e>", "why ? <e> there bye <e>"]


def test_tools_that_are_no_list_are_named(folder):
    path = folder.parent / "calls.jsonl"
    path.write_text(json.dumps({"messages": HI, "tools": "{"}) + "\n")
    with pytest.raises(ValueError, match=r"tools must be a list, or its JSON; given '{' in .*calls.jsonl, line 1"):
        text_data(path, length=24, tokenizer=str(folder), format="chat")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_that_is_null_leaves_room_for_the_other(folder, kind):
    rows = [{"messages": None, "conversations": HI}, {"messages": LONG, "conversations": None}]
    path = folder.parent / f"both.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    data = text_data(path, length=24, tokenizer=str(folder), format="chat", heldout_fraction=0.5)
    plain = text_data(
        write_rows(folder, HI, LONG), length=24, tokenizer=str(folder), format="chat", heldout_fraction=0.5
    )
    assert data.fingerprint == plain.fingerprint


def test_a_tokenizer_without_an_end_says_what_to_set(folder):
    """The other file of special tokens is read too."""
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": PLAIN}))
    with pytest.raises(ValueError, match=r'added tokens, which are <s>, <u>, <a>, <e>, as "eos_token" in .*of a chat'):
        opened(folder, HI, LONG)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<e>"}}))
    assert opened(folder, HI, LONG, heldout_fraction=0.5).answer_end == ID["<e>"]


def test_what_a_chat_needs(folder, tmp_path):
    rows = write_rows(folder, HI, LONG)
    (tmp_path / "a.txt").write_text("hi")
    calls = {
        "needs a tokenizer with a chat template; given \"bytes\"": {},
        'packing "documents"; given packing "stream"': {"tokenizer": str(folder), "packing": "stream"},
        'given tokenizer "none"': {"tokenizer": "none"},
        "must be a file of text; given .*gone.jinja: No such file": {
            "tokenizer": str(folder), "chat_template": str(tmp_path / "gone.jinja")
        },
        "must be a file of text; given /dev/null": {"tokenizer": str(folder), "chat_template": "/dev/null"},
        "conversations must be rows of .*; given .*a.txt": {"tokenizer": str(folder), "source": tmp_path / "a.txt"},
    }  # fmt: skip
    for message, options in calls.items():
        with pytest.raises(ValueError, match=message):
            text_data(options.pop("source", rows), length=8, format="chat", **options)
    with pytest.raises(ValueError, match=r'format must be "text", "chat" or "preferences"; given "chats"'):
        text_data(rows, length=8, format="chats")
