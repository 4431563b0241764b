"""Text, and negative text, to pictures.

    python SD_ImageGen.py --model runs/demo --prompt "a red circle" --out out
    python SD_ImageGen.py --model runs/final/checkpoints/step_00035000 --prompt "a portrait of an old sailor" \
        --negative "blurry, cropped" --steps 100 --cfg 8.5 --seed 7 --n 4 --out out
    python SD_ImageGen.py --model runs/final --prompts_file prompts.txt --batch 8 --out out
    python SD_ImageGen.py --model v1-5-pruned.safetensors --prompt "a lighthouse" --sampler dpmpp_2m_karras --steps 25
    python SD_ImageGen.py --model sd15_folder --prompt "the same in winter" --init_image house.jpg --strength 0.6

Picture i is drawn from seed + i by a CPU generator of its own, so it is the same whatever the batch, and nearly the
same on every device. PNGs carry their settings; several pictures also come as grid.png. Prompts may be of any length:
they are encoded in chunks of 75 tokens, joined along the sequence.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

import SD_Convert
import SD_Kernels
from SD_Model import InputError, NoiseSchedule, TextEncoder, UNet, UNetConfig, run_cli
from SD_Samplers import SAMPLERS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Dense bf16 FLOP/s of tensor cores, from the makers' data sheets, for MFU.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12, "3090": 71e12}


def pick_device(name: str | None) -> torch.device:
    """The named device, else CUDA, else Apple MPS, else the CPU. InputError if the named one is absent."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind = name.split(":")[0]
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not present.get(kind):
        raise InputError(f"--device {name} was wanted, and this machine has {[k for k, v in present.items() if v]}")
    device = torch.device(name)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # kernels and streams are the current device's
    return device


def layout(device: torch.device) -> torch.memory_format:
    """The memory format that convolutions are fastest in."""
    return torch.channels_last if device.type == "cuda" else torch.preserve_format


def fast(unet, device: torch.device, dtype: torch.dtype):
    """A UNet on its device to sample from, its weights final, with the fused kernels where they run."""
    unet = unet.to(device, dtype, memory_format=layout(device))
    return SD_Kernels.settle(SD_Kernels.apply(unet)) if SD_Kernels.available(device) else unet


def peak_flops(device: torch.device) -> float | None:
    """Of the card, if it is in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for card, flops in PEAK_FLOPS.items() if card in name), None)


def count_flops(function, *shapes: tuple[int, ...]) -> int:
    """FLOPs of function() on tensors of these shapes, counted by torch on the meta device; modules that the function
    makes are made there."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        function(*(torch.empty(shape) for shape in shapes))
    return counter.get_total_flops()


def unet_flops(config: UNetConfig, latent: tuple[int, int, int], tokens: int) -> int:
    """Of one latent through the UNet; with the backward pass three times that."""
    return count_flops(lambda *x: UNet(config)(*x), (1, *latent), (1,), (1, tokens, config.context_dim))


def benchmark_facts(device: torch.device, flops: float) -> dict:
    """What every benchmark's line of JSON ends with: MFU at so many FLOP/s, memory, card and versions."""
    cuda, peak = device.type == "cuda", peak_flops(device)
    return {
        "mfu": round(flops / peak, 4) if peak else None,
        "peak_GiB": round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if cuda else None,
        "card": torch.cuda.get_device_name(device) if cuda else device.type,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": SD_Kernels.triton and SD_Kernels.triton.__version__,
    }


@torch.no_grad()
def benchmark(unet, vae, context: torch.Tensor, args, shape: tuple[int, int, int], device, dtype) -> dict:
    """Time args.benchmark steps of DDIM under guidance, args.batch pictures at once, and the VAE's decoder."""
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    started = time.perf_counter()
    call = SD_Kernels.Graphed(unet) if isinstance(unet, SD_Kernels.FusedUNet) else unet
    contexts = torch.stack([context] * args.batch)
    x = torch.randn(args.batch, *shape, device=device)
    model = guided(call, contexts, contexts, args.cfg)
    sampler = make_sampler("ddim", NoiseSchedule("scaled_linear"), {})
    sampler(model, x, 5, randn=lambda x: torch.randn_like(x))
    sync()
    first = time.perf_counter() - started
    started = time.perf_counter()
    sampler(model, x, args.benchmark, randn=lambda x: torch.randn_like(x))
    sync()
    step = (time.perf_counter() - started) / args.benchmark
    vae = vae.to(device, dtype, memory_format=layout(device))
    decode_latents(vae, x.cpu(), args.batch, device, dtype)
    started = time.perf_counter()
    for _ in range(3):
        decode_latents(vae, x.cpu(), args.batch, device, dtype)
    decode = (time.perf_counter() - started) / 3 / args.batch
    rate = (2 if args.cfg not in (0, 1) else 1) * args.batch / step
    return {"batch": args.batch, "latent": list(shape), "cfg": args.cfg, "steps": args.benchmark,
            "ms_per_step": round(step * 1e3, 3), "steps_per_s": round(1 / step, 2),
            "evaluations_per_s": round(rate, 1), "decode_ms_per_picture": round(decode * 1e3, 2),
            "first_steps_s": round(first, 2), "dtype": str(dtype).removeprefix("torch."),
            "kernels": call is not unet,
            **benchmark_facts(device, rate * unet_flops(unet.config, shape, len(context)))}  # fmt: skip


