"""Ranks of test_statistics.py, started by torchrun: sequence parallelism with and without collecting."""

import argparse

import torch
import torch.distributed as dist

import te_lite as te
from te_lite.testing.distributed import init_ranks, leave_ranks
from te_lite.testing.numerics import assert_bitwise_equal
from tests.harness import under


def results(recipe, tokens, place, collect):
    """(tensors of two steps, statistics or None) of a column-parallel, a row-parallel linear and an MLP."""
    torch.manual_seed(3 + dist.get_rank())
    options = {"tp_group": dist.group.WORLD, "tp_size": dist.get_world_size(), "sequence_parallel": True}
    options |= {"params_dtype": torch.bfloat16, "device": place}
    model = torch.nn.Sequential(
        te.Linear(128, 256, parallel_mode="column", **options),
        te.Linear(256, 128, parallel_mode="row", **options),
        te.LayerNormMLP(128, 256, set_parallel_mode=True, **options),
    )
    x = torch.randn(tokens, 128, dtype=torch.bfloat16, device=place, requires_grad=True)
    with te.collect_statistics(model) if collect else under(None) as stats:
        for _ in range(2):
            with under(recipe):
                out = model(x)
            out.backward(torch.ones_like(out))
    found = {"out": out, "dx": x.grad, **{name: p.grad for name, p in model.named_parameters()}}
    return found | {name: t for name, t in model.state_dict().items() if "extra" in name}, x, stats


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    rank, _, place = init_ranks(parser.parse_args().device)
    for recipe in te.recipe.available():
        for tokens in (7, 64):  # of a rank; 7: shards do not end with a block
            expected, _, _ = results(recipe, tokens, place, False)
            got, x, stats = results(recipe, tokens, place, True)
            for name, value in expected.items():
                assert_bitwise_equal(f"{recipe} {tokens} {name}", got[name], value)
            own = [row for row in stats.rows() if (row["layer"], row["operand"]) == ("0", "x")]
            assert len(own) == te.recipe.from_name(recipe).is_fp8
            assert all(row["amax"] == x.abs().max() for row in own), (rank, own)  # this rank's shard, unreduced
    print("all the same")
    leave_ranks()


if __name__ == "__main__":
    main()
