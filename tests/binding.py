"""Where a name of the library is bound: `from sd.x import name` gives each file a binding of its own."""

import sys


def bound_in(owner, name: str) -> list:
    """The project's loaded modules in which `name` is what it is in `owner`, that one included."""
    value = getattr(owner, name)
    ours = [
        m for n, m in list(sys.modules.items()) if n.split(".")[0] == "sd" or n.startswith(("SD_", "encode_latents"))
    ]
    return [m for m in ours if getattr(m, name, None) is value]


def rebind(owner, name: str, value, setattr=setattr):
    """Bind `name` to another value wherever it is bound. setattr: monkeypatch.setattr, to be undone."""
    for module in bound_in(owner, name):
        setattr(module, name, value)
