"""From text to pictures: prompts to contexts, guided sampling, decoding."""

import copy
import inspect
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from sd.data import Split, validation_index
from sd.device import layout
from sd.errors import InputError
from sd.fused import FusedUNet, apply, settle
from sd.graphs import Graphed
from sd.kernels import available
from sd.objective import Denoiser, in_autocast
from sd.output import save_png
from sd.pictures import grid, read_picture
from sd.prompts import Parsed, prompt_chunks, read_prompts, unparsed, weigh
from sd.samplers import SAMPLERS
from SD_Model import NoiseSchedule


def fast(unet, device: torch.device, dtype: torch.dtype):
    """A UNet on its device to sample from, its weights final, with the fused kernels where they run."""
    unet = unet.to(device, dtype, memory_format=layout(device))
    return settle(apply(unet)) if available(device) else unet


def at_full_speed(unet, vae, device: torch.device, dtype: torch.dtype) -> tuple:
    """A UNet and a VAE on their device to paint with, their weights final: fused, the UNet's passes as CUDA graphs,
    where the kernels run."""
    unet = fast(unet, device, dtype)
    if isinstance(unet, FusedUNet):
        unet, vae = Graphed(unet), apply(vae)
    return unet, vae.to(device, dtype, memory_format=layout(device))


def encoded_at_once(batch: int) -> int:
    """How many prompts are encoded together: whole batches, so that memory does not grow with the prompts' number."""
    return batch * max(1, 64 // batch)


def initial_noise(seeds: list[int], shape: tuple[int, int, int]) -> torch.Tensor:
    """Standard normal noise fp32 [len(seeds), z, h, w] on the CPU, each picture from its own generator."""
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in seeds])


def guided(unet, context, null_context, cfg: float, rescale: float = 0.0):
    """The prediction model(x, t) under classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598).

    null + cfg (text - null), both from one UNet call, or two where their lengths differ. cfg 1 is the text alone,
    cfg 0 the null (or negative) alone.
    rescale, 0 to 1: how far the standard deviation of each picture's prediction is brought back to that of the text's
    alone, which guidance raises (Lin et al. 2023, section 3.4; 0.7 for zero-SNR models).
    context [B, T, D], null_context [B, T', D] have the dtype the UNet runs in; x [B, C, H, W] may be of any.
    """
    one_sided = {1.0: context, 0.0: null_context}.get(float(cfg))
    alike = context.shape == null_context.shape
    both = torch.cat([null_context, context]) if one_sided is None and alike else None  # [2B, T, D]

    def model(x: torch.Tensor, t) -> torch.Tensor:
        def alone(side: torch.Tensor) -> torch.Tensor:
            return unet(x.to(side.dtype), torch.full((len(x),), t, device=x.device), side).to(x.dtype)

        if one_sided is not None:
            return alone(one_sided)
        if both is None:
            null, text = alone(null_context).clone(), alone(context)  # a graph's output is the next call's too
        else:
            ts = torch.full((2 * len(x),), t, device=x.device)
            null, text = unet(torch.cat([x, x]).to(both.dtype), ts, both).to(x.dtype).chunk(2)  # each [B, C, H, W]
        pred = null + cfg * (text - null)
        if rescale > 0:
            ratio = text.std(dim=(1, 2, 3), keepdim=True) / pred.std(dim=(1, 2, 3), keepdim=True)  # [B, 1, 1, 1]
            pred = pred * (1 + rescale * (ratio - 1))
        return pred

    return model


def sampler_options(name: str, schedule: NoiseSchedule, settings: dict) -> dict:
    """Of spacing, offset, set_alpha_to_one and timesteps, where the model or the user names them, those the sampler
    has; spacing always. InputError for an unknown sampler."""
    if name not in SAMPLERS:
        raise InputError(f"--sampler wants one of {', '.join(SAMPLERS)}, found {name!r}")
    options = {k: v for k, v in settings.items() if k not in ("set_alpha_to_one", "timesteps") or name == "ddim"}
    if schedule.config["zero_terminal_snr"]:  # such a model must start at its last timestep (Lin et al., section 3.3)
        options = {"spacing": "trailing"} | options
    own = inspect.signature(SAMPLERS[name]).parameters.get("spacing")
    return options if own is None else {"spacing": own.default} | options


