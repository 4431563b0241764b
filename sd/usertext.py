"""Text files that people write: which encodings are read, and what separates lines."""

import codecs
import re
from pathlib import Path

from sd.errors import InputError


def read_user_text(path: str | Path, encoding: str | None = None) -> str:
    """The text of a file that a person wrote: UTF-8 with or without a mark, or UTF-16 with its mark.

    encoding: read it as this one instead. InputError names the file and what is wrong with it.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as e:
        raise InputError(f"a text file was wanted at {path}, and it cannot be read ({e.strerror})") from None
    utf32 = data.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE))
    utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and not utf32
    try:
        text = data.decode(encoding or ("utf-16" if utf16 else "utf-8-sig"))
    except (UnicodeDecodeError, LookupError) as e:
        found = "UTF-32" if utf32 else f"other bytes ({e})"
        wanted = encoding or "UTF-8, or UTF-16 with its mark"
        raise InputError(f"{path} wants text in {wanted}, found {found}: save it as UTF-8") from None
    if "\0" in text:
        raise InputError(f"{path} wants text, found zero bytes in it: save it as UTF-8")
    return text


def user_lines(text: str) -> list[str]:
    r"""Lines, separated by \n, \r\n or \r alone: other characters that Unicode calls line ends belong to the text."""
    return re.split(r"\r\n|\n|\r", text)
