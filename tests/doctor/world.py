"""A world so small that a run takes seconds: 64 px drawings of shapes through the demo's VAE, words as tokens, and a
network of one level, `mini`. Its runs are made in forked processes, healthy or broken on purpose."""

import json
import os
import runpy
import shutil
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "faults"), str(ROOT / "data_pipeline")]

import micro  # noqa: E402  (first, as it sets the environment)
import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import torch  # noqa: E402

import sd.files  # noqa: E402
import sd.text  # noqa: E402
import SD_Model  # noqa: E402
from sd.shapes import random_caption, sample  # noqa: E402
from sd.weights.read import load_vae  # noqa: E402

SIZE, LENGTH, HELD_OUT = 64, 16, 256
VAE = ROOT / "demo" / "vae"
TEXT = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)


def unet(width: int = 32, levels: int = 1) -> SD_Model.UNetConfig:
    return SD_Model.UNetConfig(channels=(width,) * levels, attention=(True,) * levels, num_res_blocks=1, num_heads=2,
                               context_dim=32, norm_groups=8)  # fmt: skip


for name, config in (("mini", unet()), ("mini_48", unet(48)), ("mini_2", unet(24, 2))):
    SD_Model.PRESETS[name] = dict(unet=config, vae=SD_Model.PRESETS["tiny"]["vae"], text=TEXT)


def captions_of(truths: list[dict], seed: int = 0) -> list[str]:
    return [random_caption(t, np.random.default_rng([seed, i])) for i, t in enumerate(truths)]


def write_dataset(folder: Path, tokenizer, keys: list[str], captions: list[str], held_out: int = HELD_OUT,
                  ids: np.ndarray | None = None):  # fmt: skip
    """The Arrow dataset, the first `held_out` rows being the val split. ids: instead of the captions'."""
    shutil.rmtree(folder, ignore_errors=True)
    every = sd.text.tokenize(tokenizer, captions) if ids is None else ids
    for split, part in (("train", slice(held_out, None)), ("val", slice(0, held_out))):
        (folder / split).mkdir(parents=True)
        flat = pa.array(every[part].ravel(), pa.int32())
        texts = pa.array(captions[part], pa.string())
        table = pa.table({"image_key": pa.array(keys[part], pa.string()), "caption": texts,
                          "input_ids": pa.FixedSizeListArray.from_arrays(flat, every.shape[1])})  # fmt: skip
        with pa.ipc.new_stream(folder / split / "data.arrow", table.schema) as stream:
            stream.write_table(table)
        (folder / split / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    sd.files.write_manifest(folder, {"complete": True, "tokenizer_hash": sd.text.tokenizer_hash(tokenizer),
                                     "max_length": every.shape[1],
                                     "counts": {"train": len(keys) - held_out, "val": held_out}})  # fmt: skip


def write_latents(folder: Path, keys: list[str], values: np.ndarray, vae: dict):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    np.save(folder / "00000.npy", values.astype(np.float16))
    table = pa.table({"image_key": pa.array(keys, pa.string()), "row": pa.array(range(len(keys)), pa.int32())})
    pq.write_table(table, folder / "00000.parquet")
    sd.files.write_manifest(folder, {"format": "latents-1", "vae": vae, "size": SIZE, "kind": "mean", "scaled": True,
                                     "latent_shape": list(values.shape[1:]), "count": len(keys),
                                     "shards": 1})  # fmt: skip


class World:
    """Pictures, captions, latents and encoders below a folder. Sources are written into data/<name>/."""

    def __init__(self, root: Path, pictures: int = 1024):
        self.root, self.data = root, root / "data"
        count = pictures + HELD_OUT
        torch.manual_seed(0)
        drawn = [sample(0, i, SIZE) for i in range(count)]
        self.truths = [truth for _, truth in drawn]
        self.captions = captions_of(self.truths)
        self.keys = [f"shapes/{i // 1000:05d}/{i:09d}" for i in range(count)]
        self.tokenizer = runpy.run_path(str(ROOT / "data_pipeline/04a_make_tokenizer.py"))["train"](
            iter(self.captions), 700, LENGTH
        )
        self.tokenizer.save_pretrained(root / "tokenizer")
        SD_Model.TextEncoder.new(TEXT, self.tokenizer).save(root / "text_encoder")
        SD_Model.TextEncoder.from_pretrained(str(root / "text_encoder"))
        vae = load_vae(VAE)
        self.vae = {"hash": SD_Model.weights_hash(vae), "name": str(VAE), "config": {}}
        images = torch.from_numpy(np.stack([p for p, _ in drawn])).permute(0, 3, 1, 2).float() / 127.5 - 1
        with torch.no_grad():
            self.latents = torch.cat([vae.encode(x) for x in images.split(64)]).numpy()
        self.source("shapes")

    def source(self, name: str, latents=None, captions=None, keys=None, ids=None, tokenizer=None):
        """A source with some of its parts changed."""
        keys = self.keys if keys is None else keys
        write_dataset(self.data / name / "dataset", tokenizer or self.tokenizer, keys,
                      self.captions if captions is None else captions, ids=ids)  # fmt: skip
        write_latents(self.data / name / "latents", keys, self.latents if latents is None else latents, self.vae)

    def flags(self, out: Path, source: str = "shapes", **more) -> list[str]:
        """A command line of SD_Train.py; None leaves a flag out, True gives it alone."""
        settings = dict(
            phase="demo", model="mini", size=SIZE, data=source, data_root=self.data, out=out, max_steps=160, batch=16,
            text_encoder=self.root / "text_encoder", lr=4e-3, warmup=10, ema=0.95, beta2=0.99, save_steps=10000,
            log_steps=5, val_steps=40, val_images=48, sample_steps=0, health_steps=20, wandb="disabled", device="cpu",
            seed=1, zero_init="original",
        ) | more  # fmt: skip
        words = []
        for name, value in settings.items():
            if value is not None:
                words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return words

    def train(self, name: str, hook=None, source: str = "shapes", **more) -> int:
        """Begin a run in a forked process; its id."""
        return micro.start(self.flags(self.root / "runs" / name, source, **more), self.root / f"{name}.txt", hook)


def in_fork(function) -> int:
    """function() in a forked process, whose id is returned; its status is 0 if it returned."""
    sys.stdout.flush(), sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        torch.set_num_threads(1)
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