def make_sampler(name: str, schedule: NoiseSchedule, settings: dict, strength: float = 1.0):
    """sample(model, x, steps, randn, callback, init) for a sampler's name.

    settings: spacing, offset, set_alpha_to_one, timesteps, where they are named; else the sampler's own defaults.
    """
    options = sampler_options(name, schedule, settings)

    def sample(model, x, steps, randn, callback=None, init=None):
        return SAMPLERS[name](
            model, x, schedule, steps, randn=randn, callback=callback, init=init, strength=strength, **options
        )

    return sample


@torch.no_grad()
def sample_batches(
    unet, contexts, null_contexts, seeds, shape, *, sampler, steps, cfg, batch, device, watch=None, rescale=0.0,
    init=None, wanted=None,
):  # fmt: skip
    """Denoise len(seeds) pictures, `batch` at a time: yields indices and fp32 [B, z, h, w], CPU, as they are done.

    contexts, null_contexts: N of [T, D] and [T', D]; pictures of one T and T' share batches. shape (z, h, w) of one
    latent; sampler from make_sampler; init: clean latents [1 or N, z, h, w] to start from, or None. watch(b) is called
    after each step of b pictures. wanted: a set of indices: batches without any of them are left out; None: all.
    """
    lengths = [(len(c), len(n)) for c, n in zip(contexts, null_contexts)]
    groups = [[i for i in range(len(seeds)) if lengths[i] == n] for n in dict.fromkeys(lengths)]
    for part in (group[i : i + batch] for group in groups for i in range(0, len(group), batch)):
        if wanted is not None and wanted.isdisjoint(part):
            continue
        generators = [torch.Generator().manual_seed(seeds[i]) for i in part]

        def randn(_, generators=generators):
            return torch.stack([torch.randn(shape, generator=g) for g in generators]).to(device)

        x = randn(None)  # the first draw of each picture's generator: initial_noise
        context = torch.stack([contexts[i] for i in part]).to(device)  # [B, T, D]
        null = torch.stack([null_contexts[i] for i in part]).to(device)
        begin = None if init is None else init.expand(len(seeds), *shape)[part].to(device)
        model = guided(unet, context, null, cfg, rescale)
        after = None if watch is None else lambda *_, part=part: watch(len(part))
        x = sampler(model, x, steps, randn=randn, callback=after, init=begin)
        yield part, x.float().cpu()


def sample_latents(unet, contexts, null_contexts, seeds, shape, **options) -> torch.Tensor:
    """sample_batches' pictures in order, all at once: fp32 [N, z, h, w], CPU."""
    out = torch.empty(len(seeds), *shape)
    for part, x in sample_batches(unet, contexts, null_contexts, seeds, shape, **options):
        out[part] = x
    return out


