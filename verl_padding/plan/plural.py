"""Numbers of things in messages."""


def counted(number: int, thing: str) -> str:
    """
    >>> counted(1, "pad"), counted(1200, "pad"), counted(2, "micro-batch")
    ('1 pad', '1200 pads', '2 micro-batches')
    """
    if number == 1:
        return f"1 {thing}"
    return f"{number} {thing}{'es' if thing.endswith('ch') else 's'}"
