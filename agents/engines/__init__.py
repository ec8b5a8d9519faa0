"""Engine adapters: one module per engine."""
