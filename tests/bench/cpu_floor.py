"""What the machine can do at a model's shapes: `python cpu_floor.py MODEL NUM_THREADS`.

gemm_bN_ms is the time of the model's matrix products alone for N tokens, in bfloat16 by torch, with plain weights or,
where oneDNN has bfloat16 for this CPU, with packed ones, whichever is faster; read_gb_s the speed at which memory is
read. A decode step's floor is its products plus its KV bytes at that speed.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from cpu_workload import report

from pagoda.worker.models.config import ModelConfig
from pagoda.worker.models.families import read_model_config

NUM_REPEATS = 9


def median_ms(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(NUM_REPEATS):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def product_shapes(model: ModelConfig) -> list[tuple[int, int]]:
    """(outputs, inputs) of every matrix product of a step, the head last."""
    hidden, inner = model.hidden_size, model.intermediate_size
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_size
    layer = [(qkv, hidden), (hidden, model.num_heads * model.head_size), (2 * inner, hidden), (hidden, inner)]
    return layer * model.num_layers + [(model.vocab_size, hidden)]


def products_ms(model: ModelConfig, num_tokens: int) -> float:
    shapes = product_shapes(model)
    weights = [torch.randn(shape).bfloat16() for shape in shapes]
    inputs = {size: torch.randn(num_tokens, size).bfloat16() for _, size in shapes}
    plain = median_ms(lambda: [F.linear(inputs[weight.shape[1]], weight) for weight in weights])
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return plain
    packed = [(weight.shape[1], torch.ops.mkldnn._reorder_linear_weight(weight, num_tokens)) for weight in weights]
    multiply = torch.ops.mkldnn._linear_pointwise
    return min(
        plain, median_ms(lambda: [multiply(inputs[size], weight, None, "none", [], "") for size, weight in packed])
    )


def main() -> None:
    torch.set_num_threads(int(sys.argv[2]))
    torch.set_grad_enabled(False)
    model = read_model_config(Path(sys.argv[1]))
    block = torch.randn(64 * 2**20)
    result = {f"gemm_b{count}_ms": products_ms(model, count) for count in (1, 8, 32)}
    result["read_gb_s"] = block.numel() * 4 / median_ms(block.sum) / 1e6
    result["weights_gb"] = sum(num_out * num_in for num_out, num_in in product_shapes(model)) * 2 / 1e9
    result["kv_bytes_per_token"] = model.num_layers * 2 * model.num_kv_heads * model.head_size * 2
    report(result)


if __name__ == "__main__":
    main()
