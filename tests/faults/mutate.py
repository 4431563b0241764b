"""Spoils files, values and surroundings at random, and tells whether the files that a program left are whole.

Everything is chosen by the random.Random that is given, so that the same seed spoils alike.
"""

import copy
import ctypes
import io
import json
import random
import resource
import signal
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import safetensors.torch
import torch
from PIL import Image

PICTURES = (".png", ".jpg", ".jpeg")
STRANGE = ["", " ", "x", "0", "-1", "nan", "None", "../../x", "/", "a/b", "\0",
           "\u2028", "\ufeff", "\ud800", "子猫", "{", "{x}", "%s", "x" * 300]  # fmt: skip
VALUES = [None, True, False, 0, 1, -1, 2, 1.5, 0.0, float("nan"), float("inf"), -float("inf"), 2**31, 2**63, 2**64,
          -(2**63), 10**40, 1e308, [], {}, [None], [[]], {"": None}, *STRANGE]  # fmt: skip
NUMBERS = ["0", "-1", "1", "2", "3", "7", "1.5", "nan", "inf", "-inf", "1e308", "1e-308", "2147483648", "4294967296",
           "9223372036854775808", "18446744073709551616", "1" + "0" * 40, "9" * 5000, "", "x", "0x10", "1_0",
           "٣", " 4"]  # fmt: skip
