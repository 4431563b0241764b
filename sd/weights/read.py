"""Any SD 1.x model opened: a run or checkpoint of this project, a diffusers folder, a single file."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from sd.errors import InputError
from sd.files import read_json, sha256
from sd.lora import from_tensors, merged
from sd.weights import prediction as told
from sd.weights.configs import (
    CLIP_TEXT_SETTINGS,
    infer_clip_config,
    infer_unet_config,
    pixels,
    schedule_from_folder,
    unet_config_from_folder,
    vae_config_from_folder,
)
from sd.weights.int8 import TEXT_FILE, int8_remark
from sd.weights.names import ema_name, shapes_of
from sd.weights.parts import (
    DEFAULT_VAE,
    fetch,
    load_own_vae,
    own_description,
    own_json,
    vae_from_file,
    vae_from_tensors,
)
from sd.weights.tensors import (
    SHARDS,
    build,
    fit,
    fit_unet,
    fit_vae,
    fp8_remark,
    guess_cause,
    read_tensors,
    read_weights,
    short,
    tensors_only,
    weights_file,
    without_left_overs,
)
from sd.weights.text import (
    CLIP_REST,
    DEFAULT_TEXT_ENCODER,
    TEXT_PREFIXES,
    carried_tokenizer,
    clip_from_tensors,
    clip_skip,
    clip_tokenizer,
    has_tokenizer,
    load_clip_folder,
    load_int8_folder,
    load_tokenizer,
    of_length,
    text_remark,
    tokenizer_from_text,
    with_tokenizer,
)
from SD_Model import VAE, NoiseSchedule, TextEncoder, UNet, UNetConfig, config_from_dict, weights_hash

WORDS = {"ema": "EMA", "live": "live"}


def load_vae(source: str | Path = DEFAULT_VAE, weights: str = "ema") -> VAE:
    """A VAE in fp32 on the CPU, eval, without gradients.

    source: a folder written by save_vae, a checkpoint or run folder of this project, a diffusers VAE folder or a whole
    diffusers model, a standalone or full single file, or a hub name. weights: 'ema' or 'live', where a file has EMA
    copies of the VAE beside it; a file's VAE has `found`, which says what was taken. Raises InputError.
    """
    path = fetch(str(source), ["config.json", "diffusion_pytorch_model.safetensors", "vae/*.json",
                               "vae/diffusion_pytorch_model.safetensors", "*.index.json",
                               f"diffusion_pytorch_model{SHARDS}", f"vae/diffusion_pytorch_model{SHARDS}"])  # fmt: skip
    if path.is_file():
        return vae_from_file(path, weights)
    if (path / "vae.json").is_file():
        return load_own_vae(path)
    if (path / "model.json").is_file() or (path / "checkpoints").is_dir():
        return open_model(path).vae()
    if (path / "config.json").is_file():
        config = vae_config_from_folder(path / "config.json", read_json(path / "config.json"))
        tensors = tensors_only(read_weights(weights_file(path, "diffusion_pytorch_model")))
        return build(VAE, config, fit_vae(path, config, tensors))
    if (path / "vae").is_dir():
        return load_vae(path / "vae")
    raise InputError(f"a VAE was wanted in {path}: neither vae.json nor config.json nor vae/ is there")


def load_text_encoder(
    source: str | Path = DEFAULT_TEXT_ENCODER, tokenizer: str | None = None, length: int | None = None
) -> TextEncoder:
    """A text encoder in fp32 on the CPU, eval, without gradients.

    source: a transformers folder, with a tokenizer or without; a diffusers model, or its text_encoder/; a checkpoint or
    run folder of this project; a single file, whole or CLIP alone; a hub name. tokenizer: what load_tokenizer takes;
    default: the source's own, where it has none CLIP's. length: ids of a text, where the source would take more (a
    Model's text_length). Raises InputError.
    """
    if length is not None:
        return of_length(load_text_encoder(source, tokenizer), length)
    path = Path(source).expanduser()
    if path.is_file():
        return text_encoder_from_file(path, *read_tensors(path), tokenizer=tokenizer)
    if not path.exists():
        try:
            return with_tokenizer(source, TextEncoder.from_pretrained(str(source)), tokenizer)
        except InputError:
            if source == DEFAULT_TEXT_ENCODER:
                raise
        path = fetch(str(source), ["*.json", "text_encoder/*.json", "text_encoder/model.safetensors", "tokenizer/*"])
    if (path / "model.json").is_file() or (path / "checkpoints").is_dir():
        return open_model(path, tokenizer=tokenizer).text_encoder()
    if (path / "text_encoder" / "config.json").is_file():
        path = path / "text_encoder"
    if not (path / "config.json").is_file():
        alone = "a tokenizer alone, which --tokenizer takes" if has_tokenizer(path) else sorted(os.listdir(path))[:10]
        raise InputError(f"a text encoder was wanted in {path}: no config.json is there, but {alone}")
    if (path / TEXT_FILE).is_file():
        return with_tokenizer(path, load_int8_folder(path), tokenizer)
    if read_json(path / "config.json").get("model_type") in ("clip_text_model", "clip"):
        return load_clip_folder(path, tokenizer)
    return with_tokenizer(path, TextEncoder.from_pretrained(str(path)), tokenizer)


def null_of(encoder: TextEncoder, null: str) -> TextEncoder:
    """The encoder of a model whose null condition this is (Model.null)."""
    if null not in ("empty", "zeros"):
        raise InputError(f"a model's null condition is 'empty' or 'zeros', found {null!r}")
    encoder.null_tokens = ()  # of a model that it was part of
    return encoder.guide_from_zeros() if null == "zeros" else encoder


def named_text_encoder(name: str) -> TextEncoder:
    """The text encoder that a run names: a transformers folder's, a hub name's, or a whole model's at a local path."""
    path = Path(name)
    if path.is_file() or any((path / part).exists() for part in ("model.json", "checkpoints", "model_index.json")):
        return open_model(path).text_encoder()
    if (path / TEXT_FILE).is_file():
        return load_int8_folder(path)
    return TextEncoder.from_pretrained(name)


def text_encoder_from_file(
    path: Path, content: dict, metadata: dict, settings: dict | None = None, tokenizer: str | None = None, skipped=0
) -> TextEncoder:
    """The CLIP text encoder of a single file: whole, or CLIP alone under the names that other programs give it.

    settings: of its config, what shapes do not tell. skipped: how many of its last layers to leave out (clip skip).
    """
    nested = content.get("state_dict")
    tensors = tensors_only(nested if isinstance(nested, dict) else content)
    if settings is None:
        described = own_description(path, metadata)[0]
        settings, skipped = described.get("text", {}), 0 if described else clip_skip(metadata)
    for prefix in TEXT_PREFIXES:
        if any(name.startswith(prefix) for name in tensors):
            tensors = {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
    tensors = {name.removeprefix("text_model."): t for name, t in tensors.items() if not name.startswith(CLIP_REST)}
    config = infer_clip_config(path, tensors)
    for key in CLIP_TEXT_SETTINGS:
        setattr(config, key, settings.get(key, getattr(config, key)))
    if 0 < skipped < config.num_hidden_layers:
        config.num_hidden_layers -= skipped
        layers = [f"encoder.layers.{config.num_hidden_layers + i}." for i in range(skipped)]
        tensors = {name: t for name, t in tensors.items() if not name.startswith(tuple(layers))}
    if tokenizer is not None:
        found = load_tokenizer(tokenizer)
    elif files := carried_tokenizer(metadata):
        found = tokenizer_from_text(files)
    else:
        found = clip_tokenizer()
    return with_tokenizer(path, clip_from_tensors(path, config, tensors, found), None)


@dataclass
class Model:
    """An opened model. Parts are loaded when they are asked for, so that not all need be in memory at once."""

    found: str  # what it is, which weights were taken, what it predicts and who says so; a line each further remark
    unet_config: UNetConfig
    tensors: Callable[[], dict[str, torch.Tensor]]  # the UNet's, in our names, memory-mapped, in the file's dtype
    vae: Callable[[], VAE]  # fp32, CPU, eval, without gradients
    text_encoder: Callable[[], TextEncoder]  # the same
    schedule: NoiseSchedule = field(default_factory=NoiseSchedule)
    sampling: dict = field(default_factory=dict)  # spacing, offset, set_alpha_to_one, where the model names them
    size: int = 512  # pixels, of the pictures it was trained on
    text_length: int | None = None  # ids of the texts it was trained on, where the model says it
    null: str = "empty"  # what guidance steers away from: the encoding of "", or 'zeros' (text_encoder gives them)
    lineage: dict = field(default_factory=dict)  # how it was trained, for the metadata of exports

    def unet_state(self) -> tuple[UNetConfig, dict[str, torch.Tensor]]:
        """The UNet's architecture and weights: our names, fp32, on the CPU."""
        return self.unet_config, {k: t.to(torch.float32, copy=True) for k, t in self.tensors().items()}

    def unet(self, device="cpu", dtype=torch.float32) -> UNet:
        """The UNet, eval, without gradients."""
        return build(UNet, self.unet_config, self.tensors(), device, dtype)


def open_model(
    source: str | Path,
    weights: str = "ema",
    prediction: str | None = None,
    zero_terminal_snr: bool | None = None,
    tokenizer: str | None = None,
) -> Model:
    """Open any SD 1.x model. Raises InputError.

    source: a checkpoint or run folder of this project; a single file of the original names; a diffusers model or UNet
    folder; a UNet's file; a hub name. weights: 'ema' or 'live', where the source has both; `found` says what was taken.
    prediction ('epsilon' or 'v') and zero_terminal_snr override what the source says, or does not say, of its schedule;
    tokenizer: what load_tokenizer takes, instead of the source's own.
    """
    if weights not in ("ema", "live"):
        raise InputError(f"--weights wants ema or live, found {weights!r}")
    path = fetch(str(source), ["*.json", "*/*.json", "tokenizer/*", "text_encoder/model.safetensors",
                               "unet/diffusion_pytorch_model.safetensors", "vae/diffusion_pytorch_model.safetensors",
                               "diffusion_pytorch_model.safetensors", f"text_encoder/model{SHARDS}",
                               f"unet/diffusion_pytorch_model{SHARDS}", f"vae/diffusion_pytorch_model{SHARDS}",
                               f"diffusion_pytorch_model{SHARDS}"])  # fmt: skip
    if (path / "checkpoints").is_dir():
        path = newest_checkpoint(path)
    parts = ("model_index.json", "unet/config.json", "unet_ema/config.json", "config.json")
    if path.is_file():
        opener = open_single_file
    elif (path / "model.json").is_file():
        opener = open_checkpoint
    elif any((path / name).is_file() for name in parts):
        opener = open_folder
    else:
        raise InputError(
            f"a model was wanted at {path}: neither model.json (a checkpoint of this project) nor checkpoints/ (a run) "
            f"nor model_index.json (a diffusers folder) nor unet/ is there, but {sorted(os.listdir(path))[:10]}"
        )
    model = opener(path, weights, prediction, zero_terminal_snr, tokenizer)
    if zero_terminal_snr:  # the source's spacing is that of the schedule that it believes in
        model.sampling = {k: v for k, v in model.sampling.items() if k != "spacing"}
    return model


def settled_schedule(source, settings: dict, facts, prediction, zero_terminal_snr) -> tuple[NoiseSchedule, str]:
    """(the schedule of these settings, with what facts or flags say of the prediction; that in words)."""
    what, says = told.settle(facts, prediction, zero_terminal_snr, source)
    try:
        return NoiseSchedule(**(settings | what)), says
    except (TypeError, ValueError) as e:
        raise InputError(f"{source} has no schedule that is known here ({short(e)})") from None


def found_text(first: str, says: str, *remarks: str) -> str:
    """Model.found: the first line, and indented lines of what else there is to say."""
    return "\n  ".join([f"{first}; {says}", *filter(None, remarks)])


# --- this project's checkpoints
def checkpoint_problem(folder: Path, skip: tuple[str, ...] = ()) -> str | None:
    """Why a checkpoint folder is not whole (checked against its manifest.json), or None. `skip`: files not to read."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for name, digest in manifest.items():
            if name not in skip and sha256(folder / name) != digest:
                return f"{name} differs from its checksum"
    except (OSError, ValueError, AttributeError) as e:
        return f"{getattr(e, 'filename', None) or 'manifest.json'} cannot be read ({short(e)})"
    return None


def checkpoint_step(folder: Path) -> int | None:
    """The step of a checkpoint folder by its name, `step_` and exactly eight digits; None for any other name."""
    return int(folder.name[5:]) if re.fullmatch("step_[0-9]{8}", folder.name) else None


def checkpoint_folders(run: Path) -> list[Path]:
    """A run's finished checkpoints by their names, newest first. Copies under other names do not count."""
    found = [p for p in (run / "checkpoints").glob("step_*") if checkpoint_step(p) is not None]
    return sorted(found, reverse=True)


def newest_checkpoint(run: Path) -> Path:
    """The newest whole checkpoint of a run folder. InputError if there is none."""
    problems = []
    for folder in checkpoint_folders(run):
        problem = checkpoint_problem(folder, skip=("optimizer.pt",))
        if problem is None:
            return folder
        problems.append(f"{folder.name}: {problem}")
    raise InputError(f"a whole checkpoint was wanted in {run / 'checkpoints'}, found {problems[:3] or 'none'}")


def is_gone(path: str) -> bool:
    """Whether nothing is at a local path; a hub name is not gone."""
    return Path(path).is_absolute() and not Path(path).exists()


def base_gone(folder: Path, path: str) -> str:
    """What to say of a checkpoint whose adapter belongs to weights that are not there any more."""
    return (
        f"the adapter of {folder} belongs to the weights of {path}, and nothing is there: put that model back, or for "
        'training name it with --init_from (model.json keeps its path under "base")'
    )


def base_differs(folder: Path, path: str) -> str:
    """And of one at whose path others are."""
    return (
        f"the adapter of {folder} belongs to other weights than those that are at {path} now (their hashes differ): "
        "put back the model that it was trained on"
    )


def open_base(folder: Path, base: dict) -> Model:
    """The model that a checkpoint's adapter belongs to. InputError if it is gone or has other weights."""
    if is_gone(base["path"]):
        raise InputError(base_gone(folder, base["path"]))
    model = open_model(base["path"], weights=base["weights"])
    if weights_hash(model.tensors()) != base["hash"]:
        raise InputError(base_differs(folder, base["path"]))
    return model


def open_checkpoint(folder: Path, weights: str, prediction=None, zero_terminal_snr=None, tokenizer=None) -> Model:
    values = read_json(folder / "model.json")
    if values.get("format") != "checkpoint-1":
        raise InputError(f"{folder / 'model.json'} wants format checkpoint-1, found {values.get('format')!r}")
    try:
        config = config_from_dict(UNetConfig, values["unet"])
        schedule = NoiseSchedule(**values["schedule"])
        vae, text, null = values["vae"], values["text_encoder"], values.get("null", "empty")
    except (KeyError, TypeError, ValueError) as e:
        raise InputError(f"{folder / 'model.json'} is incomplete or of another version ({e!r})") from None
    name, which = "unet_ema.safetensors" if weights == "ema" else "unet.safetensors", f"{WORDS[weights]} weights"
    if only := values.get("weights"):  # of a model that was written to paint with, which has one UNet
        name, which = "unet.safetensors", f"{WORDS[only]} weights (it has no others)"
    adapters, remark = {}, ""
    if base := values.get("base"):
        file, base = folder / f"lora{'_ema' * (weights == 'ema')}.safetensors", open_base(folder, base)
        adapters, metadata, remark = from_tensors(read_tensors(file)[0], file), {}, f"an adapter beside {base.found}"
        unet_tensors = merged(base.tensors(), adapters, "unet")
    else:
        tensors, metadata = read_tensors(folder / name)
        unet_tensors = fit_unet(folder / name, config, tensors)

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
        if (own / TEXT_FILE).is_file():
            encoder = load_int8_folder(own)
        else:
            encoder = named_text_encoder(str(own) if own.exists() else text)
        if any(name.startswith("text_encoder.") for name in adapters):
            encoder.model.load_state_dict(merged(encoder.model.state_dict(), adapters, "text_encoder"))
        encoder = with_tokenizer(own if own.is_dir() else text, encoder, tokenizer)
        return null_of(of_length(encoder, values.get("text_length")), null)

    facts = [(schedule.prediction, schedule.config["zero_terminal_snr"], "model.json")]
    schedule, says = settled_schedule(folder, schedule.config, facts, prediction, zero_terminal_snr)
    state = read_json(folder / "state.json") if (folder / "state.json").is_file() else {}
    return Model(
        found=found_text(
            f"{folder}: a checkpoint of this project (preset {values.get('preset')}), {which}",
            says,
            int8_remark(metadata),
            remark,
            "its null condition is zeros, not the encoding of an empty text" if null == "zeros" else "",
        ),
        unet_config=config,
        tensors=lambda: unet_tensors,
        vae=load_own_vae,
        text_encoder=load_own_text_encoder,
        schedule=schedule,
        sampling=values.get("sampling", {}),
        size=values.get("size", 512),
        text_length=values.get("text_length"),
        null=null,
        lineage=state,
    )


def open_folder(path: Path, weights: str, prediction=None, zero_terminal_snr=None, tokenizer=None) -> Model:
    """A diffusers model, or a UNet folder alone (then with SD 1.x's own VAE, text encoder and schedule).

    A trainer's checkpoint has unet/, often unet_ema/, and nothing else: VAE and text encoder have then to be given.
    """
    whole = any((path / name / "config.json").is_file() for name in ("unet", "unet_ema"))
    unet = path / "unet" if whole else path
    copies = whole and (path / "unet_ema" / "config.json").is_file()
    if copies and (weights == "ema" or not (unet / "config.json").is_file()):
        unet = path / "unet_ema"
    values = read_json(unet / "config.json")
    config = unet_config_from_folder(unet / "config.json", values)
    file = weights_file(unet, "diffusion_pytorch_model", live=weights == "live")
    tensors = fit_unet(file, config, tensors_only(read_weights(file)))
    if ".non_ema." in file.name or (copies and unet.name == "unet"):
        which = "live"
    else:
        which = "EMA" if unet.name == "unet_ema" else "its only"
    scheduler = path / "scheduler" / "scheduler_config.json"
    schedule, sampling, facts = NoiseSchedule(), {}, []
    if scheduler.exists():
        schedule, sampling = schedule_from_folder(scheduler, read_json(scheduler))
        facts.append((schedule.prediction, schedule.config["zero_terminal_snr"], scheduler.name))
    schedule, says = settled_schedule(path, schedule.config, facts, prediction, zero_terminal_snr)
    lineage = path / "lineage.json"
    vae = path / "vae" / "config.json"
    levels = len(read_json(vae).get("block_out_channels", [0] * 4)) if vae.is_file() else 4

    def part(name: str) -> Path:
        if not (path / name).is_dir():
            raise InputError(f"{path} has no {name}/, as a trainer's checkpoint has not; give --{name}")
        return path / name

    def load_own_text_encoder():
        if whole:
            return load_clip_folder(part("text_encoder"), tokenizer)
        return load_text_encoder(DEFAULT_TEXT_ENCODER, tokenizer)

    return Model(
        found=found_text(
            f"{path}: a diffusers {'folder' if whole else 'UNet'}, {which} weights ({file.name})",
            says,
            fp8_remark(tensors),
        ),
        unet_config=config,
        tensors=lambda: tensors,
        vae=lambda: load_vae(part("vae") if whole else DEFAULT_VAE),
        text_encoder=load_own_text_encoder,
        schedule=schedule,
        sampling=sampling,
        size=pixels(values.get("sample_size"), 2 ** (levels - 1)),
        lineage=read_json(lineage) if lineage.is_file() else {},
    )


# --- single files
PARTS = {  # prefix in the file: part
    "model.diffusion_model.": "unet",
    "model_ema.": "ema",
    "first_stage_model.": "vae",
    "vae.": "vae",
    "cond_stage_model.transformer.": "text",
    "cond_stage_model.": "text",  # some files lack `transformer.`
    "text_encoder.": "text",  # a folder's three networks in one file
    "unet.": "unet",
}

LIVE_NAMES = ("state_dict", "model_state_dict", "unet", "model")  # where old training files keep their weights

EMA_NAMES = ("ema_state_dict", "unet_ema", "model_ema", "ema")


def split_single_file(path: Path, content: dict) -> tuple[dict[str, dict[str, torch.Tensor]], list[tuple], str]:
    """The content of a single file -> ({part: {name without its prefix: tensor}}, what its marker tensors say it
    predicts, what was left out); parts of PARTS. Strict."""
    live = next((content[k] for k in LIVE_NAMES if isinstance(content.get(k), dict)), None)
    ema = next((content[k] for k in EMA_NAMES if isinstance(content.get(k), dict)), None)
    if live is None:
        live = content if ema is None else ema
    tensors, left_out = without_left_overs(tensors_only(live))
    facts = told.from_tensors(tensors)
    tensors = {name: t for name, t in tensors.items() if name not in told.MARKERS}
    if not any(name.startswith(tuple(PARTS)) for name in tensors):  # a UNet alone
        tensors = {"model.diffusion_model." + name: t for name, t in tensors.items()}
    parts, unknown = {part: {} for part in PARTS.values()}, []
    for name, tensor in tensors.items():
        prefix = next((p for p in PARTS if name.startswith(p)), None)
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
    return parts, facts, left_out


def described_beside(path: Path, tensors: dict[str, torch.Tensor]) -> dict:
    """Of a UNet's file out of a folder: what the model.json or config.json beside it says, else {}."""
    own, config = path.with_name("model.json"), path.with_name("config.json")
    if own.is_file() and (values := read_json(own)).get("format") == "checkpoint-1":
        return {k: values[k] for k in ("unet", "schedule", "sampling", "size") if k in values}
    if config.is_file() and any(name.startswith("down_blocks.") for name in tensors):
        return {"unet": asdict(unet_config_from_folder(config, read_json(config)))}
    return {}


def open_single_file(path: Path, weights: str, prediction=None, zero_terminal_snr=None, tokenizer=None) -> Model:
    """A single file of the original names: .safetensors, .ckpt; or a UNet's, of either kind of names."""
    content, metadata = read_tensors(path)
    parts, markers, left_out = split_single_file(path, content)
    described, remark = own_description(path, metadata)
    alone = not parts["vae"] and not parts["text"]
    if not parts["unet"]:
        raise InputError(f"{path} has EMA weights alone, in names without dots, from which no architecture can be told")
    if not described and alone:
        described = described_beside(path, parts["unet"])
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
    facts, (yaml_facts, yaml_settings, yaml_remark) = [], told.from_yaml(path)
    if "schedule" in described:
        own = described["schedule"]
        facts.append((own.get("prediction"), own.get("zero_terminal_snr"), "this project's own description"))
    facts += markers + told.from_metadata(metadata) + yaml_facts
    schedule, says = settled_schedule(
        path, described.get("schedule", yaml_settings), facts, prediction, zero_terminal_snr
    )
    vae_copies = any(re.match(r"model_ema\.(encoder|decoder|quant|post_quant)", name) for name in parts["vae"])
    skipped = clip_skip(metadata) if parts["text"] and not described else 0

    def load_file_vae():
        return vae_from_tensors(path, parts["vae"], described, weights) if parts["vae"] else load_vae(DEFAULT_VAE)

    def load_file_text_encoder():
        if not parts["text"]:
            return load_text_encoder(DEFAULT_TEXT_ENCODER, tokenizer)
        return text_encoder_from_file(path, parts["text"], metadata, described.get("text", {}), tokenizer, skipped)

    kind = "UNet file" if alone else "single file"
    theirs = any(name.startswith("down_blocks.") for name in parts["unet"])
    names = "diffusers' names" if theirs else "the original names"
    if parts["text"] and skipped:
        remark = f"{remark}; " * bool(remark) + f"clip skip {skipped + 1}: the last text layers are left out"
    return Model(
        found=found_text(
            f"{path}: a {kind} of {names}, {which}",
            says,
            fp8_remark(everything),
            text_remark(parts["text"], metadata, tokenizer),
            f"its VAE has EMA copies too: {WORDS[weights]} weights" if vae_copies else "",
            remark,
            yaml_remark,
            left_out,
        ),
        unet_config=config,
        tensors=lambda: tensors,
        vae=load_file_vae,
        text_encoder=load_file_text_encoder,
        schedule=schedule,
        sampling=described.get("sampling", {}),
        size=described.get("size", 512),
        lineage=own_json(metadata, "lineage") if described else {},
    )
