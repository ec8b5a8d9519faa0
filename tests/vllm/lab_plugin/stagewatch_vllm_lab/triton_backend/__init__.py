"""A Triton backend named ``cpu`` that reports itself active and compiles nothing.

PyPI's triton has none for the CPU, and without an active backend vLLM falls back to its V1 runner. With
``TRITON_INTERPRET=1`` every kernel is interpreted, so nothing is ever compiled.
"""
