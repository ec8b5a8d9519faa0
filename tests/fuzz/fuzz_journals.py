"""Fuzz journals: `python tests/fuzz/fuzz_journals.py --seconds 60`."""

from fuzzing import main

if __name__ == "__main__":
    main("journals")
