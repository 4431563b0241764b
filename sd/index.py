"""What pictures there are: tars, folders and lists read once into an index, from which each picture is then read alone.

The unit is a part: a tar, or up to 5,000 files of a folder or list. Each has a parquet file, with a row a picture, in
the folder `.index` beside it, or in the one that --index names:

    key       string, as image_key: source/shard/name of a tar's, folder/path of a folder's or list's
    offset    int64, where the picture's file begins in the tar; 0 of a file of its own
    bytes     int64, its length
    captions  list of strings, at least one
    fraction  float64, key_fraction of the key, by which pictures are held out
    n:NAME    float64, each number (true and false: 1 and 0) that its JSON or list has under NAME; n:width and n:height
              are the picture's own, in pixels, as it is shown
    mask      int64, with --masks: where the file of the picture's mask begins in the tar, 0 of a file of its own, null
              where it has none; mask_bytes: its length
    t:NAME    string, each text likewise; t:folder, t:shard and t:source where the JSON has no such names

and in the file's metadata under `index` what it was made from, and what was left out, by reason.
"""

import glob
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import tarfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sd import usertext
from sd.columns import TEXT_LISTS, TEXTS, map_columns, write_columns
from sd.errors import InputError, reading
from sd.files import atomic_path, stamp
from sd.folder_captions import (
    captions_beside,
    captions_by_template,
    find_pictures,
    list_columns,
    list_rows,
    read_captions,
)
from sd.folders import IMAGE_EXTENSIONS, is_hidden, is_picture
from sd.locks import Locks
from sd.masks import is_mask, mask_of
from sd.metadata import metadata_value
from sd.pictures import Header, Reject, read_header
from sd.remote import Remote, is_remote
from sd.shards import CAPTION_EXTENSIONS, iter_members, key_fraction, source_of
from sd.text import clean_text
from sd.where import COLUMN, NUMBER, TEXT, Where
from sd.workers import parallel, progress

FORMAT = "pictures-1"  # another one: all parts are indexed anew

FILES_A_PART = 5000

MAX_TARS = 1_000_000  # that braces may stand for

POLL_S = 0.5  # between looks at parts that are in other processes' hands

LISTS = (".csv", ".jsonl", ".parquet")

MAPPED = 1_000_000  # pictures; of more the table lies in files, and below it in each process's memory

SHOWN = 1000  # pictures that are left out are named in a part's metadata, up to so many


class Captions(NamedTuple):
    """Where captions come from, if not from the files beside the pictures; and whether masks beside them are wanted."""

    template: str | None = None  # with {name} and {folder}
    listed: Path | None = None  # of pictures in folders: a list of file and caption
    encoding: str | None = None
    masks: bool = False


class Part(NamedTuple):
    index: Path  # its parquet file
    prefix: str  # of its pictures' keys
    path: Path  # the tar, or the folder from which the files' paths go
    made_from: dict  # format, stamps and settings: if they are others, the part is indexed anew
    files: list[tuple[str, str | None, dict | str | None]] | None  # file, caption, fields or .json; None: a tar
    captions: Captions
    remote: Remote | None = None  # where the tar comes from; path is where it lies there
    masks: dict[str, str] | None = None  # of files that have one, where masks are wanted


# ----------------------------------------------------------------------------------------------------------------
# What --pictures names
# ----------------------------------------------------------------------------------------------------------------


def expand_braces(word: str) -> list[str]:
    """`a{00..02}b{x,y}` as six words; numbers keep the width of the first."""
    match = re.search(r"\{([^{}]*)\}", word)
    if not match:
        return [word]
    if numbers := re.fullmatch(r"(\d+)\.\.(\d+)", match[1]):
        first, last = int(numbers[1]), int(numbers[2])
        if not first <= last < first + MAX_TARS:
            raise InputError(f"--pictures wants numbers from a lower to a higher one, found {match[0]}")
        choices = [f"{n:0{len(numbers[1])}d}" for n in range(first, last + 1)]
    else:
        choices = match[1].split(",")
    rest = expand_braces(word[match.end() :])
    if len(choices) * len(rest) > MAX_TARS:
        raise InputError(f"--pictures wants at most {MAX_TARS:,} tars, found {word}")
    return [f"{word[: match.start()]}{choice}{end}" for choice in choices for end in rest]


