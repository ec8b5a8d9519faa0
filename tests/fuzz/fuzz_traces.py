"""Fuzz traces: `python tests/fuzz/fuzz_traces.py --seconds 60`."""

from fuzzing import main

if __name__ == "__main__":
    main("traces")