ENVIRONMENT = {
    "RANK": NUMBERS, "WORLD_SIZE": NUMBERS, "LOCAL_RANK": NUMBERS, "LOCAL_WORLD_SIZE": NUMBERS,
    "SLURM_PROCID": NUMBERS, "SLURM_LOCALID": NUMBERS, "SLURM_JOB_ID": NUMBERS,
    "HOME": ["", "/nonexistent", "/dev/null", "."], "TMPDIR": ["", "/nonexistent", "/dev/null"],
    "XDG_CACHE_HOME": ["", "/dev/null"], "HF_HOME": ["", "/dev/null"], "MPLCONFIGDIR": ["/dev/null"],
    "COLUMNS": NUMBERS, "LANG": ["C", "xx"], "PYTHONHASHSEED": ["x"], "WANDB_MODE": ["online", "x"], "USER": [""],
    "PATH": ["", "/nonexistent"], "OMP_NUM_THREADS": NUMBERS, "CUDA_VISIBLE_DEVICES": ["", "-1", "x"],
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Values


def spoil_text(text: str, r: random.Random) -> str:
    at = r.randrange(len(text) + 1)
    return r.choice([r.choice(STRANGE), text[:at], text[:at] + r.choice(STRANGE) + text[at:], text * 2, text.upper()])


def spoil_value(value, r: random.Random):
    if isinstance(value, str) and r.random() < 0.4:
        return spoil_text(value, r)
    if isinstance(value, int | float) and r.random() < 0.4:
        return r.choice([-value, value + 1, value - 1, value * 2, value / 2, str(value), [value]])
    return r.choice([*VALUES, [value], {"x": value}])


def places(content, found=None) -> list[tuple]:
    """(container, key) of everything inside lists and dicts."""
    found = [] if found is None else found
    for key in list(content) if isinstance(content, dict) else range(len(content)):
        found.append((content, key))
        if isinstance(content[key], dict | list):
            places(content[key], found)
    return found


def spoil_json(content, r: random.Random) -> tuple:
    """(the content with one place spoiled, what was done)."""
    content = copy.deepcopy(content)
    if r.random() < 0.08 or not isinstance(content, dict | list) or not (all_places := places(content)):
        value = r.choice(VALUES)
        return value, f"all of it is {value!r}"
    container, key = r.choice(all_places)
    old = container[key]
    kind = r.choice(["set", "set", "set", "drop", "rename", "double", "swap"])
    if kind == "drop":
        del container[key]
    elif kind == "rename" and isinstance(container, dict):
        container[r.choice([str(key) + "x", str(key).upper(), *STRANGE])] = container.pop(key)
    elif kind == "double" and isinstance(container, list):
        container.insert(key, copy.deepcopy(old))
    elif kind == "swap":
        other, place = r.choice(all_places)
        container[key] = copy.deepcopy(other[place]) if other is not container else spoil_value(old, r)
    else:
        kind = "set"
        container[key] = spoil_value(old, r)
    return content, f"{kind} {key!r}, was {str(old)[:40]!r}"


def as_json(content) -> bytes:
    return json.dumps(content, ensure_ascii=True).encode()


# ---------------------------------------------------------------------------------------------------------------------
# Bytes


def spoil_bytes(data: bytes, r: random.Random) -> tuple[bytes, str]:
    at, kind = r.randrange(len(data) + 1), r.choice(["cut", "flip", "flip_early", "empty", "noise", "extend", "zeros"])
    if kind == "cut":
        return data[:at], f"cut at {at} of {len(data)}"
    if kind in ("flip", "flip_early") and data:
        changed = bytearray(data)
        for _ in range(r.choice([1, 1, 8])):
            changed[r.randrange(min(len(data), 64) if kind == "flip_early" else len(data))] ^= 1 << r.randrange(8)
        return bytes(changed), kind
    if kind == "empty":
        return b"", kind
    if kind == "extend":
        return data + r.choice([b"\0", b"\xff\xfe\x80", b"\n{", data]), kind
    if kind == "zeros":
        return data[:at] + bytes(min(64, len(data) - at)) + data[at + 64 :], f"zeros at {at}"
    return r.randbytes(r.choice([1, 7, 600])), "noise"


def picture_bytes(r: random.Random) -> tuple[bytes, str]:
    """A whole picture of an unusual kind."""
    mode, size = r.choice([("L", (9, 9)), ("I;16", (70, 70)), ("RGBA", (64, 64)), ("1", (3, 200)), ("P", (64, 1)),
                           ("CMYK", (80, 80)), ("F", (64, 64)), ("RGB", (1, 1)), ("LA", (65, 64))])  # fmt: skip
    file, image = io.BytesIO(), Image.new(mode, size)
    image.save(file, {"CMYK": "JPEG", "F": "TIFF"}.get(mode, "PNG"))
    data = bytearray(file.getvalue())
    if data[:4] == b"\x89PNG" and r.random() < 0.2:
        data[16:24] = struct.pack(">II", 40_000, 40_000)  # claims more than there is
        mode = "a claim of 40,000 px"
    return bytes(data), f"picture: {mode} {size}"


def spoil_text_file(data: bytes, r: random.Random, suffix: str) -> tuple[bytes, str]:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return spoil_bytes(data, r)
    lines, kind = text.split("\n"), r.choice(["line", "line", "drop", "double", "encoding", "cell", "long", "only"])
    at = r.randrange(len(lines))
    if suffix == ".jsonl" and kind == "line":
        try:
            content, done = spoil_json(json.loads(lines[at]), r)
            lines[at], kind = as_json(content).decode(), f"row {at}: {done}"
        except ValueError:
            lines[at] = spoil_text(lines[at], r)
    elif kind == "drop":
        del lines[at]
    elif kind == "double":
        lines.insert(at, lines[at])
    elif kind == "encoding":
        name = r.choice(["utf-16", "utf-16-le", "cp1252", "shift_jis", "utf-8-sig"])
        return ("é子" * ("cp" not in name) + "é" + text).encode(name, "replace"), name
    elif kind == "cell":
        cells = lines[at].split(",")
        cells[r.randrange(len(cells))] = r.choice(['"', 'a "b" c', "", "\0", *STRANGE])
        lines[at] = ",".join(cells)
    elif kind == "long":
        lines[at] = '"' + "x" * 200_000
    elif kind == "only":
        lines = lines[: r.randrange(2)]
    else:
        lines[at] = spoil_text(lines[at], r)
    return "\n".join(lines).encode("utf-8", "surrogatepass"), f"{kind}, line {at}"


def spoil_safetensors(data: bytes, r: random.Random) -> tuple[bytes, str]:
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    if r.random() < 0.5:
        header, done = spoil_json(header, r)
        text = as_json(header)
        return struct.pack("<Q", len(text)) + text + data[8 + length :], f"header: {done}"
    tensors, about = safetensors.torch.load(data), header.get("__metadata__")
    name = r.choice(sorted(tensors))
    t, kind = tensors[name], r.choice(["drop", "rename", "extra", "dtype", "shape", "nan", "huge", "none"])
    if kind == "drop":
        del tensors[name]
    elif kind == "rename":
        tensors[spoil_text(name, r).replace("\ud800", "?")] = tensors.pop(name)
    elif kind == "extra":
        tensors[r.choice(["x", "model_ema.decay", name + ".weight"])] = torch.zeros(r.choice([(), (1,), (0,), (2, 3)]))
    elif kind == "dtype":
        tensors[name] = t.to(r.choice([torch.float64, torch.int64, torch.bool, torch.float16, torch.uint8]))
    elif kind == "shape":
        flat = t.flatten()
        tensors[name] = r.choice([flat, flat[:1].clone(), flat[:0].clone(), t[None], t.repeat(2, *[1] * (t.dim() - 1))
                                  if t.dim() else t[None]])  # fmt: skip
    elif kind == "nan" and t.is_floating_point():
        tensors[name] = torch.full_like(t, r.choice([float("nan"), float("inf")]))
    elif kind == "huge" and t.is_floating_point():
        tensors[name] = torch.full_like(t, 1e30)
    else:
        tensors = {}
    contiguous = {k: v.contiguous().clone() for k, v in tensors.items()}
    return safetensors.torch.save(contiguous, about), f"tensor {name}: {kind}"


def spoil_table(table: pa.Table, r: random.Random) -> tuple[pa.Table, str]:
    kind = r.choice(["drop", "rename", "null", "text", "none", "twice", "list", "other", "empty", "number"])
    at = r.randrange(table.num_columns)
    name, column = table.column_names[at], table.column(at)
    if kind == "drop":
        table = table.drop_columns([name])
    elif kind == "rename":
        new = r.choice([name.upper(), "x", *table.column_names])
        table = table.rename_columns([new if i == at else n for i, n in enumerate(table.column_names)])
    elif kind == "null":
        keep = pa.array([r.random() < 0.5 for _ in range(table.num_rows)])
        values = [v if k else None for v, k in zip(column.to_pylist(), keep.to_pylist())]
        table = table.set_column(at, name, pa.array(values, column.type))
    elif kind == "none":
        table = table.set_column(at, name, pa.nulls(table.num_rows))
    elif kind == "text":
        table = table.set_column(at, name, pa.array([str(v) for v in column.to_pylist()]))
    elif kind == "number":
        table = table.set_column(at, name, pa.array([r.choice([float("nan"), -1.0, 1e30])] * table.num_rows))
    elif kind == "list":
        table = table.set_column(at, name, pa.array([[v] * r.randrange(3) for v in column.to_pylist()]))
    elif kind == "other":
        table = table.set_column(at, name, pc.take(column, pa.array([0] * table.num_rows)))
    elif kind == "twice":
        table = pa.concat_tables([table, table.slice(0, r.randrange(table.num_rows + 1))])
    else:
        table = table.slice(0, r.randrange(2))
    return table, f"column {name}: {kind}"


def spoil_parquet(data: bytes, r: random.Random) -> tuple[bytes, str]:
    table = pq.read_table(io.BytesIO(data))
    changed, done = spoil_table(table, r)
    file = io.BytesIO()
    about = table.schema.metadata if r.random() < 0.7 else {}
    pq.write_table(changed.replace_schema_metadata(about), file)
    return file.getvalue(), done + ("" if about else ", notes lost")


def spoil_arrow(data: bytes, r: random.Random) -> tuple[bytes, str]:
    changed, done = spoil_table(pa.ipc.open_stream(data).read_all(), r)
    file = io.BytesIO()
    with pa.ipc.new_stream(file, changed.schema) as stream:
        stream.write_table(changed)
    return file.getvalue(), done


def spoil_npy(data: bytes, r: random.Random) -> tuple[bytes, str]:
    a = np.load(io.BytesIO(data))
    kind = r.choice(["nan", "inf", "fp64", "int", "object", "fewer", "flat", "fortran", "wide", "empty", "scalar"])
    if kind in ("nan", "inf"):
        a[r.randrange(len(a))] = float(kind)
    elif kind == "fortran":
        a = np.asfortranarray(a)
    else:
        a = {"fp64": a.astype(float), "int": a.astype(int), "object": np.array([{}, None], dtype=object),
             "fewer": a[:-1], "flat": a.reshape(-1), "wide": np.concatenate([a, a], 1), "empty": a[:0],
             "scalar": np.float16(3)}[kind]  # fmt: skip
    file = io.BytesIO()
    np.save(file, a)
    return file.getvalue(), kind


def spoil_archive(members: list[tuple[str, bytes]], r: random.Random, done=None) -> tuple[list, str]:
    """Members of a tar or zip, one of them dropped, doubled, renamed, emptied, exchanged or spoiled."""
    at, kind = r.randrange(len(members)), r.choice(["drop", "double", "rename", "empty", "swap", "spoil", "spoil"])
    name, data = members[at]
    if kind == "drop":
        del members[at]
    elif kind == "double":
        members.insert(r.randrange(len(members) + 1), members[at])
    elif kind == "rename":
        stem, _, ending = name.rpartition(".")
        new = [stem, "x." + ending, stem + "." + r.choice(["TXT", "webp", "gif", "x", "json"]), "._" + name, "a\nb.png"]
        members[at] = r.choice([*new, *(s.replace("\ud800", "?").replace("\0", "?") for s in STRANGE[7:])]), data
    elif kind == "empty":
        members[:] = []
    elif kind == "swap":
        members[at] = name, r.choice(members)[1]
    else:
        data, how = spoil_data(data, Path(name).suffix, r)
        members[at], kind = (name, data), f"spoil, {how}"
    return members, f"member {name}: {kind}"


def spoil_tar(data: bytes, r: random.Random) -> tuple[bytes, str]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = [(m.name, tar.extractfile(m).read()) for m in tar if m.isreg()]
    members, done = spoil_archive(members, r)
    link = r.randrange(len(members)) if members and r.random() < 0.1 else None
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=r.choice([tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])) as tar:
        for i, (name, content) in enumerate(members):
            info = tarfile.TarInfo(name or "x")
            if i == link:
                info.type, info.linkname, content = r.choice([tarfile.SYMTYPE, tarfile.FIFOTYPE]), "/etc/passwd", b""
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue(), done + (", a link" if link is not None else "")


