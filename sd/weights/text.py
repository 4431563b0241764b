"""Text encoders and tokenizers of files and folders."""

import json
import tempfile
from pathlib import Path

import torch

from sd.errors import InputError, reading
from sd.files import read_json
from sd.weights import vocabulary
from sd.weights.parts import own_json
from sd.weights.tensors import file_kind, fit, read_tensors, read_weights, short, tensors_only, weights_file
from SD_Model import TextEncoder

DEFAULT_TEXT_ENCODER = "openai/clip-vit-large-patch14"

CLIP_REST = ("vision_model.", "visual_projection.", "text_projection", "logit_scale")  # a whole CLIP's other half

TEXT_PREFIXES = ("cond_stage_model.", "text_encoders.", "text_encoder.", "clip_l.", "transformer.")  # peeled in order


def clip_from_tensors(source, config, tensors: dict[str, torch.Tensor], tokenizer) -> TextEncoder:
    """A CLIP text encoder of these weights, strictly. Names with or without `text_model.`; fp32, eval."""
    from transformers import CLIPTextModel

    tensors = {
        name.removeprefix("text_model."): t
        for name, t in tensors.items()
        if not name.startswith(CLIP_REST) and not name.endswith("position_ids")
    }
    with reading(f"the text encoder's settings of {source}", "copy or download it again"), torch.device("meta"):
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


TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "spiece.model", "vocab.txt")


def load_tokenizer(name: str):
    """A transformers tokenizer; InputError if it cannot be had.

    name: a folder of a tokenizer, or one with tokenizer/ inside; CLIP's vocabulary as a file (bpe_simple_vocab_16e6.
    txt.gz, merges.txt); a single file of this project; a hub name.
    """
    from transformers import AutoTokenizer

    path = Path(name).expanduser()
    if path.is_file():
        if file_kind(path) == "safetensors":
            if files := carried_tokenizer(read_tensors(path)[1]):
                return tokenizer_from_text(files)
            raise InputError(f"a tokenizer was wanted in {path}, which carries none; give its folder")
        return tokenizer_from_text(vocabulary.clip_files(vocabulary.read_merges(path)))
    if path.is_dir():
        own = has_tokenizer(path) or not (path / "tokenizer").is_dir()
        name = str(path if own else path / "tokenizer")
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as e:  # absent, offline, damaged: the library's classes of errors are many, and change
        raise InputError(
            f"a tokenizer was wanted at {name!r} and could not be loaded ({short(e)}); "
            f"give --tokenizer FOLDER, or run once with a network"
        ) from None


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def clip_tokenizer():
    """CLIP's own tokenizer, of the vocabulary that this machine has already, or else from the hub."""
    merges = vocabulary.find_merges()
    if merges is not None:
        return tokenizer_from_text(vocabulary.clip_files(merges))
    return load_tokenizer(DEFAULT_TEXT_ENCODER)


