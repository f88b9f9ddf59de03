# SPDX-License-Identifier: Apache-2.0

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from input_pipeline.errors import DataError
from input_pipeline.reading import documents
from input_pipeline.reading.documents import TextFile, check_unchanged, hold_out, scan
from tests.input_pipeline.memory import spans_of

TEXT = st.text(alphabet=st.sampled_from("a\n\r é\u2581\0😀"), max_size=60)


def content_of(spans):
    return ["".join(span.text()) for span in spans]


@given(text=TEXT, piece=st.integers(4, 30))
def test_pieces_are_the_text_and_end_at_lines(text, piece):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE_BYTES", piece)
        pieces = [piece for span in spans_of(text) for piece in span.text()]
    assert "".join(pieces) == text and all(pieces)
    assert all(len(part.encode()) <= 2 * piece for part in pieces)
    assert all(part.endswith("\n") or "\n" not in part for part in pieces[:-1])


@given(text=TEXT.filter(lambda text: len(text) > 1), data=st.data())
def test_a_cut_loses_nothing(text, data):
    (span,) = spans_of(text)
    head, tail = span.cut(data.draw(st.integers(0, span.size)), slack=data.draw(st.integers(span.size, 100_000)))
    assert "".join(content_of([head, tail])) == text and head.size and tail.size
    assert (head.begins, head.ends, tail.begins, tail.ends) == (True, False, False, True)
    if "\n" in text[:-1]:
        assert content_of([head])[0].endswith("\n")


def test_empty_documents_are_skipped_and_one_line_says_so(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    empty, said = [tmp_path / "b.txt", tmp_path / "c.txt"], []
    for file in empty:
        file.touch()
    spans = scan([TextFile(str(file)) for file in sorted(tmp_path.iterdir())], announce=said.append)
    assert content_of(spans) == ["a"]
    assert said == [f"skipped 2 of 3 documents: 2 empty; first: {empty[0]}"]


def test_a_name_that_is_not_utf_8_can_be_printed(tmp_path):
    name = os.fsdecode(b"caf\xe9.txt")
    (tmp_path / name).touch()
    (tmp_path / "whole.txt").write_text("text")
    said = []
    scan([TextFile(str(tmp_path / name)), TextFile(str(tmp_path / "whole.txt"))], announce=said.append)
    assert said == [f"skipped 1 of 2 documents: 1 empty; first: {tmp_path}/caf\\udce9.txt"]


@given(
    contents=st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=30), fraction=st.floats(0.001, 0.999)
)
def test_the_split_keeps_every_document_and_copies_together(contents, fraction):
    train, heldout = (content_of(side) for side in hold_out(spans_of(*(text + "!\n?" for text in contents)), fraction))
    assert train and heldout
    if len(set(contents)) > 1:
        assert sorted(train + heldout) == sorted(text + "!\n?" for text in contents)
        assert not set(train) & set(heldout)


def test_the_split_follows_the_fraction_and_the_content_alone():
    contents = [f"document {number}" for number in range(1000)]
    sides = [content_of(side) for side in hold_out(spans_of(*contents), 0.1)]
    assert 70 < len(sides[1]) < 130
    backwards = [content_of(side) for side in hold_out(spans_of(*reversed(contents), name="other"), 0.1)]
    assert [sorted(side) for side in backwards] == [sorted(side) for side in sides]
    assert set(content_of(hold_out(spans_of(*contents), 0.05)[1])) < set(sides[1])


def test_the_last_tenth_of_a_single_document_is_held_out():
    text = "".join(f"line {number}\n" for number in range(1000))
    for copies in (1, 3):
        train, heldout = hold_out(spans_of(*[text] * copies), 0.5)
        halves = zip(content_of(train), content_of(heldout), strict=True)
        assert [head + tail for head, tail in halves] == [text] * copies
        assert content_of(heldout)[0].startswith("line 9")
        assert heldout[0].size == pytest.approx(len(text) / 10, rel=0.02)
        assert all(span.begins and span.ends for span in train + heldout)
    assert content_of(hold_out(spans_of("😀😀"), 0.5)[1]) == ["😀"]


@pytest.mark.parametrize("fraction", [0, 1, -1, 2.0])
def test_a_fraction_outside_0_to_1_is_an_error(fraction):
    with pytest.raises(DataError, match=r"data.holdout_fraction=\S+ is not between 0 and 1; .*0.05"):
        hold_out(spans_of("a", "b"), fraction)


def test_a_document_of_one_character_is_an_error():
    with pytest.raises(DataError, match=r"memory.txt: too short to be split"):
        hold_out(spans_of("😀"), 0.5)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"good\nbad \xff\n", r"byte 9 \(line 2\)"),
        (b"\xc3", r"byte 0 \(line 1\)"),
        (b"x\n" * 200_000 + b"\x80", r"byte 400000 \(line 200001\)"),
        (b"\xbf" * 600_000, r"byte 0 \(line 1\)"),
    ],
)
def test_text_that_is_not_utf8_is_an_error_that_says_where(content, place):
    with pytest.raises(DataError, match=f"memory.txt: not valid UTF-8 at {place}. Fix the file, or"):
        content_of(spans_of(content))


def test_a_document_that_changes_meanwhile_is_an_error(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("one")
    spans = scan([TextFile(str(path))])
    check_unchanged(spans)
    path.write_text("two")
    with pytest.raises(DataError, match=r"log.txt: changed while it was being read"):
        check_unchanged(spans)
    path.unlink()
    with pytest.raises(DataError, match=r"log.txt: No such file"):
        check_unchanged(spans)
