"""Folders of pictures as people have them: what is looked at, and what is left out."""

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

IMAGE_EXTENSIONS = (  # what counts as the picture; the last row is counted as unsupported_format
    "jpg", "jpeg", "jpe", "jfif", "png", "apng", "webp", "gif", "bmp", "dib", "tif", "tiff", "avif", "jp2", "j2k",
    "ppm", "pgm", "pbm", "pnm",
    "heic", "heif", "jxl",
)  # fmt: skip
SYSTEM_NAMES = {  # of folders and files that programs leave behind, in small letters
    "__macosx", "@eadir", "#recycle", "$recycle.bin", "system volume information", "lost+found", "thumbs.db",
    "desktop.ini",
}  # fmt: skip


def is_hidden(name: str) -> bool:
    """Whether a path, with / between parts, leads into a hidden or system folder, or to such a file: .trash, __MACOSX,
    .ipynb_checkpoints, @eaDir, Thumbs.db, ..."""
    parts = name.split("/")
    return any(p.lower() in SYSTEM_NAMES or (p.startswith(".") and p not in (".", "..")) for p in parts)


def is_picture(name: str) -> bool:
    """Whether a file's name ends as a picture's does."""
    return name.rpartition(".")[2].lower() in IMAGE_EXTENSIONS


def endings(names: Iterable[str]) -> str:
    """How names end, as a message shows it: '.psd 3, .txt 1', the most frequent first, or 'no files'."""
    counts = Counter(("." + name.rpartition(".")[2].lower()) if "." in name else "no ending" for name in names)
    return ", ".join(f"{ending} {count:,}" for ending, count in counts.most_common(8)) or "no files"


def walk_folder(folder: Path, counts: Counter) -> list[str]:
    """The paths of all files inside a folder, with / between parts, sorted.

    Linked folders are followed, but each folder is read once: so no loop is endless. Not listed but counted: hidden
    (pictures in hidden and system folders, see is_hidden), link_repeated (links to folders that were read already),
    link_broken.
    """
    found, read = [], set()
    real, linked = [folder], []
    while real or linked:
        top = real.pop() if real else linked.pop(0)  # links last: they may lead to one of the others
        if (place := os.path.realpath(top)) in read:
            counts["link_repeated"] += 1
            continue
        read.add(place)
        with os.scandir(top) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                name = Path(entry.path).relative_to(folder).as_posix()
                if entry.is_dir():
                    (linked if entry.is_symlink() else real).append(Path(entry.path))
                elif not entry.is_file():
                    counts["link_broken"] += entry.is_symlink()
                elif not is_hidden(name):
                    found.append(name)
                else:
                    counts["hidden"] += is_picture(name)
    return sorted(found)
