"""Compile every kernel of sd/kernels.py for an H100, which needs no GPU: Triton's interpreter takes more than its
compiler does. Run by test_kernels.py in a process without the interpreter."""

import inspect

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sd import kernels

# Types of arguments by name: activations and their gradients in bf16, the rest as in the kernels' docstrings.
HALF = set("x x1 x2 x3 joined e y dy dres dx dx2 de a res h u du".split())
FLOAT = set("eps scale limit lr beta1 beta2 correction1 correction2 decay".split())
WHOLE = set("HW C C1 G S N K M ROWS begin key".split())
TABLES = {"table": "*i64", "grads": "*i64", "chunks": "*i32"}
# Of _geglu_product, tiles that the GPU copies.
TILES = {"x": "tensordesc<bf16[128, 64]>", "w": "tensordesc<bf16[2, 128, 64]>", "y": "tensordesc<bf16[128, 128]>"}
SIZES = {"BM": 128, "BN": 128, "BK": 64, "BR": 64, "BC": 64, "BS": 16, "BLOCK": 1024, "STEPS": 4, "P": 3}
OPTIONS = {"_geglu_product": {"num_warps": 8, "num_stages": 3}}
SMALL_TILES = {"_adamw8bit": {"ROWS": 4}, "_ln_forward": {"BR": 4, "BC": 512}, "_ln_backward": {"BR": 4, "BC": 512}}


def compile_kernel(name: str, flag: bool):
    kernel = getattr(kernels, name)
    parameters, sizes = inspect.signature(kernel.fn).parameters, SIZES | SMALL_TILES.get(name, {})
    names = list(parameters)
    constants = {n: sizes.get(n, flag) for n in names if parameters[n].annotation is triton.language.constexpr}
    types = {}
    for n in names:
        if n in constants:
            types[n] = "constexpr"
        elif name == "_geglu_product" and n in TILES:
            types[n] = TILES[n]
        elif n in WHOLE:
            types[n] = "i32"
        elif n in FLOAT:
            types[n] = "fp32"
        else:
            types[n] = TABLES.get(n, "*bf16" if n in HALF else "*fp32")
    source = ASTSource(fn=kernel, signature=types, constexprs={(names.index(n),): v for n, v in constants.items()})
    asm = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS.get(name)).asm
    assert "wgmma" in asm["ptx"] if name == "_geglu_product" else "ptx" in asm


if __name__ == "__main__":
    functions = [(n, f) for n, f in vars(kernels).items() if isinstance(f, triton.JITFunction)]
    launched = [n for n, f in functions if f.do_not_specialize is not None]
    helpers = {"_tile", "_normed", "_gn_dz", "_chunk_moments", "_store_moments", "_gated"}
    helpers |= {"_mixed", "_rounded", "_moment", "_keep_moment"}
    for name in launched:
        if name not in helpers:
            for flag in (True, False):
                compile_kernel(name, flag)
            print(name)
