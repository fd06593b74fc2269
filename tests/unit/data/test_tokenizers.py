"""What a tokenizer's file promises: the ids it says, in few bytes, each document closed, whatever it was saved with."""

import json

import numpy as np
import pytest
import tokenizers
from corpora import word_tokenizer
from guide_folders import trained_tokenizer

from jdp.data import mixture, open_tokenizer, text_data

TEXTS = [f"In chapter {number} of the tale, naïvely told: ☃ " * 3 for number in range(40)]
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def trained():
    """A byte-level BPE of 300 tokens, the last of which closes a document."""
    bpe = trained_tokenizer([END], TEXTS)
    assert bpe.token_to_id(END) == 299
    return bpe


@pytest.fixture
def file(trained, tmp_path):
    folder = tmp_path / "bpe"
    folder.mkdir()
    trained.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.fixture
def texts(tmp_path, own_hub):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return f"hf:json:{tmp_path}/rows.jsonl"


def documents_of(side, separator):
    ends = np.flatnonzero(side.ids == separator)
    assert ends[-1] == len(side.ids) - 1
    return [document[:-1] for document in np.split(side.ids, ends[:-1] + 1)]


def test_documents_become_the_tokens_of_the_file(trained, file, texts):
    data = text_data(texts, length=16, heldout_fraction=0.3, tokenizer=str(file))
    plain = text_data(texts, length=16, heldout_fraction=0.3)
    assert data.vocab_size == 300 and data.train.ids.dtype == np.uint16
    decode = data.tokenizer.decode
    sides = [[decode(document) for document in documents_of(side, 299)] for side in (data.train, data.heldout)]
    assert sorted(sides[0] + sides[1]) == sorted(TEXTS)
    # Which text is held out does not depend on the tokenizer.
    for side, other in zip(sides, (plain.train, plain.heldout), strict=True):
        assert [text.encode() for text in side] == other.ids.tobytes().split(b"\0")[:-1]
    expected = trained.encode(sides[0][0]).ids
    assert data.train[0]["tokens"].tolist() == expected[:16] and data.train[0]["targets"].tolist() == expected[1:17]
    assert data.train[0]["tokens"].dtype == np.int32
    assert f"tokens by {file} (300 tokens, {END} closes a document) (" in str(data) and " in memory)" in str(data)


@pytest.mark.parametrize("kind", ["bytes", "byte level", "metaspace"])
def test_text_is_decoded_token_by_token(kind, trained, file):
    """Characters of several tokens are never cut; a space that opens the text is not lost after other text."""
    if kind == "metaspace":  # whose decoder drops the first space
        words = {"<eos>": 0, "▁a": 1, "▁": 2, "b": 3, "ï": 4, "☃": 5}
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE(words, [], unk_token="<eos>"))
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        bpe.decoder = tokenizers.decoders.Metaspace()
        bpe.save(str(file))
    tokenizer = open_tokenizer("bytes" if kind == "bytes" else str(file))
    before, text = tokenizer.encode("b b").tolist(), " ☃ ï☃☃☃ bbï"
    tokens = tokenizer.encode(f"b b{text}").tolist()[len(before) :]
    parts = [*tokenizer.decode_stream(iter(tokens), after=before)]
    assert "".join(parts) == text and len(parts) > 8 and "\ufffd" not in parts
    torn = [*tokenizer.decode_stream([0xE2, 0x98])] if kind == "bytes" else ["\ufffd"]
    assert torn == ["\ufffd"]  # what is not complete at the end is shown as it is


def test_a_files_truncation_and_padding_are_off(trained, tmp_path, texts):
    saved = tokenizers.Tokenizer.from_str(trained.to_str())
    saved.enable_truncation(5)
    saved.enable_padding(length=50)
    saved.post_processor = tokenizers.processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 299)])
    saved.save(str(tmp_path / "tokenizer.json"))
    plain, cut = (tmp_path / name for name in ("plain.json", "tokenizer.json"))
    trained.save(str(plain))
    tokens = [text_data(texts, length=16, tokenizer=str(path)).train.ids for path in (plain, cut)]
    assert np.array_equal(*tokens)


@pytest.mark.parametrize(
    ("config", "token"), [('{"eos_token": "t"}', "t"), ('{"eos_token": {"content": "t"}}', "t"), ("{}", END)]
)
def test_the_configuration_names_what_closes_a_document(trained, file, config, token):
    (file.parent / "tokenizer_config.json").write_text(config)
    assert open_tokenizer(str(file)).separator == trained.token_to_id(token)


BOS = {"bos_token": "t"}


OPENED = {
    "the file adds it": (END, {}, END),
    "it is turned off": (END, BOS | {"add_bos_token": False}, None),
    "it is only named": ("", BOS, None),
    "it is turned on": ("", BOS | {"add_bos_token": True}, "t"),
}


