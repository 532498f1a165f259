"""Trains a small Llama in fp8 with fully_shard, in place of torchao (docs/how-to/from-torchao.md).

torchrun --nproc-per-node 2 examples/fsdp_llama.py --steps 20
"""

import argparse
import os

import torch
import torch.distributed as dist
from gpt.llama import Windows, show, small_llama
from torch.distributed.fsdp import fully_shard

import te_lite as te


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8, help="of each rank")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--hidden", type=int, default=64)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    model = small_llama(args.hidden).to(device, torch.bfloat16)
    te.convert_to_float8_training(model, "tensorwise", lambda layer, name: name != "lm_head", minimum_size=0)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = Windows(args.steps * args.batch_size * dist.get_world_size())
    sampler = torch.utils.data.DistributedSampler(data)
    losses = []
    for batch in torch.utils.data.DataLoader(data, args.batch_size, sampler=sampler):
        loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        show(losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
