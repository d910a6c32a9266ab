"""An agent whose context grows, and each of whose model calls is a row."""
