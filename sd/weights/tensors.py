"""Tensors in files: read without running foreign code, fitted to a network strictly, written."""

import contextlib
import os
import re
import warnings
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save_file

from sd.errors import InputError, system_error
from sd.files import read_json
from sd.weights.int8 import from_int8
from sd.weights.names import VAE_ATTENTION, WRAPPERS, shapes_of, squeezed, unet_names, vae_names
from SD_Model import VAE, UNet, UNetConfig, VAEConfig

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)  # read and widened, never written


class Inert:
    """Stands in for a training framework's class inside a .ckpt: runs nothing, and holds nothing."""

    def __new__(cls, *args, **kwargs):
        return object.__new__(cls)

    def __init__(self, *args, **kwargs):
        pass

    def __setstate__(self, state):
        pass


# Modules whose objects lie beside the weights in honest original checkpoints. They become Inert; their code never runs.
INERT_MODULES = ("pytorch_lightning", "lightning", "lightning_fabric", "omegaconf", "numpy")


def read_tensors(path: Path) -> tuple[dict, dict]:
    """A weight file's content, memory-mapped, and its metadata. Its first bytes say what it is, not its name.

    Safetensors give {name: tensor}, 8-bit ones in fp32 and not mapped; pickles (.ckpt, .pt, .pth, .bin) whatever they
    hold, read with weights_only.
    Raises InputError for absent, damaged and unsafe files.
    """
    if not path.is_file():
        raise InputError(f"a weight file was wanted at {path}, and there is none")
    kind = file_kind(path)
    if kind == "safetensors":
        try:
            with safetensors.safe_open(path, "pt") as f:
                content, metadata = {name: f.get_tensor(name) for name in f.keys()}, f.metadata() or {}
        except (safetensors.SafetensorError, OSError, RuntimeError, AttributeError) as e:
            raise InputError(
                f"{path} is not a whole safetensors file ({short(e)}); copy or download it again"
            ) from None
        return from_int8(path, content, metadata), metadata
    if kind != "pickle":
        raise InputError(f"{path} is {kind}, and no whole safetensors or PyTorch file; copy or download it again")
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except ValueError:  # a legacy file, no zip: torch.load reads it, without mapping it, and finds for itself
        unsafe = []
    except Exception as e:  # the zip or pickle is damaged in one of many ways
        raise InputError(f"{path} is not a whole PyTorch file ({short(e)}); copy or download it again") from None
    inert = [(Inert, name) for name in unsafe if name.split(".")[0] in INERT_MODULES]
    foreign = sorted(set(unsafe) - {name for _, name in inert})
    if foreign:
        raise InputError(
            f"{path} would run foreign code when unpickled ({', '.join(foreign[:5])}), so it was not opened; ask for "
            f"its .safetensors version, or convert it where you trust it"
        )
    try:
        with torch.serialization.safe_globals(inert), warnings.catch_warnings(), contextlib.ExitStack() as stack:
            warnings.simplefilter("ignore")  # of pickle protocols that torch did not write itself
            mapped, file = is_zip(path), path
            if path.suffix.lower() == ".safetensors":  # torch would go by the name: handed over opened, not mapped
                mapped, file = False, stack.enter_context(open(path, "rb"))
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as e:  # UnpicklingError, RuntimeError, EOFError, ...: torch names no common class
        raise InputError(f"{path} is damaged, or would run foreign code ({short(e)}); use .safetensors") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a {type(content).__name__}, where a dict of weights was wanted")
    return content, {}


def file_kind(path: Path) -> str:
    """'safetensors', 'pickle', or in words what a file's first bytes show instead."""
    try:
        with open(path, "rb") as f:
            head = f.read(64)
    except OSError as e:
        raise InputError(f"{path} could not be read ({short(e)})") from None
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**40:  # the header's length, and its JSON
        return "safetensors"
    if head[:4] == b"PK\x03\x04" or head[:1] == b"\x80":
        return "pickle"
    if head.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS, in the place of the weights"
    if head.startswith(b"GGUF"):
        return "a GGUF file"
    if head.lstrip()[:1] == b"<":
        return "a web page"
    return "empty" if not head else "of an unknown kind"


