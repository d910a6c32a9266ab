"""A job run small before it runs large: a step on a CPU, its sessions on scripted replies."""