def find_parts(
    text: str, captions: Captions, index: Path | None, left_out: Counter, cache: tuple[Path, float] | None = None
) -> list[Part]:
    """The parts that --pictures names: folders, tars, lists, with braces and globs, and tars of servers and commands,
    which go into the folder `cache` of so many bytes; parted by commas. What is passed
    over is counted in left_out; missing_tar are those that braces name and that are not there. InputError if a word
    names nothing, or two parts would give their pictures the same keys."""
    tars, parts = [], []
    for word in [text] if Path(text).exists() else re.findall(r"(?:[^,{]|\{[^}]*\})+", text):
        word, names = word.strip(), expand_braces(word.strip())
        if is_remote(word):
            if cache is None:
                raise InputError(f"--cache wants a folder for the tars that are got, as of {names[0]}")
            parts += [_remote_part(Remote(name, *cache), captions, index) for name in names]
            continue
        if len(names) == 1 and glob.has_magic(word) and not Path(word).exists():
            names = sorted(glob.glob(word, recursive=True))
        there = [Path(name) for name in names if Path(name).exists()]
        if not there:
            raise InputError(f"--pictures wants a folder of pictures, tars or a list, and nothing is there: {word}")
        left_out["missing_tar"] += len(names) - len(there)
        for path in there:
            if path.is_dir() and (found := sorted(path.glob("*.tar"))):
                tars += found
            elif path.is_dir():
                parts += _folder_parts(path, captions, index, left_out)
            elif path.suffix.lower() == ".tar":
                tars.append(path)
            elif path.suffix.lower() in LISTS:
                parts += _list_parts(path, captions, index, left_out)
            else:
                raise InputError(f"--pictures wants folders, .tar, .csv, .jsonl or .parquet, found {path}")
    tars = list({os.path.realpath(tar): tar for tar in tars}.values())
    if tars and captions.listed:
        raise InputError("--captions is of pictures in folders, and --pictures names tars: drop that flag")
    parts += [_tar_part(tar, captions, index) for tar in tars]
    places = {}
    for part in parts:
        if (other := places.setdefault(part.prefix, part.path)) != part.path:
            raise InputError(
                f"the pictures of {other} and {part.path} would have the same keys ({part.prefix}/...): give one of "
                "the folders another name, or one of them alone"
            )
    return parts


def _index_file(path: Path, folder: Path, index: Path | None, number: int | None = None) -> Path:
    place = hashlib.blake2b(os.path.realpath(path).encode(), digest_size=6).hexdigest()
    name = path.stem if number is None else f"{path.stem}-{number:05d}"
    return (index or folder / ".index") / f"{name}-{place}.parquet"


def _told(captions: Captions) -> dict:
    """What an index of a tar is made from beside the tar."""
    told = {"template": captions.template, "encoding": captions.encoding}
    return told | {"masks": True} if captions.masks else told  # without, as before there were masks


def _tar_part(tar: Path, captions: Captions, index: Path | None) -> Part:
    made_from = {"format": FORMAT, **stamp(tar), **_told(captions)}
    prefix = f"{source_of(tar)}/{tar.stem}"
    return Part(_index_file(tar, tar.parent, index), prefix, tar, made_from, None, captions)


def _remote_part(remote: Remote, captions: Captions, index: Path | None) -> Part:
    made_from = {"format": FORMAT, "address": remote.address, **_told(captions)}
    place, name = (index or remote.folder / ".index") / f"{remote.place}.parquet", remote.name
    return Part(place, f"{source_of(name)}/{name.stem}", name, made_from, None, captions, remote)


