"""Any SD 1.x model opened: a run or checkpoint of this project, a diffusers folder, a single file."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sd.errors import InputError
from sd.files import read_json
from sd.weights.configs import (
    CLIP_TEXT_SETTINGS,
    infer_clip_config,
    infer_unet_config,
    schedule_from_folder,
    unet_config_from_folder,
    vae_config_from_folder,
)
from sd.weights.names import ema_name, shapes_of
from sd.weights.parts import DEFAULT_VAE, fetch, own_description, vae_from_file, vae_from_tensors
from sd.weights.tensors import (
    IGNORED,
    build,
    fit,
    fit_unet,
    fit_vae,
    guess_cause,
    read_tensors,
    short,
    tensors_only,
    weights_file,
)
from sd.weights.text import (
    DEFAULT_TEXT_ENCODER,
    clip_from_tensors,
    load_clip_folder,
    load_tokenizer,
    tokenizer_from_text,
)
from SD_Model import VAE, NoiseSchedule, TextEncoder, UNet, UNetConfig, VAEConfig, config_from_dict, weights_hash

WORDS = {"ema": "EMA", "live": "live"}


def load_vae(source: str | Path = DEFAULT_VAE) -> VAE:
    """A VAE in fp32 on the CPU, eval, without gradients.

    source: a folder written by save_vae, a checkpoint or run folder of this project, a diffusers VAE folder or a whole
    diffusers model, a standalone or full single file, or a hub name. Raises InputError.
    """
    path = fetch(str(source), ["config.json", "diffusion_pytorch_model.safetensors", "vae/*.json",
                               "vae/diffusion_pytorch_model.safetensors"])  # fmt: skip
    if path.is_file():
        return vae_from_file(path)
    if (path / "vae.json").is_file():
        config = config_from_dict(VAEConfig, read_json(path / "vae.json"))
        return build(VAE, config, fit_vae(path, config, read_tensors(path / "vae.safetensors")[0]))
    if (path / "model.json").is_file() or (path / "checkpoints").is_dir():
        return open_model(path).vae()
    if (path / "config.json").is_file():
        config = vae_config_from_folder(path / "config.json", read_json(path / "config.json"))
        tensors = tensors_only(read_tensors(weights_file(path, "diffusion_pytorch_model"))[0])
        return build(VAE, config, fit_vae(path, config, tensors))
    if (path / "vae").is_dir():
        return load_vae(path / "vae")
    raise InputError(f"a VAE was wanted in {path}: neither vae.json nor config.json nor vae/ is there")


@dataclass
class Model:
    """An opened model. Parts are loaded when they are asked for, so that not all need be in memory at once."""

    found: str  # one sentence: what it is, and which weights were taken
    unet_config: UNetConfig
    tensors: Callable[[], dict[str, torch.Tensor]]  # the UNet's, in our names, memory-mapped, in the file's dtype
    vae: Callable[[], VAE]  # fp32, CPU, eval, without gradients
    text_encoder: Callable[[], TextEncoder]  # the same
    schedule: NoiseSchedule = field(default_factory=NoiseSchedule)
    sampling: dict = field(default_factory=dict)  # spacing, offset, set_alpha_to_one, where the model names them
    size: int = 512  # pixels, of the pictures it was trained on
    lineage: dict = field(default_factory=dict)  # how it was trained, for the metadata of exports

    def unet_state(self) -> tuple[UNetConfig, dict[str, torch.Tensor]]:
        """The UNet's architecture and weights: our names, fp32, on the CPU."""
        return self.unet_config, {k: t.to(torch.float32, copy=True) for k, t in self.tensors().items()}

    def unet(self, device="cpu", dtype=torch.float32) -> UNet:
        """The UNet, eval, without gradients."""
        return build(UNet, self.unet_config, self.tensors(), device, dtype)


def open_model(source: str | Path, weights: str = "ema") -> Model:
    """Open any SD 1.x model. Raises InputError.

    source: a checkpoint or run folder of this project; a single file of the original names; a diffusers model or UNet
    folder; a UNet's .pt; a hub name. weights: 'ema' or 'live', where the source has both; `found` says what was taken.
    """
    if weights not in ("ema", "live"):
        raise InputError(f"--weights wants ema or live, found {weights!r}")
    path = fetch(str(source), ["*.json", "*/*.json", "tokenizer/*", "text_encoder/model.safetensors",
                               "unet/diffusion_pytorch_model.safetensors", "vae/diffusion_pytorch_model.safetensors",
                               "diffusion_pytorch_model.safetensors"])  # fmt: skip
    if path.is_file():
        return open_single_file(path, weights)
    if (path / "checkpoints").is_dir():
        path = newest_checkpoint(path)
    if (path / "model.json").is_file():
        return open_checkpoint(path, weights)
    if (path / "model_index.json").is_file() or (path / "unet").is_dir() or (path / "config.json").is_file():
        return open_folder(path, weights)
    raise InputError(
        f"a model was wanted at {path}: neither model.json (a checkpoint of this project) nor checkpoints/ (a run) nor "
        f"model_index.json (a diffusers folder) is there"
    )