def read_weights(path: Path) -> dict:
    """The content of a weight file, or of all the files that an index (`….index.json`) names."""
    if path.suffix != ".json":
        return read_tensors(path)[0]
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not names or any(not isinstance(n, str) for n in names.values()):
        raise InputError(f"{path} wants a weight_map of tensor names to file names")
    out = {}
    for name in sorted(set(names.values())):
        if Path(name).name != name:
            raise InputError(f"{path} names {name!r}, which is no file beside it")
        out |= read_tensors(path.with_name(name))[0]
    return out


def is_zip(path: Path) -> bool:
    with open(path, "rb") as f:
        return f.read(4) == b"PK\x03\x04"


def short(e: Exception) -> str:
    """The first line of an error, at most 200 characters; of torch's advice on unsafe files, the finding alone."""
    text = str(e).strip()
    if "weights_only" in text or "Weights only" in text:
        found = re.search(r"GLOBAL [\w.]+\w|Unsupported operand \d+", text)
        return found[0] if found else "its pickle is damaged"
    return (text.splitlines() or [type(e).__name__])[0][:200]


# What files carry beside the weights of the three networks: buffers that follow from the schedule, counters, what a
# checker of pictures or a loss had to itself. Known by name, left out, and said.
IGNORED = {
    "betas", "alphas_cumprod", "alphas_cumprod_prev", "sqrt_alphas_cumprod", "sqrt_one_minus_alphas_cumprod",
    "log_one_minus_alphas_cumprod", "sqrt_recip_alphas_cumprod", "sqrt_recipm1_alphas_cumprod", "posterior_variance",
    "posterior_log_variance_clipped", "posterior_mean_coef1", "posterior_mean_coef2", "lvlb_weights", "logvar",
    "ddim_sigmas", "ddim_alphas", "ddim_alphas_prev", "ddim_sqrt_one_minus_alphas", "ddim_timesteps",
    "ddim_sigmas_for_original_num_steps", "denoiser.sigmas", "denoiser.log_sigmas", "sigmas", "log_sigmas",
    "model_sampling.sigmas", "model_sampling.log_sigmas", "global_step", "global_steps", "epoch", "iteration",
    "scale_factor", "model_ema.decay", "model_ema.num_updates", "cond_stage_model.logit_scale",
    "cond_stage_model.text_projection", "cond_stage_model.text_projection.weight",
    "cond_stage_model.transformer.text_projection.weight", "cond_stage_model.transformer.logit_scale",
}  # fmt: skip

IGNORED_MODULES = ("first_stage_model.loss", "loss", "discriminator", "embedding_manager", "safety_checker",
                   "cond_stage_model.transformer.vision_model", "cond_stage_model.transformer.visual_projection",
                   )  # fmt: skip


def without_left_overs(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], str]:
    """(the tensors that are not known to be left over, the others in words or "")."""
    kept, dropped = {}, {}
    for name, tensor in tensors.items():
        module = next((m for m in IGNORED_MODULES if name.startswith(m + ".")), None)
        if name in IGNORED or module is not None:
            label = name if module is None else module + ".*"
            dropped[label] = dropped.get(label, 0) + 1
        else:
            kept[name] = tensor
    labels = [label if n == 1 else f"{label} ({n})" for label, n in dropped.items()]
    return kept, f"left out as known: {', '.join(labels)}" if labels else ""


def tensors_only(content: dict) -> dict[str, torch.Tensor]:
    """The tensors of a pickled dict, without wrappers' segments in their names; other values (counters) are dropped."""
    return {
        ".".join(s for s in name.split(".") if s not in WRAPPERS): value
        for name, value in content.items()
        if isinstance(name, str) and isinstance(value, torch.Tensor)
    }


