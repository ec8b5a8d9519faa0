"""Fuzz rings: `python tests/fuzz/fuzz_rings.py --seconds 60`."""

from fuzzing import main

if __name__ == "__main__":
    main("rings")
