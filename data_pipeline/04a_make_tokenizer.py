"""Trains a small tokenizer of CLIP's kind on the captions of image shards, for those who train their own text encoder.

    python data_pipeline/04a_make_tokenizer.py --in data/mine/images --out data/mine/tokenizer
    python data_pipeline/04a_make_tokenizer.py --in data/shapes/images --out data/shapes/tokenizer \\
        --vocab_size 600 --max_length 16

The folder opens with transformers' AutoTokenizer, without network, as a CLIPTokenizer: lower case, byte-level BPE with
an end-of-word mark, `<|startoftext|>` text `<|endoftext|>`, padded with `<|endoftext|>`. Ids 0..255 are the bytes,
256..511 the bytes at a word's end (so every text has ids, in any language), then the merges, most frequent pair first,
then start and end. The same captions give the same tokenizer. A second run with a finished --out does nothing.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import _path  # noqa: F401

from sd import usertext
from sd.cli import parser
from sd.errors import InputError, run
from sd.files import atomic_write, claim_folder, fingerprint, read_json, write_manifest
from sd.pictures import Reject
from sd.shards import caption_of, iter_samples, list_shards
from sd.text import add_encoding_argument, tokenizer_hash
from sd.workers import progress

START, END = "<|startoftext|>", "<|endoftext|>"
SUFFIX = "</w>"


def captions(tars: list[Path], encoding: str | None = None) -> Iterator[str]:
    """The captions of all tars that can be read and are not empty, in order, with a progress bar; fails if there is
    none."""
    found = unreadable = 0
    with progress(None, "04a_make_tokenizer.py", "captions") as bar:
        for tar in tars:
            for _, sample in iter_samples(tar, images=False, encoding=encoding):
                try:
                    caption = caption_of(sample)
                except Reject:
                    unreadable += 1
                    continue
                if caption:
                    bar.update()
                    found += 1
                    yield caption
    advice = f"name the encoding of captions with {usertext.FLAG} NAME" if unreadable else "give tars with captions"
    if not found:
        raise InputError(f"{len(tars)} tars hold no caption ({unreadable} that are not UTF-8): {advice}")
    if unreadable:
        print(f"note: {unreadable:,} captions that are not UTF-8 were left out: {advice}")


def train(texts: Iterator[str], vocab_size: int, max_length: int):
    """A transformers CLIPTokenizer with at most `vocab_size` tokens and model_max_length `max_length`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # 256 printable characters that stand for the bytes
    base = letters + [letter + SUFFIX for letter in letters]
    bare = CLIPTokenizer(vocab={token: i for i, token in enumerate(base + [START, END])}, merges=[])
    learner = Tokenizer(models.BPE(end_of_word_suffix=SUFFIX))
    learner.normalizer = bare.backend_tokenizer.normalizer  # words are split as the finished tokenizer will split them
    learner.pre_tokenizer = bare.backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, end_of_word_suffix=SUFFIX, initial_alphabet=letters, show_progress=False
    )
    learner.train_from_iterator(texts, trainer)
    merges = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    merges = merges[: vocab_size - len(base) - 2]
    tokens = list(dict.fromkeys(base + [left + right for left, right in merges] + [START, END]))
    return CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, model_max_length=max_length)


def main() -> None:
    p = parser(__doc__)
    g = p.add_argument_group("input and output")
    g.add_argument("--in", dest="images", required=True, help="folder or glob of tars")
    g.add_argument("--out", required=True, help="folder of the tokenizer")
    add_encoding_argument(g)

    g = p.add_argument_group("the tokenizer")
    g.add_argument("--vocab_size", type=int, default=2048, help="tokens at most; 514 are bytes, start and end")
    g.add_argument("--max_length", type=int, default=77, help="ids a caption, start and end included")
    args = p.parse_args()
    usertext.check_encoding(args.caption_encoding)
    if not 514 <= args.vocab_size <= 1_000_000 or args.max_length < 3:
        raise InputError(
            f"--vocab_size is {args.vocab_size} and must be from 514 (bytes, bytes at a word's end, start, "
            f"end) to 1,000,000, --max_length is {args.max_length} and must be at least 3"
        )
    tars = list_shards(args.images)
    settings = {
        "input": fingerprint(*tars),
        "vocab_size": args.vocab_size,
        "max_length": args.max_length,
    }
    if args.caption_encoding:
        settings["caption_encoding"] = args.caption_encoding
    out = Path(args.out)
    claim_folder(out, "04a_make_tokenizer.py", settings)
    manifest = read_json(out / "manifest.json")
    if manifest["complete"]:
        print(f"done already: {out} has {manifest['tokens']} tokens")
        return
    tokenizer = train(captions(tars, args.caption_encoding), args.vocab_size, args.max_length)
    with tempfile.TemporaryDirectory(suffix=".tmp", dir=out) as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(Path(folder).iterdir()):
            atomic_write(out / file.name, file.read_bytes())
    tokens = len(tokenizer)
    manifest.update(complete=True, tokens=tokens, tokenizer_hash=tokenizer_hash(tokenizer))
    write_manifest(out, manifest)
    print(f"{tokens} tokens, {args.max_length} ids a caption: {out}")


if __name__ == "__main__":
    run(main)
