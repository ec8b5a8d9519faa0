"""Fuzz bundles: `python tests/fuzz/fuzz_bundles.py --seconds 60`."""

from fuzzing import main

if __name__ == "__main__":
    main("bundles")
