"""The pictures of one call, saved as they are done, behind those that are there."""

import io
import json
import os
import re
from pathlib import Path

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from sd.errors import InputError
from sd.files import make_writable, rename_new
from sd.pictures import grid, label_height, label_scale
from sd.pnginfo import parameters_text


def png_bytes(picture: np.ndarray, settings: dict | None = None) -> bytes:
    """A PNG of uint8 RGB [H, W, 3], with its settings as JSON in the text chunk `sd`; those of one picture also as
    `parameters`, which other tools read."""
    info, file = PngInfo(), io.BytesIO()
    if settings:
        info.add_itxt("sd", json.dumps(settings, ensure_ascii=False))
        if "prompt" in settings:
            info.add_text("parameters", parameters_text(settings))  # becomes iTXt where Latin-1 does not do
    Image.fromarray(picture).save(file, "PNG", pnginfo=info)
    return file.getvalue()


def save_png(path: Path, picture: np.ndarray, settings: dict | None = None, overwrite: bool = True):
    """Write png_bytes. The file is there whole or not at all; FileExistsError if it was there before and may not be
    overwritten."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(png_bytes(picture, settings))
        if overwrite:
            os.replace(temporary, path)
        else:
            rename_new(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def grid_capacity(height: int, width: int, columns: int | None = None, pad: int = 2) -> int:
    """How many pictures of this size a labelled grid() may have, in a square or in so many columns, for Pillow to open
    it without a warning."""
    scale = label_scale(width)
    high, wide = scale * height + label_height(scale * width) + pad, scale * width + pad
    rows = 0
    while ((rows + 1) * high + pad) * ((columns or rows + 1) * wide + pad) <= Image.MAX_IMAGE_PIXELS:
        rows += 1
    return rows * (columns or rows)


class Output:
    """Where pictures go: a folder of numbered ones, behind those that are there, or one .png."""

    OTHERS = (".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".jxl", ".heic")

    def __init__(self, out: str, count: int, overwrite: bool, columns: int | None = None):
        """Make the folder and try it. columns: of the grid; None: as many as rows. InputError if the folder cannot be
        written or something would be lost."""
        path = Path(out)
        self.single = path.suffix.lower() == ".png"
        self.path, self.folder = path, path.parent if self.single else path
        self.count, self.overwrite, self.done, self.first = count, overwrite, 0, 0
        self.columns, self.ends = columns, {}
        self.paths: dict[int, Path] = {}  # of the first ones, for the grid
        if path.suffix.lower() in self.OTHERS:
            raise InputError(f"--out {path} names no PNG: pictures are written as .png, or give a folder")
        if self.single and count > 1:
            raise InputError(f"--out {path} names one picture and {count} were asked for; give a folder")
        if self.single and path.exists() and (path.is_dir() or not overwrite):
            raise InputError(f"--out {path} is there already: give another name, or --overwrite for a file")
        make_writable(self.folder)
        if not overwrite:
            self.first = self.next_number()

    def next_number(self) -> int:
        numbers = [re.fullmatch(r"(\d{5,})\.png", name, re.IGNORECASE) for name in os.listdir(self.folder)]
        return max((int(match[1]) + 1 for match in numbers if match), default=0)

    def save(self, i: int, picture: np.ndarray, settings: dict):
        """Write picture i of the run, counted from 0. InputError if that cannot be done."""
        while True:
            path = self.path if self.single else self.folder / f"{self.first + i:05d}.png"
            try:
                save_png(path, picture, settings, self.overwrite)
                break
            except FileExistsError:
                if self.single:
                    raise InputError(f"{path} has appeared meanwhile and was not overwritten") from None
                self.first = self.next_number() - i
                print(f"note: {path} was painted by another program; going on at {self.first + i:05d}.png")
            except OSError as e:
                raise InputError(f"{path} could not be written ({e.strerror or e})") from None
        self.done += 1
        ends = self.ends | {i: path}
        self.ends = {k: ends[k] for k in (min(ends), max(ends))}
        if not self.single and i < grid_capacity(*picture.shape[:2], self.columns):
            self.paths[i] = path

    def save_grid(self, settings: dict, prompts: list[str]) -> Path | None:
        """The run's pictures side by side, each above its prompt, read from disk: the first ones, if all are too many.
        prompts: theirs. Returns the grid's path; None where there is none."""
        if len(self.paths) < 2:
            return None
        name = "grid.png" if self.overwrite or not self.first else f"grid_{self.first:05d}.png"
        pictures = []
        for _, path in sorted(self.paths.items()):  # long prompts are painted after short ones
            with Image.open(path) as picture:
                pictures.append(np.array(picture.convert("RGB")))
        try:
            sheet = grid(np.stack(pictures), self.columns, labels=prompts)
            save_png(self.folder / name, sheet, settings | {"prompts": prompts}, self.overwrite)
        except FileExistsError:
            print(f"note: {self.folder / name} was there already and was left as it is")
            return None
        except OSError as e:
            raise InputError(f"{self.folder / name} could not be written ({e.strerror or e})") from None
        if len(pictures) < self.done:
            print(f"{name} shows the first {len(pictures)} of {self.done}: a larger one would not open everywhere")
        return self.folder / name

    def written(self) -> str:
        """The path of the picture, or those of the first and the last."""
        return " to ".join(str(path) for path in self.ends.values())

    def told(self) -> str:
        return f"{self.done} of {self.count} pictures are painted, in {self.path if self.single else self.folder}"
