"""Over ranks: modules that overlap, their bodies recorded and replayed, against twins that are not recorded.

    python -m torch.distributed.run --standalone --nproc-per-node 2 tests/distributed/run_recordings.py

On CPU ranks recordings are those of tests/modules/cpu_recordings.py: the ops of a body, its turns and its programs.
Bits are compared. Ranks differ in when they record: one of them begins later.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import sys
from contextlib import nullcontext
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TE_LITE_AUTO"] = "rule"
os.environ["TE_LITE_UB_TIMEOUT"] = "20"

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import te_lite as te  # noqa: E402
from te_lite import watch  # noqa: E402
from te_lite.ops.recorder import Recorder  # noqa: E402
from te_lite.testing.distributed import init_ranks, leave_ranks  # noqa: E402
from te_lite.testing.numerics import assert_bitwise_equal  # noqa: E402
from tests.distributed.overlapping import begin, poison  # noqa: E402
from tests.modules.cpu_recordings import record_on_cpu  # noqa: E402

BF16 = torch.bfloat16
RECIPES = (None, "delayed", "current", "mxfp8", "blockwise", "rowwise", "rowwise_with_gw_hp")
HIDDEN, TOKENS, STEPS, LEAST = 64, 32, 13, 4  # tokens of a rank; replays of a module
BLOCK = 128  # blockwise: shards of other numbers of tokens are put together as plain values, which is not recorded
FLAGS = {"ub_overlap_ag": True, "ub_overlap_rs": True}
COLLECTIVE = dict.fromkeys(FLAGS, False)
BULK = FLAGS | {"ub_bulk_dgrad": True, "ub_bulk_wgrad": True}
SCATTERS = FLAGS | {"ub_overlap_rs_dgrad": True}
KINDS = ("column", "row", "LayerNormLinear", "LayerNormMLP")
REFUSALS: list[str] = []  # why bodies were not recorded
TOO_FEW: list[str] = []


def make(kind: str, size: int, flags: dict[str, bool], device: torch.device, **more: Any) -> torch.nn.Module:
    common = {"params_dtype": BF16, "device": device, "tp_group": dist.group.WORLD, "tp_size": size}
    common |= {"sequence_parallel": True, **more}
    torch.manual_seed(5)  # the same whole weights are of no interest
    if kind == "LayerNormMLP":
        common |= {"activation": "swiglu", "normalization": "RMSNorm", "set_parallel_mode": True}
        return te.LayerNormMLP(HIDDEN, 64 * size, **common, **flags)
    mode, name = ("row", "proj") if kind == "row" else ("column", "qkv")
    common |= {"parallel_mode": mode, "ub_name": name}
    if kind == "row":
        return te.Linear(64 * size, HIDDEN, **common, **{name: flags[name] for name in FLAGS})
    taken = {name: value for name, value in flags.items() if name != "ub_overlap_rs"}
    return (te.LayerNormLinear if kind == "LayerNormLinear" else te.Linear)(HIDDEN, 64 * size, **common, **taken)


def one_step(
    module: Any, recipe: str | None, xs: list[torch.Tensor], dys: Any, last: bool, residual: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Every tensor that a step leaves. xs: of micro-batches, whose forwards come before their backwards. last: an
    evaluation follows. residual: is added to each y."""
    more = {} if residual is None else {"residual": residual}
    xs, ys = [x.clone().requires_grad_() for x in xs], []
    module.zero_grad(set_to_none=True)
    for x in xs:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            ys.append(module(x, **more))
    got: dict[str, Any] = {}
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        y.backward(dys(y.shape))
        got |= {f"y {i}": y.detach(), f"dx {i}": x.grad}
    if last:
        with torch.no_grad(), te.autocast(enabled=recipe is not None, recipe=recipe):
            got["evaluated"] = module(xs[0], **more)
    got |= {name: p.grad for name, p in module.named_parameters()}
    got |= {f"{name}.main_grad": getattr(p, "main_grad", None) for name, p in module.named_parameters()}
    got |= {name: t for name, t in module.state_dict().items() if "extra" in name and t.numel()}
    return {name: t.clone() for name, t in got.items() if t is not None}


