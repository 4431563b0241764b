"""Text that people give: captions, lists of captions, class files, prompts. One reader for all of it.

Text is UTF-8, with or without a byte-order mark, or UTF-16 or UTF-32 with its mark; anything else is refused rather
than turned into noise, unless its encoding is named. Lines end at \\n, \\r\\n or \\r and nowhere else: U+2028, U+0085,
\\x0b and \\x0c, at which str.splitlines() cuts too, belong to a caption. Every fault is an InputError, one sentence
with the number of the row.
"""

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

from sd.errors import InputError

FLAG = "--caption_encoding"  # of the data scripts
MARKS = {  # UTF-32 first: its mark begins with that of UTF-16
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def read_user_text(
    source: str | Path | bytes, encoding: str | None = None, name: str | None = None, flag: str | None = None
) -> str:
    """The text of a file (str or Path) or of its bytes, without a byte-order mark.

    Args:
        encoding: of text without a mark; a mark is believed first. None: UTF-8.
        name: what messages call the text; by default its path, or "the text".
        flag: the flag by which the caller's user may give `encoding`; None where there is none.

    Raises InputError if the file cannot be read, is in another encoding, or holds NUL characters, as UTF-16 without a
    mark does when it is taken for UTF-8.
    """
    if isinstance(source, bytes):
        data, name = source, name or "the text"
    else:
        name = name or str(source)
        try:
            data = Path(source).read_bytes()
        except OSError as error:
            raise InputError(f"cannot read {name}: {error.strerror or error}: give a file that may be read") from None
    check_encoding(encoding)
    marked = next((known for mark, known in MARKS.items() if data.startswith(mark)), None)
    used = marked or encoding or "utf-8"
    advice = "save it as UTF-8" + (f", or name its encoding with {flag} NAME, such as cp1252 or shift_jis" * bool(flag))
    try:
        text = data.decode(used)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not {used.upper()} (byte {error.start} is {error.object[error.start]:#04x}): {advice}"
        ) from None
    if "\0" in text:
        raise InputError(f"{name} holds NUL characters, as UTF-16 without a byte-order mark does: {advice}")
    return text


def check_encoding(encoding: str | None) -> None:
    """Raises InputError unless text can be read in an encoding of this name (None: the usual ones)."""
    try:
        b"text".decode(encoding or "utf-8")
    except UnicodeDecodeError:
        pass
    except LookupError:
        raise InputError(f"no encoding is called {encoding!r}: give one that Python knows, such as cp1252") from None


def user_lines(text: str) -> list[str]:
    """The lines of a text, without their ends: \\n, \\r\\n or a lone \\r. The last one need not have an end."""
    lines = re.split(r"\r\n|\r|\n", text)
    return lines[:-1] if lines[-1] == "" else lines


def json_rows(text: str, name: str) -> Iterator[tuple[int, dict]]:
    """(line, object) of each line of JSONL, counted from 1; blank lines are passed over. InputError at a line that is
    no JSON or no object (null, 5, [1, 2])."""
    for number, line in enumerate(user_lines(text), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{name}, row {number}, is not JSON ({error}): give one JSON object a line") from None
        if not isinstance(row, dict):
            raise InputError(f"{name}, row {number}, is {shown(row)} and not an object: give one JSON object a line")
        yield number, row


def csv_rows(text: str, name: str) -> Iterator[tuple[int, dict]]:
    """(row, {column: value}) of a CSV with a header; the header is row 1, as spreadsheets count. Columns are parted by
    commas, or by semicolons or tabs where the header has more of these. InputError at a row that has more or fewer
    values than the header, and where quotes do not match. A quoted value may hold line breaks."""
    header = user_lines(text)[:1] or [""]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=header[0].count), strict=True)
    columns: list[str] | None = None
    number = 0
    try:
        for number, values in enumerate(reader, 1):
            if columns is None:
                columns = [column.strip() for column in values]
            elif not values:  # a blank line
                continue
            elif len(values) != len(columns):
                raise InputError(
                    f"{name}, row {number}, has {len(values)} values, and the header (row 1) {len(columns)}: "
                    "put values that hold commas into double quotes"
                )
            else:
                yield number, dict(zip(columns, values))
    except csv.Error as error:
        raise InputError(f"{name}, row {number + 1}, is not CSV ({error}): put it right") from None


def text_value(row: dict, column: str, where: str, null: bool = False) -> str | None:
    """A row's value of `column`, as text; `where` names the row in messages, such as 'list.csv, row 3'.

    InputError if it is not there or no text; null is None with `null`, and an error without: it is never the text
    "null" or "nan"."""
    value = row.get(column)
    if isinstance(value, str):
        return value
    if value is None and null:
        return None
    found = shown(value) if column in row else "not there"
    raise InputError(f"{where}: {column} is {found}: give a text in double quotes")


def shown(value: object) -> str:
    """A JSON value as a message shows it, cut to 40 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."