def initial_noise(seeds: list[int], shape: tuple[int, int, int]) -> torch.Tensor:
    """Standard normal noise fp32 [len(seeds), z, h, w] on the CPU, each picture from its own generator."""
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in seeds])


def guided(unet, context, null_context, cfg: float, rescale: float = 0.0):
    """The prediction model(x, t) under classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598).

    null + cfg (text - null), both from one UNet call. cfg 1 is the text alone, cfg 0 the null (or negative) alone.
    rescale, 0 to 1: how far the standard deviation of each picture's prediction is brought back to that of the text's
    alone, which guidance raises (Lin et al. 2023, section 3.4; 0.7 for zero-SNR models).
    context, null_context [B, T, D] have the dtype the UNet runs in; x [B, C, H, W] may be of any.
    """
    one_sided = {1.0: context, 0.0: null_context}.get(float(cfg))
    both = None if one_sided is not None else torch.cat([null_context, context])  # [2B, T, D]

    def model(x: torch.Tensor, t) -> torch.Tensor:
        if one_sided is not None:
            ts = torch.full((len(x),), t, device=x.device)
            return unet(x.to(one_sided.dtype), ts, one_sided).to(x.dtype)
        ts = torch.full((2 * len(x),), t, device=x.device)
        null, text = unet(torch.cat([x, x]).to(both.dtype), ts, both).to(x.dtype).chunk(2)  # each [B, C, H, W]
        pred = null + cfg * (text - null)
        if rescale > 0:
            ratio = text.std(dim=(1, 2, 3), keepdim=True) / pred.std(dim=(1, 2, 3), keepdim=True)  # [B, 1, 1, 1]
            pred = pred * (1 + rescale * (ratio - 1))
        return pred

    return model


def make_sampler(name: str, schedule: NoiseSchedule, settings: dict, strength: float = 1.0):
    """sample(model, x, steps, randn, callback, init) for a sampler's name.

    settings: spacing, offset, set_alpha_to_one, where the model names them; else the sampler's own defaults.
    """
    if name not in SAMPLERS:
        raise InputError(f"--sampler wants one of {', '.join(SAMPLERS)}, found {name!r}")
    options = {k: v for k, v in settings.items() if k != "set_alpha_to_one" or name == "ddim"}
    if schedule.config["zero_terminal_snr"]:  # such a model must start at its last timestep (Lin et al., section 3.3)
        options = {"spacing": "trailing"} | options

    def sample(model, x, steps, randn, callback=None, init=None):
        return SAMPLERS[name](
            model, x, schedule, steps, randn=randn, callback=callback, init=init, strength=strength, **options
        )

    return sample


@torch.no_grad()
def sample_latents(
    unet, contexts, null_contexts, seeds, shape, *, sampler, steps, cfg, batch, device, progress=False, rescale=0.0,
    init=None,
):  # fmt: skip
    """Denoise len(seeds) pictures, `batch` at a time. -> fp32 [N, z, h, w], CPU.

    contexts, null_contexts: N of [T, D], in pairs of one T; pictures of one T share batches. shape (z, h, w) of one
    latent; sampler from make_sampler; init: clean latents [1 or N, z, h, w] to start from, or None.
    """
    lengths = [len(c) for c in contexts]
    groups = [[i for i in range(len(seeds)) if lengths[i] == n] for n in dict.fromkeys(lengths)]
    parts = [group[i : i + batch] for group in groups for i in range(0, len(group), batch)]
    out = torch.empty(len(seeds), *shape)
    with tqdm(total=len(parts) * steps, desc="sampling", unit="step", disable=not progress) as bar:
        for part in parts:
            generators = [torch.Generator().manual_seed(seeds[i]) for i in part]

            def randn(_, generators=generators):
                return torch.stack([torch.randn(shape, generator=g) for g in generators]).to(device)

            x = randn(None)  # the first draw of each picture's generator: initial_noise
            context = torch.stack([contexts[i] for i in part]).to(device)  # [B, T, D]
            null = torch.stack([null_contexts[i] for i in part]).to(device)
            begin = None if init is None else init.expand(len(seeds), *shape)[part].to(device)
            model = guided(unet, context, null, cfg, rescale)
            x = sampler(model, x, steps, randn=randn, callback=lambda *_: bar.update(), init=begin)
            out[part] = x.float().cpu()
    return out


