"""What preferences promise: both answers of a pair in one sample, and loss on what follows their common prompt."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from chat_words import HI, ID, LONG, MARKED, PLAIN, WORDS, marked, said, write_template, write_words

from jdp.data import mixture, text_data

BYE = [said("assistant", "bye")]
PAIR = {"prompt": "hi", "chosen": "there bye", "rejected": "why"}
OTHER = {"prompt": "so", "chosen": "bye", "rejected": "there"}
THIRD = {"prompt": "why", "chosen": "hi", "rejected": "so"}
"""Rows of text. As `PLAIN` writes the first: <s> <u> hi <e> <a> there bye <e>, and <s> <u> hi <e> <a> why <e>."""


@pytest.fixture
def folder(tmp_path):
    return write_words(tmp_path / "model")


def opened(folder, *given, length=16, name="pairs.jsonl", **options):
    path = folder.parent / name
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return text_data(path, length=length, tokenizer=str(folder), format="preferences", **options)


def samples(data):
    return [side[index] for side in (data.train, data.heldout) for index in range(len(side))]


def read(sample):
    """Return both rows of a sample as text, with a star after each learnt target."""
    lines = []
    for tokens, targets, weights in zip(sample["tokens"], sample["targets"], sample["weights"], strict=True):
        size = int(np.flatnonzero(weights)[-1]) + 1
        assert not weights[size:].any()
        words = [WORDS[tokens[0]], *(WORDS[t] + "*" * int(w) for t, w in zip(targets, weights, strict=True))][
            : size + 1
        ]
        lines.append(" ".join(words))
    return lines


EXPECTED = ["<s> <u> hi <e> <a> there* bye* <e>*", "<s> <u> hi <e> <a> why* <e>*"]
FORMS = {
    "text": PAIR,
    "prompt of messages": {**PAIR, "prompt": [said("user", "hi")]},
    "all of messages": {
        "prompt": [said("user", "hi")],
        "chosen": [said("assistant", "there bye")],
        "rejected": [said("assistant", "why")],
    },
    "no prompt": {"chosen": HI, "rejected": [HI[0], said("assistant", "why")]},
    "prompt is null": {"prompt": None, "chosen": HI, "rejected": [HI[0], said("assistant", "why")]},
    "prompt in the answers too": {"prompt": "hi", "chosen": HI, "rejected": [HI[0], said("assistant", "why")]},
    "as ShareGPT": {
        "prompt": [{"from": "human", "value": "hi"}],
        "chosen": "there bye",
        "rejected": [{"from": "gpt", "value": "why"}],
    },
}


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_row_is_the_same_pair(folder, template, form):
    write_template(folder, template)
    found = [read(sample) for sample in samples(opened(folder, FORMS[form], OTHER))]
    assert EXPECTED in found and len(found) == 2


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_answers_in_the_prompt_are_not_learnt(folder, template):
    write_template(folder, template)
    row = {"chosen": LONG, "rejected": [*LONG[:3], said("assistant", "so")]}
    found = [read(sample) for sample in samples(opened(folder, row, OTHER))]
    before = "<s> <u> so <e> <a> there <e> <u> why why <e> <a>"
    assert [f"{before} bye* <e>*", f"{before} so* <e>*"] in found


def test_parquet_is_read_as_json_is(folder):
    lines = opened(folder, PAIR, OTHER, THIRD)
    table = pyarrow.Table.from_pylist([PAIR, OTHER, THIRD])
    pyarrow.parquet.write_table(table, folder.parent / "pairs.parquet")
    data = text_data(folder.parent / "pairs.parquet", length=16, tokenizer=str(folder), format="preferences")
    assert data.fingerprint == lines.fingerprint


def test_a_mixture_of_pairs_is_pairs(folder):
    first, second = opened(folder, PAIR, OTHER), opened(folder, OTHER, THIRD, name="others.jsonl")
    both = mixture([(first, 1), (second, 1)])
    assert both.train.sample_at(0, 0)["tokens"].shape == (2, 16)


def test_pairs_that_are_alike_are_left_out_and_counted(folder, capsys):
    data = opened(folder, PAIR, {**OTHER, "rejected": "bye"}, OTHER, {"chosen": HI, "rejected": HI})
    error = capsys.readouterr().err
    assert len(samples(data)) == 2
    assert "2 pairs are left out, as chosen and rejected are the same; the first is" in error
    assert "pairs.jsonl, line 2" in error


def test_what_is_longer_than_a_row_is_cut_and_counted(folder, capsys):
    """The prompt of the long pair leaves no room for an answer; the cut leaves two that are alike in another."""
    long, alike = {**PAIR, "prompt": "hi " * 9}, {"prompt": "hi", "chosen": "so so bye", "rejected": "so so why"}
    data = opened(
        folder,
        PAIR,
        long,
        OTHER,
        alike,
        {"prompt": "hi", "chosen": "why bye bye", "rejected": "so"},
        length=6,
        heldout_fraction=0.5,
    )
    error = " ".join(capsys.readouterr().err.split())
    assert "2 of 5 pairs have more than 6 tokens in an answer with its prompt; its end is cut" in error
    assert "2 of 5 pairs are left out: with more than 6 tokens the prompt leaves no room for an answer" in error
    assert ["<s> <u> hi <e> <a> there* bye*", "<s> <u> hi <e> <a> why* <e>*"] in map(read, samples(data))
    with pytest.raises(ValueError, match=r"must hold a prompt and some of both answers; given length 3, with which"):
        opened(folder, PAIR, OTHER, length=3)


def test_tokens_in_files_are_the_same_pairs(folder, monkeypatch):
    monkeypatch.setenv("JDP_CACHE_DIR", str(folder.parent / "cache"))
    memory, stored = (opened(folder, PAIR, OTHER, THIRD, in_files=each, heldout_fraction=0.5) for each in (False, True))
    assert stored.folder is not None and stored.fingerprint == memory.fingerprint
    assert [read(sample) for sample in samples(stored)] == [read(sample) for sample in samples(memory)]


WRONG = {
    "no column": ({"prompt": "hi", "chosen": "so"}, r'must have the field "rejected"; given .*pairs.jsonl, line 1 wit'),
    "text alone": ({"chosen": "hi", "rejected": "so"}, r'must have a "prompt", or .* given text, .hi., in .*, line 1'),
    "no common prompt": ({"chosen": HI, "rejected": LONG}, r"must answer one prompt; given no message that both begin"),
    "no answer": (
        {**PAIR, "chosen": HI[:1]},
        r"chosen must answer the prompt, .* given one that has none, in .*line 1",
    ),
    "a question": ({**PAIR, "chosen": LONG}, r"chosen must answer .* begins with a message of user, in .*, line 1"),
    "one is the other": ({"chosen": HI, "rejected": [*HI, *LONG]}, r"chosen must answer .* that has none, in .*line 1"),
    "a number": ({**PAIR, "rejected": 1}, r"rejected must be a list of .* given 1 in .*, line 1: fix it"),
    "null": ({**PAIR, "chosen": None}, r"chosen must be a list of .* given None in .*, line 1: fix it"),
    "no messages": (
        {**PAIR, "prompt": []},
        r"prompt must be text, or hold messages; given an empty list in .*, line 1",
    ),
    "a role": ({**PAIR, "prompt": [said("me", "hi")]}, r"role must be one of .* given 'me' in .*, line 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_row_that_is_no_preference_is_named(folder, case):
    row, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        opened(folder, row, OTHER)


def test_options_that_preferences_do_not_have(folder):
    for options, message in {
        ("field", "text"): "given field 'text'",
        ("packing", "stream"): 'packing "stream"',
    }.items():
        with pytest.raises(ValueError, match=message):
            opened(folder, PAIR, OTHER, **dict([options]))


def test_a_sample_holds_both_rows_and_their_reference(folder):
    [sample] = [sample for sample in samples(opened(folder, PAIR, OTHER)) if read(sample) == EXPECTED]
    ids = [ID[word] for word, _ in marked(EXPECTED[1].replace("*", ""))]
    assert sample["tokens"][1][:6].tolist() == ids[:-1] and sample["targets"][1][:6].tolist() == ids[1:]
    assert sample["weights"].sum(axis=1).tolist() == [3, 2] and sample["reference"].tolist() == [0, 0]