def _folder_parts(folder: Path, captions: Captions, index: Path | None, left_out: Counter) -> list[Part]:
    found, others = find_pictures(folder, left_out)
    masks = {name for name in found if is_mask(Path(name).stem)}
    files = sorted(set(found) - masks)
    of_files = {file: mask for file in files if (mask := mask_of(file, masks.__contains__))} if captions.masks else {}
    left_out["mask"] += len(masks - set(of_files.values()))
    listed = captions.listed
    if listed is None:  # a list that lies in the folder under one of the usual names
        usual = (f"{stem}{end}" for stem in ("captions", "metadata") for end in LISTS)
        listed = next((folder / name for name in usual if name in others), None)
    if captions.template is not None:
        texts = captions_by_template(files, folder, captions.template)
    elif listed is not None:
        texts = read_captions(listed, captions.encoding, folder, files, left_out)
    else:
        texts = captions_beside(folder, files, others, captions.encoding, left_out)
    beside = {name for name in others if name.endswith(".json")}
    jsons = {file: f"{file.rpartition('.')[0]}.json" for file in files}
    items = [(file, texts.get(file, ""), jsons[file] if jsons[file] in beside else None) for file in files]
    return _file_parts(folder, folder, Path(os.path.realpath(folder)).name, items, captions, index, of_files)


def _list_parts(path: Path, captions: Captions, index: Path | None, left_out: Counter) -> list[Part]:
    """Of a list of files (from its own folder, or the current one) and captions; its other columns are fields."""
    items, entry = {}, None
    for number, row in list_rows(path, captions.encoding):
        where = f"{path}, row {number}"
        file, caption = list_columns(row if captions.template is None else row | {"caption": ""}, where)
        entry = usertext.text_value(row, file, where).strip()
        bases = [base for base in (path.parent, Path.cwd()) if (base / entry).is_file()]
        if not bases:
            left_out["listed_not_found"] += 1
        elif entry in items:
            left_out["listed_twice"] += 1
        else:
            place = os.path.relpath(bases[0] / entry, path.parent)
            text = usertext.text_value(row, caption, where, null=True) if captions.template is None else ""
            items[entry] = (place, text or "", {k: v for k, v in row.items() if k not in (file, caption)})
    if not items:
        raise InputError(f"{path}: no row names a picture that is there (the last: {entry}): mend the paths")
    if captions.template is not None:
        texts = captions_by_template([place for place, *_ in items.values()], path.parent, captions.template)
        items = {entry: (place, texts[place], fields) for entry, (place, _, fields) in items.items()}
    masks = {}
    if captions.masks:
        places = [place for place, *_ in items.values()]
        masks = {p: mask for p in places if (mask := mask_of(p, lambda name: (path.parent / name).is_file()))}
    return _file_parts(path, path.parent, path.stem, list(items.values()), captions, index, masks)


def _file_parts(named: Path, folder: Path, prefix: str, items: list, captions: Captions, index, masks) -> list[Part]:
    """masks: of the files that have one; used only where they are wanted."""
    parts, masks = [], masks if captions.masks else None
    for number, first in enumerate(range(0, len(items), FILES_A_PART)):
        own = items[first : first + FILES_A_PART]
        stats = [
            [s.st_size, s.st_mtime_ns]
            for file, _, about in own
            for name in (file, about if isinstance(about, str) else None, masks and masks.get(file))
            if name and (s := (folder / name).stat())
        ]
        decides = [own, stats] if masks is None else [own, stats, "masks", [masks.get(file) for file, *_ in own]]
        content = hashlib.sha256(json.dumps(decides, default=str).encode()).hexdigest()
        place = _index_file(named, folder, index, number)
        made_from = {"format": FORMAT, "content": content}
        parts.append(Part(place, prefix, folder, made_from, own, captions, None, masks))
    return parts


# ----------------------------------------------------------------------------------------------------------------
# One part
# ----------------------------------------------------------------------------------------------------------------


def split_member(name: str) -> tuple[str, str] | None:
    """The key and the kind of a tar's member: ("a/cat.v2", "jpg") of a/cat.v2.jpg, ("cat", "jpg.txt") of cat.jpg.txt;
    None of what is no picture, caption or .json. The key ends at the last dot, so that names may hold others."""
    stem, dot, kind = name.rpartition(".")
    kind = kind.lower()
    if not dot or not stem.rpartition("/")[2]:
        return None
    if kind in CAPTION_EXTENSIONS and is_picture(stem):
        inner, _, picture = stem.rpartition(".")
        return inner, f"{picture.lower()}.{kind}"
    return (stem, kind) if kind in (*IMAGE_EXTENSIONS, *CAPTION_EXTENSIONS, "json") else None


