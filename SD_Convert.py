"""Weights of Stable Diffusion 1.x, in and out.

    python SD_Convert.py runs/final final.safetensors --format ldm                  # ComfyUI, A1111: EMA weights, fp16
    python SD_Convert.py runs/final final_folder --format diffusers                 # StableDiffusionPipeline: fp32
    python SD_Convert.py runs/final full.ckpt.safetensors --format ldm --weights both --dtype fp32
    python SD_Convert.py v1-5-pruned.ckpt sd15 --format native                      # this project's checkpoint folder
    python SD_Convert.py runs/final small --dtype int8 --decoder_only               # the same, to paint with: 1/8 of it
    python SD_Convert.py runs/final with_cat.safetensors --lora cat.safetensors:0.7 --format ldm   # a LoRA merged in
    python SD_Convert.py runs/a mean --average runs/b:0.5 --format diffusers        # (a + b / 2) / 1.5
    python SD_Convert.py runs/cat cat.safetensors --format lora                     # a LoRA for A1111 and ComfyUI: fp16
    python SD_Convert.py a.safetensors ab.safetensors --lora b.safetensors:0.5 --format lora  # two LoRAs in one

open_model, load_vae and load_text_encoder read, whatever the format: this project's checkpoint and run folders, single
files (safetensors or pickles, known by their first bytes), diffusers folders, hub names. One table of names (unet_rows,
vae_rows) serves both directions and matches whole key segments. Reading is strict: every key is accounted for and every
shape checked, or InputError lists the first differences and guesses the cause; what is known to be left over is listed
by name (IGNORED). Files are memory-mapped, so reading one never holds two copies; pickles are read with weights_only
alone. What a network predicts is taken from wherever files say it (sd/weights/prediction.py), printed, and set by
--prediction and --zero_terminal_snr.

IN may be a LoRA, in whatever names (sd/weights/lora.py): it is written in kohya's (lora), as a folder of the diffusers
library, or in this project's. LoRAs are merged into a model in fp32, which is cast once; docs/FINETUNING.md says more.
"""

import argparse
from pathlib import Path

import torch

from sd.cli import parser
from sd.device import DTYPES
from sd.errors import InputError, run
from sd.weights.lora import is_lora, names_its_model, read_lora, text_shapes
from sd.weights.lora_write import base_for, joined, save_diffusers_lora, save_kohya, save_native_lora
from sd.weights.merge import averaged, cast_error, split_weight, with_loras
from sd.weights.read import Model, load_text_encoder, load_vae, null_of, open_model
from sd.weights.write import save_diffusers, save_ldm, save_native
from SD_Model import VAE


def parse_args(argv=None):
    p = parser(__doc__)
    g = p.add_argument_group("from and to")
    g.add_argument("source", metavar="IN", help="a checkpoint or run folder, a single file, a diffusers folder or a "
                   "hub name; or a LoRA. Where others are added, with :WEIGHT")  # fmt: skip
    g.add_argument("out", metavar="OUT", help="a new .safetensors (ldm, lora) or a new folder (diffusers, native)")
    g.add_argument("--format", choices=["ldm", "diffusers", "native", "lora"], help="a single file for ComfyUI and "
                   "A1111, a diffusers folder, this project's own, or of a LoRA a file of kohya's names (default: "
                   "native for int8, else none)")  # fmt: skip
    g.add_argument("--weights", choices=["ema", "live", "both"],
                   help="the average, the last ones (default: both for native in fp32, else ema)")  # fmt: skip
    g.add_argument("--dtype", choices=[*DTYPES, "int8"], help="of the weights; int8, with a scale a row, in this "
                   "project's own folder alone (default: fp16 for ldm and lora, fp32 for folders)")  # fmt: skip
    g.add_argument("--decoder_only", action="store_true", help="of native: leave out the VAE's encoder, which only "
                   "--init_image wants")  # fmt: skip

    g = p.add_argument_group("others added to IN")
    g.add_argument("--lora", action="append", metavar="PATH[:WEIGHT]", help="merge it into IN, or join it to IN, which "
                   "is a LoRA then; several times for several (default: none)")  # fmt: skip
    g.add_argument("--average", nargs="+", metavar="MODEL[:WEIGHT]", help="the mean of IN and these models, weights "
                   "divided by their sum (default: IN alone)")  # fmt: skip

    g = p.add_argument_group("the model, where IN does not say it right")
    g.add_argument("--prediction", choices=["epsilon", "v"], help="what the UNet predicts (default: what IN says)")
    g.add_argument("--zero_terminal_snr", action=argparse.BooleanOptionalAction, default=None,
                   help="was the UNet trained down to pure noise (default: what IN says)")  # fmt: skip
    g.add_argument("--vae", help="a folder, a file, a hub name (default: IN's)")
    g.add_argument("--text_encoder", help="a folder, a file, a hub name (default: IN's)")
    g.add_argument("--tokenizer", help="a folder, CLIP's vocabulary, a hub name (default: IN's)")
    g.add_argument("--base", metavar="MODEL", help="of a LoRA: a model that it is for, which knows its modules "
                   "(default: what IN says, else SD 1.5)")  # fmt: skip
    g.add_argument("--trigger", metavar="WORDS", help="of a LoRA: what a prompt has to say, written into its metadata "
                   "(default: what IN says)")  # fmt: skip
    return p.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    int8 = args.dtype == "int8"
    args.format = args.format or ("native" if int8 else None)
    if args.format is None:
        raise InputError("--format wants ldm, diffusers, native or, of a LoRA, lora, and was not given")
    args.source, args.weight = split_weight(args.source, "IN")
    out = Path(args.out)
    whole = args.format == "ldm" and names_its_model(args.source)  # a run's LoRA added to its model
    remarks, told = (convert_lora if is_lora(args.source) and not whole else convert_model)(args, out)
    for remark in remarks:
        print(f"note: {remark}")
    size = sum(f.stat().st_size for f in out.rglob("*")) if out.is_dir() else out.stat().st_size
    print(f"{out}: {size / 1e6:,.1f} MB, {args.format}, {told}")


