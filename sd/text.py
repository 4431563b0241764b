"""Captions and token ids."""

import hashlib
import json

import numpy as np

from sd import usertext
from sd.errors import InputError

TEXT_LENGTH = 77  # ids of a text, start and end included


def check_template(template: str, fields: tuple[str, ...]) -> None:
    """Fails unless a caption template can be filled with these fields."""
    wanted = " and ".join(f"{{{field}}}" for field in fields)
    try:
        caption = template.format(**dict.fromkeys(fields, "x"))
    except (KeyError, IndexError, ValueError, AttributeError):
        raise InputError(
            f"the template {template!r} cannot be filled in: it may hold {wanted} and no other braces"
        ) from None
    if not caption.strip():
        raise InputError(f"the template {template!r} gives an empty caption: it may hold {wanted}")


def add_encoding_argument(group) -> None:
    """Adds --caption_encoding to an argument group."""
    group.add_argument(usertext.FLAG, metavar="NAME", help="of captions that are not UTF-8, such as cp1252 or "
                       "shift_jis (default: UTF-8, or UTF-16 with its mark)")  # fmt: skip


def clean_text(text: str) -> str:
    """Text that can be stored as UTF-8: JSON may hold halves of characters, which become '?'."""
    return text.encode("utf-8", "replace").decode()


def load_tokenizer(path_or_name: str, max_length: int | None = None):
    """A transformers tokenizer from a folder or a hub name, or fails in one sentence. max_length: ids of a text, where
    they are to be fewer than the tokenizer's own."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path_or_name)
    except Exception as error:  # absent, offline, damaged: the library's classes of errors are many, and change
        reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        raise InputError(
            f"cannot load a tokenizer from {path_or_name} ({reason}): give a folder that holds one (as made by "
            "04a_make_tokenizer.py), or a name on a hub that can be reached"
        ) from None
    ends = tokenizer.eos_token_id, tokenizer.sep_token_id  # CLIP's and BERT's
    if tokenizer.pad_token_id is None or ends == (None, None):
        raise InputError(
            f"the tokenizer of {path_or_name} has no tokens for a text's end and for padding: give another"
        )
    if max_length is not None:
        if not 3 <= max_length <= text_length(tokenizer):
            raise InputError(
                f"--max_length wants 3 to {text_length(tokenizer)}, which the tokenizer of {path_or_name} takes, "
                f"found {max_length}"
            )
        tokenizer.model_max_length = max_length
    return tokenizer


def text_length(tokenizer) -> int:
    """L, the ids of a text: 77 as CLIP, or fewer if the tokenizer asks for it."""
    asked = tokenizer.model_max_length
    if type(asked) not in (int, float) or not asked >= 3:  # start, a token, end
        raise InputError(f"a tokenizer wants a model_max_length of at least 3, found {asked!r}")
    return int(min(TEXT_LENGTH, asked))


def tokenize(tokenizer, texts: list[str]) -> np.ndarray:
    """Token ids int32 [N, L], L = text_length(tokenizer): start, text, end, padding. Longer text is cut so that the row
    still ends with the end token. The same call as the generator's, so training and painting see the same ids."""
    length = text_length(tokenizer)
    rows = tokenizer(list(texts), padding="max_length", truncation=True, max_length=length)
    return np.array(rows["input_ids"], np.int32).reshape(-1, length)


def fast_tokenizer(tokenizer) -> str:
    """What `tokenize` does with a tokenizer, cut and padding included, as the text that Tokenizer.from_str of the
    tokenizers library reads: it loads in a tenth of a second and without transformers. '' of a tokenizer that is
    written in Python, or whose class does more than that library."""
    import tokenizers

    probes = [*PROBES, "a long text " * text_length(tokenizer)]
    wanted = tokenize(tokenizer, probes)  # which sets the cut and the padding
    written = tokenizer.backend_tokenizer.to_str() if getattr(tokenizer, "backend_tokenizer", None) else ""
    if not written:
        return ""
    found = [encoding.ids for encoding in tokenizers.Tokenizer.from_str(written).encode_batch_fast(probes)]
    return written if found == wanted.tolist() else ""


PROBES = ["", "a photo of an astronaut riding a horse", "Résumé  you've 12,5 %\n🙂", "ÀÉ naïve CO2 don't"]


def tokenizer_hash(tokenizer) -> str:
    """SHA-256 of what a tokenizer does: its vocabulary, its length, and the ids it gives to some difficult texts. The
    same over versions of the libraries and ways of saving, as long as the ids are the same."""
    content = [sorted(tokenizer.get_vocab().items()), tokenizer.pad_token_id, tokenize(tokenizer, PROBES).tolist()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
