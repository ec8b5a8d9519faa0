"""The node side of stagewatch: what runs in and beside the engine."""
