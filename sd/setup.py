"""What a run is made of, opened and checked before its first step: encoders, data, weights, folder."""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from sd.checkpoints import Progress, load_optimizer, load_weights
from sd.data import Batch, LatentStore, Split, parse_sources, read_manifest, validation_batches
from sd.device import Place
from sd.errors import InputError
from sd.files import absolute, read_json, sha256
from sd.fused import apply
from sd.kernels import available
from sd.lora import average_of, describe, inject, settle_base
from sd.networks import unet_config
from sd.objective import Denoiser, in_autocast
from sd.optim import describe_optimizer, make_optimizer
from sd.sharding import Shard
from sd.text import load_tokenizer, tokenizer_hash
from sd.weights.read import (
    Model,
    base_differs,
    base_gone,
    is_gone,
    load_vae,
    named_text_encoder,
    newest_checkpoint,
    null_of,
    open_model,
)
from SD_Model import PRESETS, TextEncoder, UNet, weights_hash


def git_revision() -> str:
    try:
        here = Path(__file__).resolve().parent
        return subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def load_text_encoder(settings: dict, checkpoint: Path | None, init_from: str | None = None) -> TextEncoder:
    """find_text_encoder, whose output must be as wide as the UNet's context; if it is trained, without a head."""
    encoder, wanted = find_text_encoder(settings, checkpoint, init_from), unet_config(settings).context_dim
    if encoder.context_dim != wanted:
        raise InputError(
            f"the UNet attends to a context {wanted} wide, and the text encoder {settings['text_encoder']} gives "
            f"{encoder.context_dim}: name another encoder, or for a new network add --unet "
            f"context_dim={encoder.context_dim}"
        )
    encoder = null_of(encoder, settings["null"])
    return encoder.without_head() if settings["train_text_encoder"] else encoder


def text_encoder_of(path: str) -> str:
    """Where the text encoder of a model is, for --text_encoder: of this project's checkpoints the one that they name,
    else the model itself."""
    folder = newest_checkpoint(Path(path)) if (Path(path) / "checkpoints").is_dir() else Path(path)
    if (folder / "model.json").is_file():
        values = read_json(folder / "model.json")
        own = [folder / "text_encoder_ema", folder / values["text_encoder"]]  # the latter may be a path, or a hub name
        if "base" not in values:
            return next((str(p.resolve()) for p in own if p.is_dir()), values["text_encoder"])
    return absolute(str(folder))


def find_text_encoder(settings: dict, checkpoint: Path | None, init_from: str | None = None) -> TextEncoder:
    """The checkpoint's, if trained there; else --text_encoder, a fresh one for --tokenizer, that of the model that the
    run starts from, or the preset's default."""
    if checkpoint is not None and (checkpoint / "text_encoder").is_dir():
        return TextEncoder.from_pretrained(str(checkpoint / "text_encoder"))
    text = PRESETS[settings["model"]]["text"]
    if settings["text_encoder"] is None and settings["tokenizer"] is not None:
        if text is None:
            raise InputError(f"preset {settings['model']} has no text encoder of its own; give --text_encoder")
        if not settings["train_text_encoder"]:
            raise InputError("--tokenizer starts a fresh text encoder, which must be trained: add --train_text_encoder")
        return TextEncoder.new(text, load_tokenizer(settings["tokenizer"]))
    if settings["text_encoder"] is None and init_from is not None:
        settings["text_encoder"] = text_encoder_of(init_from)
    if settings["text_encoder"] is None:
        if text is not None:
            raise InputError(
                f"preset {settings['model']} wants a text encoder: --text_encoder FOLDER, or --tokenizer FOLDER "
                "--train_text_encoder for a fresh one"
            )
        settings["text_encoder"] = "openai/clip-vit-large-patch14"
    return named_text_encoder(settings["text_encoder"])


class Data(NamedTuple):
    train: Split
    val: Split
    weights: list[float] | None  # of the sources; None: in proportion to their pictures
    vae: dict  # name, hash and config of the VAE that made the latents
    hashes: dict[str, str]  # sha256 of each manifest
    stores: dict[str, LatentStore]  # by the sources' folders of latents


