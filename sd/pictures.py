"""Pictures: headers, decoding, cutting, grids, and files."""

import functools
import io
import math
import warnings
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from PIL import (
    Image,
    ImageDraw,
    ImageFont,
    JpegImagePlugin,
    PngImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from sd.errors import InputError


def read_picture(path: str) -> np.ndarray:
    """A picture file as decode_image gives it, uint8 RGB [H, W, 3]. InputError, with the reason, if it gives none."""
    try:
        return decode_image(Path(path).read_bytes())
    except OSError as e:
        raise InputError(f"--init_image wants a picture, and {path} cannot be read ({e.strerror})") from None
    except Reject as reject:
        advice = "save it as a PNG of 8 or 16 bits"
        raise InputError(f"--init_image wants a picture, and {path} is none ({reject.reason}): {advice}") from None


LINES = 3  # of a label, at most

INK, FRAME = 40, 220  # grey levels of text, and of the line around a labelled picture


def grid(
    pictures: np.ndarray,
    columns: int | None = None,
    pad: int = 2,
    labels: list[str] | None = None,
    headings: list[str] | None = None,
) -> np.ndarray:
    """Pictures uint8 [N, H, W, 3] side by side on white: uint8 [rows (H + pad) + pad, ...].

    labels: N texts, each written under its picture in up to three lines; pictures narrower than 128 pixels are then
    enlarged by a whole number, every pixel a square. headings: a text above each row, in one line.
    """
    scale = 1 if labels is None else label_scale(pictures.shape[2])
    pictures = pictures.repeat(scale, 1).repeat(scale, 2)
    n, h, w, _ = pictures.shape
    columns = columns or math.ceil(math.sqrt(n))
    rows = math.ceil(n / columns)
    font, head, line = label_font(w), label_font(w, 1.25), line_height(w)
    texts = [[] if labels is None else wrap(labels[i], font, w) for i in range(n)]
    above = line_height(w, 1.25) + pad if headings else 0
    below = 0 if labels is None else label_height(w, max(map(len, texts)))
    high = above + h + below + pad
    width = columns * (w + pad) + pad
    sheet = np.full((rows * high + pad, width, 3), 255, np.uint8)
    for i, picture in enumerate(pictures):
        y, x = (i // columns) * high + pad + above, (i % columns) * (w + pad) + pad
        if labels is not None:
            sheet[y - 1 : y + h + 1, x - 1 : x + w + 1] = FRAME  # where a white picture ends
        sheet[y : y + h, x : x + w] = picture
        for k, text in enumerate(texts[i]):
            write(sheet[y + h + k * line : y + h + (k + 1) * line, x : x + w], text, font)
    for i, heading in enumerate(headings or []):
        for text in wrap(heading, head, width - 2 * pad, 1):
            write(sheet[i * high + pad : i * high + pad + above, pad:-pad], text, head)
    return sheet


def label_scale(width: int) -> int:
    """How many times a labelled picture is enlarged: to 128 pixels, so that a label has room for some words a line."""
    return max(1, 128 // width)


def label_size(width: int, times: float = 1.0) -> int:
    """Size in pixels of the letters under a picture of this width."""
    return round(times * max(11, width / 24))


@functools.lru_cache(maxsize=8)
def label_font(width: int, times: float = 1.0) -> ImageFont.FreeTypeFont:
    """Pillow's own font, the same on every machine. A character that it lacks is drawn as a box."""
    return ImageFont.load_default(label_size(width, times))


def line_height(width: int, times: float = 1.0) -> int:
    return round(1.25 * label_size(width, times))


def label_height(width: int, lines: int = LINES) -> int:
    """Pixels between a picture of this width, as it is shown, and the gap to the next row."""
    return lines * line_height(width) + line_height(width) // 3


def wrap(text: str, font: ImageFont.FreeTypeFont, width: int, most: int = LINES) -> list[str]:
    """A text in lines of up to `width` pixels, broken between words, or within one that is longer than a line. What
    does not fit into `most` lines is left out, and the last one ends with an ellipsis."""
    words = text.encode("utf-8", "replace").decode().split()[::-1]  # the next one last; no half surrogates
    lines = [""]
    while words:
        word = words.pop()
        joined = f"{lines[-1]} {word}".lstrip()
        if len(joined) <= width and font.getlength(joined) <= width:  # no letter is narrower than a pixel
            lines[-1] = joined
            continue
        if len(lines) == most:
            last = joined[:width]
            while last and font.getlength(last.rstrip() + "…") > width:
                last = last[:-1]
            return [*lines[:-1], last.rstrip() + "…"]
        if lines[-1]:
            lines.append("")
            words.append(word)
            continue
        fits = next((n for n in range(min(len(word) - 1, width), 1, -1) if font.getlength(word[:n]) <= width), 1)
        lines[-1] = word[:fits]
        lines.append("")
        words.append(word[fits:])
    return [line for line in lines if line]


def write(place: np.ndarray, text: str, font: ImageFont.FreeTypeFont):
    """One line of dark text on a white strip uint8 [h, w, 3], which is changed; what passes its right end is cut."""
    image = Image.fromarray(place)
    ascent, descent = font.getmetrics()
    ImageDraw.Draw(image).text((0, (len(place) + ascent - descent) // 2), text, (INK,) * 3, font, anchor="ls")
    place[:] = np.array(image)


FORMATS = {  # what is decoded, by Pillow's names, and the usual ending. EPS is not here: Ghostscript would run it
    "JPEG": "jpg", "PNG": "png", "WEBP": "webp", "AVIF": "avif", "BMP": "bmp", "DIB": "bmp", "GIF": "gif",
    "JPEG2000": "jp2", "PPM": "ppm", "TIFF": "tif",
}  # fmt: skip

JPEG_END, PNG_END = b"\xff\xd9", b"IEND\xaeB`\x82"

MAX_PIXELS = 100_000_000  # a picture that claims more is rejected before anything is allocated (300 MB as RGB)

MAX_SIDE = 10_000  # pixels; a square of that side has MAX_PIXELS


class Reject(Exception):
    """A picture that is not used. `reason` is a short word under which it is counted."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class Header(NamedTuple):
    kind: str  # the usual ending of its format: jpg, png, webp, or another of FORMATS' values
    width: int  # pixels as stored, before any rotation
    height: int
    orientation: int  # EXIF, 1 to 8; 5 to 8 swap width and height
    mode: str = "RGB"  # Pillow's name for the kind of pixels: 1, L, LA, P, RGB, RGBA, CMYK, I;16, F, ...
    transparent: tuple[int, ...] | None = None  # PNG: the one grey level or colour, as stored, that is transparent
    depth: int = 8  # PNG: bits a channel


def read_header(data: bytes | None) -> Header:
    """Reads a picture's header through Pillow and checks that its file is whole; decodes nothing (but a PNG whose EXIF
    data lie behind its pixels). Raises Reject with the reason no_image, empty, html, unsupported_format (HEIC, JPEG XL,
    SVG, ... and anything unknown), animated, truncated, cmyk_without_adobe, too_many_pixels (over 178 million in a
    format other than JPEG, PNG and WebP), or corrupt."""
    return _open_image(data)[1]


def _open_image(data: bytes | None) -> tuple[Image.Image, Header]:
    """A picture as Pillow opens it, not yet decoded, and its header. Raises Reject as read_header."""
    if data is None:
        raise Reject("no_image")
    if not data.strip(b"\0"):
        raise Reject("empty")
    kind, whole = None, True
    if data[:2] == b"\xff\xd8":
        kind, reader = "jpg", JpegImagePlugin.JpegImageFile
        whole = data.rfind(JPEG_END) > 0
    elif data[:8] == b"\x89PNG\r\n\x1a\n":
        kind, reader = "png", PngImagePlugin.PngImageFile
        whole = data.rfind(PNG_END) > 0
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        kind, reader = "webp", WebPImagePlugin.WebPImageFile
        whole = int.from_bytes(data[4:8], "little") + 8 <= len(data)
    if not whole:
        raise Reject("truncated")
    stream = io.BytesIO(data)
    try:
        if kind:  # not by Image.open, which has a limit of pixels of its own, and reads a stereo JPEG otherwise
            image = reader(stream)
        else:
            with warnings.catch_warnings():  # about 89 million pixels and more: decode_image() has its own limit
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                image = Image.open(stream, formats=list(FORMATS))
        scan = stream.tell()  # of a JPEG: where its first scan begins
        header = _header(image, kind or FORMATS[image.format], data)
        if kind == "png":
            image.verify()  # the checksums of all chunks
        animated = header.kind not in ("jpg", "tif") and getattr(image, "is_animated", False)
    except Image.DecompressionBombError:
        raise Reject("too_many_pixels") from None
    except Exception as error:  # Pillow's readers raise errors of many kinds at damaged bytes
        raise Reject(_why_not_opened(data, kind, error)) from None
    if animated:
        raise Reject("animated")
    if header.kind == "jpg" and data.rfind(JPEG_END) < scan:  # one before that is a thumbnail's
        raise Reject("truncated")
    if header.kind == "jpg" and header.mode == "CMYK" and "adobe" not in image.info:
        raise Reject("cmyk_without_adobe")  # whether its inks are inverted is unknown, and OpenCV assumes that they are
    return image, header


def _header(image: Image.Image, kind: str, data: bytes) -> Header:
    (width, height), transparent, depth = image.size, None, 8
    if kind == "tif":  # Pillow gives the size as shown
        width, height = image.tag_v2.get(256, width), image.tag_v2.get(257, height)
    if kind == "png":
        depth = data[24]
        if "exif" not in image.info and data.find(b"eXIf", data.rfind(b"IDAT")) > 0:
            image = PngImagePlugin.PngImageFile(io.BytesIO(data))
            if image.width * image.height <= MAX_PIXELS:
                image.load()  # Pillow reads what lies behind the pixels only then
        if image.mode != "P":
            transparent = image.info.get("transparency")
            transparent = (transparent,) if isinstance(transparent, int) else transparent
    return Header(kind, width, height, _orientation(image), image.mode, transparent, depth)


def _orientation(image: Image.Image) -> int:
    """The orientation tag (1 to 8) of a picture's EXIF data; 1 if there is none or the data make no sense."""
    try:
        value = Image.Image.getexif(image).get(0x0112, 1)  # not PngImageFile's own, which decodes the picture
    except Exception:  # damaged EXIF data, of whatever kind, turn nothing
        return 1
    return value if value in range(1, 9) else 1


def _why_not_opened(data: bytes, kind: str | None, error: Exception) -> str:
    """The reason for which bytes that Pillow does not open are rejected."""
    if kind or not isinstance(error, UnidentifiedImageError):
        return "corrupt"
    start = data[:1000].lstrip(b"\xef\xbb\xbf \t\r\n")
    return "html" if start[:1] == b"<" and b"<svg" not in start.lower() else "unsupported_format"


def read_numbered(folder: str | Path) -> list[np.ndarray]:
    """The pictures 00000.png, 00001.png, ... of a folder, in order, RGB uint8 [H, W, 3]."""
    images = []
    for path in sorted(path for path in Path(folder).glob("*.png") if path.stem.isdigit()):
        try:
            images.append(decode_image(path.read_bytes()))
        except Reject as reject:
            raise InputError(f"cannot decode {path} ({reject.reason}): paint it again") from None
    return images


def check_side(side: int | None, least: int = 8, flag: str = "--size", unit: str = "pixels") -> None:
    """InputError unless pictures may have this side in pixels; None is no side."""
    if side is not None and not least <= side <= MAX_SIDE:
        raise InputError(f"{flag} wants {least} to {MAX_SIDE:,} {unit}, found {side:,}")


def decode_image(data: bytes | None, size: int | None = None, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Decodes a picture to RGB uint8 [H, W, 3]; with `size`, resized and cropped to [size, size, 3].

    JPEG, PNG, WebP and the other formats of FORMATS, of which the first page or frame of TIFF counts. EXIF rotation is
    applied; grey, palette, CMYK, 1-bit and 16-bit pictures become 8-bit RGB, and so do pictures of floats, which are
    taken to lie in 0..1; transparency is composited on white. Colour profiles are ignored: values are taken as sRGB.
    Raises Reject with the reasons of read_header, and too_many_pixels (claimed by the header: nothing that large is
    allocated), corrupt (it does not decode), or value_range (floats far outside 0..1, whole numbers of 32 bits).
    """
    image, header = _open_image(data)
    if header.width * header.height > max_pixels:
        raise Reject("too_many_pixels")
    if header.width * header.height == 0:
        raise Reject("corrupt")
    if header.kind in ("jpg", "png", "webp"):  # OpenCV is faster than Pillow: a JPEG of 512 pixels in 3/4 of the time
        rgb = _decode_with_opencv(data, header)
    else:
        rgb = _decode_with_pillow(image)
    return np.ascontiguousarray(rgb) if size is None else resize_crop(rgb, size)


def _decode_with_opencv(data: bytes, header: Header) -> np.ndarray:
    # Orientation is applied here, for all formats alike: which of them OpenCV rotates depends on its version.
    plain = header.kind == "jpg"
    flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION if plain else cv2.IMREAD_UNCHANGED
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error:
        image = None
    if image is None or image.shape[:2] != (header.height, header.width):
        raise Reject("corrupt")
    return _upright(_to_rgb(image, header), header.orientation)


def _decode_with_pillow(image: Image.Image) -> np.ndarray:
    """A picture that Pillow has opened, as RGB uint8 [H, W, 3], upright and on white."""
    try:
        image.load()
        orientation = _orientation(image)  # Pillow has turned a TIFF by now, and says so
        if image.mode == "F" or image.mode.startswith("I"):
            return _upright(np.repeat(_grey_of_numbers(image)[:, :, None], 3, axis=2), orientation)
        if image.has_transparency_data:
            rgba = np.asarray(image.convert("RGBA"))
            return _upright(_on_white(rgba[:, :, :3], rgba[:, :, 3:], 255), orientation)
        return _upright(np.asarray(image.convert("RGB")), orientation)
    except Reject:
        raise
    except Exception as error:  # Pillow's decoders raise errors of many kinds at damaged bytes
        raise Reject("truncated" if "truncated" in str(error) else "corrupt") from None


def _grey_of_numbers(image: Image.Image) -> np.ndarray:
    """Grey levels uint8 [H, W] of a picture whose pixels are floats, or whole numbers of 16 or 32 bits."""
    values = np.asarray(image)
    if image.mode == "F":
        if not (values.min() >= -0.5 and values.max() <= 1.5):  # NaN too; a little beyond 0..1 comes from resampling
            raise Reject("value_range")
        return np.rint(np.clip(values, 0, 1) * 255).astype(np.uint8)
    if image.format == "TIFF" and (image.mode == "I" or image.tag_v2.get(258, (16,))[0] != 16):
        raise Reject("value_range")  # of 12 or 32 bits, or with a sign: what is white is not known
    values = values.astype(np.uint32)
    clear = image.info.get("transparency")
    grey = ((values + 128) // 257).astype(np.uint8)
    return grey if clear is None else np.where(values == clear, np.uint8(255), grey)


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
    top = np.iinfo(image.dtype).max
    if alpha is None and header.transparent is not None:
        clear = np.array(header.transparent)
        if header.depth < 8:
            clear = clear * (255 // (2**header.depth - 1))
        alpha = np.where((image == clear).all(axis=2, keepdims=True), 0, top)
    if alpha is not None and alpha.min() < top:
        return _on_white(image, alpha, top)
    if image.dtype == np.uint16:
        return ((image.astype(np.uint32) + 128) // 257).astype(np.uint8)
    return image


def _on_white(image: np.ndarray, alpha: np.ndarray, top: int) -> np.ndarray:
    """[H, W, 3] and alpha [H, W, 1], both from 0 to `top`, as uint8 [H, W, 3]: white where nothing covers it."""
    image = image * np.float32(255 / top)
    image = 255 + (image - 255) * (alpha / np.float32(top))
    return np.rint(image).astype(np.uint8)


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
    return scaled(image[top : top + high, left : left + wide], size)


def scaled(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """uint8 [H, W, 3] -> [*size, 3], by area averaging (down) or cubic interpolation (up)."""
    if image.shape[:2] == size:
        return image
    method = cv2.INTER_AREA if image.shape[0] > size[0] else cv2.INTER_CUBIC
    return cv2.resize(np.ascontiguousarray(image), size[::-1], interpolation=method)


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
