"""One file per kernel family: the Triton kernel, its oracle `*_ref` of the same signature, its registered op."""