def load_picture(path: str, width: int, height: int) -> torch.Tensor:
    """A picture file as fp32 [1, 3, height, width] in -1..1: scaled to cover the size, the middle kept."""
    picture = ImageOps.fit(Image.fromarray(read_picture(path)), (width, height), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float() / 127.5 - 1  # [1, 3, H, W]


@torch.no_grad()
def decode_latents(vae, latents: torch.Tensor, batch: int, device, dtype=torch.float32) -> np.ndarray:
    """Scaled latents [N, z, h, w] -> uint8 RGB [N, H, W, 3]. InputError if latents or pictures are not finite."""
    if not latents.isfinite().all():
        raise InputError("the UNet gave latents that are not finite, or its weights are not: try --dtype fp32 or bf16")
    pictures = []
    for part in latents.split(batch):
        images = vae.decode(part.to(device, dtype)).float()  # [B, 3, H, W], -1..1
        if not images.isfinite().all():
            raise InputError(f"the VAE gave non-finite pictures in {dtype}; use --dtype fp32 or bf16")
        images = ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        pictures.append(images.permute(0, 2, 3, 1).cpu().numpy())
    return np.concatenate(pictures)


def chunk_ids(text_encoder, text: str) -> torch.Tensor:
    """Token ids int64 [chunks, max_length] of a text without syntax: each chunk start, up to max_length - 2 tokens,
    end, padding. A text that fits into one chunk has the ids that TextEncoder.tokenize gives it."""
    return prompt_chunks(text_encoder, text)[0]


@torch.no_grad()
def encode_texts(text_encoder, texts: list[str | Parsed], batch: int = 64, long_prompts: str = "padded") -> list:
    """Contexts, each [chunks x max_length, D], on the encoder's device; each distinct text is encoded once.

    texts: plain ones, or weighted ones from parse_prompt; long_prompts: how they are cut, one of LONG_PROMPTS.
    """
    texts = [unparsed(text) if isinstance(text, str) else text for text in texts]
    chunks = {text: prompt_chunks(text_encoder, text, long_prompts) for text in texts}
    ids = torch.cat([ids for ids, _ in chunks.values()]).to(text_encoder.model.device)
    states = torch.cat([text_encoder(part) for part in ids.split(batch)])  # [all chunks, max_length, D]
    parts = states.split([len(ids) for ids, _ in chunks.values()])
    contexts = {text: weigh(part, chunks[text][1].to(part.device)).flatten(0, 1) for text, part in zip(chunks, parts)}
    return [contexts[text] for text in texts]


@torch.no_grad()
def encode_pairs(text_encoder, prompts: list, negatives: list, long_prompts: str = "padded") -> tuple[list, list]:
    """Contexts of prompts and negatives, as encode_texts takes them; 'padded' gives the shorter of each pair chunks of
    "" to the other's length."""
    contexts = encode_texts(text_encoder, [*prompts, *negatives, ""], long_prompts=long_prompts)
    empty = contexts.pop()
    pairs = list(zip(contexts[: len(prompts)], contexts[len(prompts) :]))
    if long_prompts != "padded":
        return [a for a, _ in pairs], [b for _, b in pairs]

    def padded(context, other):
        return torch.cat([context] + [empty] * ((len(other) - len(context)) // len(empty)))

    return [padded(a, b) for a, b in pairs], [padded(b, a) for a, b in pairs]


def decode_each(vae, latents: torch.Tensor, device, dtype) -> tuple[list, InputError | None]:
    """One batch's pictures, uint8 [H, W, 3] each, None for those that fail, and why."""
    try:
        return list(decode_latents(vae, latents, len(latents), device, dtype)), None
    except InputError as e:
        if len(latents) == 1:
            return [None], e
        return [decode_each(vae, x[None], device, dtype)[0][0] for x in latents], e


def paint_batches(unet, vae, contexts, null_contexts, seeds, shape, *, device, dtype, **options):
    """sample_batches' pictures decoded: yields the index and the uint8 RGB [H, W, 3] of each as its batch is done.
    InputError for one that fails, behind the others of its batch."""
    for part, latents in sample_batches(unet, contexts, null_contexts, seeds, shape, device=device, **options):
        pictures, reason = decode_each(vae, latents, device, dtype)
        yield from ((i, picture) for i, picture in zip(part, pictures) if picture is not None)
        if reason is not None:
            failed = next(i for i, picture in zip(part, pictures) if picture is None)
            raise InputError(f"the picture of seed {seeds[failed]} failed: {reason}")


def sample_prompts(settings: dict, split: Split) -> list[str]:
    """--sample_prompts, or eight captions of the split."""
    if settings["sample_prompts"] is None:
        return split.captions.take(validation_index(split, 8, "val", settings["seed"])).to_pylist()
    try:
        return [row["prompt"] for row in read_prompts(settings["sample_prompts"])]
    except InputError as e:
        raise InputError(f"--sample_prompts wants a file of prompts: {e}") from None


def sample_grid(path: Path, ema: Denoiser, text_encoder, vae, schedule, prompts: list[str], settings: dict, device):
    """Write a grid of pictures, each above its prompt: fixed prompts and seeds, EMA weights. One that fails stops no
    training."""
    encoder = ema.text_encoder or text_encoder
    f, z = vae.config.factor, vae.config.latent_channels
    try:
        encoder_dtype = settings["weights_dtype"]  # of one whose weights are in bf16, with --no_ema
        with torch.autocast(device.type, torch.bfloat16, enabled=encoder_dtype == "bf16"):
            pairs = encode_pairs(encoder, prompts, [""] * len(prompts))
        contexts, nulls = ([context.to(device) for context in some] for some in pairs)  # --cache_text: from the CPU
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
        save_png(path, grid(pictures, columns=4, labels=prompts), {"prompts": prompts})
    except (OSError, InputError, torch.OutOfMemoryError) as e:  # a full disk, NaN, a full card
        print(f"\nwarning: {path} was not written ({e})", file=sys.stderr)
