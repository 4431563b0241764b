"""What every test file shares: the import path, quiet offline libraries, one torch thread, and small helpers."""

import gzip
import os
import sys
from importlib.util import find_spec
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers and huggingface_hub are imported
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "disabled"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: its threads wait for each other on busy cores

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # for subprocesses

import pytest  # noqa: E402
import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before sd.kernels is imported: its kernels then run on the CPU

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def randomise(module: torch.nn.Module, seed: int = 0, gain: float = 0.7):
    """Every parameter random, norms' too: weights of std gain/sqrt(fan_in), norm scales about 1, biases of std 0.1.

    A fresh network is zero-initialised in places, and then equal to another for the wrong reason.
    """
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in module.named_parameters():
            noise = torch.randn(p.shape, generator=g)
            if p.dim() > 1:
                p.copy_(noise * gain / p[0].numel() ** 0.5)
            else:
                p.copy_(noise * 0.1 + (1.0 if name.endswith("weight") else 0.0))
    return module.eval()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference over largest value."""
    return ((a - b).abs().max() / b.abs().max()).item()


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    words = {line.split(":")[0].strip(): line.split(":")[1].strip() for line in lines if ":" in line}
    return " ".join([words.get("model name", "?"), words.get("cpu family", "?"), words.get("model", "?"),
                     torch.backends.cpu.get_cpu_capability()])  # fmt: skip


def make_clip_tokenizer(merge_count: int = 49152 - 256 - 2):
    """CLIP's own tokenizer, from the BPE vocabulary that the package open_clip carries (not imported: torchvision).
    Fewer merges make a smaller one of the same kind, which loads faster."""
    from transformers import CLIPTokenizer

    file = Path(next(iter(find_spec("open_clip").submodule_search_locations))) / "bpe_simple_vocab_16e6.txt.gz"
    lines = gzip.open(file, "rt", encoding="utf-8").read().split("\n")
    merges = [tuple(line.split()) for line in lines[1 : merge_count + 1]]
    # 256 bytes as printable characters, in CLIP's order: those that print as themselves first
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    tokens = alphabet + [c + "</w>" for c in alphabet] + ["".join(m) for m in merges]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, model_max_length=77)


@pytest.fixture(scope="session")
def clip_tokenizer():
    return make_clip_tokenizer()


@pytest.fixture(scope="session")
def small_tokenizer():
    return make_clip_tokenizer(100)


def make_pipeline(tokenizer, *, widths=(32, 64, 64), scheduler=None, seed=0):
    """A StableDiffusionPipeline of the diffusers library with random weights, small; its pictures are not flat."""
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModel

    n = len(widths)
    unet = diffusers.UNet2DConditionModel(
        sample_size=4,
        block_out_channels=widths,
        down_block_types=("CrossAttnDownBlock2D",) * (n - 1) + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * (n - 1),
        layers_per_block=1,
        attention_head_dim=4,
        cross_attention_dim=32,
        norm_num_groups=16,
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(16, 16, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=8,
        layers_per_block=1,
    )
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            projection_dim=32, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip
    for i, module in enumerate((unet, vae, text)):
        randomise(module, seed + i)
    settings = dict(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, clip_sample=False,
                    set_alpha_to_one=False, steps_offset=1)  # fmt: skip
    pipe = diffusers.StableDiffusionPipeline(
        vae=vae, text_encoder=text, tokenizer=tokenizer, unet=unet,
        scheduler=diffusers.DDIMScheduler(**(settings | (scheduler or {}))),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe
