"""A job run small before it runs large: its sessions on scripted replies, then a step of it on this machine's CPU."""
