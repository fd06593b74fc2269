"""A ring of sends: the sum, the number of steps, the bytes of the compiled program; the time model."""

import pytest
from load import LESSONS, load

from jdp.foresight.traffic.theory import ring_bytes

lesson = load("ring_allreduce")
ELEMENTS = 840  # divides by 2 to 8


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize("way", ["ring", "naive"])
def test_each_way_sends_its_formula(way, devices):
    """A ring sends each chunk twice around; a naive exchange sends everything to everyone."""
    found, size, others = lesson.count(way, devices, ELEMENTS), 4 * ELEMENTS, devices - 1
    sent = 2 * others * size / devices if way == "ring" else others * size
    assert (found.steps, found.sent) == (2 * others if way == "ring" else others, sent)
    assert sent == lesson.formula(way, devices, size)
    assert way == "naive" or sent == ring_bytes("all-reduce", size, devices)
    assert found.error < 1e-5  # float32 sums of eight in another order


def test_the_library_is_counted_as_a_ring():
    found = lesson.count("psum", 8, ELEMENTS)
    assert (found.steps, found.sent) == (1, lesson.formula("ring", 8, 4 * ELEMENTS))


def test_an_array_that_does_not_divide_is_padded():
    found = lesson.count("ring", 8, 10)  # eight chunks of two
    assert found.sent == 2 * 7 * 2 * 4
    assert found.error < 1e-5


def test_rounds_are_drawn_as_they_are():
    """A round adds one part to one chunk of each device, or brings a whole one; the README has the drawing."""
    rows = lesson.drawn(4)
    parts = [[[int(part) for part in cell.split()] for cell in row[1:]] for row in rows]
    sums = [[sum(chunks) for chunks in devices] for devices in parts]
    assert sums == [[4] * 4, [5] * 4, [7] * 4, [10] * 4, [13] * 4, [15] * 4, [16] * 4]
    assert all(sorted(chunks) == [1, 2, 3, 4] for chunks in parts[3])
    readme = [tuple(line.split("  ")) for line in (LESSONS / "README.md").read_text("utf-8").splitlines()]
    assert all(row in readme for row in rows)


def test_the_model_of_time():
    """A parameter server slows with its devices, though each sends it less than around a ring."""
    times = [lesson.seconds("server", n, 4e6, 5e-6, 1e11) for n in (8, 16)]
    assert times == pytest.approx([2 * 5e-6 + 2 * n * 4e6 / 1e11 for n in (8, 16)])
    assert lesson.formula("server", 8, 4e6) == 4e6 < lesson.formula("ring", 8, 4e6)
    assert lesson.seconds("ring", 8, 4e6, 5e-6, 1e11) == pytest.approx(14 * 5e-6 + 1.75 * 4e6 / 1e11)
    assert lesson.seconds("naive", 8, 4e6, 5e-6, 1e11) == pytest.approx(7 * 5e-6 + 7 * 4e6 / 1e11)
    equal = lesson.size_where_equal(8, 5e-6, 1e11)
    assert lesson.seconds("ring", 8, equal, 5e-6, 1e11) == pytest.approx(lesson.seconds("naive", 8, equal, 5e-6, 1e11))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--gb-s", "0"], "argument --gb-s: takes a number above 0; given 0"),
        (["--picture", "FOLDER"], "argument --picture: takes a file that"),
        (["--picture", "FOLDER/a.png"], "argument --picture: takes a file that"),
        (["--picture", "FOLDER/file/a.svg"], "argument --picture: takes a file that"),
    ],
)
def test_a_bad_option_is_reported_first(given, words, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as left:
        lesson.main([word.replace("FOLDER", str(tmp_path)) for word in given])
    assert left.value.code == 2
    assert words in capsys.readouterr().err
