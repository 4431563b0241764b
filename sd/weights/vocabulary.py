"""CLIP's vocabulary, found where other programs keep it, and tokenizers packed into one line of text.

CLIP's tokenizer follows from its list of 48,894 merges alone (Radford et al. 2021, arXiv:2103.00020): 256 bytes as
printable characters, the same at a word's end, one token a merge, start and end of text.
"""

import base64
import gzip
import hashlib
import json
import zlib
from importlib.util import find_spec
from pathlib import Path

from sd.errors import InputError

CLIP_MERGES_SHA256 = "f61f2adf497e6f5357c347aeb4646fabe82f341e946de5bdec5d2858e41bef4a"  # of the lines, "\n" between
CLIP_SIZE = 49408  # tokens
BPE_FILE = "bpe_simple_vocab_16e6.txt.gz"  # as the packages open_clip and clip carry it
CACHED = [  # (hub name, file) with the same merges, which other programs put into the hub's cache
    ("openai/clip-vit-large-patch14", "merges.txt"),
    ("openai/clip-vit-large-patch14", "tokenizer.json"),
    ("openai/clip-vit-base-patch32", "merges.txt"),
    ("stable-diffusion-v1-5/stable-diffusion-v1-5", "tokenizer/merges.txt"),
    ("runwayml/stable-diffusion-v1-5", "tokenizer/merges.txt"),
    ("CompVis/stable-diffusion-v1-4", "tokenizer/merges.txt"),
    ("stabilityai/stable-diffusion-xl-base-1.0", "tokenizer/merges.txt"),
]
# A text with what tokenizers treat differently (spaces, case, accents, apostrophes, digits, emoji), and CLIP's ids.
PROBE = "  Résumé, you've  paid 100% 😀 naïve\u00a0İstanbul"
PROBE_IDS = [49406, 29106, 7054, 4166, 267, 592, 1200, 5057, 272, 271, 271, 260, 7334, 1097, 35689, 563, 328, 16384,
             11231, 49407]  # fmt: skip


def is_clips(merges: list[str]) -> bool:
    """Are these CLIP's own merges?"""
    return hashlib.sha256("\n".join(merges).encode()).hexdigest() == CLIP_MERGES_SHA256


def merges_of(tokenizer_json: dict) -> list[str]:
    """The merges, 'left right' each, of a tokenizer.json's content."""
    merges = tokenizer_json["model"]["merges"]
    return [" ".join(pair) if isinstance(pair, list) else pair for pair in merges]


def read_merges(path: str | Path) -> list[str]:
    """CLIP's merges from a merges.txt, a tokenizer.json or the original .txt.gz. InputError if it holds others."""
    path = Path(path)
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        text = data.decode("utf-8")
        if text.lstrip()[:1] == "{":
            merges = merges_of(json.loads(text))
        else:  # a line of comment first; the original goes on with merges that CLIP does not use
            merges = text.split("\n")[1 : CLIP_SIZE - 512 - 2 + 1]
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as e:
        raise InputError(f"CLIP's vocabulary was wanted at {path}, and it could not be read ({e})") from None
    if not is_clips(merges):
        raise InputError(f"CLIP's vocabulary was wanted at {path}, and it is another one")
    return merges


def find_merges() -> list[str] | None:
    """CLIP's merges from the hub's cache or an installed package (which is not imported); None if there are none."""
    from huggingface_hub import try_to_load_from_cache

    found = [try_to_load_from_cache(name, file) for name, file in CACHED]
    paths = [path for path in found if isinstance(path, str)]
    for package in ("open_clip", "clip"):
        spec = find_spec(package)
        paths += [f"{folder}/{BPE_FILE}" for folder in (spec and spec.submodule_search_locations or [])]
    for path in paths:
        try:
            return read_merges(path)
        except InputError:  # absent, damaged or of another package of that name
            continue
    return None


def clip_files(merges: list[str]) -> dict[str, str]:
    """{file name: content} of a folder that transformers reads as CLIP's tokenizer of these merges."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = [chr(b) for b in shown] + [chr(256 + i) for i in range(256 - len(shown))]
    start, end = "<|startoftext|>", "<|endoftext|>"
    tokens = alphabet + [c + "</w>" for c in alphabet] + [m.replace(" ", "") for m in merges] + [start, end]
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "bos_token": start, "eos_token": end,
              "unk_token": end, "pad_token": end}  # fmt: skip
    return {
        "vocab.json": json.dumps({token: i for i, token in enumerate(tokens)}, ensure_ascii=False),
        "merges.txt": "\n".join(["#version: 0.2", *merges, ""]),
        "tokenizer_config.json": json.dumps(config),
    }


def is_standard(tokenizer, tokenizer_json: dict) -> bool:
    """Is it CLIP's own tokenizer, without a token more or another rule? `tokenizer_json`: its file's content."""
    return (
        len(tokenizer) == CLIP_SIZE
        and tokenizer.pad_token_id == CLIP_SIZE - 1
        and tokenizer.model_max_length == 77
        and tokenizer_json["model"].get("type") == "BPE"
        and is_clips(merges_of(tokenizer_json))
        and tokenizer(PROBE)["input_ids"] == PROBE_IDS
    )


def pack(files: dict[str, str]) -> str:
    """Files as one line of ASCII: base64 of their deflated JSON. CLIP's merges take 0.28 MB, a whole tokenizer 0.75 MB.

    It begins with no brace, so that no program takes it for JSON (A1111's merger writes such values back as dicts).
    """
    return base64.b64encode(zlib.compress(json.dumps(files, ensure_ascii=False).encode(), 9)).decode()


def unpack(text: str, limit: int = 100_000_000) -> dict[str, str]:
    """What pack() was given; ValueError for anything else, also for more than `limit` bytes."""
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), limit)
        files = json.loads(data)
    except (ValueError, zlib.error) as e:
        raise ValueError(f"no packed files ({e})") from None
    if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
        raise ValueError("no packed files")
    return files
