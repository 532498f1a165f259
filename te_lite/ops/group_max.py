"""The maximum over all ranks' partial maxima, or elementwise over their values, in one small kernel.

    mine = max(partials[P]), or values[i]
    every rank's slots[epoch % 2, rank, i] = (mine, epoch)               # pushed: one 64-bit word, so both come at once
    out[0] = max over r of slots[epoch % 2, r, i], once that has epoch   # polled: this rank's own memory

Two slots are enough. Whoever writes epoch e + 2 has seen every rank's e + 1, which a rank sends only when it has read
all of e: a rank's kernels follow each other, whatever streams they are on, since each waits for `done`, the epoch of
the last one that has ended.

Steps of a protocol, no operators of torch's: what skips one, as selective checkpointing may, would leave ranks behind.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_lite.ops.flags import POLL_AGAIN, wait_flags
from te_lite.ops.launch import INTERPRETED, after_previous, launchable
from te_lite.ops.recorder import OPEN
from te_lite.ops.scalars import new_scalar
from te_lite.ops.steps import EpochArgument

SLOTS = 2
MOST_RANKS = 32  # a lane each
MOST_VALUES = 1 << 14  # of an elementwise call, each with room of its own in the slots; hidden sizes
A_PROGRAM = 256  # values of one program, a thread each: a thread's polls follow each other
_LANES, _BLOCK, _THREADS = tl.constexpr(MOST_RANKS), tl.constexpr(1024), tl.constexpr(A_PROGRAM)

# Where $3 is set the word $2 goes to the address $1.
_PUSH = tl.constexpr("{.reg .pred p; setp.ne.s32 p, $3, 0; @p st.relaxed.sys.global.b64 [$1], $2; mov.u32 $0, 0;}")
# Where $2 is set: polls the word at $1 until its upper half has reached $3, or the abort word at $4 is set; its lower
# half. Else 0.
_POLL = tl.constexpr(
    """
{
    .reg .pred p; .reg .b32 v, value, polls; .reg .b64 w;
    mov.u32 value, 0;
    setp.eq.s32 p, $2, 0;        @p bra DONE;
    mov.u32 polls, 0;
POLL:
    ld.relaxed.sys.global.b64 w, [$1];
    mov.b64 {value, v}, w;
    sub.s32 v, v, $3;
    setp.ge.s32 p, v, 0;         @p bra DONE;
    AGAIN
DONE:
    mov.b32 $0, value;
}
""".replace("AGAIN", POLL_AGAIN.replace("ABORT", "$4"))
)


@triton.jit(
    do_not_specialize=["delta", "count"],
    do_not_specialize_on_alignment=["values", "slots", "targets", "done", "word", "abort", "out"],
)
def group_max_kernel(
    values, slots, targets, done, word, abort, out, delta, count, RANKS: tl.constexpr, PER_RANK: tl.constexpr
):
    """slots: [SLOTS, RANKS, PER_RANK]. PER_RANK = 1: of partials, one program of one warp with a lane a rank; else
    elementwise, a thread a value.

    Every thread has sent to all of its ranks before it polls. done[1]: programs of this call that have ended, 0 between
    calls; the last one of them writes done[0].
    """
    after_previous()
    epoch = tl.load(word) + delta
    # PER_RANK = 1: a lane is a rank, and one step serves all of them. Else a thread is a value, and a step is a rank.
    # The peer is always rank + step, and the value's number is `at`.
    if PER_RANK == 1:
        rank, at = tl.arange(0, _LANES), 0
        live = rank < RANKS
        largest = tl.zeros([_BLOCK], tl.float32)
        for i in range(0, count, _BLOCK):
            partial = i + tl.arange(0, _BLOCK)
            largest = tl.maximum(largest, tl.load(values + partial, mask=partial < count, other=0.0))
        value = tl.max(largest, 0)
    else:
        rank, at = 0, tl.program_id(0) * _THREADS + tl.arange(0, _THREADS)
        live = at < count
        value = tl.load(values + at, mask=live, other=0.0)
    # Never negative: the upper half stays 0.
    message = value.to(tl.int32, bitcast=True).to(tl.int64) | (epoch.to(tl.int64) << 32)
    wait_flags(done, 0, 1, epoch - 1, abort)
    first, asked = (epoch & 1) * (RANKS * PER_RANK) + at, live.to(tl.int32)  # the word of rank 0; SLOTS is 2
    for step in tl.static_range(1 if PER_RANK == 1 else RANKS):
        there = tl.load(targets + rank + step, mask=rank < RANKS, other=0) + first * 8
        if not INTERPRETED:
            tl.inline_asm_elementwise(_PUSH, "=r,l,l,r,~{memory}", [there, message, asked], tl.int32, False, 1)
        else:
            tl.store(there.to(tl.pointer_type(tl.int64)), message, mask=live)
    for step in tl.static_range(1 if PER_RANK == 1 else RANKS):
        here = slots + (rank + step) * PER_RANK + first
        if not INTERPRETED:
            args = [here.to(tl.int64), asked, epoch, abort.to(tl.int64)]
            found = tl.inline_asm_elementwise(_POLL, "=r,l,r,r,l,~{memory}", args, tl.int32, False, 1)
        else:
            found = tl.load(here, mask=live, other=0).to(tl.int32)
        value = tl.maximum(value, found.to(tl.float32, bitcast=True))
    if PER_RANK == 1:
        tl.store(out, tl.max(value, 0))
        tl.atomic_xchg(done, epoch, sem="release")
    else:
        tl.store(out + at, value, mask=live)
        tl.debug_barrier()
        if tl.atomic_add(done + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:
            tl.atomic_xchg(done + 1, 0)
            tl.atomic_xchg(done, epoch, sem="release")


@cache
def compiled_group_max(device: torch.device, ranks: int, per_rank: int) -> Any:
    """A kernel for a CUDA device, to be launched with addresses. Launches once, so call it before a capture."""
    with torch.cuda.device(device):
        value, word = torch.zeros(1, device=device), torch.zeros(2, dtype=torch.int32, device=device)
        slots = torch.zeros(SLOTS * ranks * per_rank, dtype=torch.int64, device=device)
        targets = torch.full((ranks,), slots.data_ptr(), device=device)
        args = value, slots, targets, word, word, word, value, 0, 1, ranks, per_rank
        return launchable(group_max_kernel[(1,)](*args, num_warps=1 if per_rank == 1 else 8))


def _launch(per_rank: int, values, slots, targets, done, word, delta, abort, out) -> None:
    device, ranks = values.device, targets.numel()
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    addresses = [t.data_ptr() for t in (values, slots, targets, done, word, abort, out)]
    rest, kernel = (delta, values.numel(), ranks, per_rank), compiled_group_max(device, ranks, per_rank)
    programs = 1 if per_rank == 1 else -(-values.numel() // A_PROGRAM)
    if OPEN.recorder is not None:
        tensors = values, slots, targets, done, word, abort, out
        epoch = EpochArgument(len(tensors), delta & 0xFFFFFFFF, word)  # delta comes after the tensors
        OPEN.recorder.kernel(kernel, programs, tensors, rest, len(tensors), epoch)
    kernel.launch(programs, stream, (*addresses, *rest))


def group_maxima_ref(values, slots, targets, done, word, delta, abort) -> None:
    """Oracle of `group_maxima`, of values that have arrived; nothing is pushed."""
    epoch = word[:1] + delta
    words = slots.view(torch.int32).view(SLOTS, targets.numel(), -1, 2)[int(epoch) & 1, :, : values.numel()]
    arrived = torch.where(words[..., 1] == epoch, words[..., 0], 0).contiguous().view(torch.float32)
    torch.maximum(values, arrived.amax(0), out=values)
    done[:1] = epoch


def group_max_ref(partials, slots, targets, done, word, delta, abort) -> Tensor:
    """Oracle of `group_max`, of maxima that have arrived; nothing is pushed."""
    largest = partials.amax().view(1)
    group_maxima_ref(largest, slots, targets, done, word, delta, abort)
    return largest


def group_max(
    partials: Tensor, slots: Tensor, targets: Tensor, done: Tensor, word: Tensor, delta: int, abort: Tensor
) -> Tensor:
    """fp32 [1], the largest of all ranks' partials[P] (fp32, contiguous, not negative, no nan), for epoch word + delta.

    slots int64 [2 * R]: this rank's memory that the others write; word [e % 2, r] has the value of rank r in its lower
    half, the epoch in its upper. targets int64 [R]: the address of this rank's word [0, rank] in every rank's memory.
    done int32 [1]: of this rank; its last epoch, which must be the one before. May be `word`, with delta 1.
    Result garbage if abort[0] becomes nonzero. Waits on CUDA devices only.
    """
    if not partials.is_cuda:
        return group_max_ref(partials, slots, targets, done, word, delta, abort)
    out = new_scalar(partials)
    _launch(1, partials, slots, targets, done, word, delta, abort, out)
    return out


def group_maxima(
    values: Tensor, slots: Tensor, targets: Tensor, done: Tensor, word: Tensor, delta: int, abort: Tensor
) -> None:
    """values, fp32 [n], n <= 16,384, become the largest of all ranks', one by one. Else as group_max.

    slots int64 [2 * R * 16,384]: word [e % 2, r, i] is of rank r's value i. targets: of word [0, rank, 0]. done: [2],
    of which the second is 0 between calls.
    """
    if values.is_cuda:
        _launch(MOST_VALUES, values, slots, targets, done, word, delta, abort, values)
    else:
        group_maxima_ref(values, slots, targets, done, word, delta, abort)
