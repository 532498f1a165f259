"""What a compiled forward keeps for backward: no copies of weights, and of siblings' input one."""

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

import te_lite as te

BF16, K, N, TOKENS = torch.bfloat16, 64, 96, 48


def compiled(module: nn.Module, kept: list) -> nn.Module:
    """By the partition that inductor takes. kept: becomes (shape, dtype) of all that forward gives."""

    def forward(graph, inputs):
        output = next(node for node in graph.graph.nodes if node.op == "output")
        made = [one.meta["val"] for one in output.args[0] if one is not None and one.op != "placeholder"]
        kept.extend((tuple(t.shape), t.dtype) for t in made if isinstance(t, torch.Tensor))
        bases = [node.kwargs["_all_bases"] for node in graph.graph.nodes if "_all_bases" in node.kwargs]
        assert bases and all(len(set(each)) == len(each) for each in bases), "one buffer for two outputs is copied"
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=forward, bw_compiler=lambda graph, _: make_boxed_func(graph),
        partition_fn=min_cut_rematerialization_partition,
    )  # fmt: skip
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend=backend)


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_weights_are_quantized_again_in_backward(recipe):
    """Not in forward, which would keep a copy in bytes of each; and nothing but x is."""
    kept: list = []
    module = te.Linear(K, N, bias=False, params_dtype=BF16, device="cpu")
    run = compiled(module, kept)
    x = torch.randn(TOKENS, K, dtype=BF16).requires_grad_()
    with te.autocast(recipe=recipe):
        y = run(x)
    y.sum().backward()
    assert x.grad is not None and module.weight.grad is not None
    large = [one for one in kept if one[1] != torch.float32]
    assert large == [((TOKENS, N), BF16), ((K, TOKENS), torch.float8_e4m3fn)], kept


def test_converted_siblings_keep_one_copy():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(K, N, bias=False, dtype=BF16) for _ in range(3))

        def forward(self, x):
            return self.q_proj(x) + self.k_proj(x) + self.v_proj(x)

    kept: list = []
    module = Layer()
    te.convert_to_float8_training(module, minimum_size=0)
    x = torch.randn(TOKENS, K, dtype=BF16).requires_grad_()
    want = module(x)
    got = compiled(module, kept)(x)
    got.sum().backward()
    assert torch.equal(got, want)
    assert [one for one in kept if one[1] == torch.float8_e4m3fn] == [((K, TOKENS), torch.float8_e4m3fn)], kept