def guess_cause(tensors: dict[str, torch.Tensor]) -> str:
    """What a file that does not fit probably is; "" if nothing comes to mind."""
    names = tensors.keys()

    def any_starts(*heads):
        return any(name.startswith(heads) for name in names)

    def any_holds(*parts):
        return any(part in name for name in names for part in parts)

    def shape(*ends):
        return next((tuple(t.shape) for name, t in tensors.items() if name.endswith(ends)), ())

    if any_starts("lora_unet_", "lora_te") or any_holds(".lora_A.", ".lora_B.", "lora_down", "lora_up", "lora.down"):
        return "it looks like a LoRA, which is applied to a model and is none itself"
    if any_starts("conditioner.embedders", "model.diffusion_model.label_emb", "label_emb", "add_embedding"):
        return "it looks like SDXL, and this is SD 1.x"
    if any_holds("double_blocks", "joint_blocks"):
        return "it looks like a transformer model (Flux, SD 3), and this is SD 1.x"
    if any_starts("control_model.", "controlnet_cond_embedding", "input_hint_block"):
        return "it looks like a ControlNet, which is applied to a model and is none itself"
    if any_starts("cond_stage_model.model."):
        return "it looks like SD 2.x (OpenCLIP text encoder), and this is SD 1.x"
    if shape("input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight", "attn2.to_k.weight")[1:] == (1024,):
        return "it looks like SD 2.x (context width 1024), and this is SD 1.x"
    first = shape("input_blocks.0.0.weight") or (shape("conv_in.weight") if any_starts("time_embedding.") else ())
    if first[1:2] == (9,):
        return "it looks like an inpainting model (9 input channels)"
    if first and first[1] not in (4,):
        return f"its UNet has {first[1]} input channels: depth, instruction or another variant of SD"
    if any_holds("scaled_fp8", ".scale_weight", ".weight_scale", ".comfy_quant"):
        return "it looks like scaled fp8, whose scales are not read here; take its fp16 version"
    if any_holds("string_to_param", "emb_params"):
        return "it looks like a textual inversion"
    unet = any_holds("time_embed")
    if not unet and any_starts("encoder.down", "decoder.up", "quant_conv", "first_stage_model.", "vae."):
        return "it looks like a VAE"
    if not unet and any_starts("text_model.", "transformer.text_model.", "cond_stage_model."):
        return "it looks like a text encoder"
    if unet and not any_holds("encoder."):
        return "it looks like a UNet"
    return ""


def fit(part: str, source, wanted: dict[str, torch.Size], tensors: dict, ours: dict[str, str], original=None) -> dict:
    """Rename tensors by `ours` ({their name: our name}) and check them against `wanted` ({our name: shape}).

    1x1 convs and linear layers hold the same weights: 2-D and 4-D are taken for each other. Returns {our name: tensor},
    not copied. Raises InputError with the first ten differences; `original`, the whole file, helps to guess the cause.
    """
    fitted, differences = {}, []
    for name, tensor in tensors.items():
        mine = ours.get(name)
        if mine is None:
            differences.append(f"unexpected {name} {tuple(tensor.shape)}")
        elif mine in fitted:
            differences.append(f"{name}: a second tensor for {mine}")
        else:
            shape = wanted[mine]
            if tensor.shape != shape and squeezed(tensor.shape) == squeezed(shape):
                tensor = tensor.reshape(shape)
            fitted[mine] = tensor
            if tensor.shape != shape:
                differences.append(f"{name}: {tuple(shape)} wanted, {tuple(tensor.shape)} found")
            elif not tensor.dtype.is_floating_point or (tensor.element_size() < 2 and tensor.dtype not in FP8):
                differences.append(f"{name}: fp32, fp16, bf16 or fp8 wanted, {tensor.dtype} found")
    differences += [f"missing {name} {tuple(shape)}" for name, shape in wanted.items() if name not in fitted]
    if differences:
        cause = guess_cause(tensors if original is None else original)
        more = f" and {len(differences) - 10} more" if len(differences) > 10 else ""
        raise InputError(
            f"{source} does not fit the {part} that was wanted"
            + (f"; {cause}" if cause else "")
            + f"; {len(differences)} differences: {'; '.join(differences[:10])}{more}"
        )
    return fitted


