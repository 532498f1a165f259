"""What te_lite's own tests, its benchmarks and people who test code built on it share.

numerics: error bounds derived from a low-precision reference, bitwise equality, bytes kept for backward.
distributed: ranks on this host, devices and backends. forked: how they are started.
Nothing in te_lite imports this package.
"""