def _fields(values: dict) -> dict:
    """The columns n:NAME and t:NAME of a picture's JSON."""
    row = {}
    for name, value in values.items():
        if isinstance(value, str):
            row[COLUMN[TEXT] + clean_text(name)] = clean_text(value)
        elif isinstance(value, int | float) and (number := _number(value)) is not None:
            row[COLUMN[NUMBER] + clean_text(name)] = number
    return row


def _number(value) -> float | None:
    """A number, or a text that is one, as a finite float."""
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _numbers_too(values: dict) -> dict:
    """A CSV's values, which are texts: those that are numbers as numbers as well."""
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    return _fields(values) | _fields({name: n for name, value in texts.items() if (n := _number(value)) is not None})


def _look(data: bytes | None) -> tuple[Header, int] | Reject:
    """A picture's header and length in bytes, or why it is left out."""
    try:
        return read_header(data), len(data)
    except Reject as reject:
        return reject


def _row(key: str, picture, offset: int, texts: list, fields: dict, places: dict, mask=None) -> dict:
    """A picture's row; raises Reject. picture: what _look gives; texts: its captions, of which those that are empty or
    no text are passed over; mask: where its mask begins, and what _look gives of that."""
    captions = [clean_text(text).strip() for text in texts if isinstance(text, str)]
    captions = [text for text in dict.fromkeys(captions) if text]
    if not captions:
        raise Reject("no_caption")
    if isinstance(picture, Reject):
        raise picture
    if mask is not None and isinstance(mask[1], Reject):  # not taken for a picture that counts everywhere
        raise Reject("damaged_mask")
    masks = {} if mask is None else {"mask": mask[0], "mask_bytes": mask[1][1]}
    header, length = picture
    sides = (header.width, header.height) if header.orientation < 5 else (header.height, header.width)
    own = dict(zip((COLUMN[NUMBER] + "width", COLUMN[NUMBER] + "height"), map(float, sides)))
    places = {COLUMN[TEXT] + name: value for name, value in places.items()}
    return (
        {"key": key, "offset": offset, "bytes": length, "captions": captions, "fraction": key_fraction(key)}
        | places
        | fields
        | own
        | masks
    )


def _listed(metadata: dict) -> list:
    further = metadata.get("captions")
    return further if isinstance(further, list) else []


def _json_of(data: bytes | None, counts: Counter) -> dict:
    if data is None:
        return {}
    try:
        metadata = json.loads(data)
    except (ValueError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict):
        counts["bad_json"] += 1
        return {}
    return metadata


def _tar_rows(part: Part, tar: Path, counts: Counter, rejected: list) -> list[dict]:
    """The rows of a tar's pictures, in its order, whether or not a picture's files lie side by side."""
    samples, offsets, masks, key = {}, {}, {}, None
    try:
        for name, data, offset in iter_members(tar, counts):
            member = split_member(name)
            if is_hidden(name):
                counts["hidden"] += is_picture(name)
                continue
            if not member:
                continue
            key, kind = member
            sample = samples.setdefault(key, {})
            if kind not in IMAGE_EXTENSIONS:
                sample.setdefault(kind, data)
            elif is_mask(key):
                counts["mask"] += 1
                if part.captions.masks and kind == "png":
                    masks[key[: -len(".mask")]] = offset, _look(data)
            elif key in offsets:
                counts["duplicate_key"] += 1
            else:
                offsets[key], sample["picture"] = (offset, kind), _look(data)
    except tarfile.TarError:
        counts["cut_tar"] += 1
        first = next(iter(offsets), None)
        if key in offsets and samples[key].keys() != samples[first].keys():  # the last one has lost its end
            del offsets[key]
    rows = []
    for key, (offset, kind) in offsets.items():
        sample = samples[key]
        metadata = _json_of(sample.get("json"), counts)
        endings = [f"{kind}.{end}" for end in CAPTION_EXTENSIONS] + list(CAPTION_EXTENSIONS)
        beside = next((sample[end] for end in endings if end in sample), None)
        name = f"{part.prefix}/{key}"
        try:
            if part.captions.template is not None:
                folder = key.rpartition("/")[0] or part.path.stem
                texts = captions_by_template([f"{folder}/{Path(key).name}.{kind}"], Path(), part.captions.template)
                texts = list(texts.values())
            else:
                texts = [_caption(beside, metadata, part.captions.encoding), *_listed(metadata)]
            source, shard = part.prefix.rsplit("/", 1)
            places = {"source": source, "shard": shard}
            rows.append(_row(name, sample["picture"], offset, texts, _fields(metadata), places, masks.get(key)))
            counts["mask"] -= key in masks
        except Reject as reject:
            counts[reject.reason] += 1
            rejected.append((name, reject.reason))
    return rows


