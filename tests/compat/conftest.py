"""aliased/ holds tests that run where `transformer_engine` is te_lite: test_frameworks.py starts them there."""

import sys

collect_ignore = [] if any(type(finder).__name__ == "AliasFinder" for finder in sys.meta_path) else ["aliased"]
