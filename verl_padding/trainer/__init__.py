"""The padded trainers: one mixin over verl's three, the worker calls and losses that know of pads."""
