"""What must not run: a pickle of a Runs calls code of this module when it is read."""


class Runs:
    """Unpickled, it would be noticed."""

    ran = False

    def __reduce__(self):
        return _run, ()


def _run():
    Runs.ran = True
