"""Flags and epochs on the device: 32-bit words that only grow, compared cyclically.

A flag has reached an epoch when (int32)(flag - epoch) >= 0. An epoch is always word + delta, an int32 in device memory
and an int32 argument: under a CUDA graph the word advances once a replay and delta is frozen; elsewhere the word stays
zero, or for wait_kernel is null, and delta is the epoch. Waits also end when the abort word is not zero; what they
return then is garbage.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from te_lite.ops.launch import INTERPRETED, after_previous, launchable

# Goes to POLL, or on when the word at ABORT is set. That one lies in host memory: read at every 64th poll by all
# multiprocessors it slowed the copies that they wait for 32-fold; at every 4096th it costs nothing.
POLL_AGAIN = """add.u32 polls, polls, 1;
    and.b32 v, polls, 4095;
    setp.ne.u32 p, v, 0;         @p bra POLL;
    ld.relaxed.sys.global.b32 v, [ABORT];
    setp.eq.s32 p, v, 0;         @p bra POLL;"""
# Thread t < 32 whose bit of $3 is set polls the word at $1 + t * $2 until it has reached $4 or the word at $5 is set.
# The barrier hands what that thread acquired to the others. $3 == 0: nothing at all.
_WAIT = tl.constexpr(
    """
{
    .reg .pred p; .reg .b32 t, v, polls; .reg .b64 a;
    setp.eq.u32 p, $3, 0;        @p bra END;
    mov.u32 t, %tid.x;
    setp.ge.u32 p, t, 32;        @p bra DONE;
    shr.b32 v, $3, t;
    and.b32 v, v, 1;
    setp.eq.u32 p, v, 0;         @p bra DONE;
    mad.wide.u32 a, t, $2, $1;
    mov.u32 polls, 0;
POLL:
    ld.acquire.sys.global.b32 v, [a];
    sub.s32 v, v, $4;
    setp.ge.s32 p, v, 0;         @p bra DONE;
    nanosleep.u32 64;
    AGAIN
DONE:
    bar.sync 0;
END:
    mov.u32 $0, 0;
}
""".replace("AGAIN", POLL_AGAIN.replace("ABORT", "$5"))
)


@triton.jit
def wait_flags(flag, stride, mask, epoch, abort):
    """All threads wait until the words flag[i * stride] have reached epoch, for the bits i of `mask`.

    What was written before those flags may be read afterwards, by loads; by the tensor-copy unit in the next kernel.
    """
    if not INTERPRETED:
        args = [flag.to(tl.int64), stride * 4, mask, epoch, abort.to(tl.int64)]
        tl.inline_asm_elementwise(_WAIT, "=r,l,r,r,r,l,~{memory}", args, tl.int32, False, 1)


@triton.jit(do_not_specialize=["stride", "mask", "delta"], do_not_specialize_on_alignment=["flag", "word", "abort"])
def wait_kernel(flag, word, stride, mask, delta, abort):
    """Ends when the flags that wait_flags takes have reached *word + delta, or *abort is not zero. One warp.

    word: null for 0, and then nothing is read that the kernel before may write: the two wait at the same time."""
    counted = word.to(tl.int64) != 0
    if counted:
        after_previous()
    wait_flags(flag, stride, mask, tl.load(word, mask=counted, other=0) + delta, abort)
    after_previous()


def signed(epoch: int) -> int:
    """The int32 with the bits of a 32-bit epoch, which may have wrapped around."""
    return (epoch + 2**31) % 2**32 - 2**31


def compiled_wait(device: torch.device) -> Any:
    """`wait_kernel` compiled for a CUDA device, to launch from where no tensors are:

    launch(1, stream, (flag address, word address, stride, mask, delta, abort address)). Launches once, so call it
    before a capture.
    """
    with torch.cuda.device(device):
        word = torch.zeros(1, dtype=torch.int32, device=device)
        return launchable(wait_kernel[(1,)](word, word, 0, 1, 0, word, num_warps=1))