def fit_unet(source, config: UNetConfig, tensors: dict, original=None) -> dict[str, torch.Tensor]:
    """UNet tensors in original or diffusers names -> in our names."""
    names = unet_names(config)
    ours = {theirs: name for name, theirs in names.items()} | {name: name for name in names}
    return fit("UNet", source, shapes_of(UNet, config), tensors, ours, original)


def fit_vae(source, config: VAEConfig, tensors: dict, decoder_only: bool = False) -> dict[str, torch.Tensor]:
    """VAE tensors in original or diffusers names, with any spelling of the attention -> in our names."""
    ours = {}
    for spelling in VAE_ATTENTION:
        there = vae_names(config, spelling)
        ours |= {theirs: name for name, theirs in there.items()}
        for name in there:  # original outer names with a folder's attention names happen too
            for a, b in zip(VAE_ATTENTION[0], spelling):
                if f".attn_1.{a}." in name:
                    ours[name.replace(f".attn_1.{a}.", f".attn_1.{b}.")] = name
        ours |= {name: name for name in there}
    wanted, left_out = shapes_of(VAE, config), ("encoder.", "quant_conv.") if decoder_only else ()
    wanted = {name: shape for name, shape in wanted.items() if not name.startswith(left_out)}
    return fit("VAE", source, wanted, tensors, {theirs: name for theirs, name in ours.items() if name in wanted})


def build(cls, config, state: dict[str, torch.Tensor], device="cpu", dtype=torch.float32):
    """UNet or VAE of copies of these weights, eval, without gradients; one tensor at a time."""
    with torch.device("meta"):
        module = cls(config)
    module.load_state_dict({k: t.to(device, dtype, copy=True) for k, t in state.items()}, assign=True)
    return module.eval().requires_grad_(False)


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict | None = None):
    """A .safetensors file that others may read as far as the process's umask lets them; the library lets no one."""
    try:
        save_file(tensors, path, metadata)
    except safetensors.SafetensorError as e:
        raise system_error(e, path) or e from None
    os.umask(umask := os.umask(0o022))
    os.chmod(path, 0o666 & ~umask)


def weights_file(folder: Path, stem: str, live: bool = False) -> Path:
    """The weight file of a diffusers or transformers folder, or the index of several; with `live`, the non-EMA variant
    where there is one."""
    kinds = [".non_ema"] * live + ["", ".fp16"]
    bins = "pytorch_model" if stem == "model" else stem
    for kind in kinds:
        for name, ending in ((stem, ".safetensors"), (bins, ".bin")):
            one, index = f"{name}{kind}{ending}", f"{name}{ending}.index{kind}.json"
            for path in (folder / one, folder / index, folder / f"{one}.index.json"):
                if path.is_file():
                    return path
    found = sorted(os.listdir(folder))[:10] if folder.is_dir() else "no such folder"
    raise InputError(f"{stem}.safetensors or {bins}.bin was wanted in {folder}, found {found}")


FILE_ENDINGS = (".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin", ".gz", ".json")  # never a hub name's

SHARDS = "-?????-of-?????.safetensors"  # how files that an index names end


def fp8_remark(tensors: dict[str, torch.Tensor]) -> str:
    """In words, that weights are stored in a byte each, or ""."""
    small = sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.dtype in FP8})
    return f"stored in {' and '.join(small)}, widened" if small else ""


def cast(part: str, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Contiguous tensors of the dtype. InputError where a finite value does not fit into it."""
    out = {}
    for name, tensor in tensors.items():
        out[name] = tensor.detach().to("cpu", dtype).contiguous()
        if dtype == torch.float16 and not out[name].isfinite().all():
            raise InputError(f"the {part}'s {name} has values beyond fp16's 65504; use --dtype bf16 or fp32")
    return out
