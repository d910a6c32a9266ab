"""Numbers of things in messages."""


def counted(number: int, thing: str) -> str:
    """
    >>> counted(1, "pad"), counted(1200, "pad")
    ('1 pad', '1200 pads')
    """
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
