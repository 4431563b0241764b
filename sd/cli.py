"""The flags of programs and scripts: one layout of --help, in which every default is shown once."""

import argparse
from functools import partial


class Help(argparse.RawDescriptionHelpFormatter):
    """Each flag's line ends with its default. `defaults` has those of flags whose own default is None, because a preset
    or a saved value may stand behind them: values, or words such as "the phase's"."""

    def __init__(self, *args, defaults: dict, **kwargs):
        super().__init__(*args, max_help_position=28, **kwargs)
        self.defaults = defaults

    def _get_help_string(self, action: argparse.Action) -> str:
        value = self.defaults.get(action.dest) if action.default is None else action.default
        if value in (None, "", [], argparse.SUPPRESS) or isinstance(value, bool) or action.required:
            return action.help
        values = value if isinstance(value, list | tuple) else [value]
        words = " ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values)
        return f"{action.help} (default: {words.replace('%', '%%')})"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return {int: "N", float: "X"}.get(action.type) or action.dest.rpartition("_")[2].upper()


class Parser(argparse.ArgumentParser):
    """With a usage of one line: what must be given. The flags are listed below it, or named by the error."""

    def format_usage(self) -> str:
        self._shorten()
        return super().format_usage()

    def format_help(self) -> str:
        self._shorten()
        return super().format_help()

    def _shorten(self):
        words = ["%(prog)s"]
        for action in self._actions:
            if action.required and action.nargs != "*":  # which argparse counts as required
                words += [*action.option_strings[:1], (action.metavar or action.dest).upper()]
        self.usage = " ".join([*words, "[flags]"])


def parser(doc: str, defaults: dict | None = None) -> argparse.ArgumentParser:
    """A parser whose --help shows the first paragraph of a program's docstring, its flags, and the docstring's examples
    (the indented paragraph that comes second), laid out as they are there. The rest is for readers of the file, and
    --help says where it is. Give every flag to an argument group, with a line of help that says what no value means,
    where there is no default. defaults: see Help."""
    about, examples = doc.strip("\n").split("\n\n")[:2]
    epilog = f"examples:\n{examples.replace('%', '%%')}\n\nThe first lines of %(prog)s say more."
    return Parser(description=about, epilog=epilog, formatter_class=partial(Help, defaults=defaults or {}))
