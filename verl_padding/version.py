"""The version of the plug-in, in a module: in a folder that holds a checkout, Python takes the checkout for a package.

There ``import verl_padding`` finds a package without anything of its own, while its modules are found as installed.
"""

__version__ = "0.2.0.dev0"
