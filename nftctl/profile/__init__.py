"""The typed profile: schema, layers, preflight and diagnostics. Nothing here imports torch or Ray."""
