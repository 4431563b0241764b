"""LoRAs in files of any program: read, matched to the modules of a model, and what they add to a weight.

Read are kohya's names (LoRA, LoCon, and LyCORIS' LoHa and LoKr), those of the diffusers library, PEFT's folders, and
this project's own checkpoints. Each becomes a dict of Change by module, and `delta` says what one adds to its weight.
"""

import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import safetensors
import torch

from sd.errors import InputError
from sd.files import read_json, sha256
from sd.lora import Adapter
from sd.weights.names import rename, shapes_of, unet_rows
from sd.weights.read import newest_checkpoint
from sd.weights.tensors import file_kind, read_tensors, short, tensors_only, weights_file
from SD_Model import UNet, UNetConfig

# What the key of a tensor ends with, in the spellings of kohya, diffusers (new, old, of text encoders), PEFT (with the
# adapter's name or without), LyCORIS and this project. `lora_A` is down, `lora_B` up.
KEY = re.compile(
    r"(?P<module>.+?)(?:[._]lora\.(?P<diffusers>down|up)\.weight"
    r"|\.lora_(?P<kohya>down|up|mid)\.weight"
    r"|\.lora_linear_layer\.(?P<text>down|up)\.weight"
    r"|\.lora_(?P<peft>A|B|magnitude_vector)(?:\.(?!bias$)\w+)??(?:\.weight)?"
    r"|\.(?P<own>alpha|dora_scale|hada_(?:w[12]_[ab]|t[12])|lokr_(?:w[12](?:_[ab])?|t2)|down|up))"
)
LORA_KEYS = re.compile(r"lora_(down|up|mid|A|B)\b|lora\.(down|up)\.|lora_linear_layer|\.(hada_w|lokr_w|oft_)")

