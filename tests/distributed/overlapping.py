"""What an overlapped linear must give, bit for bit, in torch.distributed's words; modules that overlap beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import te_lite as te
from te_lite.overlap import ring, userbuffers
from te_lite.overlap.buffers import Gather
from te_lite.overlap.bulk import Bulk
from te_lite.overlap.collective import Collective, Summed, all_gather
from te_lite.overlap.exchange import Gathering, Gemm
from te_lite.overlap.exchanges import EXCHANGES
from te_lite.overlap.group import Group
from te_lite.overlap.programs import following
from te_lite.quantize import per_tensor
from te_lite.quantize.qtensor import Layout, QTensor
from te_lite.testing.numerics import assert_bitwise_equal
from tests import reference
from tests.distributed.run_modules import shard_input, shard_output, shard_parameter
from tests.harness import BLOCKED, build, leaf, under
from tests.reference import LINEAR, LN_LINEAR, LN_MLP, Spec

AG = {"ub_overlap_ag": True, "ub_overlap_rs": True}
BULK = {"ub_bulk_dgrad": True, "ub_bulk_wgrad": True}
DGRAD = {"ub_overlap_rs_dgrad": True}
SCATTERS = ("proj_fprop", "fc2_fprop", "qkv_dgrad", "fc1_dgrad")
GATHERS = ("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad")


COLUMN, ROW, NORMED, MLP = (LINEAR, "column"), (LINEAR, "row"), (LN_LINEAR, "column"), (LN_MLP, None)


def everywhere(method: str, *names: str) -> dict[str, dict[str, str]]:
    return {name: {"method": method} for name in names}


RINGS = everywhere("ring_exchange", *GATHERS) | everywhere("pipeline", "proj_fprop", "fc2_fprop")
# method -> (flags, ub_cfgs). wgrad of a row-parallel linear is "external" in all of them where dy is gathered twice.
METHODS: dict[str, tuple[dict[str, bool], dict]] = {
    "bulk": ({**AG, **BULK}, RINGS),
    "pipeline": ({**AG, **DGRAD}, RINGS | everywhere("pipeline", *SCATTERS)),
    "ring_exchange": ({**AG, **DGRAD}, everywhere("ring_exchange", *SCATTERS, *GATHERS)),
    "auto": ({**AG, **BULK}, everywhere("auto", *SCATTERS, *GATHERS, "qkv_wgrad", "fc1_wgrad", "proj_wgrad")),
    "fused": ({**AG, **DGRAD}, everywhere("fused", *SCATTERS, *GATHERS)),
}
# kind and mode of a module -> what ub_cfgs calls it
LAYERS = {COLUMN: "qkv", ROW: "proj", NORMED: "fc1", MLP: None}


class Specified(Bulk):
    """The unfused program of each method: the GEMM cut as the method cuts it, sums in the order of the protocol.

    Bitwise what userbuffers give where the same GEMMs run; whether they are right is for the fp32 oracle to say.
    """

    hides = False

    def operation(self, what: str, q: QTensor, gemm: Gemm | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    def all_gather(self, q: QTensor, layout: Layout, *, multiplied: bool = False, whole: bool = True) -> Gathering:
        return Collective.all_gather(self, q, layout)

    def all_gather_gemm(self, gemm: Gemm, gathering: Gathering) -> Any:
        """gemm of every rank's shard."""
        shard = gathering.q
        gathered = [all_gather(part.contiguous(), self.tp.group) for part in shard.wire("row")]
        parts = [[piece.clone() for piece in whole.chunk(self.tp.size)] for whole in gathered]  # aligned for cuBLAS
        shards = [shard.from_wire(one, "row", shard.shape[0]) for one in zip(*parts, strict=True)]
        return gemm.finish(torch.cat([gemm.product(one, gemm.bias) for one in shards]))

    def _ordered(self, gemm: Gemm, partial: Tensor, own: Tensor) -> Any:
        """Sum over ranks of partial[R*m, N], this rank's rows: from rank + 1 on, residual and own[m, N], bias[N], in
        fp32."""
        rank, size = dist.get_rank(self.tp.group), self.tp.size
        every = all_gather(partial.contiguous(), self.tp.group).view(size, size, *own.shape)
        total = every[(rank + 1) % size, rank].float()
        for i in range(2, size):
            total += every[(rank + i) % size, rank].float()
        total = total if gemm.residual is None else total + gemm.residual.float()
        total += own.float()
        total = (total if gemm.bias is None else total + gemm.bias.float()).to(partial.dtype)
        return total if gemm.epilogue is None else gemm.epilogue(total)

    def reduce_scatter(self, gemm: Gemm, partial: Tensor) -> Summed:
        own = partial.chunk(self.tp.size)[dist.get_rank(self.tp.group)]
        return Summed(self._ordered(gemm, partial, own))

    def gemm_reduce_scatter(self, gemm: Gemm, a: QTensor) -> Any:
        rank, m = dist.get_rank(self.tp.group), a.shape[0] // self.tp.size
        cuts = dict(zip(following(rank, self.tp.size), ring.cuts_of(gemm, a, self.tp.size), strict=True))
        products = []
        for owner in range(self.tp.size):
            rows = m // cuts.get(owner, 1)
            first = range(owner * m, (owner + 1) * m, rows)
            products += [gemm.product(a.rows(i, i + rows)) for i in first]
        own = gemm.product(a.rows(rank * m, (rank + 1) * m), None, torch.float32)
        return self._ordered(gemm, torch.cat(products), own)