def _caption(beside: bytes | None, metadata: dict, encoding: str | None):
    """Of the text beside a picture, else of its JSON. Raises Reject if the text cannot be read."""
    if beside is None:
        return metadata_value(metadata, "caption")
    try:
        return usertext.read_user_text(beside, encoding)
    except InputError:
        raise Reject("caption_encoding") from None


def _file_rows(part: Part, counts: Counter, rejected: list) -> list[dict]:
    """The rows of a part of a folder or list."""
    rows = []
    for file, caption, about in part.files:
        key = f"{part.prefix}/{file}"
        try:
            if clean_text(file) != file:  # bytes of another encoding, which a parquet file cannot hold
                raise Reject("unsafe_name")
            if caption is None:
                raise Reject("caption_encoding")
            metadata = _json_of((part.path / about).read_bytes(), counts) if isinstance(about, str) else {}
            fields = _numbers_too(about) if isinstance(about, dict) else _fields(metadata)
            texts = [caption or metadata_value(metadata, "caption"), *_listed(metadata)]
            if part.captions.template is not None:
                texts = [caption]
            picture, mask = _look((part.path / file).read_bytes()), part.masks and part.masks.get(file)
            mask = (0, _look((part.path / mask).read_bytes())) if mask else None
            rows.append(_row(key, picture, 0, texts, fields, {"folder": (part.path / file).parent.name}, mask))
        except Reject as reject:
            counts[reject.reason] += 1
            rejected.append((clean_text(key), reject.reason))
    return rows


def index_part(part: Part) -> tuple[Path, int]:
    """Write a part's parquet file; returns its path and how many pictures it has."""
    counts, rejected = Counter(), []
    about = {}
    if part.files is not None:
        rows = _file_rows(part, counts, rejected)
    elif part.remote is None:
        rows = _tar_rows(part, part.path, counts, rejected)
    else:
        descriptor = part.remote.open()
        rows = _tar_rows(part, Path(f"/dev/fd/{descriptor}"), counts, rejected)  # others may want its room meanwhile
        about["bytes"] = os.fstat(descriptor).st_size
        os.close(descriptor)
    names = sorted({name for row in rows for name in row if name[:2] in COLUMN.values()})
    schema = [
        ("key", pa.string()),
        ("offset", pa.int64()),
        ("bytes", pa.int64()),
        ("captions", pa.list_(pa.string())),
        ("fraction", pa.float64()),
    ]
    if part.captions.masks:
        schema += [("mask", pa.int64()), ("mask_bytes", pa.int64())]
    schema += [(name, pa.float64() if name.startswith(COLUMN[NUMBER]) else pa.string()) for name in names]
    about |= {"made_from": part.made_from, "rejects": counts, "rejected": rejected[:SHOWN], "pictures": len(rows)}
    table = pa.Table.from_pylist(rows, pa.schema(schema, metadata={"index": json.dumps(about)}))
    with atomic_path(part.index) as temporary:
        pq.write_table(table, temporary, compression="zstd")
    return part.index, len(rows)


def told_by(part: Part) -> dict | None:
    """What a part's parquet file says of itself; None if there is none, or one of other files, flags or formats."""
    try:
        about = json.loads((pq.read_metadata(part.index).metadata or {})[b"index"])
    except (OSError, ValueError, KeyError, pa.ArrowInvalid):
        return None
    return about if about["made_from"] == part.made_from else None


