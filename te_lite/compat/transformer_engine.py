"""Importing this module makes `import transformer_engine` give te_lite, in this process (docs/how-to/alias.md).

import te_lite.compat.transformer_engine  # first
import transformer_engine.pytorch as te
"""

from te_lite.compat.alias.finder import install

install()
