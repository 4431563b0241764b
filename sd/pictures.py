"""Pictures: headers, decoding, cutting, grids, and files."""

import io
import json
import math
import os
import re
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import torch
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from sd.errors import InputError
from sd.files import rename_new
from sd.pnginfo import parameters_text


def read_picture(path: str) -> np.ndarray:
    """A picture file as uint8 RGB [H, W, 3], upright, transparency on white: by the decoder of shards, else by Pillow.

    Grey levels of other types keep their values too: 16-bit ones are of 65535; 32-bit integers of 255, or of 65535 if
    any is larger; floats of 1, or of 255 if any is larger. InputError for anything else.
    """
    try:
        data = Path(path).read_bytes()
        return decode_image(data)
    except OSError as e:
        raise InputError(f"--init_image wants a picture, and {path} cannot be read ({e.strerror})") from None
    except Reject as reject:
        if reject.reason != "unsupported_format":
            raise InputError(f"--init_image wants a picture, and {path} is none ({reject.reason})") from None
    try:
        with Image.open(io.BytesIO(data)) as picture:
            if picture.width * picture.height > MAX_PIXELS:
                raise InputError(f"--init_image wants at most {MAX_PIXELS} pixels, {path} has {picture.size}")
            picture = ImageOps.exif_transpose(picture)
            if picture.mode != "F" and not picture.mode.startswith("I"):
                picture = picture.convert("RGBA")
                white = Image.new("RGBA", picture.size, "white")
                return np.array(Image.alpha_composite(white, picture).convert("RGB"))
            values, mode = np.array(picture, np.float64), picture.mode
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as e:
        if isinstance(e, InputError):
            raise
        raise InputError(f"--init_image wants a picture, and {path} could not be read as one ({e})") from None
    low, high = values.min(), values.max()
    tops = {"F": (1, 255), "I": (255, 65535)}.get(mode, (65535,))
    if not (low >= 0 and high <= tops[-1]):  # NaN too
        raise InputError(f"--init_image wants grey levels from 0 to {tops[-1]}, found {low:g} to {high:g} in {path}")
    values *= 255 / next(top for top in tops if high <= top)
    return np.rint(values).astype(np.uint8)[:, :, None].repeat(3, 2)