def tokenizer_from_text(files: dict[str, str]):
    """A tokenizer from the contents of its files ({name: text}), as a single file's metadata carries them."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / Path(name).name).write_text(text, encoding="utf-8")
        return load_tokenizer(folder)


def carried_tokenizer(metadata: dict[str, str]) -> dict[str, str]:
    """The tokenizer's files in a single file's metadata, {} if it carries none. Exports older than the prefix `sd_`
    have them as JSON."""
    try:
        files = vocabulary.unpack(metadata.get("sd_tokenizer", ""))
    except ValueError:
        files = own_json(metadata, "tokenizer") if own_json(metadata, "model") else {}
    if set(files) == {"merges.txt"}:  # CLIP's own, of which this much is written
        return vocabulary.clip_files(files["merges.txt"].split("\n"))
    return files if "tokenizer.json" in files else {}


def with_tokenizer(source, encoder: TextEncoder, tokenizer: str | None) -> TextEncoder:
    """The encoder with the tokenizer that was given, or its own. InputError where ids would have no embedding."""
    if tokenizer is not None:
        encoder = TextEncoder(encoder.model, load_tokenizer(tokenizer))
    rows, wanted = encoder.model.get_input_embeddings().weight.shape[0], len(encoder.tokenizer)
    if wanted > rows:
        raise InputError(
            f"the text encoder of {source} knows {rows:,} tokens and its tokenizer {wanted:,}; give --tokenizer FOLDER"
        )
    return encoder.eval().requires_grad_(False)


def of_length(encoder: TextEncoder, length: int | None) -> TextEncoder:
    """The encoder, of whose texts no more than `length` ids are taken."""
    return encoder.shorten(length) if length is not None and length < encoder.max_length else encoder


def load_clip_folder(folder: Path, tokenizer: str | None = None) -> TextEncoder:
    """The CLIP text encoder of a folder; its tokenizer lies there, or beside it as in diffusers models, or is CLIP's
    own."""
    from transformers import CLIPTextConfig

    values = read_json(folder / "config.json")
    if values.get("model_type") not in ("clip_text_model", "clip"):
        raise InputError(f"{folder} holds a {values.get('model_type')!r}, where a CLIP text model was wanted")
    tensors = tensors_only(read_weights(weights_file(folder, "model")))
    with reading(folder / "config.json", "copy or download the folder again"):
        config = CLIPTextConfig.from_pretrained(folder)
    beside = [f for f in (folder, folder.parent / "tokenizer") if has_tokenizer(f)]
    if tokenizer is not None or beside:
        found = load_tokenizer(tokenizer if tokenizer is not None else str(beside[0]))
    elif config.vocab_size == vocabulary.CLIP_SIZE:
        found = clip_tokenizer()
    else:
        raise InputError(
            f"a tokenizer of {config.vocab_size:,} tokens was wanted in {folder}, and there is none; give --tokenizer"
        )
    return with_tokenizer(folder, clip_from_tensors(folder, config, tensors, found), None)


def clip_skip(metadata: dict[str, str]) -> int:
    """How many of the text encoder's last layers a file of others was trained without: modelspec's encoder_layer and
    kohya's ss_clip_skip count from 1, the last layer."""
    for key in ("modelspec.encoder_layer", "ss_clip_skip"):
        if (value := str(metadata.get(key, "")).strip()).isdecimal() and 1 <= int(value) <= 12:
            return int(value) - 1
    return 0


def text_remark(tensors: dict[str, torch.Tensor], metadata: dict[str, str], tokenizer: str | None) -> str:
    """In words: which tokenizer a single file's text encoder gets, where it is not CLIP's own as a matter of course."""
    rows = next((len(t) for name, t in tensors.items() if name.endswith("token_embedding.weight")), None)
    if rows is None or tokenizer is not None:
        return ""
    if carried_tokenizer(metadata):
        return ""
    if rows != vocabulary.CLIP_SIZE:
        return (
            f"its text encoder knows {rows:,} tokens and CLIP's tokenizer {vocabulary.CLIP_SIZE:,}: tokens that were "
            f"added are lost unless --tokenizer gives their folder"
        )
    return ""


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


def packed_tokenizer(tokenizer) -> tuple[str, str]:
    """(a tokenizer in one line, for a single file's metadata; a remark where it is not CLIP's own, else "")."""
    files = tokenizer_files(tokenizer)
    content = json.loads(files["tokenizer.json"])
    if vocabulary.is_standard(tokenizer, content):
        return vocabulary.pack({"merges.txt": "\n".join(vocabulary.merges_of(content))}), ""
    files = {k: v for k, v in files.items() if k not in ("vocab.json", "merges.txt")}  # tokenizer.json has them
    files["tokenizer.json"] = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return vocabulary.pack(files), (
        "its tokenizer is not CLIP's own: it travels in the file, where this project alone finds it, and other "
        "programs take CLIP's; --format diffusers gives it to them as a folder"
    )
