"""Text encoders and tokenizers of files and folders."""

import json
import tempfile
from pathlib import Path

import torch

from sd.errors import InputError
from sd.files import read_json
from sd.weights.tensors import fit, read_tensors, short, tensors_only, weights_file
from SD_Model import TextEncoder

DEFAULT_TEXT_ENCODER = "openai/clip-vit-large-patch14"


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