def replays(module: torch.nn.Module) -> int:
    known = module._planned[1][0].recordings._known.values()
    return sum(one[0].runs if hasattr(one[0], "runs") else 1 for one in known if isinstance(one, tuple))


def finish(recorder: Recorder, results: Any, finish: Any = Recorder.finish) -> Any:
    """Recorder.finish, which says why not."""
    recorded = finish(recorder, results)
    if recorded is None and recorder.why_not not in REFUSALS:
        REFUSALS.append(recorder.why_not)
    return recorded


def check(
    kind: str, recipe: str | None, flags: dict[str, bool], device: torch.device, main_grads: bool, whole: bool = False
) -> None:
    """whole: each rank holds all tokens."""
    rank, size = dist.get_rank(), dist.get_world_size()
    more = {"fuse_wgrad_accumulation": main_grads, "sequence_parallel": not whole}
    REFUSALS.clear()
    module = make(kind, size, flags, device, **more)
    twin = copy.deepcopy(module)
    for one in (module, twin) if main_grads else ():
        for p in one.parameters():
            p.main_grad = torch.ones(p.shape, device=device)
    features = 64 if kind == "row" else HIDDEN
    tokens = (BLOCK if recipe == "blockwise" else TOKENS) * (size if kind == "row" else 1)
    shared = 0 if whole else rank  # whose tokens they are
    for step in range(STEPS):
        draw = torch.Generator(device).manual_seed(100 * step + shared)
        for one in (module, twin) if kind == "column" else ():  # frozen, trained, frozen again
            one.weight.requires_grad_(step % 4 < 2)
        m = tokens if step % 4 != 3 else tokens // 2  # now and then other shapes
        count = 1 if step % 3 else 4  # of micro-batches
        xs = [torch.randn(m, features, device=device, dtype=BF16, generator=draw) for _ in range(count)]
        xs = [x * 2.0 ** (step % 3) for x in xs]  # scales move
        rows = m if whole else m // size
        residual = xs[0][:rows].flip(0) if kind == "row" and flags is COLLECTIVE else None

        def dys(shape: torch.Size, draw: torch.Generator = draw) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=BF16, generator=draw.manual_seed(7))

        want = one_step(twin, recipe, xs, dys, step % 5 == 2, residual)
        if step == 4 and flags is not COLLECTIVE:  # something else takes a turn
            te.all_gather(xs[0], dist.group.WORLD).wait()
        with pytest.MonkeyPatch.context() as patch:
            if device.type == "cpu":
                record_on_cpu(patch)
            if rank == 1 and step == 2:
                module._planned[1][0].recordings._known.clear()
            got = one_step(module, recipe, xs, dys, step % 5 == 2, residual)
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert_bitwise_equal(f"{kind} {recipe} {flags} step {step}: {name}", got[name], value)
        rows = te.overlap_report()  # of the one, then of the other
        assert rows[: len(rows) // 2] == rows[len(rows) // 2 :], rows
    if replays(module) < LEAST:
        TOO_FEW.append(f"{kind} {recipe} {flags}: {replays(module)} replays of at least {LEAST}; {REFUSALS}")


def others_come_between(device: torch.device) -> None:
    """Userbuffers that come between a forward and its backward, which one rank has recorded and the other has not."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = make("column", size, COLLECTIVE, device)
    x = torch.randn(TOKENS, HIDDEN, device=device, dtype=BF16)
    dy = torch.randn(TOKENS * size, 64, device=device, dtype=BF16)  # of this rank's features
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            record_on_cpu(patch)
        for _ in range(12):
            module(x.clone().requires_grad_()).backward(dy)
        assert replays(module) >= 2  # forward and backward
        if rank == 1:
            module._planned[1][0].recordings._known.clear()
        y = module(x.clone().requires_grad_())
        begin(TOKENS * size, 64 * size, dist.group.WORLD, device, dtype=BF16)
        y.backward(dy)
        for _ in range(3):
            module(x.clone().requires_grad_()).backward(dy)
        if device.type == "cuda":
            torch.cuda.synchronize()
    te.destroy_ub()


def failing(device: torch.device) -> None:
    """A rank that fails in a replay tells the others, and says in what."""
    rank, size = dist.get_rank(), dist.get_world_size()
    te.initialize_ub([TOKENS * size, 64 * size], size, dtype=BF16, device=device, tp_group=dist.group.WORLD)
    module, x = make("column", size, BULK, device), torch.randn(TOKENS, HIDDEN, device=device, dtype=BF16)
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            record_on_cpu(patch)
        for _ in range(8):
            module(x.requires_grad_())
        found = [known[0] for known in module._planned[1][0].recordings._known.values() if isinstance(known, tuple)]
        assert len(found) == 2  # of the two slots
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()  # nobody is in a body that is not recorded yet
        for one in found if rank == 1 else ():
            if device.type == "cuda":
                one._counters = None
            else:  # after the first push
                one.steps.insert(1 + max(i for i, step in enumerate(one.steps[:4]) if step[1]), (len, (3,), {}))
        with pytest.raises(TypeError if rank == 1 else RuntimeError) as raised:
            for _ in range(200):
                module(x)
                if device.type == "cuda":
                    torch.cuda.synchronize()
    if rank != 1:
        assert "rank 1 failed in a recorded pass over qkv" in str(raised.value), raised.value
    with pytest.warns(RuntimeWarning) if rank == 1 else nullcontext():
        te.destroy_ub()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--methods", nargs="*", default=["ring_exchange", "fused"])
    parser.add_argument("--recipes", nargs="*", default=["bf16", *RECIPES[1:]])
    parser.add_argument("--collectives", action="store_true", help="bodies with torch.distributed's collectives alone")
    args = parser.parse_args()
    rank, size, device = init_ranks(args.device)
    Recorder.finish = finish  # type: ignore[method-assign]
    recipes = [None if name == "bf16" else name for name in args.recipes]
    if args.collectives:
        watch.CHECK_RANKS = "0"
        for kind, recipe in itertools.product(KINDS, recipes):
            check(kind, recipe, COLLECTIVE, device, main_grads=recipe == "current")
            if recipe in (None, "delayed", "current"):
                check(kind, recipe, COLLECTIVE, device, main_grads=recipe is None, whole=True)
        begin(BLOCK * size, 64 * size, dist.group.WORLD, device, dtype=BF16)  # others beside them overlap
        for kind, recipe in itertools.product(KINDS, recipes[:3]):
            check(kind, recipe, COLLECTIVE, device, main_grads=recipe is None)
        te.destroy_ub()
        assert not TOO_FEW, "\n".join(TOO_FEW)
        others_come_between(device)
        if rank == 0:
            print("collectives: ok", flush=True)
        leave_ranks()
        return 0
    for method in args.methods:
        for flags in (BULK, SCATTERS):
            names = ("qkv_fprop", "proj_fprop", "proj_dgrad", "fc1_fprop", "fc2_fprop", "fc2_dgrad")
            cfgs = {name: {"method": method} for name in names}
            group = begin(BLOCK * size, 64 * size, dist.group.WORLD, device, dtype=BF16, ub_cfgs=cfgs)
            group.executor.set_delays(rank, 300)
            poison([group])
            for kind, recipe in itertools.product(KINDS, recipes):
                check(kind, recipe, flags, device, main_grads=recipe in ("current", None) and flags is BULK)
            te.destroy_ub()
        assert not TOO_FEW, "\n".join(TOO_FEW)
        if rank == 0:
            print(f"{method}: ok", flush=True)
    failing(device)
    if rank == 0:
        print("failing: ok", flush=True)
    leave_ranks()
    return 0


if __name__ == "__main__":
    sys.exit(main())
