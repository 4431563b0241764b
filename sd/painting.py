"""From text to pictures: prompts to contexts, guided sampling, decoding."""

import copy
import sys
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from sd.data import Split, validation_index
from sd.device import layout
from sd.errors import InputError
from sd.fused import apply, settle
from sd.kernels import available
from sd.objective import Denoiser, in_autocast
from sd.pictures import grid, save_png
from sd.samplers import SAMPLERS
from SD_Model import NoiseSchedule


def fast(unet, device: torch.device, dtype: torch.dtype):
    """A UNet on its device to sample from, its weights final, with the fused kernels where they run."""
    unet = unet.to(device, dtype, memory_format=layout(device))
    return settle(apply(unet)) if available(device) else unet


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
    if not latents.isfinite().all():
        raise InputError("the UNet gave latents that are not finite, or its weights are not; the VAE was not asked")
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


def sample_prompts(settings: dict, split: Split) -> list[str]:
    """--sample_prompts, or eight captions of the split."""
    if settings["sample_prompts"] is None:
        return split.captions.take(validation_index(split, 8, "val", settings["seed"])).to_pylist()
    try:
        lines = Path(settings["sample_prompts"]).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(
            f"--sample_prompts wants a UTF-8 text file, found {settings['sample_prompts']} "
            f"({getattr(e, 'strerror', None) or e})"
        ) from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"--sample_prompts wants a prompt a line, and {settings['sample_prompts']} is empty")
    return prompts


def sample_grid(path: Path, ema: Denoiser, text_encoder, vae, schedule, prompts: list[str], settings: dict, device):
    """Write a grid of pictures: fixed prompts and seeds, EMA weights. A picture that fails stops no training."""
    encoder = ema.text_encoder or text_encoder
    f, z = vae.config.factor, vae.config.latent_channels
    try:
        contexts, nulls = encode_pairs(encoder, prompts, [""] * len(prompts))
        latents = sample_latents(
            in_autocast(ema.unet, device, settings["dtype"]),
            contexts,
            nulls,
            list(range(len(prompts))),
            (z, settings["size"] // f, settings["size"] // f),
            sampler=make_sampler("ddim", schedule, {}),
            steps=30,
            cfg=settings["sample_cfg"],
            batch=4,  # memory beside that of training is scarce
            device=device,
        )
        decoder = copy.deepcopy(vae).to(device)  # the VAE itself may be on its way to a checkpoint
        pictures = decode_latents(decoder, latents, 2, device)
        save_png(path, grid(pictures, columns=4), {"prompts": prompts})
    except (OSError, InputError, torch.OutOfMemoryError) as e:  # a full disk, NaN, a full card
        print(f"\nwarning: {path} was not written ({e})", file=sys.stderr)