@contextmanager
def specified() -> Iterator[None]:
    """Modules whose plans are made inside run Specified in place of every exchange."""
    with mock.patch.dict(EXCHANGES, dict.fromkeys(EXCHANGES, Specified)):
        yield


class Gathered:
    """While open, every gather through userbuffers is compared with Collective's: data and scales, shards and whole.

    compared: shards. columns: gathers whose shards of the col layout are put side by side.
    """

    def __init__(self) -> None:
        self.compared = self.columns = 0
        self._originals = Gather.__init__, Gather.shard, Gather.whole, Gather.close

    def __enter__(self) -> Gathered:
        init, shard, whole, close = self._originals
        watch = self

        def start(gather: Gather, group: Group, q: QTensor, *args: Any, **options: Any) -> None:
            ranks = group.process_group
            watch.columns += args[0] == "col" and q.format.gathers_columns(q.shape[0])
            gather.want = [all_gather(part.contiguous(), ranks) for part in q.wire(args[0])]
            init(gather, group, q, *args, **options)

        def check(gather: Gather, source: int) -> None:
            watch.compared += 1
            for i, (got, want) in enumerate(zip(gather.parts(source), gather.want, strict=True)):
                label = f"part {i} of {gather.q.format.label} {list(gather.q.shape)} from {source}"
                assert_bitwise_equal(label, got, want.chunk(gather.group.size)[source])

        def one(gather: Gather, source: int) -> QTensor:
            q = shard(gather, source)
            check(gather, source)
            return q

        def all_of(gather: Gather) -> QTensor:
            q = whole(gather)
            for source in range(gather.group.size):
                check(gather, source)
            return q

        def end(gather: Gather) -> None:
            for source in range(gather.group.size):
                if gather.own or source != gather.group.rank:
                    check(gather, source)
            close(gather)

        Gather.__init__, Gather.shard, Gather.whole, Gather.close = start, one, all_of, end
        return self

    def __exit__(self, *exc: Any) -> None:
        Gather.__init__, Gather.shard, Gather.whole, Gather.close = self._originals


@dataclass
class Sizes:
    """Features of a module: in, out, of an MLP's middle."""

    k: int
    n: int
    ffn: int


SMALL = Sizes(128, 128, 128)