def convert_lora(args, out: Path) -> tuple[list[str], str]:
    """Write the LoRA IN, and those of --lora, as one. Returns remarks, and what was written in words."""
    given = {"average": args.average, "vae": args.vae, "decoder_only": args.decoder_only, "tokenizer": args.tokenizer,
             "text_encoder": args.text_encoder, "zero_terminal_snr": args.zero_terminal_snr}  # fmt: skip
    if wrong := [name for name, value in given.items() if value]:
        raise InputError(
            f"--{wrong[0]} is for models, and IN ({args.source}) is a LoRA; to merge it, give it as --lora"
        )
    if args.format == "ldm" or args.dtype == "int8" or args.weights == "both":
        raise InputError(
            f"IN ({args.source}) is a LoRA: it is written as --format lora, diffusers or native, with --weights ema or "
            f"live, and never in int8"
        )
    if args.format == "native" and args.dtype not in (None, "fp32"):
        raise InputError(f"--format native is fp32 of a LoRA, and --dtype is {args.dtype}")
    weights = args.weights or "ema"
    dtype = DTYPES[args.dtype or ("fp16" if args.format == "lora" else "fp32")]
    model = None if args.base is None else open_model(args.base, weights)
    base = base_for(args.source, model, model and text_shapes(model.text_encoder()))
    words = [(args.source, args.weight), *(split_weight(word, "--lora") for word in args.lora or [])]
    loras = [(read_lora(path, base, weights), weight) for path, weight in words]
    for lora, weight in loras:
        print(f"{lora.found}, weight {weight:g}")
    lora = joined(loras, base, dtype)
    if args.format == "diffusers":
        remarks = save_diffusers_lora(out, lora, base, dtype)
    elif args.format == "native":
        remarks = save_native_lora(out, lora, base)
    else:
        more = {"modelspec.trigger_phrase": args.trigger, "modelspec.prediction_type": args.prediction}
        remarks = save_kohya(out, lora, base, dtype, {k: v for k, v in more.items() if v is not None})
    return remarks, f"{len(lora.changes)} modules, {dtype}"


def convert_model(args, out: Path) -> tuple[list[str], str]:
    """Write the model IN, with what is added to it. Returns remarks, and what was written in words."""
    int8 = args.dtype == "int8"
    if args.format == "lora" or args.base is not None or args.trigger is not None:
        flag = "--format lora" if args.format == "lora" else "--base" if args.base is not None else "--trigger"
        raise InputError(f"{flag} is for LoRAs, and IN ({args.source}) is a model, or is not there")
    if args.weight != 1 and not args.average:
        raise InputError(f"a weight of IN is for --average or, of a LoRA, --lora, found {args.source}:{args.weight:g}")
    if args.format != "native" and (int8 or args.decoder_only):
        flag = "--dtype int8" if int8 else "--decoder_only"
        raise InputError(f"{flag} is of this project's own folder (--format native), found --format {args.format}")
    if args.format == "native" and args.dtype not in (None, "fp32", "int8"):
        raise InputError(f"--format native is fp32 or int8, and --dtype is {args.dtype}")
    weights = args.weights or ("both" if args.format == "native" and not int8 else "ema")
    dtype = torch.int8 if int8 else DTYPES[args.dtype or ("fp16" if args.format == "ldm" else "fp32")]
    remarks = []

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
            given = args.text_encoder, args.tokenizer, model.text_length
            model.text_encoder = lambda: null_of(load_text_encoder(*given), model.null)
        if args.average:
            others = [split_weight(word, "--average") for word in args.average]
            others = [(open_model(path, which, args.prediction, args.zero_terminal_snr), w) for path, w in others]
            model = averaged([(model, args.weight), *others])
        if args.lora:
            model, _ = with_loras(model, args.lora, which)
        if (args.average or args.lora) and dtype.is_floating_point:
            remarks.append(cast_error(model, dtype))
        print(model.found)
        if model.null == "zeros" and args.format != "native":
            raise InputError(
                f"{args.source} has zeros as its null condition, and other programs steer away from the encoding of an "
                "empty text, which it never saw: use --format native"
            )
        return model

    ema = opened("ema") if weights != "live" else None
    live = opened("live") if weights != "ema" else None
    if args.format == "native":
        only = weights if int8 and weights != "both" else ""
        save_native(out, ema or live, live or ema, int8, args.decoder_only, only)
    elif args.format == "diffusers":
        save_diffusers(out, ema or live, dtype, live if ema else None)
    elif weights == "both":
        remarks += save_ldm(out, live, dtype, ema)
    else:
        remarks += save_ldm(out, ema or live, dtype)
    return list(dict.fromkeys(remarks)), f"{weights} weights, {dtype}"


if __name__ == "__main__":
    run(main)
