"""Text for a terminal that may come from anywhere."""


def printable(text: str) -> str:
    """Text that may come from a client, so that it cannot steer the terminal: quoted if it tries to."""
    return text if text.isprintable() else ascii(text)
