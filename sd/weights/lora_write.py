"""LoRAs written: kohya's file, a folder of the diffusers library, this project's own; and several joined into one."""

import hashlib
import json
import math
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import safetensors.torch
import torch

from sd.errors import InputError
from sd.files import atomic_path, digests, new_folder, read_json
from sd.lora import Adapter, to_tensors
from sd.weights.lora import NAMES, OWN, Base, Change, Lora, base_of, kind_of, lora_files, plain
from sd.weights.parts import own_text
from sd.weights.read import Model
from sd.weights.tensors import cast, read_tensors, save_tensors
from SD_Model import UNetConfig, config_from_dict


def base_for(source: str, model: Model | None, text: dict | None = None) -> Base:
    """The modules that a LoRA to be rewritten may belong to: those of `model` and its text encoder's shapes `text`,
    where they are given; of a run of this project, those that it says itself; else SD 1.5's."""
    if model is not None:
        return base_of(model.unet_config, text)
    file = next(iter(lora_files(Path(source).expanduser(), "ema")), Path())
    if file.name not in OWN or not file.with_name("model.json").is_file():
        return base_of()
    values = read_json(file.with_name("model.json"))
    if "unet" not in values:
        raise InputError(f"{file.with_name('model.json')} is incomplete or of another version: it has no unet")
    config = config_from_dict(UNetConfig, values["unet"])
    tensors, _ = read_tensors(file)
    text = {
        name.removeprefix("text_encoder.").removesuffix(".up"): torch.Size(
            (len(up), tensors[name[:-3] + ".down"].shape[1])
        )
        for name, up in tensors.items()
        if name.startswith("text_encoder.") and name.endswith(".up")
    }
    return base_of(config, text)


def joined(loras: list[tuple[Lora, float]], base: Base, dtype: torch.dtype) -> Lora:
    """Several LoRAs, each times its weight, as one: their ranks lie side by side, so that its delta is the sum of
    theirs. fp32. Where the scales of all are the same, no number changes; else they go into `up`, and an alpha is
    chosen that the dtype of the file holds exactly."""
    if len(loras) == 1 and loras[0][1] == 1:
        return loras[0][0]
    changes = {}
    for name in dict.fromkeys(name for lora, _ in loras for name in lora.changes):
        parts = [(in_shape(lora.changes[name], name, base), weight) for lora, weight in loras if name in lora.changes]
        scales = [weight * change.scale for change, weight in parts]
        rank = sum(change.rank for change, _ in parts)
        alpha = (max(map(abs, scales)) or 1.0) * rank
        if torch.tensor(alpha, dtype=torch.float64).to(dtype).item() != alpha:
            alpha = 2.0 ** math.ceil(math.log2(alpha))
        down = torch.cat([change.tensors["down"].float() for change, _ in parts])
        ups = [c.tensors["up"].float() * (scale * rank / alpha) for (c, _), scale in zip(parts, scales)]
        changes[name] = Change({"down": down, "up": torch.cat(ups, 1)}, alpha)
    told = [{"path": lora.path, "weight": weight, "sha256": lora.sha256} for lora, weight in loras]
    found = " and ".join(f"{weight:g} x {lora.path}" for lora, weight in loras)
    return replace(loras[0][0], found=found, changes=changes, metadata={"sd_joined": own_text({"loras": told})}, run={})


def in_shape(change: Change, name: str, base: Base) -> Change:
    """A change as `down` and `up` alone, with as many dimensions as its weight. InputError if it is of another kind."""
    down, up, alpha = plain(change)
    shape = base.shapes[name]
    ones = [1] * (len(shape) - 2)
    return Change({"down": down.reshape(-1, *shape[1:]), "up": up.reshape(*up.shape[:2], *ones)}, alpha)


def cast_remark(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> list[str]:
    """How far a cast moves a number at most, in words; nothing if it moves none."""
    error = max((t.float() - after[name].float()).abs().max().item() for name, t in before.items())
    dtype = next(iter(after.values())).dtype
    return [f"the cast to {dtype} moves a number by at most {error:.1e}"] if error else []


# ----------------------------------------------------------------------------------------------------------------
# kohya's file
# ----------------------------------------------------------------------------------------------------------------

KOHYA = {"down": "lora_down.weight", "up": "lora_up.weight", "mid": "lora_mid.weight"}


def save_kohya(out: Path, lora: Lora, base: Base, dtype: torch.dtype, more: dict[str, str]) -> list[str]:
    """Write one .safetensors of kohya's names, which A1111 and ComfyUI read. more: metadata that is to be there.
    Metadata of a file of theirs is kept. Returns remarks."""
    if out.suffix != ".safetensors":
        raise InputError(f"--format lora writes a .safetensors, and OUT is {out}")
    if out.exists():
        raise InputError(f"{out} exists already; remove it, or write elsewhere")
    tensors = {}
    for name, change in lora.changes.items():
        if kind_of(change) in ("LoRA", "LoCon") and "mid" not in change.tensors:
            change = in_shape(change, name, base)
        part, _, path = base.theirs[name].partition(".")
        key = {"unet": "lora_unet_", "text_encoder": "lora_te_"}[part] + path.replace(".", "_")
        tensors |= {f"{key}.{KOHYA.get(part, part)}": t for part, t in change.tensors.items()}
        alpha = change.alpha if change.alpha is not None else change.rank or 1
        tensors[f"{key}.alpha"] = torch.tensor(float(alpha), dtype=torch.float64)
    written = cast("LoRA", tensors, dtype)
    kept = {k: v for k, v in lora.metadata.items() if k not in ("lora_adapter_metadata", "format")}
    metadata = kohya_metadata(lora, out.stem) | kept | more
    metadata["sshs_model_hash"] = data_hash(written)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(out) as tmp:
        save_tensors(written, tmp, metadata)
    remarks = cast_remark(tensors, written)
    if kept.get("ss_output_name", out.stem) != out.stem:
        remarks.append(f"A1111 knows it by its ss_output_name, which is {kept['ss_output_name']} and was kept")
    return remarks


def data_hash(tensors: dict[str, torch.Tensor]) -> str:
    """sha256 of what lies behind the header of these tensors' file: `sshs_model_hash`."""
    data = safetensors.torch.save(tensors)
    return hashlib.sha256(data[8 + int.from_bytes(data[:8], "little") :]).hexdigest()


def kohya_metadata(lora: Lora, name: str) -> dict[str, str]:
    """What A1111 and others look for in a LoRA's metadata, as far as it is known.

    Without ss_base_model_version and ss_v2 A1111 does not list the file for SD 1.x; ss_output_name is its second name.
    """
    changes, kinds = lora.changes.values(), {kind_of(change) for change in lora.changes.values()}
    large = [c for c in changes if "up" in c.tensors and c.tensors["down"].shape[2:].numel() > 1]
    small = [c for c in changes if c.rank is not None and not any(c is other for other in large)]

    def one(values: list) -> str:
        return "Dynamic" if len(set(values)) > 1 else "".join(f"{v:g}" for v in set(values))

    def alphas(of: list[Change]) -> list:
        return [c.rank if c.alpha is None else c.alpha for c in of]

    args = {"conv_dim": one([c.rank for c in large]), "conv_alpha": one(alphas(large))} if large else {}
    lycoris = bool(kinds - {"LoRA", "LoCon"})
    if lycoris:
        args["algo"] = next((k for k in ("loha", "lokr") if any(k in kind.lower() for kind in kinds)), "locon")
    told = {
        "ss_v2": "False",
        "ss_base_model_version": "sd_v1",
        "ss_network_module": "lycoris.kohya" if lycoris else "networks.lora",
        "ss_network_dim": one([c.rank for c in small or large]) or "Dynamic",
        "ss_network_alpha": one(alphas(small or large)) or "Dynamic",
        "ss_network_args": json.dumps(args),
        "ss_output_name": name,
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": "stable-diffusion-v1/lora",
        "modelspec.implementation": "diffusers",
        "modelspec.title": name,
        "modelspec.date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    return told | of_training(lora.run)


def of_training(state: dict) -> dict[str, str]:
    """A run's state.json and model.json in kohya's words: whatever of it is known."""
    s, base = state.get("settings", {}), state.get("base", {}).get("path")
    lr = s.get("lr")
    size = s.get("size")
    sides = size if isinstance(size, list) else [size, size]
    told = {
        "ss_learning_rate": lr,
        "ss_unet_lr": lr,
        "ss_text_encoder_lr": lr * s["text_lr"] if lr and s.get("train_text_encoder") and s.get("text_lr") else None,
        "ss_optimizer": s.get("optimizer", "adamw" if s else None),
        "ss_lr_scheduler": s.get("lr_schedule"),
        "ss_lr_warmup_steps": s.get("warmup"),
        "ss_seed": s.get("seed"),
        "ss_steps": state.get("step"),
        "ss_max_train_steps": s.get("max_steps"),
        "ss_num_epochs": s.get("epochs"),
        "ss_batch_size_per_device": s.get("batch"),
        "ss_gradient_accumulation_steps": s.get("accumulate"),
        "ss_resolution": f"({sides[0]}, {sides[1]})" if size else None,
        "ss_mixed_precision": s.get("dtype"),
        "ss_caption_dropout_rate": s.get("drop"),
        "ss_noise_offset": s.get("offset_noise") or None,
        "ss_min_snr_gamma": s.get("gamma") if s.get("weighting") == "min_snr" else None,
        "ss_clip_skip": 1 if s else None,  # none: the last layer, which is what this project trains with
        "ss_sd_model_name": Path(base).name if base else None,
        "modelspec.resolution": f"{sides[0]}x{sides[1]}" if size else None,
        "modelspec.prediction_type": s.get("prediction"),
    }
    return {k: str(v) for k, v in told.items() if v is not None}


# ----------------------------------------------------------------------------------------------------------------
# Folders
# ----------------------------------------------------------------------------------------------------------------


def save_diffusers_lora(out: Path, lora: Lora, base: Base, dtype: torch.dtype) -> list[str]:
    """Write a folder for load_lora_weights of the diffusers library, whose versions do not all read an alpha: it is
    multiplied into `up`, and the alpha that is written is the rank. Returns remarks."""
    tensors, ranks = {}, {}
    for name, change in lora.changes.items():
        change = in_shape(change, name, base)
        other = base.theirs[name]
        ends = ("lora_A", "lora_B") if other.startswith("unet.") else ("lora_linear_layer.down", "lora_linear_layer.up")
        tensors[f"{other}.{ends[0]}.weight"] = change.tensors["down"]
        tensors[f"{other}.{ends[1]}.weight"] = change.tensors["up"].float() * change.scale
        part, _, path = other.partition(".")
        ranks.setdefault(part, {})[path.removeprefix("text_model.")] = change.rank
    settings = {}
    for part, of in ranks.items():
        usual = Counter(of.values()).most_common(1)[0][0]
        pattern = {path: rank for path, rank in of.items() if rank != usual}
        values = dict(peft_type="LORA", r=usual, lora_alpha=usual, rank_pattern=pattern, alpha_pattern=pattern,
                      target_modules=sorted(of), bias="none", use_dora=False, use_rslora=False)  # fmt: skip
        settings |= {f"{part}.{key}": value for key, value in values.items()}
    written = cast("LoRA", tensors, dtype)
    metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(settings, sort_keys=True)}
    with new_folder(out) as tmp:
        save_tensors(written, tmp / NAMES[0], metadata)
    return cast_remark(tensors, written)


def save_native_lora(out: Path, lora: Lora, base: Base) -> list[str]:
    """Write a folder of this project's names, fp32; other programs' metadata are kept. Returns remarks."""
    shaped = {name: in_shape(change, name, base) for name, change in lora.changes.items()}
    tensors = to_tensors({name: Adapter(**change.tensors, alpha=change.alpha) for name, change in shaped.items()})
    with new_folder(out) as tmp:
        save_tensors(cast("LoRA", tensors, torch.float32), tmp / OWN[0], lora.metadata or None)
        values = {"format": "lora-1", "unet": asdict(base.unet_config)}
        (tmp / "model.json").write_text(json.dumps(values, indent=1))
        if "settings" in lora.run:
            (tmp / "state.json").write_text(json.dumps({k: lora.run[k] for k in ("settings", "step") if k in lora.run}))
        (tmp / "manifest.json").write_text(json.dumps(digests(tmp), indent=1))
    return []