def spoil_zip(data: bytes, r: random.Random) -> tuple[bytes, str]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members, done = spoil_archive([(n, archive.read(n)) for n in archive.namelist()], r)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members:
            archive.writestr(name or "x", content)
    return file.getvalue(), done


BY_SUFFIX = {".safetensors": spoil_safetensors, ".parquet": spoil_parquet, ".arrow": spoil_arrow, ".npy": spoil_npy,
             ".tar": spoil_tar, ".zip": spoil_zip}  # fmt: skip


def spoil_data(data: bytes, suffix: str, r: random.Random) -> tuple[bytes, str]:
    """The bytes of a file of this ending, spoiled in its own way or as bytes."""
    suffix = suffix.lower()
    if r.random() < 0.3:
        return spoil_bytes(data, r)
    try:
        if suffix in PICTURES:
            return picture_bytes(r) if r.random() < 0.5 else spoil_bytes(data, r)
        if suffix == ".json":
            content, done = spoil_json(json.loads(data), r)
            return as_json(content), done
        if suffix in BY_SUFFIX:
            return BY_SUFFIX[suffix](data, r)
    except (ValueError, OSError, pa.ArrowException, tarfile.TarError, zipfile.BadZipFile, RuntimeError, struct.error,
            IndexError, OverflowError, UnicodeError, safetensors.SafetensorError) as e:  # fmt: skip
        # it was spoiled before, or this cannot be written
        return spoil_bytes(data, r)[0], f"bytes ({type(e).__name__})"
    return spoil_text_file(data, r, suffix)


