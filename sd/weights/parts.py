"""A VAE alone, from a file or a folder, and what this project's files say of themselves."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import torch

from sd.errors import InputError
from sd.files import new_folder
from sd.weights.configs import infer_vae_config
from sd.weights.tensors import build, fit_vae, read_tensors, save_tensors, short, tensors_only
from SD_Model import VAE, VAEConfig, config_from_dict

DEFAULT_VAE = "stabilityai/sd-vae-ft-mse"


def fetch(name: str, patterns: list[str]) -> Path:
    """A local path as it is; anything else is a hub name, downloaded or taken from the cache. InputError if neither."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", name) or path.suffix in (".safetensors", ".ckpt", ".pt"):
        raise InputError(f"weights were wanted at {name}, and there is no such file or folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as e:  # offline, unknown, gated, no disk: the hub's classes change between versions
        raise InputError(
            f"{name} is no local path, and could not be had from the model hub or its cache ({short(e)}); "
            f"give a local path, or run once with a network"
        ) from None


def vae_from_file(path: Path) -> VAE:
    """The VAE of a standalone file, or of a full single file."""
    content, metadata = read_tensors(path)
    nested = content.get("state_dict")
    tensors = tensors_only(nested if isinstance(nested, dict) else content)
    for prefix in ("first_stage_model.", "vae."):
        if any(name.startswith(prefix) for name in tensors):
            tensors = {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
    return vae_from_tensors(path, tensors, own_description(path, metadata))


def vae_from_tensors(source, tensors: dict, described: dict) -> VAE:
    """A VAE of these tensors, of the described architecture or else of the one their shapes tell."""
    tensors = {name: t for name, t in tensors.items() if not name.startswith("loss.")}
    config = config_from_dict(VAEConfig, described["vae"]) if described else infer_vae_config(source, tensors)
    return build(VAE, config, fit_vae(source, config, tensors))


def own_description(path: Path, metadata: dict) -> dict:
    """What save_ldm wrote into a file's metadata about the networks, or {} for files of others."""
    try:
        described = json.loads(metadata.get("sd_model", "{}"))
        if described and not described.keys() >= {"unet", "vae", "text", "schedule", "sampling", "size"}:
            raise ValueError(f"it has {sorted(described)}")
    except (ValueError, AttributeError) as e:
        raise InputError(f"the metadata 'sd_model' of {path} is damaged or of another version ({short(e)})") from None
    return described


def save_vae(vae: VAE, folder: str | Path):
    """Write a VAE in this project's format: vae.json and vae.safetensors (fp32), whole or not at all."""
    folder = Path(folder)
    with new_folder(folder, replace=True) as tmp:
        (tmp / "vae.json").write_text(json.dumps(asdict(vae.config), indent=2))
        state = {k: t.detach().to("cpu", torch.float32).contiguous() for k, t in vae.state_dict().items()}
        save_tensors(state, tmp / "vae.safetensors")
