"""What the tests put into a real vLLM."""