def spoil_path(root: Path, path: Path, r: random.Random) -> str:
    """Spoils one file below root. Returns what was done."""
    name = path.relative_to(root)
    if r.random() < 0.18:
        kind = r.choice(["gone", "folder", "dangling", "closed", "swapped", "loop"])
        others = [p for p in root.rglob("*") if p.is_file() and p != path]
        if kind == "swapped" and others:
            other = r.choice(others)
            path.write_bytes(other.read_bytes())
            return f"{name} has the bytes of {other.relative_to(root)}"
        if kind == "closed":
            path.chmod(0)
            return f"{name} may not be read"
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "dangling":
            path.symlink_to("nowhere")
        elif kind == "loop":
            path.symlink_to(path.name)
        return f"{name}: {kind}"
    data, done = spoil_data(path.read_bytes(), path.suffix, r)
    path.write_bytes(data)
    return f"{name}: {done}"


def spoil_alike(files: list[Path], r: random.Random) -> str:
    """All files of one ending gone or emptied, or all members of some endings gone from all tars."""
    suffix = r.choice(sorted({p.suffix for p in files}))
    if suffix == ".tar" and r.random() < 0.8:
        endings = r.choice([(".txt", ".json"), (".txt", ".json"), (".txt",), (".json",), (".png",)])
        for path in (p for p in files if p.suffix == ".tar"):
            with tarfile.open(path) as tar:
                members = [(m, tar.extractfile(m).read()) for m in tar if not m.name.endswith(endings)]
            with tarfile.open(path, "w") as tar:
                [tar.addfile(m, io.BytesIO(data)) for m, data in members]
        return f"no {' or '.join(endings)} in any tar"
    kind = r.choice(["gone", "empty"])
    for path in (p for p in files if p.suffix == suffix):
        path.unlink() if kind == "gone" else path.write_bytes(b"")
    return f"all {suffix or 'other files'} {kind}"


