"""The parts of examples/train_gpt.py: a Megatron-style GPT written with te_lite's modules."""
