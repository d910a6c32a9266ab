"""A job run small before it runs large: sessions on scripted replies, then a step on a CPU."""
