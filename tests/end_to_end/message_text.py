"""What a message says: light, since it is imported in every process of a job."""

from typing import Any


def text_of(message: dict[str, Any]) -> str:
    """The text of a message, without its images."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
