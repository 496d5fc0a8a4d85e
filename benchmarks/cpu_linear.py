"""A 4-bit linear layer on one CPU thread against bf16: how many times faster, at which error.

    python benchmarks/cpu_linear.py [--shapes 2048x6144 6144x2048] [--tokens 1 4 16 32] [--turns 25]

Contenders: torch bf16 `F.linear` (and, with --fp32, fp32); ours with exact tokens (int4) and with tokens rounded to 8
bits (int8), each through `dispatch.linear`, so rounding of tokens and of results counts; OpenVINO's and onnxruntime's
4-bit linears when they are installed. Goals: 3.1 / 2.9 / 4.0 / 5.0 times bf16 at 1 / 4 / 16 / 32 tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
from interleaved import interleave, machine, row
from torch.nn import functional

from glm5_quant.kernels.dispatch import linear
from glm5_quant.kernels.layout import PackedMatrix, dequantize, from_codes, to_codes


def random_matrix(n: int, k: int) -> PackedMatrix:
    """A matrix with weights of a usual size, its grid in bf16."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=generator)
    scale = torch.rand(n, -(-k // 64), generator=generator).add_(0.5).mul_(0.01).bfloat16()
    return from_codes(codes, scale, torch.randint(6, 10, scale.shape, dtype=torch.uint8, generator=generator))


def openvino_linear(packed: PackedMatrix, x: torch.Tensor) -> Callable[[], object] | None:
    """OpenVINO's linear on u4 weights with the same blocks, or None where OpenVINO is missing."""
    try:
        import openvino as ov
        from openvino import opset13 as ops
    except ImportError:
        return None
    n, k = packed.n, packed.k
    shape = [n, k // 64, 64]
    codes = ov.op.Constant(ov.Type.u4, ov.Shape(shape), to_codes(packed).flatten().tolist())
    zero = ov.op.Constant(ov.Type.u4, ov.Shape([n, k // 64, 1]), packed.zero.flatten().tolist())
    scale = ops.constant(packed.scale.float().numpy().astype("float16")[..., None])
    centred = ops.subtract(ops.convert(codes, "f16"), ops.convert(zero, "f16"))
    weight = ops.convert(ops.reshape(ops.multiply(centred, scale), ops.constant([n, k]), False), "f32")
    parameter = ops.parameter([-1, k], ov.Type.f32)
    model = ov.Model([ops.matmul(parameter, weight, False, True)], [parameter])
    compiled = ov.compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": 1})
    request, values = compiled.create_infer_request(), x.float().numpy()
    return lambda: request.infer([values])


def onnxruntime_linear(packed: PackedMatrix, x: torch.Tensor) -> Callable[[], object] | None:
    """onnxruntime's MatMulNBits with 8-bit tokens (accuracy level 4), or None where it or onnx is missing."""
    try:
        import onnx
        import onnxruntime as ort
    except ImportError:
        return None
    n, k = packed.n, packed.k
    pairs = to_codes(packed).view(n, k // 64, 32, 2)
    zeros = packed.zero if packed.zero.shape[1] % 2 == 0 else functional.pad(packed.zero, (0, 1))
    stored = {
        "b": (pairs[..., 0] | pairs[..., 1] << 4).numpy(),
        "scale": packed.scale.float().flatten().numpy(),
        "zero": (zeros[:, ::2] | zeros[:, 1::2] << 4).flatten().numpy(),
    }
    node = onnx.helper.make_node(
        "MatMulNBits", ["x", "b", "scale", "zero"], ["y"], domain="com.microsoft", K=k, N=n, bits=4, block_size=64,
        accuracy_level=4,
    )  # fmt: skip
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node], "linear", [value("x", onnx.TensorProto.FLOAT, ["t", k])],
        [value("y", onnx.TensorProto.FLOAT, ["t", n])],
        [onnx.numpy_helper.from_array(array, name) for name, array in stored.items()],
    )  # fmt: skip
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    values = {"x": x.float().numpy()}
    return lambda: session.run(None, values)


def contenders(
    packed: PackedMatrix, weight: torch.Tensor, x: torch.Tensor, fp32: bool
) -> dict[str, Callable[[], object]]:
    """Everything that can be run here, by name; the first is the base."""
    eight = replace(packed, resident="int8")
    wide, x_wide = (weight.float(), x.float()) if fp32 else (weight, x)
    found: dict[str, Callable[[], object] | None] = {
        "bf16": lambda: functional.linear(x, weight),
        "ours int4": lambda: linear(x, packed, backend="cpu"),
        "ours int8": lambda: linear(x, eight, backend="cpu"),
        "fp32": (lambda: functional.linear(x_wide, wide)) if fp32 else None,
        "OpenVINO": openvino_linear(packed, x),
        "onnxruntime": onnxruntime_linear(packed, x),
    }
    return {name: run for name, run in found.items() if run is not None}


def errors(packed: PackedMatrix, x: torch.Tensor) -> str:
    """Relative errors of both forms against the exact reference."""
    exact = linear(x.float(), packed, backend="reference")
    shown = []
    for resident in ("int4", "int8"):
        found = linear(x, replace(packed, resident=resident), backend="cpu").float()
        shown.append(f"{resident} {float((found - exact).norm() / exact.norm()):.1e}")
    return "relative error against the exact reference: " + ", ".join(shown)


def main() -> None:
    """Print one Markdown table a shape."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["2048x6144", "6144x2048"], metavar="NxK")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 32])
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument(
        "--fp32", action="store_true", help="torch fp32 as well; its 50 MB push the others out of caches"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    for n, k in ([int(size) for size in shape.split("x")] for shape in options.shapes):
        packed = random_matrix(n, k)
        weight = dequantize(packed, torch.bfloat16)
        for number, tokens in enumerate(options.tokens):
            x = torch.randn(tokens, k, generator=torch.Generator().manual_seed(1)).bfloat16()
            timings = interleave(contenders(packed, weight, x, options.fp32), options.turns)
            if not number:
                print(f"\n{n} x {k}, times bf16 (milliseconds of CPU)\n\n| tokens | {' | '.join(timings)} |")
                print("|" + "---|" * (len(timings) + 1))
            print(row(str(tokens), timings, "bf16"), flush=True)
        print("\n" + errors(packed, x))


if __name__ == "__main__":
    main()
