"""``python -m verl_padding``: the command ``verl-padding``, wherever the folder of scripts is not
on PATH."""

from verl_padding.cli.app import app

if __name__ == "__main__":
    app(prog_name="verl-padding")
