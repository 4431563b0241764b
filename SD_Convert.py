"""Weights of Stable Diffusion 1.x, in and out.

    python SD_Convert.py runs/final final.safetensors --format ldm                  # ComfyUI, A1111: EMA weights, fp16
    python SD_Convert.py runs/final final_folder --format diffusers                 # StableDiffusionPipeline: fp32
    python SD_Convert.py runs/final full.ckpt.safetensors --format ldm --weights both --dtype fp32
    python SD_Convert.py v1-5-pruned.ckpt sd15 --format native                      # this project's checkpoint folder

open_model, load_vae and load_text_encoder read, whatever the format: this project's checkpoint and run folders, single
files (safetensors or pickles, known by their first bytes), diffusers folders, hub names. One table of names (unet_rows,
vae_rows) serves both directions and matches whole key segments. Reading is strict: every key is accounted for and every
shape checked, or InputError lists the first differences and guesses the cause; what is known to be left over is listed
by name (IGNORED). Files are memory-mapped, so reading one never holds two copies; pickles are read with weights_only
alone. What a network predicts is taken from wherever files say it (sd/weights/prediction.py), printed, and set by
--prediction and --zero_terminal_snr.
"""

import argparse
from pathlib import Path

import torch

from sd.cli import parser
from sd.device import DTYPES
from sd.errors import InputError, run
from sd.weights.read import Model, load_text_encoder, load_vae, open_model
from sd.weights.write import save_diffusers, save_ldm, save_native
from SD_Model import VAE


def main(argv=None):
    p = parser(__doc__)
    g = p.add_argument_group("from and to")
    g.add_argument("source", metavar="IN", help="a checkpoint or run folder, a single file, a diffusers folder or a "
                   "hub name")  # fmt: skip
    g.add_argument("out", metavar="OUT", help="a new .safetensors (ldm) or a new folder (diffusers, native)")
    g.add_argument("--format", required=True, choices=["ldm", "diffusers", "native"],
                   help="a single file for ComfyUI and A1111, a diffusers folder, or this project's own")  # fmt: skip
    g.add_argument("--weights", choices=["ema", "live", "both"],
                   help="the average, the last ones (default: both for native, else ema)")  # fmt: skip
    g.add_argument("--dtype", choices=list(DTYPES), help="of the weights (default: fp16 for ldm, fp32 for folders)")

    g = p.add_argument_group("the model, where IN does not say it right")
    g.add_argument("--prediction", choices=["epsilon", "v"], help="what the UNet predicts (default: what IN says)")
    g.add_argument("--zero_terminal_snr", action=argparse.BooleanOptionalAction, default=None,
                   help="was the UNet trained down to pure noise (default: what IN says)")  # fmt: skip
    g.add_argument("--vae", help="a folder, a file, a hub name (default: IN's)")
    g.add_argument("--text_encoder", help="a folder, a file, a hub name (default: IN's)")
    g.add_argument("--tokenizer", help="a folder, CLIP's vocabulary, a hub name (default: IN's)")
    args = p.parse_args(argv)
    weights = args.weights or ("both" if args.format == "native" else "ema")
    dtype = DTYPES[args.dtype or ("fp16" if args.format == "ldm" else "fp32")]
    if args.format == "native" and dtype != torch.float32:
        raise InputError(f"--format native is fp32, and --dtype is {args.dtype}")

    def opened(which: str) -> Model:
        model = open_model(args.source, which, args.prediction, args.zero_terminal_snr, args.tokenizer)

        def given_vae() -> VAE:
            vae = load_vae(args.vae, which)
            if hasattr(vae, "found"):
                print(vae.found)
            return vae

        if args.vae is not None:
            model.vae = given_vae
        if args.text_encoder is not None:
            model.text_encoder = lambda: load_text_encoder(args.text_encoder, args.tokenizer, model.text_length)
        print(model.found)
        return model

    out = Path(args.out)
    ema = opened("ema") if weights != "live" else None
    live = opened("live") if weights != "ema" else None
    remarks = []
    if args.format == "native":
        save_native(out, ema or live, live or ema)
    elif args.format == "diffusers":
        save_diffusers(out, ema or live, dtype, live if ema else None)
    elif weights == "both":
        remarks = save_ldm(out, live, dtype, ema)
    else:
        remarks = save_ldm(out, ema or live, dtype)
    for remark in remarks:
        print(f"note: {remark}")
    size = sum(f.stat().st_size for f in out.rglob("*")) if out.is_dir() else out.stat().st_size
    print(f"{out}: {size / 1e6:,.1f} MB, {args.format}, {weights} weights, {dtype}")


if __name__ == "__main__":
    run(main)
