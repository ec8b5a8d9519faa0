"""Fuzz frames: `python tests/fuzz/fuzz_frames.py --seconds 60`."""

from fuzzing import main

if __name__ == "__main__":
    main("frames")