# ----------------------------------------------------------------------------------------------------------------
# All parts
# ----------------------------------------------------------------------------------------------------------------


def build_index(parts: list[Part], workers: int, say) -> None:
    """Index what is not yet indexed, in `workers` processes. All processes that see the folder of the index share the
    work by lock files, and return when all of it is done; what was done before a stop is not done again."""
    begun, done = time.perf_counter(), 0
    for folder, group in itertools.groupby(sorted(parts, key=lambda p: p.index.parent), lambda p: p.index.parent):
        todo = [part for part in group if told_by(part) is None]
        if not todo:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".writable").touch()
            (folder / ".writable").unlink(missing_ok=True)
        except OSError as error:
            raise InputError(
                f"the index of the pictures was to lie in {folder}, which cannot be written ({error.strerror}): name "
                "another folder with --index"
            ) from None
        with Locks(folder) as locks, progress(None, "indexing", "img") as bar:
            while todo:
                free = (p for p in todo if locks.take(p.index.stem) and not _released(locks, p))
                taken = 0
                for path, pictures in parallel(index_part, ((p,) for p in free), workers if len(todo) > 3 else 0):
                    locks.release(path.stem)
                    taken, done = taken + 1, done + pictures
                    bar.update(pictures)
                todo = [part for part in todo if told_by(part) is None]
                if todo and not taken:
                    time.sleep(POLL_S)
    if done:
        seconds = time.perf_counter() - begun
        say(f"index: {done:,} pictures indexed in {seconds:.1f} s, {done / seconds:,.0f} a second")


def _released(locks: Locks, part: Part) -> bool:
    """Whether a part that was just taken is indexed already; if so, its lock is given back."""
    indexed = told_by(part) is not None
    if indexed:
        locks.release(part.index.stem)
    return indexed


class Index(NamedTuple):
    """Pictures of all parts, in their order."""

    table: pa.Table  # key, part (int32), offset, bytes, captions, fraction, and the columns asked for; as --where says
    rejects: Counter  # what the parts left out, by reason
    rejected: list[tuple[str, str]]  # keys and reasons, some of them
    fields: set[str]  # columns that a part has
    got: list[int]  # bytes of each tar that is got from a server or a command
    pictures: int  # before --where
    lacking: int  # of these, without a field that --where names


def read_index(parts: list[Part], columns: list[str], where: Where | None = None, masks: bool = False) -> Index:
    """Of parts that are indexed, the pictures that `where` is true of. columns: of n:NAME and t:NAME; null where a part
    has none; masks: the columns of masks too. InputError if no part has a field that `where` names.

    The table of more than MAPPED pictures lies in files, in a folder beside the first part's index, which is made once
    for the same parts, columns and `where`, and which all processes map."""
    kinds = {"key": TEXTS, "offset": pa.int64(), "bytes": pa.int64(), "captions": TEXT_LISTS,
             "fraction": pa.float64()}  # fmt: skip
    kinds |= {"mask": pa.int64(), "mask_bytes": pa.int64()} if masks else {}
    base = set(kinds)
    kinds |= {name: pa.float64() if name.startswith(COLUMN[NUMBER]) else TEXTS for name in columns}
    looked_at, fields, lacking = {*columns, *(where.columns() if where else [])}, set(), [0]
    with ThreadPoolExecutor(8) as pool:
        abouts = list(pool.map(told_by, parts))
    changed = [part for part, about in zip(parts, abouts) if about is None]

    def read(number: int) -> pa.Table:
        part = parts[number]
        with reading(part.index, "delete it and run the command again"):
            names = pq.read_schema(part.index).names
            table = pq.read_table(part.index, columns=[name for name in names if name in base or name in looked_at])
        if len(table) != abouts[number]["pictures"]:
            raise changed_meanwhile(part)
        fields.update(names)
        if where:
            true, known = where.rows(table)
            table, lacks = table.filter(pa.array(true)), int((~known).sum())
            lacking.append(lacks)
        arrays = [
            table[name].cast(kind) if name in names else pa.nulls(len(table), kind) for name, kind in kinds.items()
        ]
        table = pa.table(dict(zip(kinds, arrays)))
        return table.append_column("part", pa.array(np.full(len(table), number, np.int32)))

    if changed:
        raise changed_meanwhile(changed[0])
    stored, pictures = kinds | {"part": pa.int32()}, sum(about["pictures"] for about in abouts)
    folder, facts = None, {}
    if pictures > MAPPED:
        content = [[part.index.name, part.made_from] for part in parts]
        content += [list(kinds), where.text if where else None]
        name = f"columns-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]}"
        folder = _kept_columns(parts[0].index.parent, name, stored, lambda: in_order(read, len(parts)),
                               lambda: {"fields": sorted(fields), "lacking": sum(lacking)})  # fmt: skip
    if folder:
        table, facts = map_columns(folder, stored)
    else:
        table = pa.concat_tables(list(in_order(read, len(parts)))).combine_chunks()
    rejects = Counter()
    for about in abouts:
        rejects.update(about["rejects"])
    rejected = [tuple(row) for about in abouts for row in about["rejected"]]
    got = [about["bytes"] for about in abouts if "bytes" in about]
    fields.update(facts.get("fields", ()))
    index = Index(table, rejects, rejected, fields, got, pictures, facts.get("lacking", sum(lacking)))
    for name, column in zip(where.fields, where.columns()) if where and pictures else ():
        if column not in fields:
            raise InputError(
                f"--where compares {name} with a {where.fields[name]}, and no picture has such a field; these are "
                f"there: {field_names(index)}"
            )
    return index


