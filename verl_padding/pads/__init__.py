"""Pad rows: what they hold (``roles``, ``template``) and how they come and go (``queue``)."""
