"""What a compiled forward keeps for backward: no copies of weights, and of siblings' input one."""

import copy
import math

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

import te_lite as te

BF16, K, N, TOKENS = torch.bfloat16, 64, 96, 48


def compiled(module: nn.Module, kept: list, writes: bool = False) -> nn.Module:
    """By the partition that inductor takes, of the ops that it knows. kept: becomes (shape, dtype) of all that forward
    gives. writes: some of its ops write to what they are given, as casts do that note an amax for delayed scaling."""

    def forward(graph, inputs):
        output = next(node for node in graph.graph.nodes if node.op == "output")
        made = [one.meta["val"] for one in output.args[0] if one is not None and one.op != "placeholder"]
        kept.extend((tuple(t.shape), t.dtype) for t in made if isinstance(t, torch.Tensor))
        bases = [node.kwargs["_all_bases"] for node in graph.graph.nodes if "_all_bases" in node.kwargs]
        assert bool(bases) == writes, "a cast that writes to buffers is not merged with another one of the same input"
        assert all(len(set(each)) == len(each) for each in bases), "one buffer for two outputs is copied"
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=forward, bw_compiler=lambda graph, _: make_boxed_func(graph),
        partition_fn=min_cut_rematerialization_partition, decompositions=select_decomp_table(),
    )  # fmt: skip
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend=backend)


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_weights_are_quantized_again_in_backward(recipe):
    """Not in forward, which would keep a copy in bytes of each; and nothing but x is."""
    kept: list = []
    module = te.Linear(K, N, bias=False, params_dtype=BF16, device="cpu")
    run = compiled(module, kept, recipe == "delayed")
    x = torch.randn(TOKENS, K, dtype=BF16).requires_grad_()
    with te.autocast(recipe=recipe):
        y = run(x)
    y.sum().backward()
    assert x.grad is not None and module.weight.grad is not None
    large = [one for one in kept if one[1] != torch.float32]
    assert large == [((TOKENS, N), BF16), ((K, TOKENS), torch.float8_e4m3fn)], kept


@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP"])
def test_no_weight_of_a_fused_module_is_kept(kind, recipe):
    """Of any number of tokens the graph keeps none, where eager mode keeps one that takes no more than fp8 saves."""
    kept: list = []
    more = {} if kind == "LayerNormLinear" else {"activation": "swiglu"}
    module = getattr(te, kind)(K, N, bias=False, params_dtype=BF16, device="cpu", **more)
    run = compiled(module, kept, recipe == "delayed")
    x = torch.randn(5 * TOKENS, K, dtype=BF16).requires_grad_()
    with te.autocast(recipe=recipe):
        y = run(x)
    y.sum().backward()
    assert x.grad is not None and all(p.grad is not None for p in module.parameters())
    sizes = {p.numel() for p in module.parameters() if p.dim() == 2}
    assert not [one for one in kept if one[1] == torch.float8_e4m3fn and math.prod(one[0]) in sizes], kept
    assert any(one[1] == torch.float8_e4m3fn for one in kept)


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_the_parts_of_a_weight_are_joined_again_in_backward(recipe):
    """And neither the joined weight nor its bytes are kept; results are those of eager mode."""
    kept: list = []
    split = {"q": K, "k": N - K}
    module = te.LayerNormLinear(K, N, parameters_split=split, bias=False, params_dtype=BF16, device="cpu")
    twin, run = copy.deepcopy(module), compiled(module, kept, recipe == "delayed")
    x = torch.randn(TOKENS, K, dtype=BF16)
    dy, got = torch.randn(TOKENS, N, dtype=BF16), []
    for one, forward in ((twin, twin), (module, run)):
        given = x.clone().requires_grad_()
        with te.autocast(recipe=recipe):
            y = forward(given)
        y.backward(dy)
        got.append([y.detach(), given.grad, *[p.grad for p in one.parameters()]])
    for eager, compiled_one in zip(*got, strict=True):
        assert torch.equal(eager, compiled_one)
    assert not [one for one in kept if math.prod(one[0]) == K * N], kept


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
