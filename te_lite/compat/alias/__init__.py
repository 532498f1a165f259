"""`transformer_engine` as a name for te_lite. te_lite/compat/transformer_engine.py puts it in place."""
