import pytest

from freshper_lightning.jsonl import read_jsonl


def rows(path, content):
    path.write_bytes(content)
    return list(read_jsonl(path, "questions"))


def test_a_byte_order_mark_blank_lines_and_the_ends_of_lines_do_not_matter(tmp_path):
    content = '\ufeff{"a": "ä"}\r\n\n  \n{"a": "\ufeff"}'.encode()
    assert rows(tmp_path / "rows.jsonl", content) == [{"a": "ä"}, {"a": "\ufeff"}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": "\xc3\xa4"}\n\n{"a": "caf\xe9"}\n', "line 3 is not UTF-8, which it must be: byte 0xe9 in column 11"),
        ('{"a": 1}'.encode("utf-16"), "line 1 is not UTF-8, which it must be: byte 0xff in column 1"),
        (b"{}\n" + b"[" * 100_000, "line 2 is nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "line 1 is not JSON: Exceeds the limit"),
        (b"{}\n{", "line 2 is not JSON"),
        (b"[]", "line 1 must be a JSON object, not []"),
    ],
)
def test_a_line_that_cannot_be_read_is_named_with_its_file_and_key(tmp_path, content, message):
    with pytest.raises(ValueError, match=r"^questions='.*rows\.jsonl': ") as refusal:
        rows(tmp_path / "rows.jsonl", content)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"^questions='.*' is not a file; it must be a JSONL file"):
        list(read_jsonl(tmp_path, "questions"))
    with pytest.raises(ValueError, match=r"^questions='a{300}' cannot be read: .* it must be a JSONL file"):
        list(read_jsonl("a" * 300, "questions"))
