"""The built-in backends, one device a file.

Installed as ``amphal.backends``; found by the registry through the entry points
``amphal.backends``, the same door that a plug-in uses. Nothing imports this package directly.
"""

if __name__ != "amphal.backends":
    # The folder lies at the top of a checkout: imported as plain "backends" it would be a second
    # copy of every backend, unequal to the registered one.
    raise ImportError(
        f"these are amphal's backends, imported as {__name__!r}: "
        "install amphal (pip install -e .) and import amphal.backends"
    )