# ---------------------------------------------------------------------------------------------------------------------
# Surroundings


def full_disk(size: int) -> None:
    """In this process, a write beyond `size` bytes of a file fails, as on a disk that is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def die_after(seconds: float) -> None:
    """This process ends then, at once and without a chance to tidy up."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def without_privileges() -> None:
    """Of this process: root obeys the modes of files as others do, and memory is limited to 3 GiB more than now."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if libc.capget(header, data) == 0:
        for word in (0, 1):  # effective and permitted
            data[word] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        libc.capset(header, data)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (3 << 30), now + (3 << 30)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def spoil_environment(r: random.Random) -> dict[str, str]:
    names = r.sample(sorted(ENVIRONMENT), r.choice([1, 1, 2, 3]))
    return {name: r.choice(ENVIRONMENT[name]).replace("\0", "") for name in names}


# ---------------------------------------------------------------------------------------------------------------------
# Whole files


def read_whole(path: Path) -> None:
    """Raises if a file is not what its ending says, to its last byte."""
    data, suffix = path.read_bytes(), path.suffix.lower()
    if suffix == ".safetensors":
        safetensors.torch.load(data)
    elif suffix == ".json":
        json.loads(data)
    elif suffix == ".jsonl":
        [json.loads(line) for line in data.decode().splitlines()]
        assert not data or data.endswith(b"\n"), "no end of line"
    elif suffix == ".parquet":
        pq.read_table(io.BytesIO(data))
    elif suffix == ".arrow":
        pa.ipc.open_stream(data).read_all().validate(full=True)
    elif suffix == ".npy":
        np.load(io.BytesIO(data))
    elif suffix == ".tar":
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            [tar.extractfile(m).read() for m in tar]
        assert data.endswith(bytes(1024)), "a tar without its end"
    elif suffix in (".png", ".jpg"):
        Image.open(io.BytesIO(data)).load()
    elif suffix == ".pt":
        torch.load(io.BytesIO(data), weights_only=True)
    elif suffix == ".html":
        assert data.rstrip().endswith(b"</html>"), "an unfinished page"


def is_temporary(path: Path) -> bool:
    return any(part.endswith((".tmp", ".part", ".old")) for part in path.parts)


def stamps(root: Path) -> dict[Path, tuple]:
    """What tells whether a file is the one that was there before."""
    found = {}
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            status = path.stat()
            found[path] = status.st_ino, status.st_size, status.st_mtime_ns
    return found


def broken_files(root: Path, before: dict[Path, tuple]) -> list[str]:
    """Files that are new or changed, and not whole, though their names are final."""
    found = []
    for path, stamp in stamps(root).items():
        if before.get(path) == stamp or is_temporary(path.relative_to(root)):
            continue
        try:
            read_whole(path)
        except Exception as e:
            found.append(f"{path.relative_to(root)} is not whole: {type(e).__name__}: {e}")
    return found
