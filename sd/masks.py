"""Masks of pictures: which parts of one count in its loss, and how much. `x.mask.png` is that of `x.jpg` beside it."""

import io
from collections.abc import Callable

import cv2
import numpy as np
from PIL import Image, ImageOps

from sd.pictures import decode_image

MASK = ".mask.png"
ENDINGS = (MASK, ".mask.PNG", ".MASK.PNG")  # as cameras and Windows write them


def is_mask(stem: str) -> bool:
    """Whether a picture's name without its ending is that of a mask."""
    return stem.lower().endswith(".mask")


def mask_of(file: str, there: Callable[[str], bool]) -> str | None:
    """The name of a picture's mask, a/x.mask.png of a/x.jpg, if such a file is `there`."""
    return next((name for ending in ENDINGS if there(name := file.rpartition(".")[0] + ending)), None)


def read_mask(data: bytes, shape: tuple[int, int]) -> np.ndarray:
    """A mask's file as grey levels uint8 [H, W], black where it is transparent, scaled to its picture's shape. Raises
    Reject as decode_image."""
    grey = cv2.cvtColor(decode_image(data), cv2.COLOR_RGB2GRAY)  # on white
    image = Image.open(io.BytesIO(data))
    if image.has_transparency_data:
        clear = 255 - np.asarray(ImageOps.exif_transpose(image).convert("RGBA"))[:, :, 3]
        grey = np.maximum(grey, clear) - clear
    if grey.shape == shape:
        return grey
    method = cv2.INTER_AREA if grey.shape[0] > shape[0] else cv2.INTER_LINEAR
    return cv2.resize(grey, shape[::-1], interpolation=method)


def loss_weights(square: np.ndarray, shape: tuple[int, int], floor: float) -> np.ndarray:
    """Grey levels uint8 [size, size], cut as the picture was, to the weights of its latent, fp32 [h, w] = shape: 1
    where all is white, `floor` where all is black, and by the mean grey level between these."""
    (high, wide), (h, w) = square.shape, shape
    level = square.reshape(h, high // h, w, wide // w).mean(axis=(1, 3), dtype=np.float64) / 255  # [h, w]
    return (floor + (1 - floor) * level).astype(np.float32)
