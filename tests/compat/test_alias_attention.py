"""What the alias adds to attention modules, as callers of Transformer Engine use it."""

import copy
import pickle

import pytest
import torch

import te_lite as te
import te_lite.compat.alias.attention  # noqa: F401  # it adds to the modules


def test_attention_set_up_for_tensor_parallelism_after_it_was_built():
    """As NeMo Automodel does it: a model is built whole, and its linears are split later."""
    module = te.DotProductAttention(8, 16, 4, qkv_format="bshd")
    assert (module.tp_size, module.num_gqa_groups_per_partition, module.tp_group) == (1, 4, None)
    group = torch.distributed.ProcessGroup(0, 2)
    module.tp_size = 2
    module.num_gqa_groups_per_partition = module.num_gqa_groups // 2
    module.set_tensor_parallel_group(group)
    assert module.tp_group is group and module.num_attention_heads == 8
    q, k = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 2, 16)
    want = te.DotProductAttention(4, 16, 2, qkv_format="bshd")(q, k, k)
    assert torch.equal(module(q, k, k), want)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied.tp_group is None and torch.equal(copied(q, k, k), want)
    with pytest.raises(ValueError, match=r"heads \(4, 2, 2\)"):
        module(q.repeat(1, 1, 2, 1), k, k)


def test_context_parallelism_switched_off():
    """Megatron's attention does so by these attributes for a packed batch that is not split."""
    module = te.DotProductAttention(4, 16, cp_comm_type="a2a")
    assert module.cp_comm_type == "a2a" and module.cp_group is module.cp_global_ranks is module.cp_stream is None
    module.set_context_parallel_group(None, None, None, module.cp_comm_type)
    assert module.cp_comm_type == "a2a"
    module.set_context_parallel_group(None)
    assert module.cp_comm_type == "p2p"


@pytest.mark.parametrize("tp_size", [1, 2])
def test_shapes_of_a_layers_projections(tp_size):
    options = {"tp_size": tp_size, "set_parallel_mode": tp_size > 1, "sequence_parallel": tp_size > 1}
    module = te.MultiheadAttention(
        128, 8, 24, num_gqa_groups=4, layer_number=3, fuse_qkv_params=True, device="cpu", **options
    )
    assert module.layer_number == 3 and module.params_dtype == torch.float32 and module.get_rng_state_tracker is None
    assert (module.tp_size, module.sequence_parallel) == (tp_size, tp_size > 1)
    assert (module.hidden_size_q, module.hidden_size_kv, module.hidden_size_per_attention_head) == (192, 96, 24)
    groups, heads = module.num_gqa_groups_per_partition, module.num_attention_heads_per_partition
    assert (heads, groups) == (8 // tp_size, 4 // tp_size)
    assert module.qkv.weight.shape[0] == (heads + 2 * groups) * module.hidden_size_per_attention_head
    pair = te.DotProductAttention(4, (16, 8))
    assert (pair.hidden_size_per_attention_head_k, pair.hidden_size_per_attention_head_v) == (16, 8)
