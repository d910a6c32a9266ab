"""Entry point in group ``verl.plugins``: loaded by ``import verl`` in every process, Ray workers included.

verl only imports this module, and swallows an exception of it with a line at DEBUG. So it imports nothing but the
standard library before it can speak, and a job that asks for padding while the plug-in is broken ends here: verl would
train it unpadded without a word, since Hydra takes ``+padding=prompt`` for a plain string where it finds no group.
"""

from verl_padding.entry.loud_failure import speak_of_a_failure

try:
    import verl_padding.entry.import_hooks  # noqa: F401  (leaves its notes on import)
except Exception:
    speak_of_a_failure("the plug-in could not be loaded")
