"""VAE, text encoder and tokenizer alone, from a file, a folder or the hub."""

import json
import re
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from sd.errors import InputError
from sd.files import new_folder, read_json
from sd.weights.configs import infer_vae_config
from sd.weights.tensors import build, fit, fit_vae, read_tensors, save_tensors, short, tensors_only, weights_file
from SD_Model import VAE, TextEncoder, VAEConfig, config_from_dict

DEFAULT_VAE = "stabilityai/sd-vae-ft-mse"

DEFAULT_TEXT_ENCODER = "openai/clip-vit-large-patch14"


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


def clip_from_tensors(source, config, tensors: dict[str, torch.Tensor], tokenizer) -> TextEncoder:
    """A CLIP text encoder of these weights, strictly. Names with or without `text_model.`; fp32, eval."""
    from transformers import CLIPTextModel

    dropped = ("vision_model.", "visual_projection.", "text_projection", "logit_scale")  # a whole CLIP's other half
    tensors = {
        name.removeprefix("text_model."): t
        for name, t in tensors.items()
        if not name.startswith(dropped) and not name.endswith("position_ids")
    }
    with torch.device("meta"):
        empty = CLIPTextModel(config).state_dict()
    names = {name.removeprefix("text_model."): name for name in empty}  # transformers' own names, by version
    state = fit("text encoder", source, {name: t.shape for name, t in empty.items()}, tensors, names)
    # Copies, as the model keeps these very tensors, and a file may change under the ones that are mapped. Unlike
    # CLIPTextModel(config), from_pretrained draws no random weights first, which takes seconds.
    state = {name: t.to(torch.float32, copy=True) for name, t in state.items()}
    model, info = CLIPTextModel.from_pretrained(
        None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True
    )
    if lost := [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]:
        raise InputError(f"this version of transformers did not take the text encoder's {lost[:5]} from {source}")
    return TextEncoder(model.eval().requires_grad_(False), tokenizer)


def load_tokenizer(name: str):
    """A transformers tokenizer from a folder or hub name; InputError if it cannot be had."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise InputError(
            f"a tokenizer was wanted at {name!r} and could not be loaded ({short(e)}); "
            f"give --text_encoder FOLDER, or run once with a network"
        ) from None


def tokenizer_from_text(files: dict[str, str]):
    """A tokenizer from the contents of its files ({name: text}), as a single file's metadata carries them."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / Path(name).name).write_text(text, encoding="utf-8")
        return load_tokenizer(folder)


def load_clip_folder(folder: Path, tokenizer: Path) -> TextEncoder:
    """The text encoder of a diffusers model: text_encoder/ and tokenizer/ are folders of their own."""
    from transformers import CLIPTextConfig

    values = read_json(folder / "config.json")
    if values.get("model_type") not in ("clip_text_model", "clip"):
        raise InputError(f"{folder} holds a {values.get('model_type')!r}, where a CLIP text model was wanted")
    tensors = tensors_only(read_tensors(weights_file(folder, "model"))[0])
    return clip_from_tensors(folder, CLIPTextConfig.from_pretrained(folder), tensors, load_tokenizer(str(tokenizer)))


def clip_state(encoder: TextEncoder) -> dict[str, torch.Tensor]:
    """A CLIP text encoder's weights under the names that files carry, `text_model.…`. InputError for other models."""
    if encoder.masked:
        kind = encoder.model.config.model_type
        raise InputError(f"the text encoder is a {kind}; other programs know CLIP's alone, so use --format native")
    return {"text_model." + k.removeprefix("text_model."): t for k, t in encoder.model.state_dict().items()}


def tokenizer_files(tokenizer) -> dict[str, str]:
    """{file name: content} of a tokenizer folder; vocab.json and merges.txt too, which older programs want."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {p.name: p.read_text(encoding="utf-8") for p in sorted(Path(folder).iterdir()) if p.is_file()}
    bpe = json.loads(files["tokenizer.json"])["model"]
    if bpe.get("type") != "BPE":
        raise InputError(
            f"a byte-pair tokenizer, as CLIP has, was wanted for other programs to read, found {bpe.get('type')}; "
            "--format native keeps this one"
        )
    pairs = [" ".join(pair) if isinstance(pair, list) else pair for pair in bpe["merges"]]
    files["vocab.json"] = json.dumps(bpe["vocab"], ensure_ascii=False)
    files["merges.txt"] = "\n".join(["#version: 0.2", *pairs, ""])
    return files