@torch.no_grad()
def decode_latents(vae, latents: torch.Tensor, batch: int, device, dtype=torch.float32) -> np.ndarray:
    """Scaled latents [N, z, h, w] -> uint8 RGB [N, H, W, 3]. InputError if the pictures are not finite."""
    pictures = []
    for part in latents.split(batch):
        images = vae.decode(part.to(device, dtype)).float()  # [B, 3, H, W], -1..1
        if not images.isfinite().all():
            raise InputError(f"the VAE gave non-finite pictures in {dtype}; use --dtype fp32 or bf16")
        images = ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        pictures.append(images.permute(0, 2, 3, 1).cpu().numpy())
    return np.concatenate(pictures)


def chunk_ids(text_encoder, text: str) -> torch.Tensor:
    """Token ids int64 [chunks, max_length]: each chunk start, up to max_length - 2 tokens, end, padding.

    A text that fits into one chunk has the ids that TextEncoder.tokenize gives it.
    """
    tokenizer, length = text_encoder.tokenizer, text_encoder.max_length
    start, *tokens, end = tokenizer(text, verbose=False)["input_ids"]
    rows = []
    for i in range(0, max(len(tokens), 1), length - 2):
        row = [start, *tokens[i : i + length - 2], end]
        rows.append(row + [tokenizer.pad_token_id] * (length - len(row)))
    return torch.tensor(rows, dtype=torch.long)


@torch.no_grad()
def encode_texts(text_encoder, texts: list[str], batch: int = 64) -> list[torch.Tensor]:
    """Contexts, each [chunks x max_length, D], on the encoder's device; each distinct text is encoded once."""
    chunks = {text: chunk_ids(text_encoder, text) for text in texts}
    ids = torch.cat(list(chunks.values())).to(text_encoder.model.device)
    states = torch.cat([text_encoder(part) for part in ids.split(batch)])  # [all chunks, max_length, D]
    parts = states.split([len(rows) for rows in chunks.values()])
    contexts = {text: part.flatten(0, 1) for text, part in zip(chunks, parts)}
    return [contexts[text] for text in texts]


