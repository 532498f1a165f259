"""When plans are stale: a count of what has changed in the process that plans depend on."""

number = 0


def advance() -> None:
    """From now on modules build their plans again: userbuffers came or went, or somebody observes quantizers."""
    global number
    number += 1
