"""Where a training step's time is on the GPU: a trace's kernels by kind, and those that want or make another layout.

    python SD_Train.py --phase scratch_256 --size 512 --batch 32 --accumulate 1 --benchmark 200 --trace trace.json
    python benchmarks/trace_kinds.py trace.json
    python benchmarks/trace_kinds.py trace.json --top 100

Prints the kernels that take longest. The last line is JSON: ms a step and kernels a step by kind, the time in which the
GPU did nothing, and the names of all kernels that convert between layouts or work on NCHW: none, if channels_last is
kept in the forward and in the backward pass. torch's own copies between layouts have no name of theirs; they would be
among the strided copies.
"""

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from sd.cli import parser  # noqa: E402
from sd.errors import InputError, run  # noqa: E402

# The first that is found in a kernel's name; those with an underscore before them are of sd/kernels.py.
KINDS = {
    "layout": r"nchw|transpose",
    "strided copies": r"(?<!vectorized_)(?<!unrolled_)elementwise_kernel<.*direct_copy",
    "attention": r"fmha|flash|sdpa|attention|^_softmax|compute_dot_do_o|convert_dq",
    "sharing": r"nccl|symm|barrier|^_add_parts",
    "optimizer": r"^_adamw|multi_tensor_apply",
    "GroupNorm": r"^_gn_|group_?norm|rowwisemoments",
    "LayerNorm": r"^_ln_|layer_?norm",
    "GEGLU": r"^_geglu_(forward|backward)|gelu",
    "residuals, biases, packing": r"^_add_bias|^_column_sums|^_pack",
    "convolutions": r"fprop|dgrad|wgrad|conv|implicit",
    "products": r"gemm|gemv|nvjet|cutlass|splitk|^_geglu_product",
}


def kind_of(name: str) -> str:
    return next((kind for kind, names in KINDS.items() if re.search(names, name, re.IGNORECASE)), "other")


def busy(spans: list[tuple[float, float]]) -> float:
    """The length of the union of spans (begin, end)."""
    total, until = 0.0, -float("inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def read(path: Path) -> tuple[list[dict], int]:
    """A trace's events on the GPU, and of how many steps they are."""
    try:
        trace = json.loads(path.read_text())
        steps, events = int(trace["steps"]), trace["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise InputError(f"{path} is no trace from SD_Train.py --benchmark STEPS --trace FILE ({e!r})") from e
    events = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not events:
        raise InputError(f"{path} has no kernels of a GPU; make the trace on an NVIDIA GPU")
    return events, steps


def main(argv=None):
    p = parser(__doc__)
    g = p.add_argument_group("the trace")
    g.add_argument("trace", type=Path, help="file that SD_Train.py --benchmark STEPS --trace FILE wrote")
    g.add_argument("--top", type=int, default=25, help="kernels to print")
    args = p.parse_args(argv)
    events, steps = read(args.trace)
    names, kinds = defaultdict(lambda: [0.0, 0]), defaultdict(lambda: [0.0, 0])
    for e in events:
        kind = "copies" if e["cat"] != "kernel" else kind_of(e["name"])
        for row in (names[kind, e["name"]], kinds[kind]):
            row[0] += e["dur"] / steps / 1e3  # microseconds
            row[1] += 1 / steps
    for (kind, name), (ms, count) in sorted(names.items(), key=lambda item: -item[1][0])[: args.top]:
        print(f"{ms:8.3f} ms {count:7.1f} a step  {kind}: {name[:90]}")
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events]
    whole = max(end for _, end in spans) - min(begin for begin, _ in spans)
    longest = sorted(kinds.items(), key=lambda item: -item[1][0])
    print(json.dumps({
        "steps": steps, "ms_per_step": round(whole / steps / 1e3, 2),
        "idle_ms": round((whole - busy(spans)) / steps / 1e3, 2),
        "kinds": {kind: {"ms": round(ms, 2), "kernels": round(count, 1)} for kind, (ms, count) in longest},
        "layout": sorted(name for kind, name in names if kind == "layout"),
    }))  # fmt: skip


if __name__ == "__main__":
    run(main)