KINDS = [  # what a module's tensors may be, beside dora_scale
    {"down", "up"},
    {"down", "up", "mid"},
    {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"},
    {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"},
    {"lokr_w1", "lokr_w2"},
    {"lokr_w1_a", "lokr_w1_b", "lokr_w2"},
    {"lokr_w1", "lokr_w2_a", "lokr_w2_b"},
    {"lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b"},
    {"lokr_w1", "lokr_w2_a", "lokr_w2_b", "lokr_t2"},
    {"lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b", "lokr_t2"},
]

# Ways in which PEFT begins that change the base's weights too: the adapter alone does not say what it adds.
CHANGES_THE_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")


class Change(NamedTuple):
    """What a file holds of one module: tensors by their part (`down`, `up`, `mid`, `dora_scale`, LyCORIS' names)."""

    tensors: dict[str, torch.Tensor]
    alpha: float | None = None  # None: the rank, which scales by 1

    @property
    def rank(self) -> int | None:
        """None for LoKr of two whole matrices, which has none."""
        inner = next((n for n in ("down", "hada_w1_b", "lokr_w1_b", "lokr_w2_b") if n in self.tensors), None)
        return None if inner is None else self.tensors[inner].shape[0]

    @property
    def scale(self) -> float:
        """alpha / rank; 1 for LoKr of two whole matrices, whose alpha means nothing."""
        return 1.0 if self.alpha is None or self.rank is None else self.alpha / self.rank


def product(change: Change, weight: torch.Tensor) -> torch.Tensor:
    """The unscaled product of a change's tensors, fp32, in the shape of its weight [out, in, ...].

    LoRA and LoCon: up down; with a core `mid` (Tucker) its three modes times up, and down. LoHa (Hyeon-Woo et al. 2022,
    arXiv:2108.06098): (w1_a w1_b) * (w2_a w2_b), element by element. LoKr (Yeh et al. 2024, arXiv:2309.14859): the
    Kronecker product of w1 and w2. ValueError if the tensors are not of this weight.
    """
    t = {name: x.float() for name, x in change.tensors.items()}
    if "mid" in t:
        whole = torch.einsum("rs...,or,si->oi...", t["mid"], t["up"].flatten(1), t["down"].flatten(1))
    elif "up" in t:
        whole = t["up"].flatten(1) @ t["down"].flatten(1)  # [out, in * kh * kw]
    elif "hada_t1" in t:
        whole = math.prod(
            torch.einsum("rs...,ro,si->oi...", t[f"hada_t{k}"], t[f"hada_w{k}_a"], t[f"hada_w{k}_b"]) for k in (1, 2)
        )
    elif "hada_w1_a" in t:
        whole = (t["hada_w1_a"] @ t["hada_w1_b"].flatten(1)) * (t["hada_w2_a"] @ t["hada_w2_b"].flatten(1))
    else:
        w1 = t["lokr_w1"] if "lokr_w1" in t else t["lokr_w1_a"] @ t["lokr_w1_b"]  # [a, b]
        if "lokr_w2" in t:
            w2 = t["lokr_w2"]
        elif "lokr_t2" in t:
            w2 = torch.einsum("rs...,ro,si->oi...", t["lokr_t2"], t["lokr_w2_a"], t["lokr_w2_b"])
        else:
            w2 = t["lokr_w2_a"] @ t["lokr_w2_b"].flatten(1)
        w2 = w2.reshape(len(w2), -1, *weight.shape[2:]).contiguous()  # [out / a, in / b, ...]
        whole = torch.kron(w1.reshape(*w1.shape, *[1] * (weight.dim() - 2)), w2)
    if whole.flatten(1).shape != weight.flatten(1).shape:
        raise ValueError(f"{tuple(weight.shape)} wanted, {tuple(whole.shape)} found")
    return whole.reshape(weight.shape)


@torch.no_grad()
def delta(change: Change, weight: torch.Tensor) -> torch.Tensor:
    """What a change adds to its weight W [out, in] or [out, in, kh, kw]: fp32 of that shape.

    DoRA (Liu et al. 2024, arXiv:2402.09353, equation 5) gives each row or column of W + dW a length of its own, so that
    what it adds depends on W: (W + dW) * m / |W + dW| - W. m is [out, 1, ...], with norms over a row and its kernel, or
    [1, in, ...], with norms over all but the column. ValueError if the tensors are not of this weight.
    """
    weight = weight.float()
    added = product(change, weight) * change.scale
    if "dora_scale" not in change.tensors:
        return added
    axis, moved = dora_axis(change, weight), weight + added
    others = [k for k in range(weight.dim()) if k != axis]
    norms = torch.linalg.vector_norm(moved, dim=others, keepdim=True)
    lengths = change.tensors["dora_scale"].float().reshape(norms.shape)
    return moved * (lengths / norms.clamp_min(torch.finfo(torch.float32).tiny)) - weight


def dora_axis(change: Change, weight: torch.Tensor) -> int:
    """0 where dora_scale has a number a row, 1 where it has one a column. ValueError if it is not of this weight."""
    lengths = change.tensors["dora_scale"]
    axis = 1 if lengths.shape[0] == 1 and len(weight) > 1 else 0
    if lengths.shape[axis : axis + 1] != weight.shape[axis : axis + 1] or lengths.numel() != weight.shape[axis]:
        raise ValueError(f"dora_scale {tuple(lengths.shape)} found, one number a row or column wanted")
    return axis


def plain(change: Change) -> Adapter:
    """A change as an Adapter; a Tucker core is multiplied into `down`. InputError for other kinds."""
    if "up" not in change.tensors or "dora_scale" in change.tensors:
        raise InputError(f"{kind_of(change)} is no product of two matrices, which a LoRA of this format is")
    down, up = change.tensors["down"], change.tensors["up"]
    if "mid" in change.tensors:
        down = torch.einsum("rs...,si->ri...", change.tensors["mid"].float(), down.float().flatten(1))
    return Adapter(down, up, float(len(down)) if change.alpha is None else change.alpha)


def kind_of(change: Change) -> str:
    """LoRA, LoCon (of kernels larger than 1x1), LoHa or LoKr, or DoRA with one of these."""
    t = change.tensors
    if "up" in t:
        kind = "LoCon" if "mid" in t or t["down"].shape[2:].numel() > 1 else "LoRA"
    else:
        kind = "LoHa" if "hada_w1_a" in t else "LoKr"
    return f"DoRA ({kind})" if "dora_scale" in t else kind


# ----------------------------------------------------------------------------------------------------------------
# The modules that a LoRA may belong to
# ----------------------------------------------------------------------------------------------------------------


@dataclass
class Base:
    """The linear layers and convolutions of a UNet and a text encoder."""

    shapes: dict[str, torch.Size]  # of their weights, by our module names
    theirs: dict[str, str]  # diffusers' names of them, with `unet.` and `text_encoder.text_model.`
    ours: dict[str, str]  # our names by every spelling that is known
    unet_config: UNetConfig


def sd15_text() -> dict[str, torch.Size]:
    """Shapes of the weights of SD 1.x's text encoder that a LoRA may change, by name."""
    inside = {f"self_attn.{x}_proj": (768, 768) for x in "qkv"} | {"self_attn.out_proj": (768, 768)}
    inside |= {"mlp.fc1": (3072, 768), "mlp.fc2": (768, 3072)}
    return {f"encoder.layers.{i}.{name}": torch.Size(shape) for i in range(12) for name, shape in inside.items()}


def text_shapes(encoder) -> dict[str, torch.Size]:
    """The same of a TextEncoder."""
    names = {name.removesuffix(".weight"): t.shape for name, t in encoder.model.named_parameters() if t.dim() > 1}
    return {name: shape for name, shape in names.items() if "embedding" not in name}


def base_of(unet_config: UNetConfig | None = None, text: dict[str, torch.Size] | None = None) -> Base:
    """The modules of a UNet and of a text encoder (sd15_text, text_shapes); default: SD 1.5's."""
    unet_config = UNetConfig() if unet_config is None else unet_config
    names = {name.removesuffix(".weight"): s for name, s in shapes_of(UNet, unet_config).items() if len(s) > 1}
    shapes, theirs, ours = {}, {}, {}
    for path, other in rename(names, unet_rows(unet_config)).items():
        name = f"unet.{path}"
        shapes[name], theirs[name] = names[path], f"unet.{other}"
        for spelling in {path, other, re.sub(r"\.to_out\.0$", ".to_out", other)}:
            heads = ("", "unet.", "diffusion_model.", "model.diffusion_model.")
            ours |= {head + spelling: name for head in heads}
            ours["lora_unet_" + spelling.replace(".", "_")] = name
    for path, shape in (sd15_text() if text is None else text).items():
        name, bare = f"text_encoder.{path}", path.removeprefix("text_model.")
        shapes[name], theirs[name] = shape, f"text_encoder.text_model.{bare}"
        old = re.sub(r"\b(q|k|v|out)_proj$", r"to_\1", bare)  # as the diffusers library once called them
        for spelling in {bare, old, f"text_model.{bare}", f"text_model.{old}"}:
            ours |= {spelling: name, f"text_encoder.{spelling}": name}
            ours["lora_te_" + spelling.replace(".", "_")] = name
    return Base(shapes, theirs, ours, unet_config)


# ----------------------------------------------------------------------------------------------------------------
# Files
# ----------------------------------------------------------------------------------------------------------------


@dataclass
class Lora:
    """A LoRA that fits its base."""

    path: str  # as it was given
    found: str  # what it is, in words
    changes: dict[str, Change]  # by our module names
    metadata: dict[str, str]  # of its file
    sha256: str
    run: dict  # what its state.json and model.json say, where it is of this project

    @property
    def name(self) -> str:
        """What A1111 calls it."""
        name = self.metadata.get("ss_output_name") or Path(self.path).resolve().name.removesuffix(".safetensors")
        return re.sub(r"[<>:,\s]+", "_", name)


OWN = ("lora.safetensors", "lora_ema.safetensors")
NAMES = ("pytorch_lora_weights.safetensors", "pytorch_lora_weights.bin")  # of the diffusers library


def lora_files(path: Path, weights: str) -> list[Path]:
    """The weight files of a LoRA: one, or PEFT's two. [] if there is none at the path."""
    if path.is_file():
        return [path]
    if (path / "checkpoints").is_dir():
        path = newest_checkpoint(path)
    own = [path / f"lora{kind}.safetensors" for kind in (["_ema", ""] if weights == "ema" else ["", "_ema"])]
    for file in [*own, *(path / name for name in NAMES)]:
        if file.is_file():
            return [file]
    folders = [f for f in (path, path / "unet", path / "text_encoder") if (f / "adapter_config.json").is_file()]
    return [weights_file(folder, "adapter_model") for folder in folders]


def is_lora(source: str | Path) -> bool:
    """Whether a path is that of a LoRA, by the names of its files and, of a single file, of its tensors."""
    path = Path(source).expanduser()
    if path.is_dir():
        checkpoints = sorted((path / "checkpoints").glob("step_????????"))
        inside = checkpoints[-1] if checkpoints else path
        names = ("lora.safetensors", "lora_ema.safetensors", "adapter_config.json", *NAMES)
        parts = ("unet/adapter_config.json", "text_encoder/adapter_config.json")
        return any((inside / name).is_file() for name in (*names, *parts))
    if not path.is_file() or file_kind(path) not in ("safetensors", "pickle"):
        return False
    try:
        with safetensors.safe_open(path, "pt") as f:
            names = list(f.keys())
    except (safetensors.SafetensorError, OSError):
        names = list(tensors_only(read_tensors(path)[0]))
    return any(LORA_KEYS.search(name) for name in names)


def names_its_model(source: str | Path) -> bool:
    """Whether a path is a checkpoint or run of this project that trained a LoRA and says of which model: it can be
    opened as that model with the LoRA added."""
    path = Path(source).expanduser()
    checkpoints = sorted((path / "checkpoints").glob("step_????????")) if path.is_dir() else []
    told = (checkpoints[-1] if checkpoints else path) / "model.json"
    return told.is_file() and "base" in read_json(told) and is_lora(source)


def read_lora(source: str, base: Base, weights: str = "ema") -> Lora:
    """A LoRA for a base: a file, a folder of the diffusers library or of PEFT, a checkpoint or run folder of this
    project. weights: 'ema' or 'live', of one that has both.

    Strict: InputError where a tensor belongs to no module of the base, does not fit it, is not finite, or lacks its
    partner; it says what kind of model the file may be for.
    """
    path = Path(source).expanduser()
    files = lora_files(path, weights) if path.exists() else []
    if not files:
        what = f"{sorted(p.name for p in path.iterdir())[:10]} is there" if path.is_dir() else "there is no such file"
        raise InputError(
            f"a LoRA was wanted at {source}, a file, a folder of the diffusers library or of PEFT, or a run of this "
            f"project, and {what}"
        )
    found, left, tensors, metadata = {}, [], {}, {}
    for file in files:
        content, metadata = read_tensors(file)
        config = adapter_config(file, metadata)
        nested = content.get("state_dict")
        for key, tensor in tensors_only(nested if isinstance(nested, dict) else content).items():
            tensors[key] = tensor
            match = KEY.fullmatch(key)
            spelling = match and match["module"].removeprefix("base_model.model.").replace(".processor.", ".")
            if spelling not in base.ours:
                left.append(key)
                continue
            module = base.ours[spelling]
            parts, _ = found.setdefault(module, ({}, config))
            part = match[match.lastgroup]
            part = {"A": "down", "B": "up", "magnitude_vector": "magnitude"}.get(part, part)
            if part in parts:
                raise InputError(f"{source} cannot be used: {key} is a second `{part}` of {module}")
            if not tensor.is_floating_point() or not tensor.isfinite().all():
                raise InputError(f"{source} cannot be used: {key} has values that are no finite fractions")
            parts[part] = tensor
    if left or not tensors:
        raise InputError(
            f"{source} does not fit the model: {len(tensors) - len(left)} of {len(tensors)} tensors matched"
            + guessed(tensors, metadata)
            + f"; left over: {', '.join(left[:10])}"
            + (f" and {len(left) - 10} more" if len(left) > 10 else "")
        )
    changes, odd = {}, []
    for module, (parts, config) in found.items():
        try:
            changes[module] = change_of(module, parts, config, base)
        except (ValueError, RuntimeError, IndexError) as e:  # of torch, which names no common class for shapes
            odd.append(f"{module}: {short(e)}")
    if odd:
        raise InputError(
            f"{source} does not fit the model: {len(odd)} of {len(found)} modules differ{guessed(tensors, metadata)}; "
            + "; ".join(odd[:5])
        )
    digest = sha256(files[0]) if len(files) == 1 else hashlib.sha256("".join(map(sha256, files)).encode()).hexdigest()
    run = {}
    for name in ("state.json", "model.json") if files[0].name in OWN else ():
        run |= read_json(files[0].with_name(name)) if files[0].with_name(name).is_file() else {}
    return Lora(source, f"{source}: {in_words(changes)} ({files[0].name})", changes, metadata, digest, run)


def adapter_config(file: Path, metadata: dict) -> dict:
    """PEFT's settings of a file: those of the folder that it lies in, or those that the diffusers library writes into
    the file, which begin with `unet.` or `text_encoder.` there. InputError for adapters that say not all they do."""
    config = file.with_name("adapter_config.json")
    if file.name.startswith("adapter_model.") and config.is_file():
        values = {"lora_alpha": 8} | read_json(config)  # which is PEFT's default
    else:
        try:
            values = json.loads(metadata.get("lora_adapter_metadata", "{}"))
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise InputError(f"{file} wants a JSON object as its lora_adapter_metadata, found something else")
    for name, value in values.items():
        name = name.rpartition(".")[2] if name.startswith(("unet.", "text_encoder.")) else name
        if name == "peft_type" and value != "LORA":
            raise InputError(f"{file} is of PEFT's type {value}, of which LORA alone is read here")
        begins = str(value).split("_niter")[0].lower()
        if (name == "init_lora_weights" and begins in CHANGES_THE_BASE) or (name == "fan_in_fan_out" and value):
            raise InputError(f"{file} has {name} {value!r}, so that its base is not the model's own weights")
    return values


def change_of(module: str, parts: dict[str, torch.Tensor], config: dict, base: Base) -> Change:
    """A module's tensors as a Change. ValueError or RuntimeError if they are incomplete or not of its shape."""
    parts = dict(parts)
    alpha = parts.pop("alpha", None)
    if alpha is not None and alpha.numel() != 1:
        raise ValueError(f"alpha wants one number, found {tuple(alpha.shape)}")
    shape = base.shapes[module]
    if (names := parts.keys() - {"dora_scale", "magnitude"}) not in KINDS:
        raise ValueError(f"it has {', '.join(sorted(names)) or 'nothing'} alone")
    if "magnitude" in parts:  # PEFT's is of rows: [out], of a convolution [1, out, 1, 1]
        parts["dora_scale"] = parts.pop("magnitude").reshape(-1, *[1] * (len(shape) - 1))
    change = Change(parts, None if alpha is None else float(alpha))
    if change.rank == 0:
        raise ValueError("its rank is 0")
    if alpha is None and "up" in parts:
        change = change._replace(alpha=peft_alpha(module, change.rank, config, base))
    weight = torch.empty(shape, device="meta")
    product(Change({name: t.to("meta") for name, t in parts.items()}), weight)
    if "dora_scale" in parts:
        dora_axis(change, weight)
    return change


def peft_alpha(module: str, rank: int, config: dict, base: Base) -> float | None:
    """A module's alpha by PEFT's settings, so that alpha / rank is its scale; None where they say nothing."""
    part, _, name = base.theirs[module].partition(".")

    def told(key: str):
        return config.get(f"{part}.{key}", config.get(key))

    alpha, patterns = told("lora_alpha"), told("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"alpha_pattern wants numbers by name, found {patterns!r}")
    try:
        alpha = next((v for pattern, v in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", name)), alpha)
    except re.error as e:
        raise ValueError(f"alpha_pattern wants regular expressions ({e})") from None
    if alpha is None:
        return None
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise ValueError(f"lora_alpha wants a number, found {alpha!r}")
    return float(alpha) * (rank**0.5 if told("use_rslora") else 1.0)


def guessed(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> str:
    """What model a LoRA that does not fit may be for, as the end of a clause; "" if nothing comes to mind."""
    names = "\n".join(tensors)
    version = metadata.get("ss_base_model_version", "") + metadata.get("modelspec.architecture", "")
    widths = {t.shape[1] for k, t in tensors.items() if re.search(r"attn2.to_k.*(down|lora_A)", k) and t.dim() > 1}
    if "xl" in version or 2048 in widths or re.search(r"lora_te[12]_|text_encoder_2\.|_blocks[._]1[._]attn", names):
        return "; it looks like a LoRA of SDXL, and this is SD 1.x"
    if "v2" in version or metadata.get("ss_v2") == "True" or 1024 in widths or re.search(r"ers[._]1[2-9][._]", names):
        return "; it looks like a LoRA of SD 2.x, and this is SD 1.x"
    if re.search(r"double_blocks|single_blocks|single_transformer_blocks|joint_blocks|^transformer\.", names, re.M):
        return "; it looks like a LoRA of a transformer model (Flux, SD 3), and this is SD 1.x"
    if not any(LORA_KEYS.search(name) for name in tensors):
        return "; it looks like no LoRA"
    return ""


def in_words(changes: dict[str, Change]) -> str:
    """Kinds, ranks, alphas and number of modules of a LoRA."""
    kinds = " and ".join(sorted({kind_of(c) for c in changes.values()}))

    def each(values: list) -> str:
        return "/".join(f"{v:g}" for v in sorted(set(values)))

    ranks = [c.rank for c in changes.values() if c.rank is not None]
    alphas = [c.rank if c.alpha is None else c.alpha for c in changes.values() if c.rank is not None]
    sizes = f" of rank {each(ranks)}, alpha {each(alphas)}" if ranks else ""
    unet = sum(name.startswith("unet.") for name in changes)
    return f"{kinds}{sizes}, of {unet} modules of the UNet and {len(changes) - unet} of the text encoder"
