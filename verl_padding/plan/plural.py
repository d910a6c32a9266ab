"""Numbers of things in messages."""


def plural(number: int, thing: str) -> str:
    """
    >>> plural(1, "pad"), plural(1200, "pad"), plural(2, "micro-batch")
    ('1 pad', '1200 pads', '2 micro-batches')
    """
    if number == 1:
        return f"1 {thing}"
    return f"{number} {thing}{'es' if thing.endswith(('ch', 'ss')) else 's'}"