# --- this project's checkpoints
def checkpoint_problem(folder: Path, skip: tuple[str, ...] = ()) -> str | None:
    """Why a checkpoint folder is not whole (checked against its manifest.json), or None. `skip`: files not to read."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for name, digest in manifest.items():
            if name not in skip:
                with open(folder / name, "rb") as f:
                    if hashlib.file_digest(f, "sha256").hexdigest() != digest:
                        return f"{name} differs from its checksum"
    except (OSError, ValueError, AttributeError) as e:
        return f"{getattr(e, 'filename', None) or 'manifest.json'} cannot be read ({short(e)})"
    return None


def newest_checkpoint(run: Path) -> Path:
    """The newest whole checkpoint of a run folder. InputError if there is none."""
    problems = []
    for folder in sorted((run / "checkpoints").glob("step_*[0-9]"), key=lambda p: int(p.name[5:]), reverse=True):
        problem = checkpoint_problem(folder, skip=("optimizer.pt",))
        if problem is None:
            return folder
        problems.append(f"{folder.name}: {problem}")
    raise InputError(f"a whole checkpoint was wanted in {run / 'checkpoints'}, found {problems[:3] or 'none'}")


def open_checkpoint(folder: Path, weights: str) -> Model:
    values = read_json(folder / "model.json")
    if values.get("format") != "checkpoint-1":
        raise InputError(f"{folder / 'model.json'} wants format checkpoint-1, found {values.get('format')!r}")
    try:
        config = config_from_dict(UNetConfig, values["unet"])
        schedule = NoiseSchedule(**values["schedule"])
        vae, text = values["vae"], values["text_encoder"]
    except (KeyError, TypeError, ValueError) as e:
        raise InputError(f"{folder / 'model.json'} is incomplete or of another version ({e!r})") from None
    name = "unet_ema.safetensors" if weights == "ema" else "unet.safetensors"
    tensors = fit_unet(folder / name, config, read_tensors(folder / name)[0])

    def load_own_vae():
        if isinstance(vae, str):
            return load_vae(folder / vae)
        loaded = load_vae(vae["path"])
        if weights_hash(loaded) != vae["hash"]:
            raise InputError(f"the VAE at {vae['path']} is not the one {folder} was trained with (hashes differ)")
        return loaded

    def load_own_text_encoder():
        own = folder / "text_encoder_ema"
        if weights == "live" or not own.is_dir():
            own = folder / text  # a subfolder, or an absolute path
        return TextEncoder.from_pretrained(str(own) if own.is_dir() else text).requires_grad_(False)

    state = read_json(folder / "state.json") if (folder / "state.json").is_file() else {}
    return Model(
        found=f"{folder}: a checkpoint of this project (preset {values.get('preset')}), {WORDS[weights]} weights",
        unet_config=config,
        tensors=lambda: tensors,
        vae=load_own_vae,
        text_encoder=load_own_text_encoder,
        schedule=schedule,
        sampling=values.get("sampling", {}),
        size=values.get("size", 512),
        lineage=state,
    )


def open_folder(path: Path, weights: str) -> Model:
    """A diffusers model, or a UNet folder alone (then with SD 1.x's own VAE, text encoder and schedule)."""
    whole = (path / "unet").is_dir()
    unet = path / "unet" if whole else path
    if whole and weights == "ema" and (path / "unet_ema").is_dir():
        unet = path / "unet_ema"
    values = read_json(unet / "config.json")
    config = unet_config_from_folder(unet / "config.json", values)
    file = weights_file(unet, "diffusion_pytorch_model", live=weights == "live")
    tensors = fit_unet(file, config, tensors_only(read_tensors(file)[0]))
    which = "live" if ".non_ema." in file.name else "EMA" if unet.name == "unet_ema" else "its only"
    scheduler = path / "scheduler" / "scheduler_config.json"
    schedule, sampling = schedule_from_folder(scheduler, read_json(scheduler)) if scheduler.exists() else (None, {})
    lineage = path / "lineage.json"
    levels = len(read_json(path / "vae" / "config.json").get("block_out_channels", [0] * 4)) if whole else 4

    def load_text_encoder():
        if whole:
            return load_clip_folder(path / "text_encoder", path / "tokenizer")
        return TextEncoder.from_pretrained(DEFAULT_TEXT_ENCODER).requires_grad_(False)

    return Model(
        found=f"{path}: a diffusers {'folder' if whole else 'UNet'}, {which} weights ({file.name})",
        unet_config=config,
        tensors=lambda: tensors,
        vae=lambda: load_vae(path / "vae" if whole else DEFAULT_VAE),
        text_encoder=load_text_encoder,
        schedule=schedule or NoiseSchedule(),
        sampling=sampling,
        size=(values.get("sample_size") or 64) * 2 ** (levels - 1),
        lineage=read_json(lineage) if lineage.is_file() else {},
    )


PARTS = {  # prefix in the file: part
    "model.diffusion_model.": "unet",
    "model_ema.": "ema",
    "first_stage_model.": "vae",
    "vae.": "vae",
    "cond_stage_model.transformer.": "text",
    "cond_stage_model.": "text",  # some files lack `transformer.`
}

LIVE_NAMES = ("state_dict", "model_state_dict", "unet", "model")  # where old training files keep their weights

EMA_NAMES = ("ema_state_dict", "unet_ema", "model_ema", "ema")


def split_single_file(path: Path, content: dict) -> dict[str, dict[str, torch.Tensor]]:
    """The content of a single file -> {part: {name without its prefix: tensor}}; parts of PARTS. Strict."""
    live = next((content[k] for k in LIVE_NAMES if isinstance(content.get(k), dict)), None)
    ema = next((content[k] for k in EMA_NAMES if isinstance(content.get(k), dict)), None)
    if live is None:
        live = content if ema is None else ema
    tensors = tensors_only(live)
    if not any(name.startswith(tuple(PARTS)) for name in tensors):  # a UNet alone
        tensors = {"model.diffusion_model." + name.removeprefix("unet."): t for name, t in tensors.items()}
    parts, unknown = {part: {} for part in PARTS.values()}, []
    for name, tensor in tensors.items():
        prefix = next((p for p in PARTS if name.startswith(p)), None)
        if name in IGNORED or name.startswith(("first_stage_model.loss.", "embedding_manager.")):
            continue
        if prefix is None:
            unknown.append(name)
        else:
            parts[PARTS[prefix]][name[len(prefix) :]] = tensor
    if ema is not None:  # an old training file: to the names that original files have
        for name, tensor in tensors_only(ema).items():
            parts["ema"][ema_name(name.removeprefix("unet."))[len("model_ema.") :]] = tensor
    open_clip = any(name.startswith("model.") for name in parts["text"])
    if unknown or open_clip or not (parts["unet"] or parts["ema"]):
        cause = guess_cause(tensors) or guess_cause(parts["unet"])
        raise InputError(
            f"{path} is no model of SD 1.x"
            + (f"; {cause}" if cause else "")
            + (f"; {len(unknown)} unknown keys: {', '.join(unknown[:10])}" if unknown else "")
        )
    return parts


def open_single_file(path: Path, weights: str) -> Model:
    """A single file of the original names: .safetensors, .ckpt; or a UNet's .pt."""
    content, metadata = read_tensors(path)
    parts = split_single_file(path, content)
    described = own_description(path, metadata)
    if not parts["unet"]:
        raise InputError(f"{path} has EMA weights alone, in names without dots, from which no architecture can be told")
    if described:
        config = config_from_dict(UNetConfig, described["unet"])
    else:
        config = infer_unet_config(path, parts["unet"])
    everything = {name: t for part in parts.values() for name, t in part.items()}
    tensors, which = fit_unet(path, config, parts["unet"], everything), "its only weights"
    if parts["ema"]:
        which = "live weights (it has EMA too)"
        if weights == "ema":
            shapes = shapes_of(UNet, config)
            dotless = {ema_name(name)[len("model_ema.") :]: name for name in shapes}
            tensors = fit("UNet's EMA", path, shapes, parts["ema"], dotless)
            which = "EMA weights (it has live ones too)"
    prediction = "v" if metadata.get("modelspec.prediction_type", "").startswith("v") else "epsilon"
    try:
        schedule = NoiseSchedule(**described.get("schedule", {"prediction": prediction}))
    except (TypeError, ValueError) as e:
        raise InputError(f"the metadata 'sd_model' of {path} has no schedule that is known here ({e})") from None

    def load_file_vae():
        return vae_from_tensors(path, parts["vae"], described) if parts["vae"] else load_vae(DEFAULT_VAE)

    def load_file_text_encoder():
        if not parts["text"]:
            return TextEncoder.from_pretrained(DEFAULT_TEXT_ENCODER).requires_grad_(False)
        clip = infer_clip_config(path, parts["text"])
        for key in CLIP_TEXT_SETTINGS:
            setattr(clip, key, described.get("text", {}).get(key, getattr(clip, key)))
        if "tokenizer" in metadata:
            tokenizer = tokenizer_from_text(json.loads(metadata["tokenizer"]))
        else:
            tokenizer = load_tokenizer(DEFAULT_TEXT_ENCODER)
        return clip_from_tensors(path, clip, parts["text"], tokenizer)

    kind = "single file" if parts["vae"] or parts["text"] else "UNet file"
    return Model(
        found=f"{path}: a {kind} of the original names, {which}",
        unet_config=config,
        tensors=lambda: tensors,
        vae=load_file_vae,
        text_encoder=load_file_text_encoder,
        schedule=schedule,
        sampling=described.get("sampling", {}),
        size=described.get("size", 512),
        lineage=json.loads(metadata.get("lineage", "{}")),
    )