def load_picture(path: str, width: int, height: int) -> torch.Tensor:
    """A picture file as fp32 [1, 3, height, width] in -1..1: scaled to cover the size, the middle kept."""
    picture = ImageOps.fit(Image.fromarray(read_picture(path)), (width, height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float() / 127.5 - 1  # [1, 3, H, W]


def grid(pictures: np.ndarray, columns: int | None = None, pad: int = 2) -> np.ndarray:
    """Pictures uint8 [N, H, W, 3] side by side on white: uint8 [rows (H + pad) + pad, ...]."""
    n, h, w, _ = pictures.shape
    columns = columns or math.ceil(math.sqrt(n))
    rows = math.ceil(n / columns)
    sheet = np.full((rows * (h + pad) + pad, columns * (w + pad) + pad, 3), 255, np.uint8)
    for i, picture in enumerate(pictures):
        y, x = (i // columns) * (h + pad) + pad, (i % columns) * (w + pad) + pad
        sheet[y : y + h, x : x + w] = picture
    return sheet


def save_png(path: Path, picture: np.ndarray, settings: dict | None = None, overwrite: bool = True):
    """Write uint8 RGB [H, W, 3], with its settings as JSON in the text chunk `sd`; those of one picture also as
    `parameters`, which other tools read. The file is there whole or not at all; FileExistsError if it was there before
    and may not be overwritten."""
    info = PngInfo()
    if settings:
        info.add_itxt("sd", json.dumps(settings, ensure_ascii=False))
        if "prompt" in settings:
            info.add_text("parameters", parameters_text(settings))  # becomes iTXt where Latin-1 does not do
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        Image.fromarray(picture).save(temporary, "PNG", pnginfo=info)
        if overwrite:
            os.replace(temporary, path)
        else:
            rename_new(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


MAX_PIXELS = 100_000_000  # a picture that claims more is rejected before anything is allocated (300 MB as RGB)


class Reject(Exception):
    """A picture that is not used. `reason` is a short word under which it is counted."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class Header(NamedTuple):
    kind: str  # jpg, png or webp
    width: int  # pixels as stored, before any rotation
    height: int
    orientation: int  # EXIF, 1 to 8; 5 to 8 swap width and height
    transparent: bytes | None = None  # PNG: the one grey level or colour that is transparent (big-endian 16 bit each)
    depth: int = 8  # PNG: bits a channel


def read_header(data: bytes | None) -> Header:
    """Reads a picture's header and checks that its file is whole; decodes nothing. Raises Reject with the reason
    no_image, empty, html, unsupported_format (GIF, BMP, TIFF, AVIF, ... and anything unknown), animated, truncated,
    cmyk_without_adobe, or corrupt."""
    if data is None:
        raise Reject("no_image")
    if not data.strip(b"\0"):
        raise Reject("empty")
    try:
        if data[:2] == b"\xff\xd8":
            return _jpeg_header(data)
        if data[:8] == b"\x89PNG\r\n\x1a\n":
            return _png_header(data)
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return _webp_header(data)
    except (struct.error, IndexError):
        raise Reject("truncated") from None
    if b"<" == data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]:
        raise Reject("html")
    raise Reject("unsupported_format")


_JPEG_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")  # inside a scan, FF00 and FFD0..FFD7 are data and restarts

_JPEG_FRAME = {0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF}


def _jpeg_header(data: bytes) -> Header:
    # Walks all segments up to the end-of-image marker: a thumbnail inside a segment has such a marker too.
    position, size, components, orientation, adobe, scans = 2, None, 3, 1, False, 0
    while True:
        match = _JPEG_MARKER.search(data, position)
        if not match:
            raise Reject("truncated")
        marker, position = data[match.end() - 1], match.end()
        if marker == 0xD9:
            break
        if marker in (0x01, 0xD8):  # markers without a length
            continue
        (length,) = struct.unpack_from(">H", data, position)
        segment = data[position + 2 : position + length]
        if length < 2:
            raise Reject("corrupt")
        if position + length > len(data):
            raise Reject("truncated")
        position += length
        if marker in _JPEG_FRAME and size is None:
            height, width, components = struct.unpack_from(">HHB", segment, 1)
            size = width, height
        elif marker == 0xE1 and segment.startswith(b"Exif\0\0"):
            orientation = _exif_orientation(segment[6:])
        elif marker == 0xEE and segment.startswith(b"Adobe"):
            adobe = True
        elif marker == 0xDA:
            scans += 1
    if size is None or not scans:
        raise Reject("corrupt")
    if components == 4 and not adobe:  # whether its inks are inverted is unknown, and OpenCV assumes that they are
        raise Reject("cmyk_without_adobe")
    return Header("jpg", *size, orientation)


def _png_header(data: bytes) -> Header:
    width, height, depth, colour_type = struct.unpack_from(">IIBB", data, 16)
    position, orientation, transparent, pixels = 8, 1, None, False
    while True:
        length, name = struct.unpack_from(">I4s", data, position)
        end = position + 12 + length
        if end > len(data):
            raise Reject("truncated")
        body = data[position + 8 : end - 4]
        if position == 8 and name != b"IHDR":
            raise Reject("corrupt")
        if name in (b"IHDR", b"PLTE", b"IDAT", b"tRNS"):
            if zlib.crc32(data[position + 4 : end - 4]) != struct.unpack_from(">I", data, end - 4)[0]:
                raise Reject("corrupt")
        if name == b"IEND":
            break
        if name == b"acTL":
            raise Reject("animated")
        if name == b"eXIf":
            orientation = _exif_orientation(body)
        if name == b"tRNS" and colour_type in (0, 2):
            transparent = body
        pixels = pixels or name == b"IDAT"
        position = end
    if not pixels:
        raise Reject("corrupt")
    return Header("png", width, height, orientation, transparent, depth)


def _webp_header(data: bytes) -> Header:
    (riff_size,) = struct.unpack_from("<I", data, 4)
    if riff_size + 8 > len(data):
        raise Reject("truncated")
    position, size, orientation = 12, None, 1
    while position + 8 <= riff_size + 8:
        name, length = struct.unpack_from("<4sI", data, position)
        body = data[position + 8 : position + 8 + length]
        if len(body) < length:
            raise Reject("truncated")
        if name in (b"ANIM", b"ANMF"):
            raise Reject("animated")
        if name == b"VP8X":
            if body[0] & 2:
                raise Reject("animated")
            size = int.from_bytes(body[4:7], "little") + 1, int.from_bytes(body[7:10], "little") + 1
        elif name == b"VP8 " and size is None:
            width, height = struct.unpack_from("<HH", body, 6)
            size = width & 0x3FFF, height & 0x3FFF
        elif name == b"VP8L" and size is None:
            (bits,) = struct.unpack_from("<I", body, 1)
            size = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        elif name == b"EXIF":
            orientation = _exif_orientation(body.removeprefix(b"Exif\0\0"))
        position += 8 + length + length % 2
    if size is None:
        raise Reject("corrupt")
    return Header("webp", *size, orientation)


def _exif_orientation(tiff: bytes) -> int:
    """The orientation tag (1 to 8) of EXIF data; 1 if there is none or the data make no sense."""
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    try:
        (start,) = struct.unpack_from(order + "I", tiff, 4)
        (entries,) = struct.unpack_from(order + "H", tiff, start)
        for entry in range(entries):
            tag, _, _, value = struct.unpack_from(order + "HHIH", tiff, start + 2 + 12 * entry)
            if tag == 0x0112:
                return value if 1 <= value <= 8 else 1
    except (struct.error, TypeError):
        pass
    return 1


def decode_image(data: bytes | None, size: int | None = None, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Decodes a JPEG, PNG or WebP to RGB uint8 [H, W, 3]; with `size`, resized and cropped to [size, size, 3].

    EXIF rotation is applied; grey, palette, CMYK and 16-bit pictures become 8-bit RGB; transparency is composited on
    white. Colour profiles are ignored: values are taken as sRGB. Raises Reject with the reasons of read_header, and
    too_many_pixels (claimed by the header: nothing that large is allocated) or corrupt (it does not decode).
    """
    header = read_header(data)
    if header.width * header.height > max_pixels:
        raise Reject("too_many_pixels")
    if header.width * header.height == 0:
        raise Reject("corrupt")
    # Orientation is applied below, for all formats alike: which of them OpenCV rotates depends on its version.
    plain = header.kind == "jpg"
    flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION if plain else cv2.IMREAD_UNCHANGED
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error:
        image = None
    if image is None or image.shape[:2] != (header.height, header.width):
        raise Reject("corrupt")
    image = _to_rgb(image, header)
    image = _upright(image, header.orientation)
    return np.ascontiguousarray(image) if size is None else resize_crop(image, size)


def _to_rgb(image: np.ndarray, header: Header) -> np.ndarray:
    """What OpenCV decoded (uint8 or uint16, [H, W] or [H, W, 1..4], BGR order) as RGB uint8 on white."""
    if image.ndim == 2:
        image = image[:, :, None]
    alpha = None
    if image.shape[2] in (2, 4):
        image, alpha = image[:, :, :-1], image[:, :, -1:]
    if image.shape[2] == 1:
        image = np.repeat(image, 3, axis=2)
    image = image[:, :, ::-1]
    if alpha is None and header.transparent is not None:
        clear = np.frombuffer(header.transparent[: len(header.transparent) // 2 * 2], ">u2")  # 1 or 3 values
        if header.depth < 8:
            clear = clear * (255 // (2**header.depth - 1))
        alpha = np.where((image == clear).all(axis=2, keepdims=True), 0, np.iinfo(image.dtype).max)
    if alpha is not None and alpha.min() < np.iinfo(image.dtype).max:
        top = np.float32(np.iinfo(image.dtype).max)
        image = image * (255 / top)
        image = 255 + (image - 255) * (alpha / top)  # white where nothing covers it
        return np.rint(image).astype(np.uint8)
    if image.dtype == np.uint16:
        return ((image.astype(np.uint32) + 128) // 257).astype(np.uint8)
    return image


def _upright(image: np.ndarray, orientation: int) -> np.ndarray:
    """Undoes the rotation and mirroring that an EXIF orientation of 1 to 8 stands for."""
    if orientation in (5, 6, 7, 8):
        image = image.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    return image


def resize_crop(image: np.ndarray, size: int, crop: str = "center") -> np.ndarray:
    """uint8 [H, W, 3] -> [size, size, 3]: the largest square in the middle, scaled by area averaging (down) or cubic
    interpolation (up). Cropping comes first, so that a very long picture costs no more than a square one."""
    if crop != "center":
        raise ValueError(f"crop must be 'center', not {crop!r}")
    return np.ascontiguousarray(cut(image, (size, size)))


def cut(image: np.ndarray, size: tuple[int, int], at: float | None = None) -> np.ndarray:
    """uint8 [H, W, 3] -> [*size, 3]: the largest part of size's aspect, from the middle, or with `at` in [0, 1) that
    far from the top or left; scaled by area averaging (down) or cubic interpolation (up)."""
    height, width = image.shape[:2]
    high = min(height, max(1, round(width * size[0] / size[1])))
    wide = min(width, max(1, round(height * size[1] / size[0])))
    top, left = (rest // 2 if at is None else int(at * (rest + 1)) for rest in (height - high, width - wide))
    image = image[top : top + high, left : left + wide]
    if (high, wide) != size:
        method = cv2.INTER_AREA if high > size[0] else cv2.INTER_CUBIC
        image = cv2.resize(np.ascontiguousarray(image), size[::-1], interpolation=method)
    return image


def encode_jpeg(image: np.ndarray) -> bytes:
    """RGB uint8 [H, W, 3] as a JPEG of quality 95."""
    ok, data = cv2.imencode(".jpg", np.ascontiguousarray(image[:, :, ::-1]), [cv2.IMWRITE_JPEG_QUALITY, 95])
    if not ok:
        raise ValueError(f"cannot encode an image of shape {image.shape}")
    return data.tobytes()


def encode_png(image: np.ndarray) -> bytes:
    """RGB uint8 [H, W, 3] as a PNG."""
    ok, data = cv2.imencode(".png", np.ascontiguousarray(image[:, :, ::-1]), [cv2.IMWRITE_PNG_COMPRESSION, 3])
    if not ok:
        raise ValueError(f"cannot encode an image of shape {image.shape}")
    return data.tobytes()
