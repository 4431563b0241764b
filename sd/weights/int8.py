"""Weights in 8 bits: whole numbers from -127 to 127 and, for each row, what one of them is worth.

A tensor `name` of two or more dimensions is stored as `name` (int8, of the same shape) and `name.scale` (fp32, one for
each row, that is each index of dimension 0), and is name * name.scale. Biases and norms are stored in fp16. Rounding
moves a weight by at most half its row's scale, which is the row's largest absolute value / 127. A file says in its
metadata what it is, so that nothing takes the whole numbers for weights.
"""

import torch

from sd.errors import InputError

KEY, FORMAT = "sd_dtype", "int8-rows-1"  # of a file's metadata

TEXT_FILE = "model.int8.safetensors"  # of a text encoder: other programs would take a model.safetensors as it is


def to_int8(part: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors as a file with FORMAT in its metadata holds them. InputError for values that are not finite."""
    out = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu()
        if not tensor.is_floating_point():
            out[name] = tensor.clone()
            continue
        exact = tensor.float()
        if not (exact if exact.dim() > 1 else exact.half()).isfinite().all():
            raise InputError(f"the {part}'s {name} has values that 8 bits and a scale cannot hold; use --dtype fp32")
        if exact.dim() < 2:
            out[name] = exact.half()
            continue
        rows = exact.flatten(1)  # [rows, ...]
        scale = (rows.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)  # of a row of zeros too
        out[name] = (rows / scale[:, None]).round().to(torch.int8).view(exact.shape)
        out[f"{name}.scale"] = scale
    return out


def from_int8(source, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> dict[str, torch.Tensor]:
    """What to_int8 was given, rounded, in fp32; tensors of any other file as they are. InputError where scales do not
    fit, and for a format of another revision."""
    if KEY not in metadata:
        return tensors
    if metadata[KEY] != FORMAT:
        raise InputError(f"{source} wants {KEY} {FORMAT} in its metadata, found {metadata[KEY]!r}: of another revision")
    out = dict(tensors)
    for name in [name for name, t in tensors.items() if t.dtype == torch.int8]:
        scale, numbers = out.pop(f"{name}.scale", None), tensors[name]
        if scale is None or scale.shape != numbers.shape[:1] or scale.dtype != torch.float32:
            found = "none" if scale is None else f"{scale.dtype} {tuple(scale.shape)}"
            raise InputError(f"{source} wants {name}.scale, fp32 of {len(numbers)} rows, found {found}; convert again")
        out[name] = (numbers.flatten(1) * scale[:, None]).view(numbers.shape)
    return {name: t.float() if t.is_floating_point() else t for name, t in out.items()}


def int8_remark(metadata: dict[str, str]) -> str:
    """In words, that weights are stored in 8 bits, or ""."""
    return "stored in 8 bits with a scale a row, widened" if KEY in metadata else ""
