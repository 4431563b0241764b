"""Captions encoded once, before training, where the text encoder is frozen: it is off the device from then on."""

import numpy as np
import torch

from sd.data import Batch
from sd.errors import InputError
from sd.setup import Data
from SD_Model import TextEncoder

CHUNK = 10_000  # captions that are tokenised at a time


def check_cache(settings: dict):
    """InputError for settings that no cache of captions can have."""
    if settings["cache_text"] and settings["train_text_encoder"]:
        raise InputError("--cache_text wants a text encoder that stays as it is: drop it, or --train_text_encoder")
    if not 0 <= settings["caption_memory"] < float("inf"):
        raise InputError(f"--caption_memory wants a number of GiB from 0 up, found {settings['caption_memory']}")


class EncodedTexts:
    """Contexts of all captions that a run may show, the empty one included, in the memory of the CPU. Called with a
    Batch of token ids, it gives the batch with their contexts [B, L, D] instead.

    Each distinct caption is encoded once, in batches of the size that training has, as products may round otherwise in
    others: so training gets the numbers that encoding at each step would give it.
    """

    def __init__(self, texts: np.ndarray, text_of, settings: dict, device: torch.device):
        """texts: the distinct ids int64 [N, L]; text_of: of ids [B, L] on the device, their contexts."""
        self.place = {row.tobytes(): i for i, row in enumerate(texts)}
        short, batch, kept = settings["dtype"] == "bf16", settings["batch"], []
        for first in range(0, len(texts), batch):
            some = texts[np.arange(first, first + batch).clip(max=len(texts) - 1)]
            found = text_of(torch.from_numpy(some).to(device))[: len(texts) - first]  # [B, L, D]
            self.dtype = found.dtype
            kept.append((found.to(torch.bfloat16) if short else found).cpu())  # as the UNet's products would cast them
        self.contexts = torch.cat(kept)  # [N, L, D]

    def __call__(self, batch: Batch) -> Batch:
        at = [self.place[row.tobytes()] for row in batch.ids.numpy()]
        return batch._replace(ids=self.contexts[at].to(self.dtype))


def distinct_ids(data: Data, null_ids: np.ndarray) -> np.ndarray:
    """Token ids int64 [N, L] of all captions of training and held-out pictures, and those of "", each once."""
    found = {null_ids.astype(np.int64).tobytes()}
    for split in (data.train, data.val):
        for ids in split.all_token_ids(CHUNK):
            found.update(row.tobytes() for row in ids)
    return np.stack([np.frombuffer(row, np.int64) for row in sorted(found)])


def cache_texts(settings: dict, data: Data, null_ids: np.ndarray, text_encoder: TextEncoder, text_of, device, say):
    """With --cache_text: EncodedTexts, and what the denoiser wants of its batches, which is what they hold; the text
    encoder is on the CPU afterwards. Else (what changes no batch, text_of), and the text encoder on the device.
    InputError if the contexts would take more than --caption_memory."""
    text_encoder.eval()
    if not settings["cache_text"]:
        if not settings["train_text_encoder"]:  # else it goes with the denoiser
            text_encoder.to(device)
        return lambda batch: batch, text_of
    texts = distinct_ids(data, null_ids)
    size = texts.size * text_encoder.context_dim * (2 if settings["dtype"] == "bf16" else 4) / 2**30
    if size > settings["caption_memory"]:
        raise InputError(
            f"--cache_text (which --fit chooses too) keeps {len(texts):,} encoded captions, of {size:.2f} GiB, and "
            f"--caption_memory is {settings['caption_memory']:g}: raise it, or give --no_cache_text"
        )
    text_encoder.to(device)
    encoded = EncodedTexts(texts, text_of, settings, device)
    text_encoder.to("cpu")
    if device.type == "cuda":
        torch.cuda.empty_cache()
    say(
        f"captions: {len(texts):,} encoded once, {size:.2f} GiB of the CPU's memory; the text encoder is off the device"
    )
    return encoded, lambda contexts: contexts
