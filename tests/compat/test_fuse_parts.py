"""te.fuse: what passes from a norm to q, k and v, and where the parameters lie."""

import copy
import gc
import threading
import weakref

import pytest
import torch

import te_lite as te
from te_lite.testing.memory import kept_tensors
from te_lite.testing.numerics import assert_bitwise_equal
from tests.compat.llamas import assert_close, assert_same, build, draw, exact, fused, lie_together, run

BF16 = torch.bfloat16

# ---- what passes from a norm to q, k and v ----


def layer_of(recipe="bf16"):
    made = fused(build(), recipe).model.layers[0]
    return made, torch.randn(2, 5, 64)


def test_one_product_is_split_once():
    layer, x = layer_of()
    y = layer.input_layernorm(x)
    q, k, v = (getattr(layer.self_attn, name)(y) for name in ("q_proj", "k_proj", "v_proj"))
    assert [t.shape[-1] for t in (q, k, v)] == [64, 32, 32] and y.shape[-1] == 128
    assert q.grad_fn is k.grad_fn and "Split" in q.grad_fn.name() and v.grad_fn.next_functions[0][0] is q.grad_fn
    assert_bitwise_equal("q, k, v", torch.cat((q, k, v), -1), y)
    with torch.no_grad():
        y = layer.input_layernorm(x)
        assert layer.self_attn.k_proj(y)._base is y
    with pytest.raises(RuntimeError, match="must be what its layer's input_layernorm gives"):
        layer.self_attn.q_proj(x)
    with pytest.raises(RuntimeError, match="runs in its mlp alone"):
        layer.mlp.gate_proj(x)


def test_what_is_written_to_between_is_read():
    layer, x = layer_of()
    y = layer.input_layernorm(x)
    y.mul_(2)
    k = layer.self_attn.k_proj(y)
    expected = 2 * layer.self_attn.k_proj(layer.input_layernorm(x))
    assert_bitwise_equal("k", k, expected)
    grads = [torch.autograd.grad(t.sum(), layer.self_attn.k_proj.weight)[0] for t in (k, expected)]
    assert_bitwise_equal("gradient", *grads)


def test_quantized_weights_that_are_kept_are_each_its_own():
    """Of an mlp's two products only the first is of a joined weight."""
    layer, x = layer_of("current")
    with torch.no_grad():
        layer.mlp._forward(x, True, None)
        layer.mlp.down_proj.weight.mul_(3)
        assert_bitwise_equal("y", layer.mlp._forward(x, False, None), layer.mlp(x))


@pytest.mark.parametrize("kind", ["mlp", "norm", "converted"])
def test_compiled_whole_under_delayed_scaling(kind):
    """Whose scales lie where the parameters do."""
    layer, _ = layer_of()
    made = te.convert_to_float8_training(torch.nn.Linear(64, 64), minimum_size=0).module
    part = {"mlp": layer.mlp, "norm": layer.input_layernorm, "converted": made}[kind]
    x, twin = torch.randn(2, 16, 64), copy.deepcopy(part)
    with te.autocast(recipe="delayed"):
        y = torch.compile(part, backend="eager", fullgraph=True)(x)
    with te.autocast(recipe="delayed"):
        assert_bitwise_equal("y", y, twin(x))


def test_nothing_outlives_a_call():
    layer, x = layer_of()
    gc.disable()
    try:
        y = layer.input_layernorm(x)
        held = weakref.ref(y)
        layer.self_attn.q_proj(y).sum().backward()
        del y
        assert held() is None
    finally:
        gc.enable()


def test_threads_share_a_layer():
    layer, _ = layer_of()
    results = {}

    def work(i):
        x = torch.randn(1, 3 + i, 64, generator=torch.Generator().manual_seed(i))
        for _ in range(20):
            y = layer.input_layernorm(x)
            results.setdefault(i, []).append(torch.cat([layer.self_attn.v_proj(y), layer.self_attn.q_proj(y)], -1))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for i in range(4):
        assert len(results[i]) == 20 and all(torch.equal(one, results[i][0]) for one in results[i])
        assert results[i][0].shape[1] == 3 + i


# ---- parameters ----


def test_parameters_are_the_same_objects_and_lie_together():
    model = build("qwen2")
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    attributes = {name: dict(vars(p)) for name, p in parameters.items()}
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    state = copy.deepcopy(model.state_dict())
    te.fuse(model, "current")
    assert all(parameters[name] is p for name, p in model.named_parameters())
    assert dict(model.named_modules()) == modules and list(model.state_dict()) == list(state)
    assert attributes == {name: vars(p) for name, p in parameters.items()}
    assert_same(model.state_dict(), state)
    assert lie_together(model)
    run(model, draw(2, 8))
    assert model.model.layers[0].self_attn.q_proj.weight.grad is None
    assert model.model.layers[0].self_attn.k_proj.weight.grad is not None
    assert lie_together(model.to(BF16)) and lie_together(model.float())
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    assert lie_together(model)
    other = copy.deepcopy(model)
    assert not lie_together(other) and te.fuse(other, "current").fused == () and lie_together(other)


def test_memory_that_is_somebodys_stays():
    """Parameters in a flat buffer are joined by a copy, which is not kept for backward."""
    model = build()
    layer = model.model.layers[0]
    flat = torch.cat([p.detach().flatten() for p in reversed(list(layer.parameters()))])
    end = len(flat)
    for p in layer.parameters():
        end, begin = end - p.numel(), end
        p.data = flat[end:begin].view_as(p)
    reference, ids = copy.deepcopy(model), draw(2, 8)
    te.fuse(model, "bf16")
    assert all(p.untyped_storage().data_ptr() == flat.data_ptr() for p in layer.parameters())
    assert_close(run(model, ids), run(exact(reference), ids), run(reference, ids))
    x = torch.randn(2, 5, 64)
    shapes = [tuple(t.shape) for t in kept_tensors(layer.mlp(x))]
    assert (192, 64) not in shapes
    shared = copy.deepcopy(model).share_memory()
    te.fuse(shared, "bf16")
    assert not lie_together(shared) and all(p.is_shared() for p in shared.parameters())


def test_a_layer_alone_is_fused():
    layer, ids = build().model.layers[0], torch.randn(2, 5, 64)
    expected = layer.mlp(layer.post_attention_layernorm(ids))
    report = te.fuse(layer, "bf16")
    assert [one.name for one in report.fused] == ["self_attn", "mlp"]
    torch.testing.assert_close(layer.mlp(layer.post_attention_layernorm(ids)), expected)
    assert set(te.unfuse(layer)) == {name for name, part in layer.named_modules() if name and "." not in name} - {
        "self_attn"
    } | {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