@pytest.mark.parametrize(("processed", "settings", "bos"), OPENED.values(), ids=OPENED)
def test_documents_and_prompts_open_as_the_tokenizer_says(trained, file, texts, processed, settings, bos, capsys):
    """By `add_bos_token`; where it is not said, as transformers does by the file itself."""
    saved = tokenizers.Tokenizer.from_str(trained.to_str())
    if processed:
        saved.post_processor = tokenizers.processors.TemplateProcessing(f"{END} $A", special_tokens=[(END, 299)])
    saved.save(str(file))
    (file.parent / "tokenizer_config.json").write_text(json.dumps(settings))
    opened, added = open_tokenizer(str(file)), [] if bos is None else [trained.token_to_id(bos)]
    text = trained.encode("In chapter").ids
    assert opened.opened(opened.encode("In chapter")).tolist() == added + text
    assert opened.opened(np.array([*added, *text])).tolist() == added + text, "once"
    data = text_data(texts, length=16, heldout_fraction=0.3, tokenizer=str(file))
    assert data.train.ids[:2].tolist() == (added + trained.encode(TEXTS[0]).ids)[:2]
    assert (", t opens it" in str(data)) == (bos == "t") and (opened.byte_counts()[added] == 0).all()
    assert "are they text" not in capsys.readouterr().err, "the separator that opens them is no doubt"


def test_a_text_ends_as_model_and_template_say(trained, file):
    named = [trained.token_to_id(token) for token in "abc"]
    saved = tokenizers.Tokenizer.from_str(trained.to_str())
    saved.add_special_tokens(["<|im_end|>", "<|eot_id|>"])
    saved.save(str(file))
    assert open_tokenizer(str(file)).ends == (299,) and open_tokenizer("bytes").ends == (0,)
    (file.parent / "config.json").write_text(json.dumps({"eos_token_id": named[0]}))
    assert open_tokenizer(str(file)).ends == (299, named[0])
    (file.parent / "generation_config.json").write_text(json.dumps({"eos_token_id": named[1:]}))
    (file.parent / "chat_template.jinja").write_text("{{ m }}<|im_end|>")
    assert open_tokenizer(str(file)).ends == (299, *named[1:], 300)


def test_a_mixture_has_one_tokenizer(file, texts):
    same = [text_data(texts, length=16, tokenizer=str(file)) for _ in range(2)]
    assert mixture([(same[0], 1), (same[1], 2)]).vocab_size == 300
    np.savez(file.parent / "ids.npz", input_ids=np.arange(200))
    ids = text_data(file.parent / "ids.npz", length=16, ids="input_ids")
    assert mixture([(ids, 1), (same[0], 1)]).tokenizer is same[0].tokenizer
    with pytest.raises(ValueError, match="must share a tokenizer; given different ones for"):
        mixture([(same[0], 1), (text_data(texts, length=16), 2)])


def test_a_file_that_is_no_tokenizer(tmp_path, texts):
    (tmp_path / "a.json").write_text("{}")
    rules = {"none": r'must be "bytes", .*, looked for at /', "a.json": "must be a file of Hugging Face tokenizers; "}
    for name, rule in rules.items():
        with pytest.raises(ValueError, match=rule) as caught:
            text_data(texts, length=4, tokenizer=str(tmp_path / name))
        assert f"given {tmp_path / name}" in str(caught.value) and "\n" not in str(caught.value)


def test_a_tokenizer_that_closes_nothing(tmp_path, file):
    words = word_tokenizer(tmp_path / "words.json", "a", "b")
    said = r"closes documents; given .*words.json: none of <\|endoftext\|>, .* is in its"
    with pytest.raises(ValueError, match=said):
        open_tokenizer(words)
    (file.parent / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(ValueError, match=r"tokenizer_config.json names <end>, which is not in its vocabulary"):
        open_tokenizer(str(file))


def test_text_that_is_not_utf8_is_named(file, tmp_path):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"must be UTF-8 for a tokenizer; given 0xe9 at byte 3 of .*b.txt: convert it"):
        text_data(tmp_path / "*.txt", length=2, tokenizer=str(file))


def test_a_tokenizer_must_fit_the_model(file, texts):
    with pytest.raises(ValueError, match=r"given vocab_size 299 and 300 in .*: set vocab_size to 300 \(importing"):
        text_data(texts, length=4, tokenizer=str(file), vocab_size=299)
    assert text_data(texts, length=4, tokenizer=str(file), vocab_size=512).vocab_size == 300
    with pytest.raises(ValueError, match="given vocab_size 255 and 256 in bytes"):
        text_data(texts, length=4, vocab_size=255)


def test_tokens_of_text_have_its_bytes(trained, file):
    """The bytes of the pieces are those of the text, and the token that closes a document has none."""
    tokenizer = open_tokenizer(str(file))
    counts = tokenizer.byte_counts()
    assert counts.shape == (300,) and counts[299] == 0
    for text in (*TEXTS[:3], "☃", "plain"):
        assert counts[tokenizer.encode(text)].sum() == len(text.encode())
    plain = open_tokenizer("bytes").byte_counts()
    assert plain.tolist() == [0, *[1] * 255]
