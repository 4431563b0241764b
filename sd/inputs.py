"""What decides a run beside its settings: hashed, agreed upon by all processes, compared when it goes on."""

import json
import zlib
from pathlib import Path

import torch

from sd.data import DRAWING
from sd.errors import InputError
from sd.files import sha256
from sd.objective import Denoiser
from sd.setup import Data
from sd.text import tokenizer_hash
from SD_Model import TextEncoder, weights_hash


def hash_inputs(data: Data, text_encoder: TextEncoder, trained: bool) -> dict:
    """What decides a run beside its settings and manifests, for state.json, by what it is: hashes, and the names of
    latent files that could not be read. trained: the text encoder, whose weights are in the checkpoint then."""
    (pictures, latents), held_out = data.train.digest(), data.val.digest()[0]
    inputs = {"drawing": DRAWING, "tokenizer": tokenizer_hash(text_encoder.tokenizer), "pictures": pictures,
              "held-out pictures": held_out, "latents": latents}  # fmt: skip
    inputs["latent files"] = [store.found for store in data.stores.values()]
    inputs["unreadable latent files"] = [store.left_out for store in data.stores.values()]
    return inputs if trained else inputs | {"text encoder": weights_hash(text_encoder)}


def check_inputs(saved: dict, data: Data, inputs: dict, say):
    """InputError, naming what changed, unless a run goes on with what it began with: `saved` is its state.json. What an
    older revision did not save is not compared, and said."""
    hashes = saved["data"]
    if hashes.keys() == data.hashes.keys():
        changed = [name for name in hashes if hashes[name] != data.hashes[name]]
    else:  # an older revision named them by --dataset's and --latents' folders
        changed = [name for name, digest in hashes.items() if digest not in data.hashes.values()]
    if changed:
        raise InputError(
            f"the data changed since the checkpoint ({changed[0]}); put it back, or start a new run with --init_from"
        )
    before, otherwise = saved.get("inputs", {}), "or start a new run with --init_from"
    unknown = [] if len(hashes) == len(data.hashes) else ["dataset's manifest"]
    if unknown := unknown + [name for name in inputs if name not in before]:
        say(f"note: the checkpoint is of an older revision and does not know the run's {', '.join(unknown)}: not "
            "compared")  # fmt: skip
    unread = "unreadable latent files"
    for folder, then, now in zip(data.stores, before.get(unread, []), inputs[unread]):
        if gone := sorted(set(now) - set(then)):
            raise InputError(
                f"{Path(folder) / gone[0]} was read when the run began, and is damaged or cannot be reached now "
                f"({len(gone)} such); put it back, {otherwise}"
            )
        if back := sorted(set(then) - set(now)):
            raise InputError(
                f"{Path(folder) / back[0]} could not be read when the run began, and can be now, which would change "
                f"the order of the pictures; move it away with its index, {otherwise}"
            )
    for folder, then, now in zip(data.stores, before.get("latent files", []), inputs["latent files"]):
        if then != now:
            raise InputError(f"the files of latents in {folder} are not those of the run; put those back, {otherwise}")
    words = {
        "drawing": "the code draws random numbers otherwise than when the run began; take that revision",
        "tokenizer": "the tokenizer is another than when the run began; give that one",
        "text encoder": "the text encoder has other weights than when the run began; give that one with --text_encoder",
        "pictures": "the training pictures or their captions are others than when the run began; put them back",
        "held-out pictures": "the held-out pictures or captions are others than when the run began; put them back",
        "latents": f"latents in {', '.join(data.stores)} are others than when the run began; put them back",
    }
    for name, sentence in words.items():
        if name in before and name in inputs and before[name] != inputs[name]:
            raise InputError(f"{sentence}, {otherwise}")


def crc(value) -> int:
    """32 bits that stand for a value of JSON."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def agreed_flags(args, settings: dict, saved: dict | None) -> dict[str, int]:
    """What all ranks must have been told alike, as numbers. With other flags some would wait for the rest for ever."""
    own = ("device", "out", "resume", "trace")  # of one machine; what is resumed counts by its contents
    return {
        "where to go on": saved["step"] if saved else 0,
        "flags": crc({name: value for name, value in vars(args).items() if name not in own}),
        "settings": crc(settings),
    }


def agreed_inputs(
    data: Data, inputs: dict, checkpoint: Path | None, denoiser: Denoiser, ema: Denoiser
) -> dict[str, int]:
    """What all ranks must have found alike, as numbers: the checkpoint, the data, and the weights to start from."""
    weights = 0
    for tensor in [*denoiser.state_dict().values(), *ema.state_dict().values()]:
        weights = zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy(), weights)
    return {
        "the checkpoint": crc(sha256(checkpoint / "manifest.json") if checkpoint else None),
        "the data": crc(data.hashes),
        **{f"the {name}": crc(value) for name, value in inputs.items()},
        "the weights to start from": weights,
    }
