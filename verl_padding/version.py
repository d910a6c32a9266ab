"""The version, in a module: beside a checkout ``import verl_padding`` finds an empty package, whose
modules do load."""

__version__ = "0.4.0"