def changed_meanwhile(part: Part) -> InputError:
    return InputError(f"{part.path} was changed while it was indexed: run the command again when it is finished")


def in_order(function, count: int, ahead: int = 16) -> Iterator:
    """function(0), function(1), ..., of which threads make a few ahead."""
    with ThreadPoolExecutor(8) as pool:
        coming = deque(pool.submit(function, i) for i in range(min(ahead, count)))
        for i in range(count):
            if i + ahead < count:
                coming.append(pool.submit(function, i + ahead))
            yield coming.popleft().result()


def _kept_columns(place: Path, name: str, kinds: dict, tables, about) -> Path | None:
    """The folder of that name, written by one of the processes that see it while the others wait; None where nothing
    can be written."""
    folder = place / name
    if (folder / "about.json").exists():
        return folder
    try:
        (place / ".writable").touch()
        (place / ".writable").unlink(missing_ok=True)
    except OSError:
        return None
    with Locks(place) as locks:
        while not (folder / "about.json").exists():
            if not locks.take(name):
                time.sleep(POLL_S)
                continue
            try:
                if not (folder / "about.json").exists():
                    _write_columns(folder, kinds, tables(), about)
            finally:
                locks.release(name)
    return folder


def _write_columns(folder: Path, kinds: dict, tables, about):
    temporary = folder.with_name(f"{folder.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        write_columns(temporary, kinds, tables, about)
        os.rename(temporary, folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise InputError(
            f"{folder}, from which all processes were to read the index, cannot be written ({error.strerror}): make "
            "room, or name another folder with --index"
        ) from None


def field_names(index: Index) -> str:
    """The names of an index's fields, as a message shows them."""
    return ", ".join(sorted({name[2:] for name in index.fields if name[:2] in COLUMN.values()})) or "none"


def read_picture(part: Part, key: str, offset: int, length: int) -> bytes:
    """The file of one picture, by one read at its place. InputError if it is not there any more, or shorter."""
    path = part.path if part.files is None else part.path / key[len(part.prefix) + 1 :]
    try:
        descriptor = part.remote.open() if part.remote else os.open(path, os.O_RDONLY)
        try:
            data = os.pread(descriptor, length, offset)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise InputError(
            f"{path}, which holds {key}, cannot be read any more ({error.strerror}): put it back"
        ) from None
    if len(data) != length:
        raise InputError(f"{path}, which holds {key}, has become shorter since it was indexed: put it back")
    return data
