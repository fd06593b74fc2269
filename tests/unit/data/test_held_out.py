"""Held out by content: what is held out once stays so, copies stay together, and every byte is on one side."""

import io

import numpy as np

from jdp.data import text_data
from jdp.data.held_out import content_score, ends_score

RNG = np.random.default_rng(0)
DOCUMENTS = [f"In chapter {i} of the tale, ".encode() * 5 for i in range(40)]


def split(folder, documents, heldout_fraction):
    """The pieces to train on, those held out, and whether documents are whole."""
    for number, document in enumerate(documents):
        (folder / f"{number:02}.txt").write_bytes(document)
    data = text_data(folder, length=1, heldout_fraction=heldout_fraction)
    return *(side.ids.tobytes().split(b"\0")[:-1] for side in (data.train, data.heldout)), data.whole


def test_more_held_out_keeps_what_was_held_out(tmp_path):
    (_, few, _), (train, many, _) = split(tmp_path, DOCUMENTS, 0.2), split(tmp_path, DOCUMENTS, 0.4)
    assert set(few) < set(many) and sorted(train + many) == sorted(DOCUMENTS)
    assert all(content_score(document) < 0.2 for document in few)


def test_the_split_is_the_same_for_ever():
    """Held-out text must not wander into training between versions."""
    assert content_score(b"abc") == 0.846604635986145


def test_few_documents_on_one_side_are_each_split(tmp_path):
    assert split(tmp_path, [b"abcdefghij", b"x"], 1e-9) == ([b"abcdefghi"], [b"j", b"x"], False)


def test_large_contents_are_distinguished_by_their_ends():
    """Without reading them whole; small ones by every byte."""

    def score(content):
        return ends_score(io.BytesIO(content))

    large = RNG.bytes(2**17)
    middle = large[: 2**16] + b"\0" + large[2**16 + 1 :]
    others = [b"\0" + large[1:], large[:-1] + b"\0", large + b"\0"]
    assert score(large) == score(middle) and len({*map(score, [large, *others])}) == 4
    assert score(large[:65536]) == content_score(large[:65536])