class Pair:
    """A module that overlaps and its twin that does the same by torch.distributed, with the same parameters."""

    def __init__(
        self, kind: str, mode: str | None, recipe: str, method: str, sizes: Sizes, tp_group, device, **options: Any
    ) -> None:
        self.tp_group, self.device, self.recipe, self.sizes = tp_group, device, recipe, sizes
        self.size, self.rank = dist.get_world_size(tp_group), dist.get_rank(tp_group)
        activation = "swiglu" if method in ("fused", "auto") else "gelu"  # the one that a fused gather computes itself
        activation = options.pop("activation", activation)
        layout = {"mode": mode, "tp": self.size, "sequence_parallel": True}
        self.spec = Spec(kind, activation=activation, bias=options.pop("bias", True), **layout)
        self.residual = options.pop("residual", False)  # the output's gradient upside down is added to the output
        self.label = f"{kind} {mode or ''} {recipe} {method} tp {self.size}"
        features, seed = (sizes.k, sizes.n, sizes.ffn), options.pop("seed", 3)
        full = reference.make_parameters(self.spec, *features, seed=seed, dtype=torch.bfloat16)
        self.spread = recipe in BLOCKED
        self.full = reference.spread_parameters(self.spec, full) if self.spread else full
        shards = {name: shard_parameter(name, p, self.spec, self.rank) for name, p in self.full.items()}
        common = {"tp_group": tp_group, "tp_size": self.size, "sequence_parallel": True}
        common.update({**METHODS[method][0], **options})
        if LAYERS[kind, mode]:
            common.setdefault("ub_name", LAYERS[kind, mode])
        self.module, self.twin = (build(self.spec, *features, device=device, parameters=shards, **common) for _ in "12")
        self.module.name = self.label

    def batch(self, seed: int, m: int) -> tuple[Tensor, Tensor]:
        """Full x [R*m, K] and dy."""
        width = self.sizes.k if self.spec.kind == LN_MLP else self.sizes.n
        x = reference.make_tokens(m * self.size, self.sizes.k, seed=seed, dtype=torch.bfloat16)
        dy = reference.make_tokens(m * self.size, width, seed=seed + 1, dtype=torch.bfloat16, scale=0.1)
        return reference.spread_tokens(self.spec, x, dy) if self.spread else (x, dy)

    def inputs(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """This rank's x and dy."""
        x, dy = batch
        return leaf(shard_input(x, self.spec, self.rank), self.device), shard_output(dy, self.spec, self.rank).to(
            self.device
        )

    def forward(self, batch: tuple[Tensor, Tensor], twin: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """(x, output, its gradient to come) of this rank."""
        x, dy = self.inputs(batch)
        if self.residual:
            x.added = leaf(dy.flip(0), self.device)
        with under(self.recipe):
            out = (self.twin if twin else self.module)(x, **({"residual": x.added} if self.residual else {}))
        return x, out, dy

    def backward(self, call: tuple[Tensor, Tensor, Tensor], twin: bool = False) -> dict[str, Tensor]:
        """{"out", "dx", gradients by name} of this call alone."""
        module = self.twin if twin else self.module
        x, out, dy = call
        result = {"out": out.detach().clone()}
        out.backward(dy)
        result["dx"] = x.grad
        if self.residual:
            result["dresidual"] = x.added.grad
        result.update({name: p.grad for name, p in module.named_parameters() if p.grad is not None})
        module.zero_grad(set_to_none=True)
        return result

    def expected(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        with specified():
            return self.backward(self.forward(batch, twin=True), twin=True)


def assert_same(label: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Every tensor bit for bit."""
    assert set(got) == set(want), f"{label}: {sorted(got)} are not {sorted(want)}"
    for name in want:
        assert_bitwise_equal(f"{label}: {name}", got[name].cpu(), want[name].cpu())


def pair_of(which, recipe, device, method="bulk", group=None, sizes: Sizes = SMALL, **options: Any) -> Pair:
    """which: one of LAYERS."""
    return Pair(*which, recipe, method, sizes, group or dist.group.WORLD, device, **options)


def check_pass(pair: Pair, seed: int, m: int) -> None:
    """Forward and backward of a batch of m tokens a rank, bit for bit."""
    batch = pair.batch(seed, m)
    got = pair.backward(pair.forward(batch))
    assert_same(f"{pair.label}, {m} tokens a rank", got, pair.expected(batch))


def in_eighths(t: Tensor) -> Tensor:
    """Multiples of 1/8 of magnitude 4 at most, whose products of 128 fp32 adds up exactly, in any order."""
    return (t.detach().float() * 8).round().clamp(-32, 32).div(8).to(t.dtype)


def rows_of(pair: Pair) -> dict[str, dict]:
    """The report of the module: GEMM -> row."""
    return {row["gemm"]: row for row in te.overlap_report() if row["module"] == pair.label}


def poison(groups: list[Group]) -> None:
    """All slots of all ranks become 0xFF, NaN in every number format, while no exchange is under way."""
    settle()
    for group in groups:
        for name in ("gather", "scatter"):
            for slot in range(2):
                group.arena.view(name, slot).fill_(0xFF)
    settle()


def settle() -> None:
    """Until every rank has done all that it was told."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    dist.barrier()


def begin(tokens: int, hidden: int, tp_group, device, method: str = "bulk", **options: Any) -> Group:
    """initialize_ub for one group, which is returned."""
    per_tensor.LEAST_COLUMNS = 16  # shards are small here
    size = dist.get_world_size(tp_group)
    cfgs = options.pop("ub_cfgs", METHODS[method][1])
    te.initialize_ub([tokens, hidden], size, ub_cfgs=cfgs, tp_group=tp_group, device=device, **options)
    group = userbuffers._groups[tuple(dist.get_process_group_ranks(tp_group))]
    group.process_group = tp_group
    return group
