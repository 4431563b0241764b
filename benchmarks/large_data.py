"""Data that benchmarks make for themselves, as large as real data: random latents, captions and weights, and JPEGs."""

import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/faults")]

import micro  # noqa: E402

import SD_Model  # noqa: E402
from sd.shards import ShardWriter, iter_samples  # noqa: E402
from sd.speed import decode_ms, synthetic_tar  # noqa: E402
from sd.weights.parts import save_vae  # noqa: E402

CLIP = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)


class LargeData(NamedTuple):
    """root: a data_root whose source `random` has latents, and which has the folders vae and text_encoder beside it;
    tars: a folder of noisy JPEGs, 1.5 x 1.25 times `size` pixels; decode_ms: of one of them to `size`, on one core."""

    root: Path
    tars: Path
    size: int
    vae_config: SD_Model.VAEConfig
    decode_ms: float


def make_large(root: Path, trial: bool = False, more_sizes: tuple[int, ...] = ()) -> LargeData:
    """A text encoder of CLIP's size, a VAE, 4,096 latents of pictures of 512 pixels, and of each of more_sizes, and
    6,144 JPEGs. trial: all of it tiny, 64 pixels."""
    size, tars = 64 if trial else 512, root / "source" / "images"
    preset = SD_Model.PRESETS["tiny" if trial else "sd15"]
    micro.LENGTH = 12 if trial else 77
    torch.manual_seed(0)
    vae = SD_Model.VAE(preset["vae"])
    save_vae(vae, root / "vae")
    tokenizer = micro.make_tokenizer()
    SD_Model.TextEncoder.new(preset["text"] or CLIP, tokenizer).save(root / "text_encoder")
    keys = [f"random/{i // 1000:05d}/{i:09d}" for i in range(64 if trial else 4096)]
    micro.write_dataset(root / "random" / "dataset", tokenizer, {"train": keys[8:], "val": keys[:8]})
    described = {"hash": SD_Model.weights_hash(vae), "name": str(root / "vae"), "config": {}}
    for side in (size, *more_sizes):
        latents = root / "random" / ("latents" if side == size else f"latents_{side}")
        micro.write_latents(latents, keys, described, 0, size=side)
    tars.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        tar = synthetic_tar(Path(folder), size, 8 if trial else 64)
        decoding, samples = decode_ms(tar, size, 8), [s["image"] for _, s in iter_samples(tar)]
    for number in range(12 if trial else 64):
        with ShardWriter(tars / f"{number:05d}.tar") as shard:
            for i in range(4 if trial else 96):
                shard.add(f"{i:09d}", samples[i % len(samples)], "jpg", f"picture {i}", {})
    return LargeData(root, tars, size, preset["vae"], decoding)
