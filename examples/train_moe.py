"""Trains a byte-level mixture-of-experts GPT with te_lite on real text, on CPU ranks or on GPUs.

    python examples/train_moe.py --recipe rowwise
    torchrun --nproc-per-node 2 examples/train_moe.py --ep 2 --recipe current      # half of the experts on each rank
    torchrun --nproc-per-node 8 examples/train_moe.py --ep 4 --experts 16 --batch-size 64 --recipe mxfp8

The program is train_gpt.py with gpt/moe.py in the place of the MLPs, and has its options. Ranks are data parallel; --ep
of them share the experts, and tokens travel to them. docs/how-to/mixture-of-experts.md.
"""

import sys

import train_gpt
from gpt.options import build_moe_parser

if __name__ == "__main__":
    sys.exit(train_gpt.main(parser=build_moe_parser()))