def load_data(settings: dict, text_encoder: TextEncoder, pretouch: bool) -> Data:
    """Datasets and latents of a run. Refuses those that do not fit it: another size, VAE, scale or tokenizer. Where the
    texts have fewer ids than the text encoder takes, it takes no more from here on."""
    sources, channels = parse_sources(settings), unet_config(settings).in_channels
    manifests = [read_manifest(s.dataset, "the dataset", ("tokenizer_hash", "counts")) for s in sources]
    lengths = [m.get("max_length", text_encoder.max_length) for m in manifests]
    for s, length in zip(sources, lengths):
        if length != lengths[0]:
            raise InputError(
                f"the texts of {sources[0].dataset} have {lengths[0]} ids and those of {s.dataset} {length}; tokenise "
                "both with the same --max_length (04, 05)"
            )
        if length > text_encoder.max_length:
            raise InputError(
                f"the texts of {s.dataset} have {length} ids, and the text encoder takes {text_encoder.max_length}; "
                f"tokenise again with --max_length {text_encoder.max_length} (04, 05)"
            )
    text_encoder.shorten(lengths[0])
    for s, manifest in zip(sources, manifests):
        found = manifest["tokenizer_hash"]
        if found != tokenizer_hash(text_encoder.tokenizer):
            raise InputError(
                f"the ids in {s.dataset} come from another tokenizer than the text encoder's; tokenise again (04, 05)"
            )
    stores = [LatentStore(s.latents, pretouch) for s in sources]
    first = stores[0].manifest
    for s, store in zip(sources, stores):
        m = store.manifest
        if m["size"] != settings["size"]:
            own = s.latents.with_name(f"latents_{settings['size']}")
            hint = "" if settings["dataset"] or own == s.latents else f"; {own}, which would be taken, is not there"
            raise InputError(
                f"latents of {settings['size']} px were wanted, and those in {s.latents} are of {m['size']}{hint}"
            )
        if not m["scaled"]:
            raise InputError(f"scaled latents were wanted, and {s.latents} says they are not; encode them again")
        if m["vae"]["hash"] != first["vae"]["hash"] or m["kind"] != first["kind"]:
            raise InputError(f"{s.latents} and {sources[0].latents} were made by different VAEs or settings")
        z, h, w = m.get("latent_shape") or min(store.shapes, default=(channels, 0, 0))
        stored = 2 * z if m["kind"] == "moments" else z
        wanted = {(stored, h * a // m["size"], w * b // m["size"]) for a, b in m.get("buckets") or [[m["size"]] * 2]}
        if z != channels or not store.shapes <= wanted:
            raise InputError(
                f"latents of {channels} channels were wanted in {s.latents}; its manifest says {sorted(wanted)} and "
                f"its arrays are {sorted(store.shapes)}; encode them again"
            )
    weights = [s.weight for s in sources] if sources[0].weight is not None else None
    train = Split(sources, stores, "train", settings["latent_fraction"])
    val = Split([s._replace(cap=None) for s in sources], stores, "val", 1.0)
    for s, n in zip(sources, train.sizes):
        if n == 0:
            raise InputError(
                f"no picture of {s.dataset} has a latent in {s.latents}; were both made from the same shards?"
            )
    hashes = {}
    for s in sources:
        for what, folder in (("dataset", s.dataset), ("latents", s.latents)):  # whatever the two folders are called
            name = what if settings["dataset"] else str(Path(s.name) / what)
            hashes[name] = sha256(folder / "manifest.json")
    return Data(train, val, weights, first["vae"], hashes, {str(s.latents): x for s, x in zip(sources, stores)})


def describe_data(data: Data, settings: dict, say):
    """Say how many pictures there are, which sources have no held-out ones, and what then is validated on."""
    train, val = data.train, data.val
    say(f"data: {len(train):,} training and {len(val):,} held-out pictures; {train.missing + val.missing:,} without a "
        f"latent, {train.unreadable:,} unreadable latent files")  # fmt: skip
    if train.several:
        say(f"captions: {len(train.ids):,} of the {len(train):,} training pictures; each showing draws one")
    names = [s.name for s in parse_sources(settings)]
    empty = [name for name, n in zip(names, data.val.sizes) if n == 0]
    if empty and settings["val_steps"]:
        rest = [name for name in names if name not in empty]
        say(f"note: no held-out pictures in {', '.join(empty)}; validation is on "
            f"{'those of ' + ', '.join(rest) if rest else 'training pictures alone'}")  # fmt: skip


def vae_of_latents(settings: dict, vae_info: dict):
    """The VAE for sample grids; it must be the one the latents were made with."""
    name = settings["vae"] or vae_info["name"]
    vae = load_vae(name)
    if weights_hash(vae) != vae_info["hash"]:
        raise InputError(
            f"the latents were made with another VAE than {name}; give theirs ({vae_info['name']}) with --vae"
        )
    return vae


def make_denoiser(unet: UNet, text_encoder: TextEncoder | None, settings: dict) -> Denoiser:
    """What is trained, on the CPU: the UNet, the text encoder too if asked; with --lora adapters beside them."""
    denoiser = Denoiser(unet, text_encoder if settings["train_text_encoder"] else None)
    if settings["lora"]:
        inject(denoiser, settings)
    return denoiser


def open_weights(path, weights: str, net: Denoiser, settings: dict, vae_hash: str) -> Model:
    """A model's weights, 'live' or 'ema', into a Denoiser. InputError if they do not fit the run."""
    source = open_model(path, weights=weights)
    config, state = source.unet_state()
    if config != net.unet.config:
        raise InputError(f"{path} holds a UNet of {config}, and the preset wants {net.unet.config}")
    if source.schedule.prediction != settings["prediction"]:
        raise InputError(
            f"{path} predicts {source.schedule.prediction}, and this run {settings['prediction']}; add --prediction "
            f"{source.schedule.prediction}"
        )
    if source.null != settings["null"]:
        raise InputError(
            f"{path} was trained with the null condition {source.null}, and this run has {settings['null']}; add "
            f"--null {source.null}"
        )
    if source.lineage.get("vae", vae_hash) != vae_hash:
        raise InputError(
            f"{path} was trained on the latents of another VAE than this run's; encode the pictures with its VAE, or "
            "start without --init_from"
        )
    net.unet.load_state_dict(state)
    if net.text_encoder is not None and net.adapters is None:
        net.text_encoder.load_state_dict(source.text_encoder().state_dict())
    return source


def open_base(args, denoiser: Denoiser, settings: dict, vae_hash: str, checkpoint, say) -> tuple[dict, list[dict]]:
    """The weights that adapters stand beside, into a Denoiser: those of --init_from, or those that the checkpoint
    names, which must be the same. Returns what model.json says of them (path, hash of the UNet, 'live' or 'ema'), and
    the lineage that a new run continues."""
    if checkpoint is None:
        weights, before = "live" if args.init_weights == "live" else "ema", None
        folder = Path(args.init_from)  # of a run, another checkpoint may be the newest tomorrow
        paths = [newest_checkpoint(folder) if (folder / "checkpoints").is_dir() else args.init_from]
    else:
        before = read_json(checkpoint / "model.json")["base"]
        weights, paths = before["weights"], [p for p in (before["path"], args.init_from) if p and not is_gone(p)]
        if not paths:
            raise InputError(base_gone(checkpoint, before["path"]))
    for path in paths:
        source = open_weights(path, weights, denoiser, settings, vae_hash)
        found = {"path": absolute(str(path)), "weights": weights, "hash": weights_hash(denoiser.unet)}
        if before is None or found["hash"] == before["hash"]:
            break
    else:
        raise InputError(base_differs(checkpoint, paths[0]))
    say(source.found)
    lineage = source.lineage.get("lineage") or [{"phase": "import", "path": found["path"]}]
    lineage[-1]["hash"] = found["hash"]
    return found, lineage


def init_weights(args, denoiser: Denoiser, ema: Denoiser, settings: dict, vae_hash: str, say) -> list[dict]:
    """Weights of --init_from into live and EMA; returns the lineage that the new run continues."""
    wanted = {"same": ("live", "ema"), "ema": ("ema", "ema"), "live": ("live", "live")}[args.init_weights]
    for net, weights in list(zip((denoiser, ema), wanted))[: 1 if ema is denoiser else 2]:
        source = open_weights(args.init_from, weights, net, settings, vae_hash)
    say(source.found)
    lineage = source.lineage.get("lineage") or [{"phase": "import", "path": str(args.init_from)}]
    lineage[-1]["hash"] = weights_hash(ema.unet)  # of the parent's weights, so that it can be found again
    return lineage


@dataclass
class Trained:
    """What training changes: live weights, their average (with --no_ema the live weights themselves), the optimizer's
    state, and where it stands."""

    denoiser: Denoiser
    ema: Denoiser
    optimizer: torch.optim.Optimizer
    progress: Progress
    base: dict | None = None  # of adapters: what model.json says of the weights that they stand beside
    shard: Shard | None = None  # where the optimizer has this process's part alone, and the average is in such parts


def fresh_unet(args, settings: dict, device: torch.device) -> UNet:
    """A new UNet of the preset on the CPU, with the fused kernels where they run; fills in settings["kernels"]. Weights
    are drawn from the seed, so that every device and rank starts alike."""
    torch.manual_seed(settings["seed"])
    unet = UNet(unet_config(settings), settings["zero_init"])
    if args.compress_gradients and device.type != "cuda":
        raise InputError(f"--compress_gradients wants NVIDIA GPUs, found {device}; drop the flag")
    if args.kernels and not available(device):
        raise InputError(f"--kernels wants an NVIDIA GPU of 2020 or later and Triton, found {device}; drop the flag")
    if args.kernels is None:  # also on resume, which may be on another machine
        settings["kernels"] = available(device)
    return apply(unet) if settings["kernels"] else unet


def open_trained(args, settings: dict, denoiser: Denoiser, data: Data, checkpoint, saved, place: Place, say) -> Trained:
    """Weights, optimizer and progress on the device: from the checkpoint, from --init_from, or fresh."""
    base, lineage, memory = None, [], memory_format(settings)
    if settings["lora"]:
        base, lineage = open_base(args, denoiser, settings, data.vae["hash"], checkpoint, say)
        say(describe(denoiser, settings))
        settle_base(denoiser, settings)
    ema = denoiser if settings["no_ema"] else average_of(denoiser)
    if checkpoint:
        load_weights(checkpoint, denoiser, ema)
        progress = Progress.resumed(saved, place.rank)
    else:
        progress = Progress(lineage=lineage)
        if args.init_from and not base:
            progress.lineage = init_weights(args, denoiser, ema, settings, data.vae["hash"], say)
        progress.lineage.append({"phase": settings["phase"], "data": data.hashes, "images": 0,
                                 "revision": git_revision(), "torch": torch.__version__})  # fmt: skip
    shared = settings["shard"] and place.world > 1
    early = torch.device("cpu") if shared else place.device  # so that no device ever holds all of what is cut
    ema.to("cpu" if settings["ema_on_cpu"] else early, memory_format=memory)
    denoiser.to(early, memory_format=memory).train()
    optimizer, shard = make_optimizer(denoiser, settings), None
    if checkpoint:
        load_optimizer(checkpoint, optimizer)
    say(describe_optimizer(optimizer, denoiser, settings))
    if shared:
        denoiser.to(place.device, memory_format=memory)
        shard = Shard(optimizer, {} if ema is denoiser else averages_of(denoiser, ema), place)
        ema.to(place.device)  # what it has beside parameters
        say(f"shard: each of {place.world} processes keeps that, and the average, of its own part of the weights; the "
            f"first one's has {shard.ends[1]:,} of {shard.ends[-1]:,} numbers")  # fmt: skip
    return Trained(denoiser, ema, optimizer, progress, base, shard)


def averages_of(denoiser: Denoiser, ema: Denoiser) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
    """Of each trained weight."""
    return {p: average for p, average in zip(denoiser.parameters(), ema.parameters()) if p.requires_grad}


def memory_format(settings: dict) -> torch.memory_format:
    return torch.channels_last if settings["channels_last"] else torch.contiguous_format


def text_for(text_encoder: TextEncoder, settings: dict, device: torch.device):
    """text_of(ids): what the denoiser wants of token ids [B, L]. These, if it trains the text encoder, else the frozen
    encoder's context [B, L, D]."""
    encode = in_autocast(text_encoder, device, settings["dtype"])

    @torch.no_grad()
    def text_of(ids: torch.Tensor) -> torch.Tensor:
        return ids if settings["train_text_encoder"] else encode(ids)

    return text_of


def fixed_batches(val: Split, train: Split, settings: dict, steps: int, say) -> dict[str, list[Batch]]:
    """What is validated on: batches of held-out and of training pictures, by split; none of a split without any."""
    batches = {
        name: validation_batches(split, settings["val_images"], name, settings["seed"], steps, say)
        for name, split in (("val", val), ("train", train)) if len(split) and settings["val_steps"]
    }  # fmt: skip
    return {name: part for name, part in batches.items() if part}