@torch.no_grad()
def encode_pairs(text_encoder, prompts: list[str], negatives: list[str]) -> tuple[list, list]:
    """Contexts of prompts and negatives; the shorter of each pair is padded with chunks of "" to the other's length."""
    contexts = encode_texts(text_encoder, [*prompts, *negatives, ""])
    empty = contexts.pop()

    def padded(context, other):
        return torch.cat([context] + [empty] * ((len(other) - len(context)) // len(empty)))

    pairs = list(zip(contexts[: len(prompts)], contexts[len(prompts) :]))
    return [padded(a, b) for a, b in pairs], [padded(b, a) for a, b in pairs]


def load_picture(path: str, width: int, height: int) -> torch.Tensor:
    """A picture file as fp32 [1, 3, height, width] in -1..1: turned upright, transparency on white, scaled to cover the
    size, the middle kept."""
    try:
        with Image.open(path) as picture:
            picture = ImageOps.exif_transpose(picture).convert("RGBA")
    except (OSError, Image.DecompressionBombError) as e:
        raise InputError(f"--init_image wants a picture, and {path} could not be read as one ({e})") from None
    picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    picture = ImageOps.fit(picture, (width, height), Image.Resampling.LANCZOS)
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


# What A1111 calls the samplers, so that other tools read them back.
SAMPLER_TITLES = {"ddpm": "DDPM", "ddim": "DDIM", "dpmpp_2m": "DPM++ 2M", "dpmpp_2m_karras": "DPM++ 2M Karras",
                  "euler": "Euler", "euler_a": "Euler a", "heun": "Heun"}  # fmt: skip


def parameters_text(settings: dict) -> str:
    """Settings of a picture in A1111's form: prompt, negative prompt, and one line of `name: value` pairs."""
    pairs = {
        "Steps": settings["steps"],
        "Sampler": SAMPLER_TITLES[settings["sampler"]],
        "CFG scale": settings["cfg"],
        "Seed": settings["seed"],
        "Size": "{}x{}".format(*settings["size"]),
        "Model": Path(settings["model"]).stem,
        "CFG rescale": settings.get("cfg_rescale"),
        "Denoising strength": settings.get("strength"),
    }
    pairs = {k: str(v) for k, v in pairs.items() if v is not None}
    pairs = {k: json.dumps(v, ensure_ascii=False) if set(v) & set(',:"\n') else v for k, v in pairs.items()}
    negative = f"Negative prompt: {settings['negative']}\n" if settings["negative"] else ""
    return f"{settings['prompt']}\n{negative}" + ", ".join(f"{k}: {v}" for k, v in pairs.items())


def save_png(path: Path, picture: np.ndarray, settings: dict | None = None):
    """Write uint8 RGB [H, W, 3], with its settings as JSON in the text chunk `sd`; those of one picture also as
    `parameters`, which other tools read."""
    info = PngInfo()
    if settings:
        info.add_itxt("sd", json.dumps(settings, ensure_ascii=False))
        if "prompt" in settings:
            info.add_text("parameters", parameters_text(settings))  # becomes iTXt where Latin-1 does not do
    Image.fromarray(picture).save(path, pnginfo=info)


def read_jobs(args) -> list[dict]:
    """One job a picture: prompt, negative, seed. A prompts file has a prompt a line, or .jsonl objects with `prompt`
    and, if wanted, `negative` and `seed`."""
    if args.benchmark is not None and args.prompts_file is None:
        args.prompt = args.prompt or ""  # the words do not matter
    if (args.prompt is None) == (args.prompts_file is None):
        raise InputError("give either --prompt TEXT or --prompts_file FILE")
    if args.n < 1:
        raise InputError(f"--n wants at least 1 picture a prompt, found {args.n}")
    lines = [{"prompt": args.prompt}]
    if args.prompts_file is not None:
        try:
            text = Path(args.prompts_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise InputError(f"--prompts_file wants a UTF-8 text file, found {args.prompts_file} ({e})") from None
        lines = [{"prompt": line.strip()} for line in text.splitlines() if line.strip()]
        if args.prompts_file.endswith(".jsonl"):
            try:
                lines = [json.loads(line["prompt"]) for line in lines]
                lines = [{k: row[k] for k in ("prompt", "negative", "seed") if k in row} for row in lines]
            except (json.JSONDecodeError, TypeError) as e:
                raise InputError(f"{args.prompts_file} wants one JSON object a line ({e})") from None
        if not lines or any(not isinstance(row.get("prompt"), str) for row in lines):
            raise InputError(f"{args.prompts_file} wants at least one prompt, and in .jsonl a `prompt` on every line")
    jobs = []
    for row in lines:
        for k in range(args.n):
            seed = row["seed"] + k if "seed" in row else args.seed + len(jobs)
            jobs.append({"prompt": row["prompt"], "negative": row.get("negative", args.negative), "seed": seed})
    return jobs


def parse_args(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="a checkpoint or run folder, or any SD 1.x file or folder")
    p.add_argument("--prompt", help="what to paint")
    p.add_argument("--negative", default="", help="what to steer away from")
    p.add_argument("--prompts_file", help=".txt with a prompt a line, or .jsonl with prompt, negative, seed")
    p.add_argument("--steps", type=int, default=50)
    p.add_argument("--cfg", type=float, default=7.5, help="guidance scale; 1: the prompt alone, 0: the negative alone")
    p.add_argument("--seed", type=int, default=0, help="picture i uses seed + i")
    p.add_argument("--n", type=int, default=1, help="pictures a prompt")
    p.add_argument("--batch", type=int, default=4, help="pictures at once; does not change them")
    p.add_argument("--width", type=int, help="pixels, a multiple of 8; default: the size the model was trained at")
    p.add_argument("--height", type=int)
    p.add_argument("--cfg_rescale", type=float, default=0.0, help="0 to 1; 0.7 for zero-SNR models, which burn else")
    p.add_argument("--sampler", default="ddim", help=", ".join(SAMPLERS))
    p.add_argument("--init_image", help="a picture to start from instead of noise")
    p.add_argument("--strength", type=float, default=0.75, help="0 to 1, with --init_image: how much may change")
    p.add_argument("--vae", help="a VAE other than the model's: folder, file or hub name")
    p.add_argument("--text_encoder", help="a text encoder other than the model's: folder or hub name")
    p.add_argument("--weights", choices=["ema", "live"], default="ema")
    p.add_argument("--device", help="cuda, cuda:1, mps or cpu; default: the best there is")
    p.add_argument("--dtype", choices=list(DTYPES), help="default: bf16 on CUDA, fp32 elsewhere")
    p.add_argument("--benchmark", type=int, metavar="STEPS", help="time so many steps with --batch, write nothing")
    p.add_argument("--out", default="out", help="a folder, or a .png for one picture")
    return p.parse_args(argv)


def make_writable(folder: Path):
    """Make the folder and try to write there, before the work and not after it. InputError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as e:
        raise InputError(f"--out wants a folder that can be written, found {folder} ({e.strerror})") from None


def main(argv=None):
    args = parse_args(argv)
    started = time.time()
    device = pick_device(args.device)
    dtype = DTYPES[args.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    jobs = read_jobs(args)
    out = Path(args.out)
    if out.suffix.lower() == ".png" and len(jobs) > 1:
        raise InputError(f"--out {out} names one picture and {len(jobs)} were asked for; give a folder")
    for name in ("batch", "benchmark"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise InputError(f"--{name} wants at least 1, found {getattr(args, name)}")
    if not 0 <= args.cfg_rescale <= 1:
        raise InputError(f"--cfg_rescale wants 0 to 1, found {args.cfg_rescale}")
    model = SD_Convert.open_model(args.model, weights=args.weights)
    print(model.found)
    height = args.height if args.height is not None else model.size
    width = args.width if args.width is not None else model.size
    if not 1 <= args.steps <= model.schedule.steps:
        raise InputError(f"--steps wants 1 to {model.schedule.steps}, found {args.steps}")
    sampler = make_sampler(args.sampler, model.schedule, model.sampling, args.strength)
    if args.init_image is not None:
        if not 0 < args.strength <= 1 or int(args.steps * args.strength) < 1:
            raise InputError(f"--strength wants 0 to 1 and, of {args.steps} steps, at least one; found {args.strength}")
    folder = out.parent if out.suffix.lower() == ".png" else out
    if args.benchmark is None:
        make_writable(folder)

    # Text encoder, UNet and VAE are on the device one after the other, never together.
    vae = model.vae() if args.vae is None else SD_Convert.load_vae(args.vae)
    factor, z = vae.config.factor, vae.config.latent_channels
    if height < factor or width < factor or height % factor or width % factor:
        raise InputError(f"--width and --height want multiples of {factor}, found {width} x {height}")
    init = None
    if args.init_image is not None:
        picture = load_picture(args.init_image, width, height)
        init = vae.to(device, dtype).encode(picture.to(device, dtype)).float().cpu()  # [1, z, h, w]
        vae = vae.cpu()
    text_encoder = model.text_encoder() if args.text_encoder is None else TextEncoder.from_pretrained(args.text_encoder)
    text_encoder = text_encoder.to(device, dtype)
    contexts, nulls = encode_pairs(text_encoder, [j["prompt"] for j in jobs], [j["negative"] for j in jobs])
    del text_encoder
    unet = fast(model.unet(device, dtype), device, dtype)
    if args.benchmark:
        load_s = round(time.time() - started, 2)  # all three networks, and the prompt encoded
        if isinstance(unet, SD_Kernels.FusedUNet):
            SD_Kernels.apply(vae)
        row = benchmark(unet, vae, contexts[0], args, (z, height // factor, width // factor), device, dtype)
        return print(json.dumps({"benchmark": "sample", "model": args.model, "load_s": load_s} | row))
    if isinstance(unet, SD_Kernels.FusedUNet):
        unet, vae = SD_Kernels.Graphed(unet), SD_Kernels.apply(vae)
    latents = sample_latents(
        unet, contexts, nulls, [j["seed"] for j in jobs], (z, height // factor, width // factor), sampler=sampler,
        steps=args.steps, cfg=args.cfg, batch=args.batch, device=device, progress=True, rescale=args.cfg_rescale,
        init=init,
    )  # fmt: skip
    del unet
    pictures = decode_latents(vae.to(device, dtype, memory_format=layout(device)), latents, args.batch, device, dtype)

    common = {"steps": args.steps, "cfg": args.cfg, "sampler": args.sampler, "size": [width, height],
              "weights": args.weights, "model": str(args.model)}  # fmt: skip
    if args.cfg_rescale:
        common["cfg_rescale"] = args.cfg_rescale
    if init is not None:
        common |= {"init_image": args.init_image, "strength": args.strength}
    for i, (job, picture) in enumerate(zip(jobs, pictures)):
        save_png(out if folder != out else out / f"{i:05d}.png", picture, job | common)
    if len(jobs) > 1:
        save_png(out / "grid.png", grid(pictures), common | {"prompts": [j["prompt"] for j in jobs]})
    print(f"{len(jobs)} pictures of {width} x {height} in {time.time() - started:.1f} s: {out}")


if __name__ == "__main__":
    run_cli(main)
